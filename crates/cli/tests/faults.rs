//! Faults while a checkpoint is quantized: each is one line that names file and tensor, the input
//! does not change, and nothing is under the name of the output.

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
    refused(&["model-00002-of-00002.safetensors: ", &first, "the file is missing: download it"]);
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
    refused(&["model-00002-of-00002.safetensors", "tensor `", "cut off: download it again"]);
    restore();
    fails(folder.path(), "quantize nowhere --out out", 2, &["nowhere: no such file or folder"]);
    let hub = ["Qwen/Qwen3-8B", "`hf download Qwen/Qwen3-8B --local-dir Qwen3-8B`"];
    fails(folder.path(), "quantize Qwen/Qwen3-8B --out out", 2, &hub);
    fails(folder.path(), "quantize model --out no/out", 2, &["no"]);
    fs::create_dir(folder.path().join("taken")).expect("a folder");
    fails(folder.path(), "quantize model --out taken", 2, &["taken: already exists"]);
    let mut tensors = model::tensors(SMALL);
    tensors[2].bytes[6..8].copy_from_slice(&[0xC0, 0x7F]);
    model::write(&folder.path().join("nan.safetensors"), &tensors);
    let name = "model.layers.0.mlp.down_proj.weight";
    let keep = format!("; fix it, or pass --keep '{name}' to keep it");
    let says = [name, "not finite", keep.as_str()];
    fails(folder.path(), "quantize nan.safetensors --out out --only *_proj", 2, &says);
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
        for more in ["", "--method sse-tensor-scale"] {
            fails(folder.path(), &format!("quantize model --out out {more}"), 2, &says);
        }
        // Behind a note on the dialect.
        let (code, _, error) = run(folder.path(), "quantize model --out out --dialect mlx");
        let last = error.trim_end().lines().last().expect("an error");
        assert!(code == 2 && says.iter().all(|word| last.contains(word)), "{error}");
    }
    assert_eq!(names(folder.path()), ["model"]);
}

/// Large enough that it is not done before something happens to it.
const LARGE: Sizes = Sizes(6, 512, 1024);

/// Starts to quantize, and waits until it has noted something, or ended.
fn start(folder: &Path, more: &[&str]) -> Child {
    start_from(folder, "model", "out", more)
}

