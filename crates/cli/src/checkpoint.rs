//! Checkpoints as the command line names them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use burn_fp4_checkpoints::{
    CONFIG, Checkpoint, CheckpointError, DIALECTS, DataType, KnownBy, Model, Reader, Value, Weight,
    dialect,
};
use burn_fp4_search::formats::Fp4Format;
use clap::builder::PossibleValuesParser;

use crate::counted::counted;
use crate::error::CliError;
use crate::remarks::{Remarks, Warning};

// A checkpoint to read. No documentation: clap would take it for that of the command.
#[derive(clap::Args)]
pub(crate) struct Input {
    /// A safetensors or GGUF file, or a folder of a Hugging Face model.
    #[arg(value_name = "INPUT")]
    pub(crate) path: PathBuf,
    /// The dialect to read it in, if nothing in it says which.
    #[arg(long, value_name = "DIALECT", value_parser = readable())]
    pub(crate) from: Option<String>,
}

impl Input {
    /// Opens it: headers are read and checked, tensors are not.
    pub(crate) fn open(&self, remarks: &mut Remarks) -> Result<Checkpoint, CliError> {
        open(&self.path, self.from.as_deref(), remarks)
    }
}

/// Returns true if a weight is FP4, FP8 or in quantized records of ggml.
pub(crate) fn is_quantized(weight: &Weight<'_>) -> bool {
    weight.is_quantized() || is_of_ggml(weight)
}

/// Returns true if a weight is in quantized records of ggml other than FP4.
pub(crate) fn is_of_ggml(weight: &Weight<'_>) -> bool {
    matches!(&weight.value, Value::Plain(tensor) if matches!(tensor.dtype, DataType::Ggml(_)))
}

/// The dialect of GGUF files, and how their names end.
pub(crate) const GGUF: &str = "gguf";

/// Returns true if a path has the extension of a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(GGUF))
}

/// The path to write to, without slashes at its end. Nothing is there yet. A file in GGUF ends in
/// `.gguf`, and nothing else does: it would not be read again.
pub(crate) fn target(out: &Path, dialect: &str) -> Result<PathBuf, CliError> {
    let path: PathBuf = out.components().collect();
    let shown = path.display();
    match (dialect == GGUF, is_gguf(&path)) {
        (true, false) => Err(CliError::Conflict(format!(
            "{shown}: the dialect `{GGUF}` is a file; pass an --out that ends in .gguf, or another \
             --dialect"
        ))),
        (false, false)
            if path.extension().is_some_and(|end| end.eq_ignore_ascii_case("safetensors")) =>
        {
            Err(CliError::Conflict(format!(
                "{shown}: the dialect `{dialect}` is a folder of files; pass an --out that does \
                 not end in .safetensors"
            )))
        }
        (false, true) => Err(CliError::Conflict(format!(
            "{shown}: the dialect `{dialect}` is a folder; pass an --out that does not end in \
             .gguf, or --dialect {GGUF}"
        ))),
        // A plan is refused as the run would be.
        _ if path.symlink_metadata().is_ok() => Err(CheckpointError::TargetExists { path }.into()),
        (true, true) | (false, false) => Ok(path),
    }
}

/// Reads a checkpoint's model with the scales of whole tensors in memory: plans, warnings and
/// notes look at them, and must not meet a map whose file was cut off.
pub(crate) fn model<'c>(
    checkpoint: &'c Checkpoint,
    remarks: &mut Remarks,
) -> Result<Model<'c>, CliError> {
    let mut model = checkpoint.model()?;
    Reader::new(checkpoint.container()).scales(&mut model)?;
    let cast = |weight: &&Weight<'_>| match &weight.value {
        Value::Plain(tensor) => tensor.dtype.is_fp8(),
        Value::Fp8(_) | Value::Fp4(_) => false,
    };
    let cast = model.weights.iter().filter(cast).count();
    if cast > 0 {
        let (path, cast) = (checkpoint.container().root().display(), counted(cast, "weight"));
        let what = "in FP8 without scales, read by the values of the dtype";
        remarks.note(format!("{path}: {cast} {what}"));
    }
    Ok(model)
}

