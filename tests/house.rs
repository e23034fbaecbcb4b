//! The rules of the house, executable.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates, each allowed to depend on those before it.
const RANKS: [&str; 7] = [
    "burn-fp4-formats",
    "burn-fp4-search",
    "burn-fp4-cubecl",
    "burn-fp4-ops",
    "burn-fp4-modules",
    "burn-fp4",
    "burn-fp4-cli",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn crates_depend_downward_only() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rank = |name: &str| RANKS.iter().position(|known| *known == name);
    let mut arrows = 0;
    for package in metadata["packages"].as_array().expect("packages") {
        let name = package["name"].as_str().expect("a name");
        let Some(from) = rank(name) else { continue };
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let to = dependency["name"].as_str().expect("a name");
            if let Some(to_rank) = rank(to) {
                assert!(to_rank < from, "{name} depends on {to}");
                arrows += 1;
            }
        }
    }
    assert!(arrows >= 5, "found {arrows} arrows");
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn no_drawers() {
    let mut files = Vec::new();
    sources(&root().join("crates"), &mut files);
    sources(&root().join("kernels-cubecl"), &mut files);
    assert!(files.len() > 20);
    for file in files {
        let stem = file.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        assert!(!["base", "utils", "helpers", "common", "misc"].contains(&stem), "{file:?}");
    }
}

#[test]
fn every_rule_is_known_by_its_name() {
    use burn_fp4_search::ScaleRule;
    for rule in ScaleRule::ALL {
        assert_eq!(rule.row().name.parse(), Ok(rule));
        let json = serde_json::to_string(&rule).expect("a unit variant");
        assert_eq!(json.trim_matches('"'), rule.row().name);
    }
    assert!("nearest".parse::<ScaleRule>().is_err());
}