fn start_from(folder: &Path, input: &str, out: &str, more: &[&str]) -> Child {
    let journal = folder.join(format!(".{out}.partial/journal"));
    let length = || fs::metadata(&journal).map_or(0, |journal| journal.len());
    let before = length();
    let mut child = Command::new(env!("CARGO_BIN_EXE_fp4"))
        .current_dir(folder)
        .args(["quantize", input, "--out", out])
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let begun = Instant::now();
    while length() <= before {
        let ended = child.try_wait().expect("a child").is_some();
        if ended || begun.elapsed() > Duration::from_secs(60) {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child
}

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

/// Notes a weight as done, which a fast run has not done before it is killed.
fn note_first_weight(partial: &Path) {
    let mut journal = fs::read_to_string(partial.join("journal")).expect("a journal");
    journal.push_str("0\n");
    fs::write(partial.join("journal"), journal).expect("a journal");
}

#[test]
#[ignore = "slow"]
fn only_the_same_task_is_gone_on_with() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", LARGE);
    let mut child = start(folder.path(), &["--method", "sse"]);
    // Two do not write to the same place.
    fails(folder.path(), "quantize model --out out", 2, &["another process is writing"]);
    child.kill().expect("it is killed");
    child.wait().expect("it ended");
    let other = "quantize model --out out --method amax --resume";
    let says = ".out.partial: left by a run with --method sse, but this run has --method amax; \
                repeat the command of that run, or remove the folder to start over";
    fails(folder.path(), other, 2, &[says]);
    for (options, says) in [
        ("--keep *.o_proj", "with no --keep, but this run has --keep '*.o_proj'"),
        ("--preset mlp-only", "with --preset all-linear, but this run has --preset mlp-only"),
        ("--cast-kept bf16", "with no --cast-kept, but this run has --cast-kept bf16"),
        ("--last-layers-high-precision 1", "with --last-layers-high-precision 0, but this run"),
    ] {
        let other = format!("quantize model --out out --method sse {options} --resume");
        fails(folder.path(), &other, 2, &[says]);
    }
    fs::write(folder.path().join("apart.toml"), "together = false\n").expect("a recipe");
    let other = "quantize model --out out --method sse --recipe apart.toml --resume";
    let (code, _, error) = run(folder.path(), other);
    let says = "with no `together` in the recipe, but this run has `together` in the recipe, which \
                is false; ";
    assert!(code == 2 && error.contains(says), "{error}");
    fs::remove_file(folder.path().join("apart.toml")).expect("a recipe");
    // What is written already is not removed unasked.
    let partial = folder.path().join(".out.partial");
    note_first_weight(&partial);
    let says = [".out.partial: holds weights of an earlier run (", "or pass --resume to go on"];
    for method in ["sse", "amax"] {
        let command = format!("quantize model --out out --method {method}");
        fails(folder.path(), &command, 2, &says);
        assert!(partial.join("files").is_dir());
    }
    let convert = "convert model --out out --dialect plain";
    fails(folder.path(), convert, 2, &[says[0], "if `fp4 quantize` has left it"]);
    assert!(partial.join("files").is_dir());
    fs::remove_dir_all(&partial).expect("a folder");
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
    for word in
        ["-of-00002.safetensors: tensor `", "bytes when it was opened", "with --resume to go on"]
    {
        assert!(error.contains(word), "{error}");
    }
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    assert_eq!(names(folder.path()), [".out.partial", "model"]);
}

/// The exit code of a process, and what it said in a line at its end: on a slow machine there are
/// lines of progress before.
fn ended(child: Child) -> (i32, String) {
    let output = child.wait_with_output().expect("it ended");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{said}");
    let last = said.trim_end().lines().last().unwrap_or_default().to_owned();
    (output.status.code().expect("an exit code"), last)
}

/// More files than are kept open, so that the last is opened again when it is read.
const SHARDS: usize = 40;

#[test]
#[ignore = "slow"]
fn a_shard_that_is_moved_away_meanwhile_costs_no_work() {
    let folder = tempdir().expect("a folder");
    let path = model::sharded(folder.path(), "model", SHARDS, [512, 512]);
    let whole = succeeds(folder.path(), "quantize model --out whole --json");
    let last = path.join(format!("model-{SHARDS:05}-of-{SHARDS:05}.safetensors"));
    let away = folder.path().join("away");
    let child = start(folder.path(), &["--memory", "72MB"]);
    fs::rename(&last, &away).expect("it is moved");
    let (code, error) = ended(child);
    fs::rename(&away, &last).expect("it is moved back");
    assert_eq!(code, 3, "{error}");
    for word in ["safetensors: tensor `model.layers.39.", "No such file", "--resume"] {
        assert!(error.contains(word), "{error}");
    }
    assert_eq!(names(folder.path()), [".out.partial", "model", "whole"]);
    // The journal has the errors of what the first run did.
    let resumed = succeeds(folder.path(), "quantize model --out out --resume --json");
    let report = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("an object");
    assert_eq!(report(&whole)["errors"], report(&resumed)["errors"]);
    assert_same(&folder.path().join("whole"), &folder.path().join("out"));
}

#[test]
#[ignore = "slow"]
fn what_an_earlier_run_has_written_stays_whatever_is_wrong() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", LARGE);
    // In the last layer.
    let broken = "model.layers.5.self_attn.o_proj.weight";
    let tensors = model::tensors(LARGE);
    let place = tensors.iter().position(|tensor| tensor.name == broken).expect("a weight") % 2;
    let mut own: Vec<_> = tensors.into_iter().skip(place).step_by(2).collect();
    let tensor = own.iter_mut().find(|tensor| tensor.name == broken).expect("a weight");
    tensor.bytes[..2].copy_from_slice(&[0xC0, 0x7F]);
    model::write(&path.join(format!("model-{:05}-of-00002.safetensors", place + 1)), &own);
    let mut child = start(folder.path(), &["--memory", "100MB"]);
    child.kill().expect("it is killed");
    child.wait().expect("it ended");
    let says = [broken, "not finite", "what an earlier run has written stays: .out.partial"];
    let refused = |more: &[&str], says: &[&str]| {
        let (code, error) = ended(start(folder.path(), more));
        assert_eq!(code, 2, "{error}");
        says.iter().for_each(|word| assert!(error.contains(word), "{error} does not say {word}"));
    };
    for _ in 0..2 {
        refused(&["--memory", "100MB", "--resume"], &says);
        assert_eq!(names(folder.path()), [".out.partial", "model"]);
    }
    note_first_weight(&folder.path().join(".out.partial"));
    refused(&[], &[".out.partial: holds weights of an earlier run (", "--resume"]);
    assert_eq!(names(folder.path()), [".out.partial", "model"]);
}

