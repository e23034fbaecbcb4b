//! What a file of a crate defines, imports and names.

use std::collections::{BTreeMap, BTreeSet};

use super::tokens::{Token, starts_with};

/// A module by its path from the root of its crate.
pub type ModulePath = Vec<String>;

/// One name of a `use`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Import {
    /// What it is called here; `*` for all.
    pub name: String,
    /// What it is.
    pub path: Vec<String>,
    /// The module that it is written in.
    pub module: ModulePath,
    /// Whether it is handed on: `pub use`, `pub(crate) use`.
    pub public: bool,
    /// Its line.
    pub line: usize,
}

/// A path with `::` outside of a `use`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mention {
    /// Its names.
    pub path: Vec<String>,
    /// The module that it is written in.
    pub module: ModulePath,
    /// Its line.
    pub line: usize,
}

/// The items of a file, and of the modules that are written in it.
#[derive(Debug, Default)]
pub struct Items {
    /// Names that a module defines.
    pub definitions: BTreeSet<(ModulePath, String)>,
    /// Modules that are written in the file, its own first.
    pub modules: Vec<ModulePath>,
    /// What it imports.
    pub imports: Vec<Import>,
    /// What it names by a path.
    pub mentions: Vec<Mention>,
    /// Words that look like the use of an item, outside of imports, with the first line of each.
    pub words: BTreeMap<String, usize>,
}

impl Items {
    /// Reads the tokens of the file of a module.
    pub fn read(module: ModulePath, tokens: &[Token]) -> Self {
        let items = Self { modules: vec![module.clone()], ..Self::default() };
        let mut reader = Reader { tokens, at: 0, depth: 0, module, written: Vec::new(), items };
        while reader.at < tokens.len() {
            reader.step();
        }
        reader.items
    }
}

struct Reader<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
    /// Open braces.
    depth: usize,
    /// The module here.
    module: ModulePath,
    /// Depths at which the modules that are written in the file were opened.
    written: Vec<usize>,
    items: Items,
}

impl Reader<'_> {
    fn step(&mut self) {
        let rest = &self.tokens[self.at..];
        match rest[0].text {
            "{" => self.depth += 1,
            "}" => self.close(),
            "use" if !starts_with(rest, &["use", "<"]) => return self.import(),
            "mod" if rest.get(2).is_some_and(|token| token.text == "{") => return self.open(),
            _ if rest[0].is_word() => return self.word(),
            _ => {}
        }
        self.at += 1;
    }

    fn open(&mut self) {
        self.module.push(self.tokens[self.at + 1].text.to_owned());
        self.items.modules.push(self.module.clone());
        self.written.push(self.depth);
        self.depth += 1;
        self.at += 3;
    }

    fn close(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        if self.written.last() == Some(&self.depth) {
            self.written.pop();
            self.module.pop();
        }
    }

    /// A path, a definition or another word.
    fn word(&mut self) {
        let rest = &self.tokens[self.at..];
        let in_module = self.depth == self.written.last().map_or(0, |depth| depth + 1);
        if let Some(name) = defined(rest).filter(|_| in_module) {
            self.items.definitions.insert((self.module.clone(), name.to_owned()));
        }
        let (path, line) = (path(rest), rest[0].line);
        let length = 3 * path.len() - 2;
        if self.is_use(&path[0], &rest[length..]) {
            self.items.words.entry(path[0].clone()).or_insert(line);
        }
        self.at += length;
        if path.len() > 1 {
            let module = self.module.clone();
            self.items.mentions.push(Mention { path, module, line });
        }
    }

    /// Whether a word is the use of an item, as far as one sees: a call, a macro, or the name of a
    /// type or constant; not a method, a field, a definition or a variable.
    fn is_use(&self, word: &str, after: &[Token]) -> bool {
        let before = self.at.checked_sub(1).map_or("", |before| self.tokens[before].text);
        let marks: [&[&str]; 3] = [&["("], &["!"], &[":", ":"]];
        let called = marks.iter().any(|marks| starts_with(after, marks));
        !matches!(before, "." | "fn") && (called || word.starts_with(char::is_uppercase))
    }

    fn import(&mut self) {
        let before = &self.tokens[..self.at];
        let visibility = match before.last().map(|token| token.text) {
            // `pub(crate)`, `pub(in a::b)`
            Some(")") => before.iter().rposition(|token| token.text == "(").unwrap_or(0),
            _ => before.len(),
        };
        let public = visibility > 0 && before[visibility - 1].text == "pub";
        let line = self.tokens[self.at].line;
        self.at += 1;
        let mut found = Vec::new();
        self.tree(&[], &mut found);
        for (name, path) in found {
            let module = self.module.clone();
            self.items.imports.push(Import { name, path, module, public, line });
        }
    }

    /// Reads `a::{b, c as d, e::*}` behind `before`, as pairs of name and path.
    fn tree(&mut self, before: &[String], found: &mut Vec<(String, Vec<String>)>) {
        let mut path = before.to_vec();
        let mut name = None;
        while let Some(token) = self.tokens.get(self.at) {
            self.at += 1;
            match token.text {
                ":" => {}
                "{" => {
                    while self.tokens.get(self.at).is_some_and(|token| token.text != "}") {
                        self.tree(&path, found);
                    }
                    self.at += 1;
                    name = None;
                }
                "as" => {
                    name = self.tokens.get(self.at).map(|token| token.text.to_owned());
                    self.at += 1;
                }
                "," | ";" => break,
                "}" => {
                    self.at -= 1;
                    break;
                }
                "*" => name = Some("*".to_owned()),
                "self" if !path.is_empty() => name = path.last().cloned(),
                word => {
                    path.push(word.to_owned());
                    name = Some(word.to_owned());
                }
            }
        }
        found.extend(name.map(|name| (name, path)));
    }
}

