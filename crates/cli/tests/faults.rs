//! What can go wrong while a checkpoint is quantized: every fault is one line that names file and
//! tensor, the input stays as it is, and nothing is under the name of the output.

mod model;

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use model::{SMALL, Sizes, assert_same, bytes, fails, names, run, succeeds};
use tempfile::tempdir;

#[test]
fn broken_inputs_are_named() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", SMALL);
    let before = bytes(&path);
    let restore = || {
        fs::remove_dir_all(&path).expect("a folder");
        fs::create_dir(&path).expect("a folder");
        before.iter().for_each(|(name, bytes)| fs::write(path.join(name), bytes).expect("a file"));
    };
    let shard = path.join("model-00002-of-00002.safetensors");
    let refused = |says: &[&str]| {
        let left = names(folder.path());
        for command in ["quantize model --out out", "convert model --out out --dialect plain"] {
            fails(folder.path(), command, 2, says);
        }
        assert_eq!(names(folder.path()), left);
    };
    // A header that promises more than there is.
    let mut hostile = fs::read(&shard).expect("a shard");
    hostile[..8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    fs::write(&shard, &hostile).expect("a shard");
    refused(&["model-00002-of-00002.safetensors", "header"]);
    restore();
    fs::remove_file(&shard).expect("a shard");
    let first = model::tensors(SMALL).into_iter().map(|tensor| tensor.name).nth(1);
    let first = format!("tensor `{}`: No such file", first.expect("a tensor"));
    refused(&["model-00002-of-00002.safetensors: ", &first]);
    restore();
    // A tensor that is in two shards.
    let twice = model::tensors(SMALL).into_iter().take(1).collect::<Vec<_>>();
    model::write(&shard, &twice);
    refused(&["model.embed_tokens.weight", "twice"]);
    restore();
    let index = path.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).expect("an index");
    fs::write(&index, text.replace("lm_head.weight", "lm_tail.weight")).expect("an index");
    refused(&["lm_tail.weight", "model-0000"]);
    restore();
    // Cut off before it is opened.
    let length = fs::metadata(&shard).expect("a shard").len();
    OpenOptions::new().write(true).open(&shard).and_then(|f| f.set_len(length - 7)).expect("cut");
    refused(&["model-00002-of-00002.safetensors", "tensor `"]);
    restore();
    fails(folder.path(), "quantize nowhere --out out", 2, &["nowhere"]);
    fails(folder.path(), "quantize model --out no/out", 2, &["no"]);
    fs::create_dir(folder.path().join("taken")).expect("a folder");
    fails(folder.path(), "quantize model --out taken", 2, &["taken: exists"]);
    let mut tensors = model::tensors(SMALL);
    tensors[2].bytes[6..8].copy_from_slice(&[0xC0, 0x7F]);
    model::write(&folder.path().join("nan.safetensors"), &tensors);
    let says = ["model.layers.0.mlp.down_proj.weight", "not finite"];
    fails(folder.path(), "quantize nan.safetensors --out out", 2, &says);
    assert_eq!(names(folder.path()), ["model", "nan.safetensors", "taken"]);
}

#[test]
fn of_weights_that_share_a_scale_the_one_that_is_broken_is_named() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", SMALL);
    let tensors = model::tensors(SMALL);
    let broken = "model.layers.1.mlp.up_proj.weight";
    let place = tensors.iter().position(|tensor| tensor.name == broken).expect("a weight") % 2;
    let shard = |at: usize| format!("model-{:05}-of-00002.safetensors", at + 1);
    for (bits, shown) in [([0xC0, 0x7F], "NaN"), ([0x80, 0xFF], "-inf")] {
        let mut own: Vec<_> = model::tensors(SMALL).into_iter().skip(place).step_by(2).collect();
        let tensor = own.iter_mut().find(|tensor| tensor.name == broken).expect("a weight");
        tensor.bytes[..2].copy_from_slice(&bits);
        model::write(&path.join(shard(place)), &own);
        let says = [broken, shown, &shard(place)];
        for more in ["", "--method sse-tensor-scale", "--dialect mlx"] {
            fails(folder.path(), &format!("quantize model --out out {more}"), 2, &says);
        }
    }
    assert_eq!(names(folder.path()), ["model"]);
}