#[cfg(unix)]
#[test]
fn a_run_that_a_signal_stops_says_how_to_go_on() {
    use std::os::unix::process::ExitStatusExt;

    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", LARGE);
    let options = ["--method", "sse-tensor-scale", "--resume"];
    // A shell in the background starts this with SIGINT ignored, and so does a program from here.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.map_or(Ok(0), |mask| u64::from_str_radix(mask.trim(), 16));
    let ignored = ignored.expect("a mask");
    let signals: [(&str, i32); 2] = [("INT", 2), ("TERM", 15)];
    let heard = |number: &i32| ignored >> (number - 1) & 1 == 0;
    assert!(heard(&15), "nothing starts tests with SIGTERM ignored");
    for (name, number) in signals.into_iter().filter(|(_, number)| heard(number)) {
        let child = start(folder.path(), &options);
        // The journal is there a moment before signals are waited for.
        std::thread::sleep(Duration::from_millis(300));
        let mut kill = Command::new("kill");
        kill.args([format!("-{name}"), child.id().to_string()]);
        assert!(kill.status().expect("it is sent").success());
        let output = child.wait_with_output().expect("it ended");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // A shell makes 130 and 143 of it.
        assert_eq!(output.status.signal(), Some(number), "{said}");
        let last = said.trim_end().lines().last().unwrap_or_default();
        assert!(last.starts_with("stopped at ") && last.contains(" of "), "{said}");
        assert!(last.ends_with("; run the same command with --resume to go on"), "{said}");
        assert_eq!(names(folder.path()), [".out.partial", "model"]);
    }
}

/// As a shell starts what runs in the background.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "slow"]
fn a_run_that_was_started_with_a_signal_ignored_goes_on() {
    let folder = tempdir().expect("a folder");
    // It has to end: a larger model takes a minute with this method.
    model::model(folder.path(), "model", Sizes(3, 256, 512));
    let script = "trap '' INT; exec \"$0\" quantize model --out out --method sse-tensor-scale";
    let mut child = Command::new("sh")
        .current_dir(folder.path())
        .args(["-c", script, env!("CARGO_BIN_EXE_fp4")])
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    // From when on it waits for SIGTERM it would for SIGINT.
    let waits = |id: u32| {
        let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
        u64::from_str_radix(caught.trim(), 16).expect("a mask") >> 14 & 1 == 1
    };
    while !waits(child.id()) && child.try_wait().expect("a child").is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(child.try_wait().expect("a child").is_none(), "it ended before the signal");
    let _ = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    let output = child.wait_with_output().expect("it ended");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !said.contains("stopped at"), "{said}");
    assert_eq!(names(folder.path()), ["model", "out"]);
}

#[test]
fn a_gguf_file_that_is_cut_off_meanwhile_is_the_machines_fault() {
    let folder = tempdir().expect("a folder");
    let values = |seed| model::values(768 * 512, seed).into_iter().flat_map(f32::to_le_bytes);
    let weight = |at: u64| {
        let name = format!("blk.{at}.ffn_down.weight");
        (name, vec![768, 512], 0, values(at).collect::<Vec<u8>>())
    };
    let tensors: Vec<_> = (0..24).map(weight).collect();
    let path = folder.path().join("model.gguf");
    model::write_gguf(&path, &tensors);
    let child = start_from(folder.path(), "model.gguf", "out.gguf", &["--memory", "74MB"]);
    let file = OpenOptions::new().write(true).open(&path).expect("the file");
    file.set_len(100_000).expect("it is cut off");
    let (code, error) = ended(child);
    assert_eq!(code, 3, "{error}");
    for word in ["model.gguf: tensor `blk.", "bytes when it was opened", "with --resume to go on"] {
        assert!(error.contains(word), "{error}");
    }
    assert_eq!(names(folder.path()), [".out.gguf.partial", "model.gguf"]);
}

