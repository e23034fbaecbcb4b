//! The files of a crate that each file uses items of: `use` declarations and paths in code,
//! followed through re-exports to the file that defines the item.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree};

use super::File;

/// Path of a module, or of an item, from the root of its crate.
type Names = Vec<String>;

/// The modules of a crate, by their paths.
pub struct Crate {
    modules: BTreeMap<Names, Module>,
}

/// Names that a file defines, imports and uses.
#[derive(Default)]
struct Module {
    file: String,
    /// Items defined in the file.
    defined: BTreeSet<String>,
    /// Names brought in by `use`, with their paths.
    imported: BTreeMap<String, Names>,
    /// Paths followed by `::*`.
    globs: Vec<Names>,
    /// Every path in the file, other than in its tests.
    paths: Vec<Names>,
}

/// The place that a path leads to.
enum Target {
    Module(Names),
    Item(Names),
}

impl Crate {
    /// Parses the files of a crate, whose paths begin with `folder`, which ends in `/`.
    pub fn parse(folder: &str, files: &[File]) -> Self {
        let own = files.iter().filter_map(|file| Some((file.path.strip_prefix(folder)?, file)));
        let modules = own.map(|(path, file)| {
            let stem = path.strip_suffix(".rs").expect("a Rust file");
            let mut names: Names = stem.split('/').map(str::to_owned).collect();
            if ["lib", "main", "mod"].contains(&names.last().expect("a name").as_str()) {
                names.pop();
            }
            (names, Module::parse(&file.path, &file.text))
        });
        Self { modules: modules.collect() }
    }

    /// Returns the files, and for each the numbers of the files that it uses items of, with the
    /// names of the items.
    pub fn uses(&self) -> (Vec<&str>, Vec<BTreeMap<usize, Names>>) {
        let number = |names: &Names| self.modules.keys().position(|key| key == names);
        let edges = self.modules.iter().map(|(own, module)| {
            let mut edges = BTreeMap::<usize, Names>::new();
            for path in &module.paths {
                if let Some(Target::Item(owner)) = self.resolve(own, path, 0)
                    && owner != *own
                {
                    let item = path.last().expect("a name").clone();
                    edges.entry(number(&owner).expect("a module")).or_default().push(item);
                }
            }
            edges
        });
        (self.modules.values().map(|module| module.file.as_str()).collect(), edges.collect())
    }

    /// Follows a path that stands in a module. `None` leads out of the crate.
    fn resolve(&self, own: &Names, path: &[String], depth: usize) -> Option<Target> {
        // Re-exports that name each other would go on forever.
        if depth > 16 {
            return None;
        }
        let (first, rest) = path.split_first()?;
        let child = |parent: &Names, name: &String| {
            let names = [parent.as_slice(), std::slice::from_ref(name)].concat();
            self.modules.contains_key(&names).then_some(names)
        };
        let (mut at, mut rest) = match first.as_str() {
            "crate" => (Names::new(), rest),
            "self" => (own.clone(), rest),
            "super" => (own.split_last()?.1.to_vec(), rest),
            _ => (own.clone(), path),
        };
        let relative = rest.len() == path.len();
        while let Some((name, after)) = rest.split_first() {
            let parent = at.split_last().map(|(_, parent)| parent.to_vec());
            if name == "super" {
                at = parent?;
            } else if let Some(module) = child(&at, name) {
                at = module;
            } else {
                return self.item(&at, name, after, relative && at == *own, depth);
            }
            rest = after;
        }
        Some(Target::Module(at))
    }

    /// Follows a name in a module that is not a module in it.
    fn item(
        &self,
        at: &Names,
        name: &String,
        after: &[String],
        relative: bool,
        depth: usize,
    ) -> Option<Target> {
        let module = self.modules.get(at)?;
        if module.defined.contains(name) {
            return Some(Target::Item(at.clone()));
        }
        if let Some(path) = module.imported.get(name) {
            if path.first() == Some(name) && relative {
                return None;
            }
            return self.resolve(at, &[path.as_slice(), after].concat(), depth + 1);
        }
        let through = |glob: &Names| {
            let path = [glob.as_slice(), std::slice::from_ref(name), after].concat();
            let Some(Target::Module(to)) = self.resolve(at, glob, depth + 1) else { return None };
            let known = self.modules[&to].defined.contains(name)
                || self.modules[&to].imported.contains_key(name);
            known.then(|| self.resolve(at, &path, depth + 1)).flatten()
        };
        module.globs.iter().find_map(through)
    }
}

