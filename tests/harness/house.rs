//! The files that each file of a crate uses, for the guards in `tests/house.rs`.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};
use syn::{ItemMod, ItemUse, MetaList, UseTree, VisRestricted};

/// Path of a module, or of an item, in its crate.
type Names = Vec<String>;

/// For each file the files that it uses, each with a path that leads there.
pub type Uses = BTreeMap<String, BTreeMap<String, String>>;

/// Finds the files of a crate that the paths in each of its files, outside of tests, lead to. The
/// files of the crate are those in `folder`.
pub fn uses(folder: &str, files: &BTreeMap<String, String>) -> Uses {
    let of_crate = files.iter().filter_map(|file| Some((file.0.strip_prefix(folder)?, file)));
    let modules: BTreeMap<Names, _> = of_crate.map(|(path, file)| (module(path), file)).collect();
    let mut uses = Uses::new();
    for (own, (file, text)) in &modules {
        let mut paths = Paths::default();
        paths.visit_file(&syn::parse_file(text).unwrap_or_else(|e| panic!("{file}: {e}")));
        let used = uses.entry((*file).clone()).or_default();
        for path in paths.found {
            let from_root = path.first().is_some_and(|name| name == "crate");
            let mut at = if from_root { Names::new() } else { own.clone() };
            for name in path.iter().filter(|name| *name != "crate" && *name != "self") {
                let child = [&at[..], std::slice::from_ref(name)].concat();
                if name == "super" {
                    at.pop();
                } else if modules.contains_key(&child) {
                    at = child;
                } else {
                    // The rest is an item of the module, or in another crate.
                    break;
                }
            }
            if let Some((other, _)) = modules.get(&at).filter(|(other, _)| other != file) {
                used.insert((*other).clone(), path.join("::"));
            }
        }
    }
    uses
}

/// The module of a file of a crate.
fn module(path: &str) -> Names {
    let stem = path.strip_suffix(".rs").expect("a Rust file");
    let mut names: Names = stem.split('/').map(str::to_owned).collect();
    names.pop_if(|last| ["lib", "mod"].contains(&last.as_str()));
    names
}

/// Lists the files that a file uses, directly or through others.
pub fn reached<'u>(uses: &'u Uses, from: &str) -> BTreeSet<&'u str> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&str> = uses[from].keys().map(String::as_str).collect();
    while let Some(file) = open.pop() {
        if reached.insert(file) {
            open.extend(uses[file].keys().map(String::as_str));
        }
    }
    reached
}

/// The paths in a file, outside of its tests.
#[derive(Default)]
struct Paths {
    found: Vec<Names>,
    /// Count of the inline modules around the item that is read.
    inline: usize,
}

impl Paths {
    fn add(&mut self, path: &[String]) {
        // In an inline module `super` may be the file itself.
        let inside = path.iter().take(self.inline).take_while(|name| *name == "super").count();
        self.found.push(path[inside..].to_vec());
    }

    fn add_use(&mut self, tree: &UseTree, before: &[String]) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.add_use(&path.tree, &with(&path.ident)),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_use(tree, before));
            }
            UseTree::Name(name) => self.add(&with(&name.ident)),
            UseTree::Rename(renamed) => self.add(&with(&renamed.ident)),
            UseTree::Glob(_) => self.add(before),
        }
    }
}

impl<'a> Visit<'a> for Paths {
    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        let for_tests =
            |list: &MetaList| list.path.is_ident("cfg") && list.tokens.to_string().contains("test");
        if !item.attrs.iter().any(|one| one.meta.require_list().is_ok_and(for_tests)) {
            self.inline += 1;
            visit::visit_item_mod(self, item);
            self.inline -= 1;
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        self.add_use(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let names: Names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        // A single name is one of the file.
        if names.len() > 1 {
            self.add(&names);
        }
        visit::visit_path(self, path);
    }

    /// `pub(in path)` uses nothing.
    fn visit_vis_restricted(&mut self, _: &'a VisRestricted) {}
}
