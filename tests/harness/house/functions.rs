//! How long functions are, and how many arguments they have.

use super::tokens::{Token, after_bracket};

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Line of its name.
    pub line: usize,
    /// Lines from there to the closing brace; comments and attributes before it do not count.
    pub lines: usize,
    /// Its arguments, `self` among them.
    pub arguments: usize,
    /// Whether `#[cube]` is written before it.
    pub kernel: bool,
}

/// Every function of a source, nested ones too.
pub fn functions(tokens: &[Token]) -> Vec<Function> {
    (0..tokens.len()).filter_map(|at| function(tokens, at)).collect()
}

fn function(tokens: &[Token], at: usize) -> Option<Function> {
    if tokens[at].text != "fn" {
        return None;
    }
    // In the pattern of a macro a name begins with `$`; the type `fn(..)` has no name.
    let name = tokens[at + 1..].iter().take(2).find(|token| token.text != "$")?;
    if !name.is_word() {
        return None;
    }
    let body = body(tokens, at)?;
    let end = tokens[after_bracket(tokens, body) - 1].line;
    let line = tokens[at].line;
    let kernel = before(tokens, at)
        .windows(3)
        .any(|w| [w[0].text, w[1].text, w[2].text] == ["#", "[", "cube"]);
    let (name, arguments) = (name.text.to_owned(), arguments(tokens, at));
    Some(Function { name, line, lines: end - line + 1, arguments, kernel })
}

/// The number of arguments of a function: what begins in its first brackets outside of generics.
fn arguments(tokens: &[Token], at: usize) -> usize {
    let (mut count, mut depth) = (0, 0usize);
    let (mut inside, mut begins) = (false, true);
    for (before, token) in tokens[at..].iter().zip(&tokens[at + 1..]) {
        let text = token.text;
        if inside && depth == 1 {
            match text {
                ")" => break,
                "," => begins = true,
                _ if begins => (count, begins) = (count + 1, false),
                _ => {}
            }
        }
        match text {
            "(" if depth == 0 => (inside, depth) = (true, 1),
            "(" | "[" | "{" | "<" => depth += 1,
            // The arrow of a function's type closes nothing.
            ">" if before.text == "-" => {}
            ")" | "]" | "}" | ">" => depth -= 1,
            _ => {}
        }
    }
    count
}

/// Where the body of a function opens, if it has one.
fn body(tokens: &[Token], mut at: usize) -> Option<usize> {
    while at < tokens.len() {
        match tokens[at].text {
            ";" => return None,
            "{" => return Some(at),
            "(" | "[" => at = after_bracket(tokens, at),
            _ => at += 1,
        }
    }
    None
}

/// The attributes and keywords of the item before `at`.
fn before<'a, 'b>(tokens: &'b [Token<'a>], at: usize) -> &'b [Token<'a>] {
    let start = tokens[..at].iter().rposition(|token| matches!(token.text, ";" | "{" | "}"));
    &tokens[start.map_or(0, |start| start + 1)..at]
}

#[cfg(test)]
mod tests {
    use super::super::tokens::{mask, tokens};
    use super::*;

    fn found(source: &str) -> Vec<(String, usize, usize, bool)> {
        let masked = mask(source);
        let found = functions(&tokens(&masked));
        found.into_iter().map(|f| (f.name, f.line, f.lines, f.kernel)).collect()
    }

    #[test]
    fn lines_are_those_from_the_name_to_the_closing_brace() {
        let source =
            "/// Doc.\n#[inline]\nfn a(x: [u8; 2]) -> u8\n{\n  // }\n  \"}\"\n}\nfn b() {}";
        assert_eq!(found(source), [("a".into(), 3, 5, false), ("b".into(), 8, 1, false)]);
    }

    #[test]
    fn arguments_are_counted_whatever_their_types() {
        let count = |source: &str| functions(&tokens(&mask(source)))[0].arguments;
        assert_eq!(count("fn a() {}"), 0);
        assert_eq!(
            count("fn a<F: Fn(A, B) -> C>(&self, x: [u8; 2], f: Box<dyn Fn(A) -> B>,) {}"),
            3
        );
        assert_eq!(
            count("fn a(#[comptime] x: (u8, u8), y: M<A, B>) -> (A, B, C) { f(a, b, c) }"),
            2
        );
    }

    #[test]
    fn declarations_and_types_are_no_functions() {
        assert_eq!(found("trait T { fn a(&self); }\ntype F = fn(u8) -> u8;"), []);
    }

    #[test]
    fn kernels_are_told_by_their_attribute() {
        let source = "#[cube(launch_unchecked)]\npub fn k() {\n}\nfn f() { fn g() {} }";
        let expected =
            [("k".into(), 2, 2, true), ("f".into(), 4, 1, false), ("g".into(), 4, 1, false)];
        assert_eq!(found(source), expected);
    }
}
