//! Pickles of PyTorch: refused, with the command that converts them.

use std::fs;
use std::path::{Path, PathBuf};

use burn_fp4_checkpoints::{CheckpointError, Container, Dtype};

use super::models::raw_file;

/// Names the file that a path is refused for, and all files to convert.
fn refused(path: &Path) -> (PathBuf, PathBuf) {
    let error = Container::open(path).expect_err("no tensors");
    let text = error.to_string();
    let CheckpointError::Pickle { path, all } = error else { panic!("{text}") };
    assert!(text.starts_with(&format!("{}: a pickle", path.display())), "{text}");
    assert!(text.contains("; convert it to safetensors: python3 -c \"import "), "{text}");
    assert!(text.ends_with(&format!("\" '{}'", all.display())), "{text}");
    // Of dictionaries in each other, the one with the most tensors.
    assert!(text.contains("isinstance(v, dict)") && text.contains("key=len"), "{text}");
    (path, all)
}

#[test]
fn pickles_are_refused_with_the_command_that_converts_them() {
    let folder = super::folder("pickles");
    for name in ["a.bin", "a.pt", "a.pth", "a.ckpt"] {
        let path = folder.join(name);
        fs::write(&path, b"PK\x03\x04").expect("a file");
        assert_eq!(refused(&path), (path.clone(), path));
    }
    let cases: [(&[&str], &str, &str); 4] = [
        (&["model.pt"], "model.pt", "model.pt"),
        (&["training_args.bin", "pytorch_model.bin"], "pytorch_model.bin", "pytorch_model.bin"),
        (&["m-2-of-2.bin", "m-1-of-2.bin", "z.pth"], "m-1-of-2.bin", "m-*.bin"),
        (&["modèle.bin", "modéle.bin"], "modèle.bin", "mod*.bin"),
    ];
    for (at, (files, first, all)) in cases.into_iter().enumerate() {
        let folder = folder.join(at.to_string());
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("config.json"), "{}").expect("a file");
        files.iter().for_each(|name| fs::write(folder.join(name), "").expect("a file"));
        assert_eq!(refused(&folder), (folder.join(first), folder.join(all)));
    }
}

#[test]
fn pickles_next_to_safetensors_are_left_out_of_a_copy() {
    let folder = super::folder("pickles-next");
    let trainer = folder.join("training_args.bin");
    fs::write(&trainer, "").expect("a file");
    let error = Container::open(&folder).expect_err("nothing there").to_string();
    assert!(error.contains("or safetensors files; "), "{error}");
    raw_file(&folder.join("x.safetensors"), &[], &[("x", Dtype::U8, vec![1], vec![1])]);
    let others =
        ["x.bin", "x.bin.index.json", "x.ckpt", "x.pt", "x.pth"].map(|name| folder.join(name));
    others.iter().for_each(|path| fs::write(path, "").expect("a file"));
    let container = Container::open(&folder).expect("safetensors");
    assert_eq!(container.left_out(), [&[trainer], &others[..]].concat());
    assert!(container.sidecars().is_empty());
}