/// The name that is defined here, if one is.
fn defined<'a>(tokens: &[Token<'a>]) -> Option<&'a str> {
    const KINDS: [&str; 8] = ["fn", "struct", "enum", "trait", "const", "static", "type", "union"];
    match tokens {
        // `const fn` and `const unsafe fn` define a function.
        [_, name, ..] if matches!(name.text, "fn" | "unsafe") => None,
        [kind, name, ..] if KINDS.contains(&kind.text) && name.is_word() => Some(name.text),
        [word, mark, name, ..] if word.text == "macro_rules" && mark.text == "!" => Some(name.text),
        _ => None,
    }
}

/// The words that are joined by `::` at the beginning.
fn path(tokens: &[Token]) -> Vec<String> {
    let mut path = vec![tokens[0].text.to_owned()];
    let mut rest = &tokens[1..];
    while let [first, second, word, ..] = rest
        && (first.text, second.text) == (":", ":")
        && word.is_word()
    {
        path.push(word.text.to_owned());
        rest = &rest[3..];
    }
    path
}

#[cfg(test)]
mod tests {
    use super::super::tokens::{mask, tokens};
    use super::*;

    fn items(source: &str) -> Items {
        Items::read(vec!["m".to_owned()], &tokens(&mask(source)))
    }

    fn imports(source: &str) -> Vec<(String, String, bool)> {
        let imports = items(source).imports.into_iter();
        imports.map(|i| (i.name, i.path.join("::"), i.public)).collect()
    }

    #[test]
    fn uses_are_taken_apart() {
        let source = "use a::{self, b::{C, D as E}, f::*};\npub(crate) use super::g;\nuse h;";
        let expected = [
            ("a", "a", false),
            ("C", "a::b::C", false),
            ("E", "a::b::D", false),
            ("*", "a::f", false),
            ("g", "super::g", true),
            ("h", "h", false),
        ];
        let expected = expected.map(|(name, path, public)| (name.into(), path.into(), public));
        assert_eq!(imports(source), expected);
        assert_eq!(imports("use super::*; fn f() -> impl use<'a> X {}").len(), 1);
    }

    #[test]
    fn definitions_are_those_of_a_module_not_of_a_type() {
        let source = "const fn f() { fn inner() {} }\nimpl A { fn method() {} }\n\
                      macro_rules! x {}\nmod n { struct S { t: u8 } }";
        let found: Vec<_> = items(source).definitions.into_iter().collect();
        let at = |path: &[&str]| path.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let own = |name: &str| (at(&["m"]), name.to_owned());
        let expected = [own("f"), own("x"), (at(&["m", "n"]), "S".to_owned())];
        assert_eq!(found, expected);
    }

    #[test]
    fn words_are_uses_of_items() {
        let found = items("fn f(a: B) { c(d.e(), g!(), h::<u8>()); let i = J; k::L }");
        let words: Vec<_> = found.words.keys().map(String::as_str).collect();
        assert_eq!(words, ["B", "J", "c", "g", "h"]);
    }

    #[test]
    fn paths_are_mentioned_with_their_module_and_line() {
        let source = "fn f() {\n crate::a::B::<u8>::c(); }\nmod n { fn g() { super::d(e) } }";
        let found = items(source);
        let expected = [("crate::a::B", 1, 2), ("super::d", 2, 3)];
        let found: Vec<_> =
            found.mentions.iter().map(|m| (m.path.join("::"), m.module.len(), m.line)).collect();
        assert_eq!(found, expected.map(|(path, depth, line)| (path.to_owned(), depth, line)));
    }
}
