//! Everything that a caller can do with a checkpoint, in a bounded amount of memory: what the tests
//! of mutated files and the targets of `fuzz/` do with each of theirs.

use std::fs;
use std::path::{Path, PathBuf};

use burn_fp4_checkpoints::cast::{cast, fold};
use burn_fp4_checkpoints::{
    Checkpoint, CheckpointError, DIALECTS, Dtype, Model, Syntax, Value, Weight, WriteOptions,
};
use burn_fp4_formats::Fp4Format;

use super::counting::peak;

/// What may be allocated beyond the size of the files.
pub(crate) const SLACK: usize = 16_000_000;

/// What came of a checkpoint that could be read.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Done {
    /// Dialects and options in which it was written.
    pub written: usize,
    /// Dialects and options that refused it.
    pub refused: usize,
}

/// Opens, lists, decodes, casts and writes, each within the size of the files and 16 MB. `turn`
/// chooses what it is written as.
///
/// # Panics
/// If anything panics, or allocates more.
pub(crate) fn exercise(
    path: &Path,
    dialect: Option<&str>,
    out: &Path,
    turn: usize,
) -> Result<Done, CheckpointError> {
    let limit = size(path) + SLACK;
    let bounded = |what: &str, bytes: usize| {
        assert!(bytes <= limit, "{what} allocated {bytes} bytes of at most {limit}");
    };
    let (opened, bytes) = peak(|| match dialect {
        None => Checkpoint::open(path),
        Some(named) => Checkpoint::open_as(path, named),
    });
    bounded("opening", bytes);
    let checkpoint = opened?;
    let (listed, bytes) = peak(|| list(&checkpoint));
    bounded("listing", bytes);
    let model = listed?;
    let (decoded, bytes) = peak(|| model.weights.iter().try_for_each(decode));
    bounded("decoding", bytes);
    decoded?;
    let (written, bytes) = peak(|| write(&model, out, turn));
    bounded("writing", bytes);
    let (written, refused) = written;
    Ok(Done { written, refused })
}

/// Bytes of a file, or of all files of a folder.
pub(crate) fn size(path: &Path) -> usize {
    let length = |path: PathBuf| fs::metadata(path).map_or(0, |file| file.len() as usize);
    match fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| length(entry.path())).sum(),
        Err(_) => length(path.to_owned()),
    }
}

fn list(checkpoint: &Checkpoint) -> Result<Model<'_>, CheckpointError> {
    let container = checkpoint.container();
    for tensor in container.tensors() {
        let again = container.get(&tensor.name).map(|found| found.shape == tensor.shape);
        assert_eq!(again, Some(true), "{} is found by its name", tensor.name);
        assert_eq!(tensor.dtype.bytes(&tensor.shape), Some(tensor.bytes.len()));
        let floats = tensor.to_f32().map(|floats| floats.len());
        assert!(floats.is_err() || floats.ok() == Some(tensor.len()));
    }
    assert_eq!(checkpoint.weights()?.len(), checkpoint.model()?.weights.len());
    let model = checkpoint.model()?;
    for pattern in &model.quantization.ignore {
        let matcher = pattern.matcher()?;
        model.weights.iter().for_each(|weight| _ = matcher.matches(weight.module()));
        for syntax in [Syntax::Glob, Syntax::Regex, Syntax::Both, Syntax::Names, Syntax::Unmarked] {
            drop(pattern.write(syntax));
        }
    }
    Ok(model)
}

fn decode(weight: &Weight<'_>) -> Result<(), CheckpointError> {
    match &weight.value {
        Value::Plain(tensor) => assert_eq!(tensor.to_f32().is_ok(), tensor.dtype.is_float()),
        Value::Fp8(fp8) => assert_eq!(fp8.to_f32()?.len(), fp8.values.len()),
        Value::Fp4(fp4) => {
            let count: usize = fp4.shape.iter().product();
            assert_eq!(fp4.plain_codes().len(), count / 2);
            assert_eq!(fp4.plain_scales().len(), count / fp4.block_size);
            assert_eq!(fp4.dequantize().len(), count);
            let packed = fp4.to_packed();
            assert_eq!(packed.len(), fp4.stacked());
            // Files have NaN and infinite scales too: an error, here and in a cast.
            packed.iter().for_each(|matrix| drop(matrix.validate()));
            let split = fp4.split();
            assert_eq!(split.iter().flat_map(|matrix| matrix.to_packed()).count(), packed.len());
            for format in [Fp4Format::NvFp4, Fp4Format::MxFp4] {
                drop(cast(&weight.name, fp4, format));
            }
            drop(fold(&weight.name, fp4));
        }
    }
    for scale in weight.input_scale.iter() {
        assert_eq!(scale.multipliers().len(), scale.divisors().len());
    }
    Ok(())
}

/// Writes in three of the dialects and options, other ones every `turn`, and reads that again.
fn write(model: &Model<'_>, out: &Path, turn: usize) -> (usize, usize) {
    let plain = WriteOptions::default();
    let cast = |format| WriteOptions { cast: Some(format), inexact: true, ..plain };
    let (f32, bf16) = (Some(Dtype::F32), Some(Dtype::BF16));
    let decoded = WriteOptions { decode_fp4: f32, decode_fp8: bf16, decode_ggml: bf16, ..plain };
    let mut options = vec![("plain", decoded), ("mlx", cast(Fp4Format::NvFp4))];
    let floats = WriteOptions { decode_fp8: f32, decode_ggml: f32, ..cast(Fp4Format::MxFp4) };
    options.push(("gguf", floats));
    let written = DIALECTS.iter().filter(|dialect| dialect.writer().is_some());
    options.extend(written.map(|dialect| (dialect.name(), plain)));
    let (mut done, mut refused) = (0, 0);
    for (dialect, options) in (0..3).map(|at| options[(3 * turn + at) % options.len()]) {
        let path = out.join(if dialect == "gguf" { "x.gguf" } else { "x" });
        match model.write(&path, dialect, &options) {
            Ok(_) => done += 1,
            Err(_) => {
                refused += 1;
                assert!(!path.exists(), "{dialect}: all or nothing");
                continue;
            }
        }
        // Names that mean something else in the other dialect are an error there.
        drop(Checkpoint::open_as(&path, dialect).and_then(|c| c.model().map(|_| ())));
        let removed =
            if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.expect("what was written is removed");
    }
    (done, refused)
}