#[test]
fn hostile_headers_of_gguf_files_are_named() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    model::gguf(&path);
    let whole = fs::read(&path).expect("a file");
    // The version; the numbers of tensors and of pairs; the length of the first key.
    for at in [4, 8, 16, 24] {
        let mut hostile = whole.clone();
        hostile[at..at + 8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
        fs::write(&path, hostile).expect("a file");
        fails(folder.path(), "quantize model.gguf --out out.gguf", 2, &["model.gguf: header: "]);
    }
    for length in [0, 3, 20, 100, whole.len() - 4000] {
        fs::write(&path, &whole[..length]).expect("a file");
        fails(folder.path(), "quantize model.gguf --out out.gguf", 2, &["model.gguf: "]);
    }
    assert_eq!(names(folder.path()), ["model.gguf"]);
}

/// Runs a command in a shell that limits something; its exit code and what it said.
#[cfg(unix)]
fn limited(folder: &Path, limit: &str, arguments: &str) -> (i32, String) {
    let script = format!("{limit}; exec \"$0\" {arguments}");
    let output = Command::new("sh")
        .current_dir(folder)
        .args(["-c", &script, env!("CARGO_BIN_EXE_fp4")])
        .output()
        .expect("a shell");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().expect("an exit code"), error)
}

#[cfg(unix)]
#[test]
fn more_files_than_a_process_may_open_are_read_and_written() {
    let folder = tempdir().expect("a folder");
    model::sharded(folder.path(), "model", SHARDS, [64, 64]);
    succeeds(folder.path(), "quantize model --out whole --dialect modelopt");
    for (out, arguments) in [
        ("out", "quantize model --out out --dialect modelopt"),
        ("again", "quantize model --out again --dialect modelopt --resume"),
        ("converted", "convert whole --out converted --dialect modelopt"),
    ] {
        // The shards of the input alone, or of the output alone, are nearly as many.
        let (code, error) = limited(folder.path(), "ulimit -n 48", arguments);
        assert_eq!(code, 0, "{error}");
        assert_same(&folder.path().join("whole"), &folder.path().join(out));
    }
}

#[cfg(unix)]
#[test]
fn a_disk_that_is_full_is_not_blamed_on_what_is_copied_there() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", SMALL);
    fs::write(path.join("tokenizer.json"), " ".repeat(1_000_000)).expect("a tokenizer");
    let full = "trap '' XFSZ; ulimit -f 1000";
    let (code, error) = limited(folder.path(), full, "quantize model --out out");
    assert_eq!(code, 3, "{error}");
    for word in [".out.partial/files/tokenizer.json: ", "too large", "--resume"] {
        assert!(error.contains(word), "{error}");
    }
    // Again, of a run that goes on.
    let (code, error) = limited(folder.path(), full, "quantize model --out out --resume");
    assert!(code == 3 && error.contains("--resume"), "{error}");
    let (code, error) =
        limited(folder.path(), full, "convert model --out converted --dialect plain");
    assert_eq!(code, 3, "{error}");
    assert!(error.contains(".converted.partial/files/tokenizer.json: "), "{error}");
    assert_eq!(names(folder.path()), [".out.partial", "model"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_disk_that_is_too_small_is_found_before_the_work() {
    let folder = tempdir().expect("a folder");
    // 8.8 TB.
    let weights: Vec<String> = (0..64).map(|at| format!("model.layers.{at}.weight")).collect();
    let weights: Vec<&str> = weights.iter().map(String::as_str).collect();
    model::holes(&folder.path().join("holes.safetensors"), &weights);
    let says = [".out.partial: ", " TB are needed, but ", " are free; "];
    fails(folder.path(), "convert holes.safetensors --dialect plain --out out", 3, &says);
    let only = "quantize holes.safetensors --only model.layers.0 --out out";
    fails(folder.path(), only, 3, &says);
    assert_eq!(names(folder.path()), ["holes.safetensors"]);
}

/// Sets back the time at which a file was modified.
fn touch(path: &Path) {
    let file = OpenOptions::new().write(true).open(path).expect("the file");
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("a time");
}

#[test]
#[ignore = "slow"]
fn statistics_that_no_method_needs_may_come_after_an_interruption() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", LARGE);
    let first = model::tensors(LARGE).into_iter().find(|tensor| tensor.name.contains("_proj"));
    let model::Tensor { name, shape, .. } = first.expect("a layer");
    let bytes = (0..shape[1]).flat_map(|_| 1_f32.to_le_bytes()).collect();
    let (dtype, shape) = (safetensors::Dtype::F32, vec![shape[1]]);
    let moments = [model::Tensor { name, dtype, shape, bytes }];
    model::write(&folder.path().join("moments.safetensors"), &moments);
    let mut child = start(folder.path(), &[]);
    child.kill().expect("it is killed");
    child.wait().expect("it ended");
    succeeds(folder.path(), "quantize model --out out --calibration moments.safetensors --resume");
}

#[test]
#[ignore = "slow"]
fn a_run_whose_config_was_touched_is_resumed_and_a_finished_one_is_not() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", LARGE);
    let mut child = start(folder.path(), &[]);
    child.kill().expect("it is killed");
    child.wait().expect("it ended");
    touch(&path.join("config.json"));
    touch(&path.join("model.safetensors.index.json"));
    let resume = "quantize model --out out --resume";
    succeeds(folder.path(), resume);
    // Its files do not say which method made them.
    for other in ["", " --method amax", " --dialect modelopt", " --json", " --dry-run"] {
        let says =
            ["out: exists, so no interrupted run is left to resume; look at it with `fp4 inspect`"];
        fails(folder.path(), &format!("{resume}{other}"), 2, &says);
    }
}

