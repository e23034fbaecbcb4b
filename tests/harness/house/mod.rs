//! Reads the project's own source, for the guards in `tests/house.rs`.

use std::fs;
use std::path::{Path, PathBuf};

pub mod blocks;
pub mod circles;
pub mod imports;
pub mod runners;

/// A file of the project.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// Lists the files in a folder of the project (`""` is the root) with an ending, sorted by path.
/// Hidden folders other than `.ci`, and build output, are left out.
pub fn files(folder: &str, ending: &str) -> Vec<File> {
    let mut found = Vec::new();
    collect(folder, ending, &mut found);
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn collect(folder: &str, ending: &str, found: &mut Vec<File>) {
    for entry in fs::read_dir(root().join(folder)).expect("a readable folder") {
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
            found.push(File { text: read(&path), path });
        }
    }
}

/// Fails with the list of breaches of a rule, if there are any.
pub fn assert_kept(rule: &str, mut broken: Vec<String>) {
    broken.sort();
    broken.dedup();
    assert!(broken.is_empty(), "{rule}: {} breaches\n{}", broken.len(), broken.join("\n"));
}
