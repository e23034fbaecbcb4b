//! Reads the project's own source and documents, for the guards in `tests/house.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree};

/// A file of the project.
#[derive(Debug, Clone)]
pub struct File {
    /// Its path from the root of the project, with `/`.
    pub path: String,
    /// Its text.
    pub text: String,
}

/// The root of the project.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Reads a file, by its path from the root of the project.
pub fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Lists the files in a folder of the project (`""` is the root) with an ending. Hidden folders
/// other than `.ci`, and build output, are left out.
pub fn files(folder: &str, ending: &str) -> Vec<File> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join(folder)).expect("a readable folder") {
        let entry = entry.expect("a readable folder");
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let hidden = name.starts_with('.') && name != ".ci";
        if entry.path().is_dir() && !hidden && name != "target" {
            found.extend(files(&path, ending));
        } else if entry.path().is_file() && !hidden && path.ends_with(ending) {
            found.push(File { text: read(&path), path });
        }
    }
    found
}

/// A fenced block of Markdown.
#[derive(Debug)]
pub struct Block<'p> {
    /// Text behind the first fence.
    pub language: &'p str,
    /// The lines between the fences.
    pub lines: Vec<&'p str>,
}

impl Block<'_> {
    /// Returns true if rustdoc compiles the block.
    pub fn is_doctest(&self) -> bool {
        let mut words = self.language.split(',');
        words.all(|word| matches!(word, "" | "rust" | "no_run" | "should_panic"))
    }

    /// Lists what has to be run: every command of a shell block; of another block its first line.
    pub fn parts(&self) -> Vec<String> {
        if self.language != "sh" {
            return self.lines.first().map(|line| line.trim().to_owned()).into_iter().collect();
        }
        let text = self.lines.join("\n").replace("\\\n", "");
        let commands = text.lines().filter_map(|line| line.split(" # ").next()).map(str::trim);
        commands.filter(|line| !line.is_empty() && !line.starts_with('#')).map(Into::into).collect()
    }
}

/// Reads the blocks of a page.
pub fn blocks(markdown: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    let mut inside = false;
    for line in markdown.lines() {
        match line.trim().strip_prefix("```") {
            Some(language) if !inside => blocks.push(Block { language, lines: Vec::new() }),
            None if inside => blocks.last_mut().expect("the block").lines.push(line),
            _ => {}
        }
        inside ^= line.trim().starts_with("```");
    }
    assert!(!inside, "the last block has no end");
    blocks
}

/// For each file the files that it uses items of, with the names of the items.
pub type Uses = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Path of a module, or of an item, from the root of its crate.
type Names = Vec<String>;

/// Names that a file imports and uses, outside of its tests.
#[derive(Default)]
struct Module {
    file: String,
    /// Names brought in by `use`, with their paths.
    imported: BTreeMap<String, Names>,
    /// The last name of a glob is `*`.
    paths: Vec<Names>,
    /// Count of the inline modules around the item that is read.
    inline: usize,
}

/// Follows the paths of a crate's files, which are those in `folder`, through re-exports to the
/// files that define the items. A glob leads to the file of its module.
pub fn uses(folder: &str, files: &[File]) -> Uses {
    let mut modules = BTreeMap::new();
    for File { path, text } in files {
        let Some(inside) = path.strip_prefix(folder) else { continue };
        let stem = inside.strip_suffix(".rs").expect("a Rust file");
        let mut names: Names = stem.split('/').map(str::to_owned).collect();
        names.pop_if(|last| ["lib", "main", "mod"].contains(&last.as_str()));
        let mut module = Module { file: path.clone(), ..Module::default() };
        module.visit_file(&syn::parse_file(text).unwrap_or_else(|e| panic!("{path}: {e}")));
        modules.insert(names, module);
    }
    let mut uses = Uses::new();
    for (own, module) in &modules {
        let used = uses.entry(module.file.clone()).or_default();
        for path in &module.paths {
            if let Some(owner) = owner(&modules, own, path, 0).filter(|owner| owner != own) {
                let item = path.last().expect("a name").clone();
                used.entry(modules[&owner].file.clone()).or_default().insert(item);
            }
        }
    }
    uses
}

