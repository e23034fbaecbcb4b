//! The files of the project, and the blocks of its pages.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use regex::{Captures, Regex};
use serde_json::Value;

/// The root of the project.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Reads a file, by its path from the root of the project.
///
/// # Panics
/// If it cannot be read.
pub fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Reads the files in a folder with an ending, by their paths from the root of the project, which
/// is `""`. Hidden folders other than `.ci`, and build output, are left out.
///
/// # Panics
/// If one cannot be read.
pub fn files(folder: &str, ending: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(root().join(folder)).expect("a readable folder") {
        let entry = entry.expect("a readable folder");
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let left_out = name == "target" || name.starts_with('.') && name != ".ci";
        if entry.path().is_dir() && !left_out {
            found.extend(files(&path, ending));
        } else if entry.path().is_file() && !left_out && path.ends_with(ending) {
            found.insert(path.clone(), read(&path));
        }
    }
    found
}

/// Reads the sources of the crates.
///
/// # Panics
/// If one cannot be read.
pub fn sources() -> BTreeMap<String, String> {
    let mut found = files("crates", ".rs");
    found.extend(files("kernels-cubecl", ".rs"));
    found.retain(|path, _| path.contains("/src/"));
    found
}

/// The packages of the workspace, as Cargo describes them.
///
/// # Panics
/// If Cargo cannot.
pub fn packages() -> Vec<Value> {
    let metadata = ["metadata", "--no-deps", "--format-version", "1", "--offline"];
    let output = Command::new(env!("CARGO")).args(metadata).current_dir(root()).output();
    let output = output.expect("cargo runs").stdout;
    let metadata: Value = serde_json::from_slice(&output).expect("JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

/// Lists a field of some objects, such as their names.
pub fn field<'v>(objects: &'v Value, name: &'v str) -> impl Iterator<Item = &'v str> {
    objects.as_array().into_iter().flatten().filter_map(move |object| object[name].as_str())
}

/// Lists the matches of an expression: of each its first group that matches something.
///
/// # Panics
/// If it is no expression.
pub fn matches<'t>(expression: &str, text: &'t str) -> Vec<&'t str> {
    let expression = Regex::new(expression).expect("an expression");
    let group = |found: Captures<'t>| found.iter().skip(1).flatten().next();
    expression.captures_iter(text).filter_map(group).map(|group| group.as_str()).collect()
}

/// A fenced block of Markdown.
#[derive(Debug)]
pub struct Block<'p> {
    language: &'p str,
    /// The lines between the fences.
    pub text: &'p str,
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
            return self.text.lines().take(1).map(|line| line.trim().to_owned()).collect();
        }
        let text = self.text.replace("\\\n", "");
        let commands = text.lines().filter_map(|line| line.split(" # ").next()).map(str::trim);
        commands.filter(|line| !line.is_empty() && !line.starts_with('#')).map(Into::into).collect()
    }
}

/// Reads the blocks of a page.
///
/// # Panics
/// If the last has no end.
pub fn blocks<'p>(markdown: &'p str) -> Vec<Block<'p>> {
    let fenced = Regex::new(r"(?ms)^ *```([^\n]*)\n(.*?)^ *```$").expect("an expression");
    let block = |found: Captures<'p>| {
        let (_, [language, text]) = found.extract();
        Block { language, text }
    };
    let blocks: Vec<_> = fenced.captures_iter(markdown).map(block).collect();
    let fences = matches("(?m)^ *(```)", markdown).len();
    assert_eq!(fences, 2 * blocks.len(), "a block has no end: {markdown}");
    blocks
}
