//! Which files of a crate use which others.

use std::collections::BTreeMap;

use super::items::{Import, Items, Mention, ModulePath};
use super::tokens::{mask, tokens, without_tests};

/// The files of a crate, and what each of them holds.
pub struct Crate {
    /// Paths below `src`.
    pub files: Vec<String>,
    items: Vec<Items>,
    /// The file of every module.
    modules: BTreeMap<ModulePath, usize>,
}

/// One file uses what another one holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrow {
    /// The file that uses.
    pub from: usize,
    /// The file that holds.
    pub to: usize,
    /// The first line that does.
    pub line: usize,
    /// What it names there.
    pub name: String,
}

/// A path into the crate that leads nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    /// The file that names it.
    pub file: usize,
    /// Its line.
    pub line: usize,
    /// The path.
    pub path: String,
}

/// What a path leads to.
enum Target {
    File(usize),
    Module,
    /// Another crate.
    Outside,
    Nowhere,
}

impl Crate {
    /// Reads a crate from its files: paths below `src`, with their text.
    pub fn new(sources: Vec<(String, String)>) -> Self {
        let (files, texts): (Vec<_>, Vec<_>) = sources.into_iter().unzip();
        let read = |file: &String, text: &String| {
            let masked = mask(text);
            Items::read(module_of(file), &without_tests(&tokens(&masked)))
        };
        let items: Vec<_> = files.iter().zip(&texts).map(|(file, text)| read(file, text)).collect();
        let modules = items
            .iter()
            .enumerate()
            .flat_map(|(index, items)| items.modules.iter().map(move |m| (m.clone(), index)))
            .collect();
        Self { files, items, modules }
    }

    /// Every pair of files of which the first uses the second, and the paths that lead nowhere.
    ///
    /// To declare a module or to hand its names on (`pub use`) is no use of it: that is what the
    /// file of a folder is for. It is one if the file itself names what it hands on.
    pub fn arrows(&self) -> (Vec<Arrow>, Vec<Unknown>) {
        let (mut arrows, mut unknown) = (Vec::new(), Vec::new());
        for file in 0..self.files.len() {
            let mut found: BTreeMap<usize, Arrow> = BTreeMap::new();
            for Mention { module, path, line } in self.used(file) {
                match self.resolve(&module, &path, 0) {
                    Target::File(to) if to != file => {
                        let name = path.join("::");
                        found.entry(to).or_insert(Arrow { from: file, to, line, name });
                    }
                    Target::Nowhere if is_local(&path) => {
                        unknown.push(Unknown { file, line, path: path.join("::") });
                    }
                    Target::File(_) | Target::Module | Target::Outside | Target::Nowhere => {}
                }
            }
            arrows.extend(found.into_values());
        }
        (arrows, unknown)
    }

    /// The paths that a file uses, in the order of their lines.
    fn used(&self, file: usize) -> Vec<Mention> {
        let items = &self.items[file];
        let mut used = items.mentions.clone();
        for import in &items.imports {
            let module = || import.module.clone();
            if import.name == "*" {
                // Whichever of its names occur.
                let path = |word: &String| [&import.path[..], core::slice::from_ref(word)].concat();
                let names = items.words.iter();
                let named =
                    names.map(|(word, &line)| Mention { path: path(word), module: module(), line });
                used.extend(
                    named
                        .filter(|m| matches!(self.resolve(&m.module, &m.path, 0), Target::File(_))),
                );
            } else if !import.public || items.words.contains_key(&import.name) {
                let (path, line) = (import.path.clone(), import.line);
                used.push(Mention { path, module: module(), line });
            }
        }
        used.sort_by_key(|mention| mention.line);
        used
    }

    /// Follows a path from a module on, through what modules hand on.
    fn resolve(&self, module: &[String], path: &[String], steps: usize) -> Target {
        let Some((first, rest)) = path.split_first() else { return Target::Module };
        if steps > 32 {
            return Target::Nowhere;
        }
        match first.as_str() {
            "crate" => return self.resolve(&[], rest, steps + 1),
            "self" => return self.resolve(module, rest, steps + 1),
            "super" => {
                let parent = &module[..module.len().saturating_sub(1)];
                return self.resolve(parent, rest, steps + 1);
            }
            _ => {}
        }
        let Some(&file) = self.modules.get(module) else { return Target::Nowhere };
        let child = [module, core::slice::from_ref(first)].concat();
        let is_module = self.modules.contains_key(&child);
        // A function may be called as its module is.
        if is_module && !rest.is_empty() {
            return self.resolve(&child, rest, steps + 1);
        }
        // CubeCL derives `ExtentLaunch` from `Extent`.
        let written = first.strip_suffix("Launch").unwrap_or(first);
        let is_defined =
            |name: &str| self.items[file].definitions.contains(&(module.to_vec(), name.to_owned()));
        if is_defined(first) || is_defined(written) {
            return Target::File(file);
        }
        match self.imported(&self.items[file], module, path, steps) {
            Target::Nowhere if is_module => Target::Module,
            target => target,
        }
    }

    /// Follows a path whose first name a module imports.
    fn imported(&self, items: &Items, module: &[String], path: &[String], steps: usize) -> Target {
        let (name, rest) = (path[0].as_str(), &path[1..]);
        for import in items.imports.iter().filter(|import| import.module == module) {
            let path = match import.name.as_str() {
                "*" => [&import.path[..], &[name.to_owned()], rest].concat(),
                own if own == name => [&import.path[..], rest].concat(),
                _ => continue,
            };
            let target = match self.is_named(items, module, import) {
                true => self.resolve(module, &path, steps + 1),
                false => Target::Nowhere,
            };
            match target {
                Target::Nowhere if import.name == "*" => {}
                Target::Nowhere if !is_local(&path) => return Target::Outside,
                target => return target,
            }
        }
        Target::Nowhere
    }