/// Says in a line which files of a folder are not in what is written; `None` if all are.
pub(crate) fn not_copied(checkpoint: &Checkpoint, dialect: &str) -> Option<String> {
    let name = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let slash = if path.is_dir() { "/" } else { "" };
        format!("`{name}{slash}`")
    };
    let container = checkpoint.container();
    let list = |paths: &[PathBuf]| paths.iter().map(name).collect::<Vec<_>>().join(", ");
    if dialect == GGUF {
        // Files that a folder needs with its weights.
        let config = container.configs().find(|path| path.ends_with(CONFIG));
        let files: Vec<PathBuf> = config.into_iter().chain(container.sidecars().to_vec()).collect();
        return (!files.is_empty()).then(|| {
            let files = list(&files);
            format!("a GGUF file has no place for {files}; keep them for a folder made from it")
        });
    }
    if container.root().is_file() && container.config().is_some() {
        let what = "of the other files only config.json is copied; give the folder to copy all";
        return Some(what.to_owned());
    }
    let left_out = list(container.left_out());
    (!left_out.is_empty()).then(|| format!("not copied: {left_out}"))
}

/// The names of the dialects that are read.
pub(crate) fn readable() -> PossibleValuesParser {
    PossibleValuesParser::new(DIALECTS.iter().map(|dialect| dialect.name()))
}

/// The names of the dialects with a place for FP4.
pub(crate) fn packable() -> Vec<&'static str> {
    let holds = |name: &&str| {
        dialect::writer(name).is_ok_and(|(_, writer)| {
            Fp4Format::ALL.into_iter().any(|format| !writer.readers(format).is_empty())
        })
    };
    dialect::written().into_iter().filter(holds).collect()
}

/// The names of the dialects that are written.
pub(crate) fn writable() -> PossibleValuesParser {
    PossibleValuesParser::new(dialect::written())
}

/// The error of an input that is not there, with the command that downloads it if its path looks
/// like the name of a model on Hugging Face.
pub(crate) fn missing(path: &Path, error: CheckpointError) -> CliError {
    let CheckpointError::Io { path: found, source } = &error else { return error.into() };
    if found != path || source.kind() != ErrorKind::NotFound {
        return error.into();
    }
    let is_word = |word: &str| {
        let is_letter = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !word.starts_with('.') && !word.is_empty() && word.chars().all(is_letter)
    };
    let id = path.to_str().and_then(|text| text.split_once('/'));
    let id = id.filter(|(owner, name)| {
        is_word(owner) && is_word(name) && !Path::new(owner).exists() && !is_file_name(name)
    });
    let path = path.to_owned();
    match id {
        Some((owner, name)) => {
            let id = format!("{owner}/{name}");
            CliError::NotDownloaded { command: format!("hf download {id} --local-dir {name}"), id }
        }
        None => CliError::NoInput { path },
    }
}

/// Returns true if a name ends as a file with weights does.
fn is_file_name(name: &str) -> bool {
    let ends = [".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt"];
    ends.iter().any(|end| name.ends_with(end))
}

/// Opens a checkpoint in a dialect, or in the one that it is known by.
pub(crate) fn open(
    path: &Path,
    dialect: Option<&str>,
    remarks: &mut Remarks,
) -> Result<Checkpoint, CliError> {
    let checkpoint = match dialect {
        Some(dialect) => Checkpoint::open_as(path, dialect),
        None => Checkpoint::open(path),
    };
    let checkpoint = checkpoint.map_err(|error| missing(path, error))?;
    if let Some([number, count]) = checkpoint.container().shard() {
        let text = format!(
            "{}: by its name shard {number} of {count}, whose weights alone are read; give the \
             folder with all of them",
            path.display()
        );
        remarks.warn(Warning::of_all("shard-alone", text));
    }
    if checkpoint.known_by() == KnownBy::Tensors {
        let (path, dialect) = (path.display(), checkpoint.dialect());
        remarks.note(format!("{path}: read as {dialect}, by the names of its tensors"));
    }
    if path.is_file() && checkpoint.container().config().is_some() {
        remarks.note(format!("{}: read with the {CONFIG} next to it", path.display()));
    }
    Ok(checkpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_looks_like_a_name_on_hugging_face_gets_the_command_that_downloads_it() {
        let of = |path: &str| {
            let path = Path::new(path);
            missing(path, Checkpoint::open(path).expect_err("nothing is there")).to_string()
        };
        let says = "; if it is a model on Hugging Face, download it with `hf download \
                    Qwen/Qwen3-8B --local-dir Qwen3-8B`";
        assert!(of("Qwen/Qwen3-8B").ends_with(says), "{}", of("Qwen/Qwen3-8B"));
        for path in
            ["no-model", "./Qwen/Qwen3-8B", "/Qwen/Qwen3-8B", "a/b/c", "src/none", "a/b.gguf"]
        {
            let says = format!("{path}: no such file or folder; check the path");
            assert_eq!(of(path), says);
        }
    }
}
