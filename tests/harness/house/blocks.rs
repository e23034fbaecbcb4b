//! Fenced blocks of Markdown, in pages and in doc comments.

/// A fenced block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block<'p> {
    /// Line of its first fence, from 1.
    pub line: usize,
    /// Text behind the first fence: the language.
    pub language: &'p str,
    /// The lines between the fences.
    pub lines: Vec<&'p str>,
}

/// A part of a block that something has to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Line of the page, from 1.
    pub line: usize,
    /// A command, without comments; of a block in another language its first line.
    pub text: String,
}

impl Block<'_> {
    /// Returns true if rustdoc compiles the block.
    pub fn is_doctest(&self) -> bool {
        let mut words = self.language.split(',');
        words.all(|word| matches!(word, "" | "rust" | "no_run" | "should_panic"))
    }

    /// Lists what has to be run: every command of a shell block, of another block all at once.
    pub fn parts(&self) -> Vec<Part> {
        if self.language != "sh" {
            let text = self.lines.first().map_or(String::new(), |line| line.trim().to_owned());
            return vec![Part { line: self.line, text }];
        }
        let mut parts: Vec<Part> = Vec::new();
        let mut continued = false;
        for (at, line) in self.lines.iter().enumerate() {
            let command = line.split(" # ").next().unwrap_or_default().trim();
            let (text, goes_on) = match command.strip_suffix('\\') {
                Some(begin) => (begin.trim_end(), true),
                None => (command, false),
            };
            match parts.last_mut().filter(|_| continued) {
                Some(part) => part.text = format!("{} {text}", part.text),
                None if text.is_empty() || text.starts_with('#') => {}
                None => parts.push(Part { line: self.line + 1 + at, text: text.to_owned() }),
            }
            continued = goes_on;
        }
        parts
    }
}

/// Reads the blocks of a page.
pub fn blocks(markdown: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    let mut inside = false;
    for (at, line) in markdown.lines().enumerate() {
        match (line.trim().strip_prefix("```"), inside) {
            (Some(language), false) => {
                blocks.push(Block { line: at + 1, language, lines: Vec::new() });
                inside = true;
            }
            (Some(_), true) => inside = false,
            (None, true) => blocks.last_mut().expect("the block").lines.push(line),
            (None, false) => {}
        }
    }
    assert!(!inside, "the last block has no end");
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_block_is_its_commands_and_another_one_is_its_first_line() {
        let page = "text\n```sh\n# about\nfp4 a  # what it does\n\nfp4 b \\\n    --c\n```\n\
            ```text\none\ntwo\n```\n```no_run\nlet a = 1;\n```\n";
        let found = blocks(page);
        assert_eq!(found.iter().map(|block| block.line).collect::<Vec<_>>(), [2, 9, 13]);
        let parts: Vec<_> = found.iter().flat_map(Block::parts).collect();
        let parts: Vec<_> = parts.iter().map(|part| (part.line, part.text.as_str())).collect();
        assert_eq!(parts, [(4, "fp4 a"), (6, "fp4 b --c"), (9, "one"), (13, "let a = 1;")]);
        assert_eq!(found.iter().map(Block::is_doctest).collect::<Vec<_>>(), [false, false, true]);
    }
}