/// Returns the module with the item that a path in a module leads to; `None` for a module, and out
/// of the crate. A path that begins with an unknown name is one of the module itself.
fn owner(
    modules: &BTreeMap<Names, Module>,
    own: &Names,
    path: &[String],
    depth: usize,
) -> Option<Names> {
    let (mut at, mut rest) = match path.split_first()? {
        (first, rest) if first == "crate" => (Names::new(), rest),
        (first, rest) if first == "self" => (own.clone(), rest),
        _ => (own.clone(), path),
    };
    while let Some((name, after)) = rest.split_first() {
        let child = [&at[..], std::slice::from_ref(name)].concat();
        if name == "super" {
            at.pop()?;
        } else if modules.contains_key(&child) {
            at = child;
        } else {
            return match modules[&at].imported.get(name) {
                // Names of other crates lead to themselves.
                Some(_) if depth > 8 => None,
                Some(path) => owner(modules, &at, &[&path[..], after].concat(), depth + 1),
                None => Some(at),
            };
        }
        rest = after;
    }
    None
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

impl Module {
    fn add_use(&mut self, tree: &UseTree, before: &Names) {
        let then = |name: &syn::Ident| [before.as_slice(), &[name.to_string()]].concat();
        let (name, path) = match tree {
            UseTree::Path(path) => return self.add_use(&path.tree, &then(&path.ident)),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.add_use(tree, before));
            }
            UseTree::Glob(_) => {
                let path = [before.as_slice(), &["*".to_owned()]].concat();
                return self.paths.push(self.path_in_file(path));
            }
            UseTree::Name(name) if name.ident == "self" => {
                (before.last().expect("a name").clone(), before.clone())
            }
            UseTree::Name(name) => (name.ident.to_string(), then(&name.ident)),
            UseTree::Rename(rename) => (rename.rename.to_string(), then(&rename.ident)),
        };
        let path = self.path_in_file(path);
        self.paths.push(path.clone());
        // In an inline module, a name of its file.
        if path[..] != ["self".to_owned(), name.clone()] {
            self.imported.insert(name, path);
        }
    }

    /// Turns a path within inline modules into one from their file, which `super` leads to.
    fn path_in_file(&self, path: Names) -> Names {
        let supers = path.iter().take(self.inline).take_while(|name| *name == "super").count();
        match supers {
            0 => path,
            _ => [&["self".to_owned()][..], &path[supers..]].concat(),
        }
    }
}

impl<'a> Visit<'a> for Module {
    fn visit_item(&mut self, item: &'a Item) {
        let attributes = match item {
            Item::Const(syn::ItemConst { attrs, .. })
            | Item::Fn(syn::ItemFn { attrs, .. })
            | Item::Impl(syn::ItemImpl { attrs, .. })
            | Item::Mod(syn::ItemMod { attrs, .. })
            | Item::Use(syn::ItemUse { attrs, .. }) => attrs.as_slice(),
            _ => &[],
        };
        let is_test = |list: &syn::MetaList| {
            let condition = list.tokens.to_string().replace(' ', "");
            condition == "test" || condition.starts_with("all(test,")
        };
        let for_tests = |attribute: &Attribute| {
            attribute.path().is_ident("cfg") && attribute.meta.require_list().is_ok_and(is_test)
        };
        if attributes.iter().any(for_tests) {
            return;
        }
        if let Item::Use(item) = item {
            self.add_use(&item.tree, &Names::new());
        }
        let inline = usize::from(matches!(item, Item::Mod(module) if module.content.is_some()));
        self.inline += inline;
        visit::visit_item(self, item);
        self.inline -= inline;
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let names: Names = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.len() > 1 {
            self.paths.push(self.path_in_file(names));
        }
        visit::visit_path(self, path);
    }
}
