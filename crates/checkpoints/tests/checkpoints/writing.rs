//! Writing step by step: what is planned, put in pieces, flushed and gone on with.

use std::fs::{self, OpenOptions};

use burn_fp4_checkpoints::{
    Checkpoint, CheckpointError, Dtype, Model, Numbers, Reader, Start, Tensor, TensorProblem,
    TensorScale, Value, Weight, WriteOptions,
};
use burn_fp4_formats::Fp4Format;

use super::folder;
use super::models::model;

/// A map would end the process.
#[test]
fn plans_touch_no_map_whose_file_was_cut_off() {
    let folder = folder("cut");
    let source = model(Fp4Format::NvFp4, [0.25, 0.5], Some(0.5));
    let path = folder.join("source");
    source.write(&path, "modelopt", &WriteOptions::default()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
    let reader = Reader::new(checkpoint.container());
    let mut model = checkpoint.model().expect("weights");
    reader.scales(&mut model).expect("scales");
    let file = &checkpoint.container().file_names()[0];
    let file = OpenOptions::new().write(true).open(path.join(file)).expect("the file");
    file.set_len(10).expect("it is cut off");
    let decoded = WriteOptions { decode_fp4: Some(Dtype::F32), ..WriteOptions::default() };
    let planned = model.plan_reading("plain", &decoded, &reader).expect("nothing is read");
    assert_eq!(planned.report().decoded, 2);
    model.plan_reading("compressed-tensors", &WriteOptions::default(), &reader).expect("a plan");
    let cast = WriteOptions { cast: Some(Fp4Format::MxFp4), inexact: true, ..decoded };
    let cast = WriteOptions { decode_fp4: None, ..cast };
    for (dialect, options) in [("modelopt", cast), ("mlx", WriteOptions { cast: None, ..cast })] {
        let refused = model.plan_reading(dialect, &options, &reader).err();
        let Some(CheckpointError::Tensor { problem, .. }) = refused else { panic!("{dialect}") };
        assert!(matches!(problem, TensorProblem::Changed { found: 10, .. }), "{problem}");
    }
}

/// MXFP4 with the tensor scale that GGUF has for any format: values are looked at to fold it.
#[test]
fn plans_that_fold_a_scale_of_mxfp4_touch_no_map_whose_file_was_cut_off() {
    let path = folder("cut-mxfp4").join("source.gguf");
    let mut source = model(Fp4Format::MxFp4, [1.0, 1.0], None);
    for weight in &mut source.weights {
        if let Value::Fp4(fp4) = &mut weight.value {
            fp4.tensor_scale = Some(TensorScale::Multiplier(Numbers::new(&[0.5])));
        }
    }
    source.write(&path, "gguf", &WriteOptions::default()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
    let reader = Reader::new(checkpoint.container());
    let mut model = checkpoint.model().expect("weights");
    reader.scales(&mut model).expect("scales");
    let file = OpenOptions::new().write(true).open(&path).expect("the file");
    file.set_len(10).expect("it is cut off");
    for dialect in ["modelopt", "compressed-tensors"] {
        let refused = model.plan_reading(dialect, &WriteOptions::default(), &reader).err();
        let Some(CheckpointError::Tensor { problem, .. }) = refused else { panic!("{dialect}") };
        assert!(matches!(problem, TensorProblem::Changed { found: 10, .. }), "{problem}");
    }
}

/// A file with a tensor of several pieces, and a small one.
fn pieces(folder: &std::path::Path) -> Checkpoint {
    let bytes: Vec<u8> = (0..9_000_000_usize).map(|at| (at % 251) as u8).collect();
    let weight = |name: &str, bytes: &[u8]| {
        let tensor = Tensor::new(name.to_owned(), Dtype::U8, vec![bytes.len()], bytes.to_vec());
        Weight::new(name.to_owned(), 0, Value::Plain(tensor.expect("a tensor")))
    };
    let weights = vec![weight("large", &bytes), weight("small", &bytes[..7])];
    let model = Model { weights, ..Model::default() };
    model.write(folder.join("source"), "plain", &WriteOptions::default()).expect("written");
    Checkpoint::open(folder.join("source")).expect("a checkpoint")
}

#[test]
fn pieces_are_put_in_any_order_and_noted_when_all_of_them_are_there() {
    let folder = folder("pieces");
    let checkpoint = pieces(&folder);
    let (model, reader) =
        (checkpoint.model().expect("weights"), Reader::new(checkpoint.container()));
    let planned = model.plan("plain", &WriteOptions::default()).expect("a plan");
    let out = folder.join("out");
    let mut output = planned.create(&out, "task", Start::Over).expect("it begins");
    let pieces = planned.pieces(0).expect("pieces");
    assert_eq!(pieces.len(), 3);
    let put = |output: &mut burn_fp4_checkpoints::Output<'_>, at: usize| {
        output.put(&pieces[at], &pieces[at].read(&reader).expect("read")).expect("written");
    };
    put(&mut output, 2);
    put(&mut output, 0);
    output.copy(1, &reader).expect("copied");
    // Noted after a second at the latest, when something more is written.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    output.copy(1, &reader).expect("copied");
    output.keep();
    drop(output);
    // What is done is not removed unasked.
    let first = planned.create(&out, "task", Start::First).err();
    assert!(matches!(first, Some(CheckpointError::Unfinished { done: 1, .. })), "{first:?}");
    let mut output = planned.create(&out, "task", Start::Resume).expect("it goes on");
    assert_eq!([0, 1].map(|at| output.is_done(at)), [false, true]);
    (0..3).rev().for_each(|at| put(&mut output, at));
    assert!(output.finish().expect("finished").is_none());
    let read = |at: &std::path::Path| fs::read(at.join("model.safetensors")).expect("a file");
    assert!(read(&folder.join("source")) == read(&out), "the same bytes");
    assert!(!folder.join(".out.partial").exists());
}

#[test]
fn the_note_of_the_last_piece_outlives_the_write() {
    let folder = folder("notes");
    let checkpoint = pieces(&folder);
    let (model, reader) =
        (checkpoint.model().expect("weights"), Reader::new(checkpoint.container()));
    let planned = model.plan("plain", &WriteOptions::default()).expect("a plan");
    let out = folder.join("out");
    let mut output = planned.create(&out, "task", Start::Over).expect("it begins");
    for (piece, note) in planned.pieces(0).expect("pieces").iter().zip(["1", "2", "3"]) {
        let bytes = piece.read(&reader).expect("read");
        output.put_noting(piece, &bytes, note).expect("written");
    }
    // Noted after a second at the latest, when something more is written.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    output.copy(1, &reader).expect("copied");
    assert_eq!(output.earlier().count(), 0);
    output.keep();
    drop(output);
    let output = planned.create(&out, "task", Start::Resume).expect("it goes on");
    assert_eq!(output.earlier().next(), Some((0, "3")));
}

#[test]
fn what_was_gone_on_with_stays_without_being_asked_to() {
    let folder = folder("stays");
    let checkpoint = pieces(&folder);
    let model = checkpoint.model().expect("weights");
    let planned = model.plan("plain", &WriteOptions::default()).expect("a plan");
    let (out, partial) = (folder.join("out"), folder.join(".out.partial"));
    drop(planned.create(&out, "task", Start::Over).expect("it begins"));
    assert!(!partial.exists());
    planned.create(&out, "task", Start::Over).expect("it begins").keep();
    let output = planned.create(&out, "task", Start::Resume).expect("it goes on");
    assert_eq!(output.stays(), Some(&*partial));
    drop(output);
    assert!(partial.exists());
    let other = planned.create(&out, "other", Start::Resume).err();
    let Some(CheckpointError::ResumeMismatch { before, now, .. }) = other else {
        panic!("it goes on")
    };
    assert_eq!([before, now], ["task", "other"]);
    assert!(partial.exists());
    drop(planned.create(&out, "other", Start::Over).expect("it begins"));
    assert!(!partial.exists());
}

#[test]
fn weights_of_another_task_are_not_removed() {
    let folder = folder("anew");
    let checkpoint = pieces(&folder);
    let (model, reader) =
        (checkpoint.model().expect("weights"), Reader::new(checkpoint.container()));
    let planned = model.plan("plain", &WriteOptions::default()).expect("a plan");
    let out = folder.join("out");
    let mut output = planned.create(&out, "format a; size 1", Start::First).expect("it begins");
    output.copy(1, &reader).expect("copied");
    // Noted after a second at the latest, when something more is written.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    output.copy(1, &reader).expect("copied");
    output.keep();
    drop(output);
    for task in ["convert", "size 1", ""] {
        let other = planned.create(&out, task, Start::Over).err();
        assert!(matches!(other, Some(CheckpointError::Unfinished { done: 1, .. })), "{other:?}");
    }
    let error = planned.create(&out, "format a; size 2", Start::Resume).err();
    let error = error.expect("another task").to_string();
    let says = ": left by a run with size 1, but this run has size 2; repeat the command of that";
    assert!(error.contains(says), "{error}");
    drop(planned.create(&out, "format a; size 1", Start::Over).expect("its own is removed"));
    assert!(!folder.join(".out.partial").exists());
}

#[test]
fn a_panic_leaves_what_is_written() {
    let folder = folder("panic");
    let checkpoint = pieces(&folder);
    let model = checkpoint.model().expect("weights");
    let planned = model.plan("plain", &WriteOptions::default()).expect("a plan");
    let out = folder.join("out");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _output = planned.create(&out, "task", Start::Over).expect("it begins");
        std::panic::resume_unwind(Box::new("a defect"));
    }));
    assert!(panicked.is_err());
    assert!(folder.join(".out.partial").exists());
    planned.create(&out, "task", Start::Resume).expect("it goes on");
}