    /// Whether the path of an import begins with something of this crate. Globs are not looked
    /// through for it: two of other crates in a module would be followed into each other for ever.
    /// `pub use a;` of another crate leads to itself.
    fn is_named(&self, items: &Items, module: &[String], import: &Import) -> bool {
        let Some(first) = import.path.first() else { return false };
        let child = [module, core::slice::from_ref(first)].concat();
        let is_imported = |other: &Import| {
            other.module == module && other.name == *first && other.path != [first.as_str()]
        };
        is_local(&import.path)
            || self.modules.contains_key(&child)
            || items.definitions.contains(&(module.to_vec(), first.clone()))
            || items.imports.iter().any(is_imported)
    }
}

fn is_local(path: &[String]) -> bool {
    matches!(path[0].as_str(), "crate" | "super" | "self")
}

/// The module of a file: `a/b.rs` and `a/b/mod.rs` are `a::b`, `lib.rs` and `main.rs` the root.
fn module_of(file: &str) -> ModulePath {
    let path = file.strip_suffix(".rs").unwrap_or(file);
    let mut module: ModulePath = path.split('/').map(str::to_owned).collect();
    let last = module.last().map(String::as_str);
    if last == Some("mod") || (module.len() == 1 && matches!(last, Some("lib" | "main"))) {
        module.pop();
    }
    module
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The arrows as `from > to`, without the ending of files.
    fn arrows(files: &[(&str, &str)]) -> Vec<String> {
        let sources = files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned()));
        let read = Crate::new(sources.collect());
        let (arrows, unknown) = read.arrows();
        assert_eq!(unknown, []);
        let stem = |file: usize| read.files[file].trim_end_matches(".rs").to_owned();
        arrows.iter().map(|arrow| format!("{} > {}", stem(arrow.from), stem(arrow.to))).collect()
    }

    #[test]
    fn names_are_followed_to_the_file_that_defines_them() {
        let root = "mod a; mod b; mod c; pub use a::{f, g as h}; pub use outside;";
        let d = "fn e() { crate::f(); crate::c::e(); super::K::new(); crate::outside::y() }";
        let files = [
            ("lib.rs", root),
            ("a.rs", "pub fn f() {}\npub fn g() {}"),
            ("b.rs", "use crate::h;\nuse outside::x;\npub struct K;"),
            ("c/mod.rs", "mod d;\nuse super::b::K;\npub(crate) use d::e;"),
            ("c/d.rs", d),
        ];
        assert_eq!(arrows(&files), ["b > a", "c/mod > b", "c/d > a", "c/d > b"]);
    }

    #[test]
    fn a_file_uses_what_it_hands_on_only_where_it_names_it() {
        let child = ("a.rs", "pub fn f() {}");
        assert_eq!(
            arrows(&[("lib.rs", "mod a; pub use a::f; fn g(f: u8) { x.f() }"), child]),
            [""; 0]
        );
        assert_eq!(
            arrows(&[("lib.rs", "mod a; pub use a::f; fn g() { f() }"), child]),
            ["lib > a"]
        );
        assert_eq!(arrows(&[("lib.rs", "mod a; fn g() { a::f() }"), child]), ["lib > a"]);
    }

    #[test]
    fn modules_that_are_imported_lead_to_what_is_named_in_them() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "pub fn f() {}"),
            ("b.rs", "use crate::a; fn g() { a::f() }"),
            (
                "c.rs",
                "use crate::a::*; use outside::*; fn h() { f() } mod n { fn i() { super::h() } }",
            ),
        ];
        assert_eq!(arrows(&files), ["b > a", "c > a"]);
    }

    #[test]
    fn globs_of_other_crates_lead_nowhere() {
        let b = "use outside::a::*; use other::*; use another::*; use crate::a; fn g() { a::f() }";
        let files = [("lib.rs", "mod a; mod b;"), ("a.rs", "pub fn f() {}"), ("b.rs", b)];
        assert_eq!(arrows(&files), ["b > a"]);
    }

    #[test]
    fn a_module_and_what_is_in_it_may_have_one_name() {
        let root = "mod a; mod b; pub use a::a; pub use outside::outside;";
        let b = "use crate::a;\nfn f() { a() }\nfn g() { crate::outside() }";
        let files = [("lib.rs", root), ("a.rs", "pub fn a() {}"), ("b.rs", b)];
        assert_eq!(arrows(&files), ["b > a"]);
    }

    #[test]
    fn tests_and_comments_use_nothing() {
        let a = "// crate::b::f\n#[cfg(test)] mod tests { use crate::b::f; }";
        assert_eq!(
            arrows(&[("lib.rs", "mod a; mod b;"), ("a.rs", a), ("b.rs", "fn f() {}")]),
            [""; 0]
        );
    }

    #[test]
    fn paths_that_lead_nowhere_are_told() {
        let files = [("lib.rs", "mod a;"), ("a.rs", "\nuse crate::nothing;")];
        let read = Crate::new(files.map(|(path, text)| (path.to_owned(), text.to_owned())).into());
        let expected = Unknown { file: 1, line: 2, path: "crate::nothing".to_owned() };
        assert_eq!(read.arrows().1, [expected]);
    }
}