/// Starts to quantize, and waits until there is something of the output.
fn start(folder: &Path, more: &[&str]) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_fp4"))
        .current_dir(folder)
        .args(["quantize", "model", "--out", "out"])
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let journal = folder.join(".out.partial/journal");
    let begun = Instant::now();
    while fs::metadata(&journal).map_or(0, |journal| journal.len()) == 0 {
        let ended = child.try_wait().expect("a child").is_some();
        if ended || begun.elapsed() > Duration::from_secs(60) {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

/// Large enough that it is not done before something happens to it.
const LARGE: Sizes = Sizes(6, 512, 1024);

#[test]
fn what_was_killed_is_gone_on_with_to_the_same_bytes() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", LARGE);
    succeeds(folder.path(), "quantize model --out whole --method sse");
    let (mut kills, mut wait) = (0, 0);
    loop {
        let resume = ["--method", "sse", "--resume"];
        let mut child = start(folder.path(), &resume);
        // Longer each time, so that it is done in the end.
        std::thread::sleep(Duration::from_millis(wait));
        wait = wait * 3 / 2 + 50;
        if let Some(status) = child.try_wait().expect("a child") {
            assert!(status.success());
            assert_eq!(names(folder.path()), ["model", "out", "whole"]);
            break;
        }
        child.kill().expect("it is killed");
        child.wait().expect("it ended");
        if folder.path().join("out").exists() {
            break;
        }
        kills += 1;
    }
    assert!(kills > 0, "it was too fast to be killed");
    assert_same(&folder.path().join("whole"), &folder.path().join("out"));
}

#[test]
fn only_the_same_task_is_gone_on_with() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", LARGE);
    let mut child = start(folder.path(), &["--method", "sse"]);
    // Two do not write to the same place.
    fails(folder.path(), "quantize model --out out", 2, &["another process is writing"]);
    child.kill().expect("it is killed");
    child.wait().expect("it ended");
    let other = "quantize model --out out --method amax --resume";
    fails(folder.path(), other, 2, &[".out.partial", "other options"]);
    // Without --resume it is begun again.
    succeeds(folder.path(), "quantize model --out out --method amax");
    succeeds(folder.path(), "quantize model --out again --method amax --resume");
    assert_same(&folder.path().join("out"), &folder.path().join("again"));
    assert_eq!(names(folder.path()), ["again", "model", "out"]);
}

#[test]
fn a_shard_that_is_cut_off_meanwhile_is_the_machines_fault() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", LARGE);
    let child = start(folder.path(), &["--method", "sse", "--memory", "100MB"]);
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        let file = OpenOptions::new().write(true).open(path.join(shard)).expect("a shard");
        file.set_len(100_000).expect("it is cut off");
    }
    let output = child.wait_with_output().expect("it ended");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{error}");
    for word in ["-of-00002.safetensors: tensor `", "bytes when it was opened", "--resume"] {
        assert!(error.contains(word), "{error}");
    }
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    assert_eq!(names(folder.path()), [".out.partial", "model"]);
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_the_machines_fault() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    // Files of at most 16 kB stand for a disk that is full.
    let limited = "trap '' XFSZ; ulimit -f 32; exec \"$0\" quantize model --out out";
    let output = Command::new("sh")
        .current_dir(folder.path())
        .args(["-c", limited, env!("CARGO_BIN_EXE_fp4")])
        .output()
        .expect("a shell");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert!(error.contains("too large") && error.contains(".safetensors"), "{error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    assert!(!folder.path().join("out").exists());
}

#[cfg(unix)]
#[test]
fn what_may_not_be_read_or_written_is_named() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::process::CommandExt;

    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", SMALL);
    let root = fs::metadata(folder.path()).expect("a folder").uid() == 0;
    let program = folder.path().join("fp4");
    fs::copy(env!("CARGO_BIN_EXE_fp4"), &program).expect("a copy");
    let set = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("permissions");
    };
    let quantize = || {
        let mut command = Command::new(&program);
        command.current_dir(folder.path()).args(["quantize", "model", "--out", "out"]);
        if root {
            // Root may do anything.
            command.uid(65534).gid(65534);
        }
        let output = command.output().expect("it runs");
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    names(&path).iter().for_each(|name| set(&path.join(name), 0o644));
    set(folder.path(), 0o555);
    let error = quantize();
    assert!(error.contains(".out.partial: Permission denied"), "{error}");
    let shard = path.join("model-00002-of-00002.safetensors");
    set(&shard, 0o000);
    let error = quantize();
    assert!(error.contains("model-00002-of-00002.safetensors: tensor `model.layers"), "{error}");
    assert!(error.contains("`: Permission denied"), "{error}");
    set(folder.path(), 0o755);
    let (code, ..) = run(folder.path(), "inspect model");
    assert!(code == 2 || root);
}
