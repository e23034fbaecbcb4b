//! Reading the project's own source, for the guards in `tests/house.rs`.
//!
//! This is no parser of Rust: it knows words, brackets, `use` and `::`, which is enough for code as
//! `cargo fmt` writes it. What it does not understand is a failure, not a pass.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

pub mod arrows;
pub mod circles;
pub mod functions;
pub mod items;
pub mod lines;
pub mod tokens;

/// A rule that a file breaks, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Breach {
    /// The file, from the root of the project.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// What is wrong and what to do.
    pub what: String,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

/// A file of the project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Its path from the root of the project, with `/`.
    pub path: String,
    /// What it holds.
    pub text: String,
}

/// The root of the project.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The files in a folder of the project (`""` is the root) that end so, by their paths. Hidden
/// folders but `.ci`, and what is built, are left out.
pub fn files(folder: &str, ending: &str) -> Vec<File> {
    let mut found = Vec::new();
    collect(folder, ending, &mut found);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn collect(folder: &str, ending: &str, found: &mut Vec<File>) {
    let Ok(entries) = fs::read_dir(root().join(folder)) else { return };
    for entry in entries {
        let entry = entry.expect("a readable folder");
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let hidden = name.starts_with('.') && name != ".ci";
        if hidden || name == "target" {
            continue;
        }
        if entry.path().is_dir() {
            collect(&path, ending, found);
        } else if path.ends_with(ending) {
            let text = fs::read_to_string(entry.path()).unwrap_or_else(|e| panic!("{path}: {e}"));
            found.push(File { path, text });
        }
    }
}

/// Fails with a list of what is broken, if anything is.
pub fn assert_kept(rule: &str, mut broken: Vec<Breach>) {
    broken.sort();
    let list: Vec<_> = broken.iter().map(Breach::to_string).collect();
    assert!(list.is_empty(), "{rule}: {} times not\n{}", list.len(), list.join("\n"));
}