#[test]
#[ignore = "slow"]
fn a_run_that_was_killed_before_its_first_weight_is_started_over_with_a_note() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", LARGE);
    let mut child = start(folder.path(), &[]);
    child.kill().expect("it is killed");
    child.wait().expect("it ended");
    let journal = folder.path().join(".out.partial/journal");
    let text = fs::read_to_string(&journal).expect("a journal");
    fs::write(&journal, text.lines().next().expect("a task").to_owned() + "\n").expect("a journal");
    let (code, _, said) = run(folder.path(), "quantize model --out out");
    let says = "note: an earlier run left no weight on the disk; this one starts over";
    assert!(code == 0 && said.contains(says), "{said}");
}

#[test]
#[ignore = "slow"]
fn values_that_an_earlier_run_has_copied_and_are_not_finite_are_warned_of() {
    let folder = tempdir().expect("a folder");
    let mut tensors = model::tensors(LARGE);
    tensors[0].bytes[..2].copy_from_slice(&[0xC0, 0x7F]);
    model::write(&folder.path().join("nan.safetensors"), &tensors);
    let mut child = start_from(folder.path(), "nan.safetensors", "out", &[]);
    child.kill().expect("it is killed");
    child.wait().expect("it ended");
    let journal = folder.path().join(".out.partial/journal");
    let text = fs::read_to_string(&journal).expect("a journal");
    // As if the embedding and nothing else had reached the disk.
    let task = text.lines().next().expect("a task");
    fs::write(&journal, format!("{task}\n0 1\n")).expect("a journal");
    let (code, _, said) = run(folder.path(), "quantize nan.safetensors --out out --resume");
    let says = "`model.embed_tokens.weight`: 1 NaN or infinite value, copied into the result";
    assert!(code == 0 && said.contains(says), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn every_command_says_by_its_exit_code_that_the_machine_failed() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    for command in ["inspect model", "compare model model", "formats", "quantize model --dry-run"] {
        let (code, error) = limited(folder.path(), "exec >/dev/full", command);
        assert_eq!(code, 3, "{command}: {error}");
        assert!(error.contains("standard output: No space left"), "{error}");
    }
}

#[test]
fn folders_of_others_are_not_removed() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let foreign = folder.path().join(".out.partial");
    let refused = || {
        for command in [
            "quantize model --out out",
            "quantize model --out out --resume",
            "convert model --out out --dialect plain",
        ] {
            fails(folder.path(), command, 2, &[".out.partial: was not left by a run"]);
        }
    };
    fs::create_dir(&foreign).expect("a folder");
    fs::write(foreign.join("thesis.txt"), "years of work").expect("a file");
    refused();
    fs::write(foreign.join("journal"), "burn-fp4 0.1.0: a task\n").expect("a file");
    refused();
    fs::remove_file(foreign.join("thesis.txt")).expect("a file");
    fs::write(foreign.join("journal"), "Dear diary\n").expect("a file");
    refused();
    assert_eq!(fs::read_to_string(foreign.join("journal")).expect("it stays"), "Dear diary\n");
    // What a kill leaves at once.
    fs::write(foreign.join("journal"), "burn").expect("a file");
    succeeds(folder.path(), "quantize model --out out --resume");
    fs::create_dir(&foreign).expect("a folder");
    succeeds(folder.path(), "quantize model --out other");
    assert_eq!(names(folder.path()), [".out.partial", "model", "other", "out"]);
}

