//! What single lines say: their width, a file's first words, and the paths a document names.

/// The most characters of a line.
pub const COLUMNS: usize = 100;

/// The lines that are too wide, with their width. Two exceptions: rows of tables in Markdown, and
/// lines that would fit without their web addresses, which cannot be broken.
pub fn wide_lines(source: &str, markdown: bool) -> Vec<(usize, usize)> {
    let numbered = source.lines().enumerate();
    numbered
        .filter(|(_, line)| !(markdown && line.starts_with('|')))
        .filter(|(_, line)| width_without_addresses(line) > COLUMNS)
        .map(|(index, line)| (index + 1, line.chars().count()))
        .collect()
}

fn width_without_addresses(line: &str) -> usize {
    let is_address = |word: &str| word.contains("https://") || word.contains("http://");
    let addresses = line.split_whitespace().filter(|word| is_address(word));
    line.chars().count() - addresses.map(|word| word.chars().count()).sum::<usize>()
}

/// Whether a file begins with `//!`, or with attributes and then `//!`.
pub fn has_header(source: &str) -> bool {
    let mut lines = source.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.find(|line| !line.starts_with("#!")).is_some_and(|line| line.starts_with("//!"))
}

/// The paths that a Markdown text names in backticks, with their lines: words with a `/`, or that
/// end like a file. In `folder/<name>.rs` the name is anyone's: the folder is what is named.
pub fn named_paths(markdown: &str) -> Vec<(usize, String)> {
    let mut paths = Vec::new();
    let mut in_block = false;
    for (index, line) in markdown.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        }
        if in_block {
            continue;
        }
        let quoted = line.split('`').skip(1).step_by(2).filter(|quoted| is_path(quoted));
        paths.extend(quoted.map(|path| (index + 1, existing_part(path).to_owned())));
    }
    paths
}

fn is_path(quoted: &str) -> bool {
    const ENDINGS: [&str; 4] = [".rs", ".md", ".toml", ".sh"];
    let is_file = ENDINGS.iter().any(|ending| quoted.ends_with(ending));
    let is_word = quoted.contains(char::is_alphanumeric) && !quoted.contains(' ');
    (quoted.contains('/') || is_file) && is_word && !quoted.contains("://")
}

fn existing_part(path: &str) -> &str {
    match path.split_once('<') {
        Some((before, _)) => before.rsplit_once('/').map_or("", |(folder, _)| folder),
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_measured_in_characters() {
        let line = "é".repeat(COLUMNS);
        assert_eq!(wide_lines(&line, false), []);
        assert_eq!(wide_lines(&format!("a\n{line}b"), false), [(2, COLUMNS + 1)]);
    }

    #[test]
    fn tables_of_markdown_and_addresses_may_be_wider() {
        let row = format!("| {} |", "a".repeat(COLUMNS));
        assert_eq!(wide_lines(&row, true), []);
        assert_eq!(wide_lines(&row, false).len(), 1);
        let address = format!("see <https://example.org/{}>", "a".repeat(COLUMNS));
        assert_eq!(wide_lines(&address, true), []);
        assert_eq!(wide_lines(&format!("{address} {}", "b".repeat(COLUMNS)), true).len(), 1);
    }

    #[test]
    fn headers_may_follow_attributes_only() {
        assert!(has_header("//! Doc.\nuse a;"));
        assert!(has_header("#![allow(x)]\n\n//! Doc.\n"));
        assert!(!has_header("use a;\n//! Doc."));
        assert!(!has_header("// Comment.\n"));
        assert!(!has_header(""));
    }

    #[test]
    fn paths_are_what_is_quoted_outside_of_blocks() {
        let text =
            "see `a/b.rs`, `word`, `//!`, `two words/x` and `c/<name>.rs`\n```\n`x/y`\n```\n`d.md`";
        let expected = [(1, "a/b.rs".into()), (1, "c".into()), (5, "d.md".into())];
        assert_eq!(named_paths(text), expected);
    }
}