impl Module {
    fn parse(file: &str, text: &str) -> Self {
        let syntax = syn::parse_file(text).unwrap_or_else(|error| panic!("{file}: {error}"));
        let mut module = Self { file: file.to_owned(), ..Self::default() };
        module.visit_file(&syntax);
        module
    }

    fn add_use(&mut self, tree: &UseTree, before: &Names) {
        let then = |name: &syn::Ident| [before.as_slice(), &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.add_use(&path.tree, &then(&path.ident)),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_use(tree, before)),
            UseTree::Glob(_) => self.globs.push(before.clone()),
            UseTree::Name(name) if name.ident == "self" => {
                self.import(before.last().expect("a name").clone(), before.clone());
            }
            UseTree::Name(name) => self.import(name.ident.to_string(), then(&name.ident)),
            UseTree::Rename(rename) => self.import(rename.rename.to_string(), then(&rename.ident)),
        }
    }

    fn import(&mut self, name: String, path: Names) {
        self.paths.push(path.clone());
        self.imported.insert(name, path);
    }
}

impl<'a> Visit<'a> for Module {
    fn visit_item(&mut self, item: &'a Item) {
        let (name, attributes) = match item {
            Item::Const(item) => (Some(&item.ident), &item.attrs),
            Item::Enum(item) => (Some(&item.ident), &item.attrs),
            Item::Fn(item) => (Some(&item.sig.ident), &item.attrs),
            Item::Macro(item) => (item.ident.as_ref(), &item.attrs),
            Item::Static(item) => (Some(&item.ident), &item.attrs),
            Item::Struct(item) => (Some(&item.ident), &item.attrs),
            Item::Trait(item) => (Some(&item.ident), &item.attrs),
            Item::Type(item) => (Some(&item.ident), &item.attrs),
            Item::Mod(item) if item.content.is_some() => (Some(&item.ident), &item.attrs),
            Item::Use(item) => (None, &item.attrs),
            Item::Impl(item) => (None, &item.attrs),
            _ => return,
        };
        if attributes.iter().any(is_for_tests) {
            return;
        }
        self.defined.extend(name.map(ToString::to_string));
        if let Item::Use(item) = item {
            self.add_use(&item.tree, &Names::new());
        }
        visit::visit_item(self, item);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let names: Names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.len() > 1 {
            self.paths.push(names);
        }
        visit::visit_path(self, path);
    }
}

fn is_for_tests(attribute: &Attribute) -> bool {
    let is_test = |list: &syn::MetaList| list.tokens.to_string() == "test";
    attribute.path().is_ident("cfg") && attribute.meta.require_list().is_ok_and(is_test)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let file = |(path, text): &(&str, &str)| File {
            path: format!("x/{path}"),
            text: (*text).to_owned(),
        };
        let parsed = Crate::parse("x/", &files.iter().map(file).collect::<Vec<_>>());
        let (files, edges) = parsed.uses();
        let named = |file: usize| files[file].trim_start_matches("x/").to_owned();
        let pairs = edges.iter().enumerate();
        pairs.flat_map(|(from, to)| to.keys().map(move |&to| (named(from), named(to)))).collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned())).collect()
    }

    #[test]
    fn reexports_lead_to_the_file_that_defines_the_item() {
        let found = uses(&[
            ("lib.rs", "mod a; mod b; pub use a::{A, inner::Inner as Other};"),
            ("a/mod.rs", "mod inner; pub use inner::*; pub struct A;"),
            ("a/inner.rs", "pub struct Inner; impl super::A {}"),
            ("b.rs", "use crate::Other; use super::a; fn f() -> a::Inner { crate::A::new() }"),
        ]);
        let expected = [
            ("lib.rs", "a/inner.rs"),
            ("lib.rs", "a/mod.rs"),
            ("a/inner.rs", "a/mod.rs"),
            ("b.rs", "a/inner.rs"),
            ("b.rs", "a/mod.rs"),
        ];
        let [mut found, mut expected] = [found, pairs(&expected)];
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn other_crates_and_tests_do_not_count() {
        let found = uses(&[
            ("lib.rs", "mod a; #[cfg(test)] mod tests { use crate::a::A; }"),
            ("a.rs", "use std::a::A; use a::A as B; pub struct A; fn f() { a::g(); }"),
        ]);
        assert_eq!(found, []);
    }
}
