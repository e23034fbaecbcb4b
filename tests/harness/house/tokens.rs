//! Rust source as words and marks, without comments, literals and tests.

/// A word (identifier, keyword, number) or one mark of punctuation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token<'a> {
    /// The word or mark.
    pub text: &'a str,
    /// Its line, from 1.
    pub line: usize,
}

impl Token<'_> {
    /// Whether it may be a name.
    pub fn is_word(&self) -> bool {
        self.text.starts_with(is_word)
    }
}

/// The source with comments, strings and characters replaced by spaces; lines stay where they are.
pub fn mask(source: &str) -> String {
    let chars: Vec<char> = source.chars().collect();
    let mut masked = String::with_capacity(source.len());
    let mut at = 0;
    while at < chars.len() {
        let end = hidden_end(&chars, at);
        if end == at {
            masked.push(chars[at]);
            at += 1;
        } else {
            masked.extend(chars[at..end].iter().map(|&c| if c == '\n' { c } else { ' ' }));
            at = end;
        }
    }
    masked
}

/// The tokens of a masked source.
pub fn tokens(masked: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    for (index, line) in masked.lines().enumerate() {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let length = match is_word(first) {
                true => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
                false => first.len_utf8(),
            };
            tokens.push(Token { text: &rest[..length], line: index + 1 });
            rest = rest[length..].trim_start();
        }
    }
    tokens
}

/// The tokens without the items that `#[cfg(test)]` marks.
pub fn without_tests<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        if starts_with(&tokens[at..], &["#", "[", "cfg", "(", "test", ")", "]"]) {
            at = item_end(tokens, at);
        } else {
            kept.push(tokens[at]);
            at += 1;
        }
    }
    kept
}

/// Whether the tokens begin with these.
pub fn starts_with(tokens: &[Token], expected: &[&str]) -> bool {
    tokens.len() >= expected.len() && tokens.iter().zip(expected).all(|(t, e)| t.text == *e)
}

/// The index after the bracket that closes the one at `open`.
pub fn after_bracket(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0usize;
    for (index, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

/// The index after an item and the attributes before it.
fn item_end(tokens: &[Token], mut at: usize) -> usize {
    while starts_with(&tokens[at..], &["#", "["]) {
        at = after_bracket(tokens, at + 1);
    }
    while at < tokens.len() {
        match tokens[at].text {
            ";" => return at + 1,
            "{" => return after_bracket(tokens, at),
            "(" | "[" => at = after_bracket(tokens, at),
            _ => at += 1,
        }
    }
    at
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Where the comment or literal that begins at `at` ends; `at` if none begins there.
fn hidden_end(chars: &[char], at: usize) -> usize {
    let in_word = at > 0 && is_word(chars[at - 1]);
    match &chars[at..] {
        ['/', '/', ..] => find(chars, at, &['\n']),
        ['/', '*', ..] => comment_end(chars, at),
        ['"', ..] => string_end(chars, at + 1),
        ['r', '"' | '#', ..] if !in_word => raw_string_end(chars, at, at + 1),
        ['b', 'r', '"' | '#', ..] if !in_word => raw_string_end(chars, at, at + 2),
        ['\'', '\\', ..] => (find(chars, at + 3, &['\'']) + 1).min(chars.len()),
        ['\'', _, '\'', ..] => at + 3,
        _ => at,
    }
}

/// The first place of `wanted` from `at` on, or the end.
fn find(chars: &[char], at: usize, wanted: &[char]) -> usize {
    (at..chars.len()).find(|&place| chars[place..].starts_with(wanted)).unwrap_or(chars.len())
}

fn comment_end(chars: &[char], mut at: usize) -> usize {
    let mut depth = 0usize;
    while at < chars.len() {
        match &chars[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] if depth == 1 => return at + 2,
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

fn string_end(chars: &[char], mut at: usize) -> usize {
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// The end of a raw string whose hashes begin at `hashes`; `start` if it is a raw identifier.
fn raw_string_end(chars: &[char], start: usize, hashes: usize) -> usize {
    let count = chars[hashes..].iter().take_while(|&&c| c == '#').count();
    let open = hashes + count;
    if chars.get(open) != Some(&'"') {
        return start;
    }
    let mut close = vec!['"'];
    close.resize(count + 1, '#');
    (find(chars, open + 1, &close) + close.len()).min(chars.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> String {
        let masked = mask(source);
        assert_eq!(masked.lines().count(), source.lines().count());
        let tokens = without_tests(&tokens(&masked));
        tokens.iter().map(|token| token.text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_literals_are_hidden() {
        assert_eq!(words("a // b\n/* c /* d */ e */ f"), "a f");
        assert_eq!(words(r#"a("b \" c", 'd', '\'', '"') e"#), "a ( , , , ) e");
        assert_eq!(words("a(r#\"b \" c\"#, br\"d\\\", r\"e\") f"), "a ( , , ) f");
        assert_eq!(
            words("fn f<'a>(x: &'a str) -> r#type"),
            "fn f < ' a > ( x : & ' a str ) - > r # type"
        );
    }

    #[test]
    fn tests_are_left_out() {
        assert_eq!(words("a; #[cfg(test)] #[x] mod tests { fn b() { {} } } c"), "a ; c");
        assert_eq!(words("#[cfg(test)] mod tests; c"), "c");
        assert_eq!(words("#[cfg(feature = \"x\")] mod a;"), "# [ cfg ( feature = ) ] mod a ;");
    }

    #[test]
    fn lines_are_counted_from_one() {
        let masked = mask("a\n/* \n */ b");
        assert_eq!(tokens(&masked), [Token { text: "a", line: 1 }, Token { text: "b", line: 3 }]);
    }
}