#[test]
fn of_runs_that_start_at_once_one_goes_on() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out whole");
    for round in 0..8 {
        // What an earlier run has left, or nothing.
        if round % 2 == 0 {
            let mut child = start(folder.path(), &[]);
            let _ = child.kill();
            child.wait().expect("it ended");
            let _ = fs::remove_dir_all(folder.path().join("out"));
        }
        let begin = |_| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_fp4"));
            command.current_dir(folder.path()).args(["quantize", "model", "--out", "out"]);
            // Some of what is left may be done.
            command.args((round % 2 == 0).then_some("--resume"));
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it runs")
        };
        let children: Vec<Child> = (0..6).map(begin).collect();
        let mut done = 0;
        for child in children {
            let output = child.wait_with_output().expect("it ended");
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            done += usize::from(output.status.success());
            let expected = ["another process is writing here", "out: already exists"];
            let known = expected.iter().any(|word| error.contains(word));
            assert!(output.status.success() || known, "{error}");
        }
        assert_eq!(done, 1);
        assert_same(&folder.path().join("whole"), &folder.path().join("out"));
        assert_eq!(names(folder.path()), ["model", "out", "whole"]);
        fs::remove_dir_all(folder.path().join("out")).expect("a folder");
    }
}

#[test]
fn what_another_version_or_another_config_began_is_not_gone_on_with() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", LARGE);
    let mut child = start(folder.path(), &[]);
    child.kill().expect("it is killed");
    child.wait().expect("it ended");
    let journal = folder.path().join(".out.partial/journal");
    let text = fs::read_to_string(&journal).expect("a journal");
    let version = concat!("burn-fp4 ", env!("CARGO_PKG_VERSION"), ", ");
    assert!(text.starts_with(version), "{text}");
    fs::write(&journal, text.replace(version, "burn-fp4 0.0.9, ")).expect("a journal");
    let resume = "quantize model --out out --resume";
    fails(
        folder.path(),
        resume,
        2,
        &[".out.partial", "with burn-fp4 0.0.9, but this run has burn-fp4 0."],
    );
    fs::write(&journal, &text).expect("a journal");
    let config = fs::read_to_string(path.join("config.json")).expect("a config");
    fs::write(path.join("config.json"), config + "\n").expect("a config");
    let says = ["with model/config.json of ", " bytes, whose text has the hash ", "; repeat the "];
    fails(folder.path(), resume, 2, &says);
    assert_eq!(fs::read_to_string(&journal).expect("it stays"), text);
}

#[test]
fn a_folder_in_the_place_of_a_shard_is_named() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", SMALL);
    let shard = path.join("model-00002-of-00002.safetensors");
    fs::remove_file(&shard).expect("a shard");
    fs::create_dir(&shard).expect("a folder");
    let says = ["model-00002-of-00002.safetensors: expected a file, found a folder"];
    for command in ["quantize model --out out", "inspect model", "compare model model"] {
        fails(folder.path(), command, 2, &says);
    }
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_the_machines_fault() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    // Files of at most 16 kB stand for a disk that is full.
    let full = "trap '' XFSZ; ulimit -f 32";
    let (code, error) = limited(folder.path(), full, "quantize model --out out");
    assert_eq!(code, 3, "{error}");
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

#[cfg(unix)]
#[test]
fn a_folder_that_cannot_be_synchronized_is_refused_before_the_work() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    use std::os::unix::process::CommandExt;

    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", SMALL);
    let set = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("permissions");
    };
    set(folder.path(), 0o755);
    names(&path).iter().for_each(|name| set(&path.join(name), 0o644));
    let parent = folder.path().join("parent");
    fs::create_dir(&parent).expect("a folder");
    let root = fs::metadata(folder.path()).expect("a folder").uid() == 0;
    let program = folder.path().join("fp4");
    fs::copy(env!("CARGO_BIN_EXE_fp4"), &program).expect("a copy");
    let mut command = Command::new(&program);
    command.current_dir(folder.path()).args(["quantize", "model", "--out", "parent/out"]);
    if root {
        // Root may do anything.
        chown(&parent, Some(65534), Some(65534)).expect("another owner");
        command.uid(65534).gid(65534);
    }
    set(&parent, 0o300);
    let output = command.output().expect("it runs");
    set(&parent, 0o700);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("parent: Permission denied"), "{error}");
    assert_eq!(names(&parent), [""; 0]);
}
