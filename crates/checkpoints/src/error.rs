//! Errors of checkpoints: they name the file, the tensor, and what was expected and found.

use std::fmt;
use std::path::{Path, PathBuf};

use burn_fp4_formats::FormatError;
use burn_fp4_policy::PolicyError;

use crate::dtype::Dtype;

/// Why a checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file system refused.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The file system refused bytes of one tensor.
    #[error("{}: tensor `{tensor}`: {source}{}", .file.display(), missing(.source))]
    TensorIo {
        /// The file (shard) that was read or written.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The path holds no checkpoint.
    #[error("{}: expected {expected}", .path.display())]
    NotACheckpoint {
        /// The path.
        path: PathBuf,
        /// A description of one.
        expected: &'static str,
    },
    /// A folder without an index has fewer shards than their names count.
    #[error("{}: has {found} of the {expected} shards that its files count; download the others",
        .path.display())]
    Shards {
        /// The folder.
        path: PathBuf,
        /// Shards that are there.
        found: usize,
        /// Shards that there are by their names.
        expected: usize,
    },
    /// The path holds weights as pickles of PyTorch.
    #[error(
        "{}: a pickle of PyTorch, which can run code when it is loaded; convert it to \
         safetensors: {}",
        .path.display(), converts(.all)
    )]
    Pickle {
        /// The file, or the first one of a folder.
        path: PathBuf,
        /// The files of the model: a path, or a pattern of paths.
        all: PathBuf,
    },
    /// The header of a file is not of its format.
    #[error(
        "{}: header: expected {expected}, found {found}; download or make the file again",
        .path.display()
    )]
    Header {
        /// The file.
        path: PathBuf,
        /// The requirement of the format.
        expected: &'static str,
        /// The number found there.
        found: u64,
    },
    /// A text is not the JSON that it should be.
    #[error("{}: {what}: {source}; correct the file or download it again", .path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Which text of the file.
        what: &'static str,
        /// Where and why; it names the tensor or field.
        source: serde_json::Error,
    },
    /// A field of a config or of a file's metadata is missing, or says something unknown.
    #[error(
        "{}: `{field}`: expected {expected}, found {found}; {remedy}", .path.display()
    )]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// The values that are understood.
        expected: &'static str,
        /// The value that is there.
        found: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A pattern of a config cannot be matched.
    #[error("{}: {source}; write the pattern another way", .path.display())]
    Pattern {
        /// The config.
        path: PathBuf,
        /// The pattern, and its problem.
        source: Box<PolicyError>,
    },
    /// Something is wrong with one tensor.
    #[error("{}", of_tensor(.file, .tensor, &.problem.to_string()))]
    Tensor {
        /// The file (shard) of the tensor; empty for one that was made in memory.
        file: PathBuf,
        /// Its name in the file.
        tensor: String,
        /// The problem.
        problem: TensorProblem,
    },
    /// Nothing says which dialect the checkpoint is written in.
    #[error(
        "{}: nothing says which dialect `{tensor}` is in; {}name one of {}",
        .path.display(), folder_of(.path), .dialects.join(", ")
    )]
    NoDialect {
        /// The checkpoint.
        path: PathBuf,
        /// A tensor that only a dialect can explain.
        tensor: String,
        /// The dialects to choose from.
        dialects: Vec<&'static str>,
    },
    /// The checkpoint says that it is written in more than one dialect.
    #[error(
        "{}: several dialects are named, {}; name one of them",
        .path.display(), .evidence.join(" and ")
    )]
    Ambiguous {
        /// The checkpoint.
        path: PathBuf,
        /// Each dialect with the evidence for it.
        evidence: Vec<String>,
    },
    /// The checkpoint says that it is written in another dialect than it is to be read in.
    #[error(
        "{}: cannot be read as `{asked}`: it says that it is {evidence}; name that dialect, or \
         none",
        .path.display()
    )]
    OtherDialect {
        /// The checkpoint.
        path: PathBuf,
        /// The dialect asked for.
        asked: &'static str,
        /// The dialect that it names, with the evidence for it.
        evidence: String,
    },
    /// The checkpoint is to be read as one without quantization, and has some.
    #[error(
        "{}: cannot be read as `plain`: `{tensor}` is a part of a quantized weight; name the \
         dialect that it is in, one of {}, or none",
        .path.display(), .dialects.join(", ")
    )]
    NotPlain {
        /// The checkpoint.
        path: PathBuf,
        /// The first of its tensors that only a dialect can explain.
        tensor: String,
        /// The dialects to choose from.
        dialects: Vec<&'static str>,
    },
    /// The dialect is not one of those known.
    #[error("unknown dialect `{name}`; choose one of {}", .dialects.join(", "))]
    UnknownDialect {
        /// The name asked for.
        name: String,
        /// The names there are.
        dialects: Vec<&'static str>,
    },
    /// The checkpoint needs something that is refused.
    #[error(
        "{}: {what}: not supported, because {because}; {remedy}", .path.display()
    )]
    Refused {
        /// The file that says so.
        path: PathBuf,
        /// The feature that the checkpoint needs, in its own words.
        what: String,
        /// Why it is not read.
        because: &'static str,
        /// The remedy.
        remedy: &'static str,
    },
    /// The dialect is read, not written.
    #[error("the dialect `{dialect}` is only read; choose one of {}", .dialects.join(", "))]
    ReadOnly {
        /// The dialect asked for.
        dialect: &'static str,
        /// The dialects that are written.
        dialects: Vec<&'static str>,
    },
    /// A dialect has no place for a weight.
    #[error("`{weight}`: the dialect `{dialect}` cannot hold {what}")]
    CannotHold {
        /// The dialect to be written.
        dialect: &'static str,
        /// The weight.
        weight: String,
        /// The property that it has no place for.
        what: &'static str,
    },
    /// Two tensors to be written have the same name.
    #[error("two tensors would be named `{name}`; rename one of their weights")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// The target exists.
    #[error("{}: already exists; remove it, or write to another path", .path.display())]
    TargetExists {
        /// The target.
        path: PathBuf,
    },
    /// The partial result of an earlier run would be lost.
    #[error(
        "{}: holds weights of an earlier run ({done}); remove it to start over", .path.display()
    )]
    Unfinished {
        /// The folder with what there is of it.
        path: PathBuf,
        /// Weights that are done.
        done: usize,
    },
    /// The partial result of an earlier run was made from something else.
    #[error(
        "{}: left by a run with {before}, but this run has {now}; repeat the command of that run, \
         or remove the folder to start over",
        .path.display()
    )]
    ResumeMismatch {
        /// The folder with what there is of it.
        path: PathBuf,
        /// The first part of its task that differs.
        before: String,
        /// The same part of the task that was asked for.
        now: String,
    },
    /// A file of the partial result is not what the earlier run laid out.
    #[error(
        "{}: damaged: its length or header is not the planned one; remove the folder that it is in \
         to start over",
        .path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// A folder in the place of a partial result was not left by a write.
    #[error(
        "{}: was not left by a run of this program; move it away, or write to another name",
        .path.display()
    )]
    ForeignFiles {
        /// The folder that a write would make and remove.
        path: PathBuf,
    },
    /// There is less space than will be written.
    #[error("{}", no_space(.path, &format!("{needed} bytes"), &.free.to_string()))]
    NoSpace {
        /// The folder in which they would be.
        path: PathBuf,
        /// Bytes that are not on the disk yet.
        needed: u64,
        /// Bytes that may be written.
        free: u64,
    },
    /// Another process is writing the same target.
    #[error("{}: another process is writing here; write to another path", .path.display())]
    Busy {
        /// The folder it writes to.
        path: PathBuf,
    },
    /// A write was to be finished before all weights were written.
    #[error("`{weight}` was not written; write every weight before the end")]
    Unwritten {
        /// The first of those that were not.
        weight: String,
    },
    /// The format does not have what is asked of it.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// No weight would be quantized.
    #[error("{}", nothing_selected(*.tensors, .reasons, &.remedy.to_string()))]
    NothingSelected {
        /// Tensors of the model.
        tensors: usize,
        /// Why they are not: every reason with the first weight that has it, the closest to being
        /// quantized first.
        reasons: String,
        /// The remedy for the first of them.
        remedy: Remedy,
    },
    /// No weight would be quantized, because all that could be are.
    #[error("nothing is left to quantize: `{weight}` is {format} already; use a model of floats")]
    AlreadyQuantized {
        /// One that is quantized.
        weight: String,
        /// Its format.
        format: String,
    },
    /// There is no decision about the weights.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// The choice that makes a weight quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    before: String,
    /// True if the remedy names the list of the weights to quantize, between the two texts.
    names_only: bool,
    behind: String,
}

/// Words for choices of a user in the text of an error, such as the options of a command.
#[expect(missing_debug_implementations, reason = "it has functions")]
pub struct ErrorWords<'w> {
    /// The remedy that keeps a weight of this name.
    pub keep: &'w dyn Fn(&str) -> String,
    /// The name of the list of the weights to quantize.
    pub only: &'w str,
    /// A number of bytes.
    pub bytes: &'w dyn Fn(u64) -> String,
}

impl Remedy {
    /// Makes a remedy that names weights with `only`, between these words.
    pub(crate) fn with_only(before: impl Into<String>, behind: impl Into<String>) -> Self {
        Self { before: before.into(), names_only: true, behind: behind.into() }
    }

    /// Describes the remedy with another name for the list of the weights to quantize.
    fn described(&self, only: &str) -> String {
        let only = if self.names_only { only } else { "" };
        format!("{}{only}{}", self.before, self.behind)
    }
}

impl From<String> for Remedy {
    fn from(before: String) -> Self {
        Self { before, names_only: false, behind: String::new() }
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.described("`only`"))
    }
}

/// The problem of a tensor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorProblem {
    /// The type of the numbers is not known.
    #[error("unknown dtype `{found}`; convert the tensor to a known one")]
    UnknownDtype {
        /// Its name or number in the file.
        found: String,
    },
    /// The type of the numbers is another.
    #[error("expected dtype {expected}, found {found}; convert it, or name another dialect")]
    Dtype {
        /// The dtypes that can be there.
        expected: &'static str,
        /// The value that is there.
        found: String,
    },
    /// The shape is another.
    #[error("expected shape {expected}, found {found:?}; make or download the file again")]
    Shape {
        /// The shape that the other tensors of the weight ask for.
        expected: String,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// The shape has more axes than the format of the file knows.
    #[error("expected at most {most} axes, found {found}; make or download the file again")]
    Axes {
        /// The most that there can be.
        most: u32,
        /// Axes in the file.
        found: u32,
    },
    /// A matrix of a stack is not like the others.
    #[error(
        "{what}: expected {expected}, as the matrix before it has, found {found}; stack matrices \
         that are alike"
    )]
    Unlike {
        /// Which of its facts.
        what: &'static str,
        /// The value of the matrix before it.
        expected: String,
        /// Its own value.
        found: String,
    },
    /// The shape is larger than an address space, or not a whole number of bytes or records.
    #[error(
        "the shape {found:?} is not a whole number of bytes that a machine can address; make or \
         download the file again"
    )]
    Size {
        /// The shape in the file.
        found: Vec<u64>,
    },
    /// The bytes are not as many as the shape asks for.
    #[error("the shape takes {expected} bytes, found {found}; make or download the file again")]
    Bytes {
        /// Bytes that dtype and shape take.
        expected: u64,
        /// Bytes between the offsets.
        found: u64,
    },
    /// The bytes lie outside the file, overlap others, or leave a hole.
    #[error(
        "bytes {begin}..{end}: expected {expected} within {limit} bytes of data{}",
        cut_off(*.end, *.limit)
    )]
    Offsets {
        /// Offset of the first byte, from the start of the data.
        begin: u64,
        /// Offset behind the last byte.
        end: u64,
        /// The requirement of the format.
        expected: &'static str,
        /// Bytes of data in the file.
        limit: u64,
    },
    /// Its name stands twice in a file, or in two files.
    #[error("it is there twice; remove one, or download the model again")]
    Duplicate,
    /// The index names it, its file does not have it, or the other way round.
    #[error("expected in {expected}, but it is not there; download the model again")]
    NotThere {
        /// The file that should have or name it.
        expected: String,
    },
    /// The file is another than the one that was opened.
    #[error(
        "its file had {expected} bytes when it was opened, and has {found} now; leave it alone \
         while it is read"
    )]
    Changed {
        /// Bytes of the file then.
        expected: u64,
        /// Bytes of the file when the tensor was read.
        found: u64,
    },
    /// A number is finite, and too large for the dtype that it becomes.
    #[error("{}", beyond(*.found, *.dtype, KEEP))]
    Beyond {
        /// The number.
        found: f64,
        /// The dtype.
        dtype: Dtype,
    },
    /// The dialect states the reciprocal of a scale, which no f32 is.
    #[error("{}", no_reciprocal(.what, *.found, KEEP))]
    NoReciprocal {
        /// Which scale.
        what: &'static str,
        /// The scale.
        found: f32,
    },
    /// A tensor without which this one means nothing is missing.
    #[error("it needs `{companion}`, which is missing; download the model again")]
    Missing {
        /// Name of the missing tensor.
        companion: String,
    },
    /// It is a part of a weight whose other parts the dialect does not find.
    #[error(
        "it ends as a part of a quantized weight, `{part}`, and no weight of this dialect has it; \
         name another dialect, or download the model again"
    )]
    Alone {
        /// The end of its name.
        part: String,
    },
    /// It is FP8, and another tensor may have its scales, which the dialect does not read.
    #[error(
        "it is FP8, and its scale may be `{scale}`, which this dialect does not read; name another \
         dialect, or decode the weight first"
    )]
    UnreadScale {
        /// The name of the other tensor.
        scale: String,
    },
    /// The codes and scales are no matrix of the format.
    #[error(transparent)]
    Format(#[from] FormatError),
}

/// The remedy for a file that is not there.
fn missing(source: &std::io::Error) -> &'static str {
    match source.kind() {
        std::io::ErrorKind::NotFound => "; the file is missing: download it",
        _ => "",
    }
}

/// The words of a remedy for keeping a weight.
const KEEP: &str = "keep the weight";

/// The largest number of BF16.
const LARGEST_BF16: f64 = 3.389_531_389_251_535_5e38;

fn beyond(found: f64, dtype: Dtype, keep: &str) -> String {
    let remedy = match dtype {
        Dtype::F16 if found.abs() <= LARGEST_BF16 => "choose BF16".to_owned(),
        Dtype::BF16 if found.abs() <= f64::from(f32::MAX) => {
            "choose F32, or leave it in its dtype".to_owned()
        }
        Dtype::F16 | Dtype::BF16 => "leave it in its dtype, or scale it down".to_owned(),
        _ => format!("{keep} without a cast, or scale it down"),
    };
    format!("the value {found:e} is beyond the range of {dtype}; {remedy}")
}

fn no_reciprocal(what: &str, found: f32, keep: &str) -> String {
    format!(
        "its {what} is {found:e}, whose reciprocal is no finite f32 other than 0; {keep}, or write \
         another dialect"
    )
}

impl TensorProblem {
    /// Describes the problem as `Display` does, with other words for keeping the weight, such as an
    /// option of a command.
    fn described(&self, keep: &str) -> String {
        match self {
            Self::Beyond { found, dtype } => beyond(*found, *dtype, keep),
            Self::NoReciprocal { what, found } => no_reciprocal(what, *found, keep),
            other => other.to_string(),
        }
    }
}

/// The remedy for a file that ends before a tensor does.
fn cut_off(end: u64, limit: u64) -> &'static str {
    match end > limit {
        true => "; the file is cut off: download it again",
        false => "; make or download the file again",
    }
}

fn counted(tensors: usize) -> String {
    format!("{tensors} tensor{}", if tensors == 1 { "" } else { "s" })
}

/// The text of an error about a tensor, behind its file if it is in one.
fn of_tensor(file: &Path, tensor: &str, problem: &str) -> String {
    match file.as_os_str().is_empty() {
        true => format!("tensor `{tensor}`: {problem}"),
        false => format!("{}: tensor `{tensor}`: {problem}", file.display()),
    }
}

fn no_space(path: &Path, needed: &str, free: &str) -> String {
    let path = path.display();
    format!("{path}: {needed} are needed, but {free} are free; free some, or write elsewhere")
}

fn nothing_selected(tensors: usize, reasons: &str, remedy: &str) -> String {
    format!("none of {} would be quantized: {reasons}; {remedy}", counted(tensors))
}

/// The advice to put the config of a model next to a file of it.
fn folder_of(path: &Path) -> &'static str {
    match path.extension() {
        Some(end) if end.eq_ignore_ascii_case("safetensors") => {
            "put the config.json of its model next to it, or "
        }
        _ => "",
    }
}

/// The command that writes pickles as safetensors files next to them: only tensors are loaded, and
/// those that share memory get some of their own. Of dictionaries in each other, such as
/// `{"model": {..}, "epoch": 3}`, the one with the most tensors is the model.
fn converts(files: &Path) -> String {
    format!(
        "python3 -c \"import glob, sys, torch; from safetensors.torch import save_file; \
         most = lambda d: max([{{k: v.contiguous().clone() for k, v in d.items() \
         if torch.is_tensor(v)}}, *(most(v) for v in d.values() if isinstance(v, dict))], \
         key=len); [save_file(most(torch.load(f, map_location='cpu', weights_only=True)), \
         f.rsplit('.', 1)[0] + '.safetensors') for f in glob.glob(sys.argv[1])]\" '{}'",
        // A shell that is handed the name reads nothing in it.
        files.display().to_string().replace('\'', r"'\''")
    )
}

impl CheckpointError {
    /// A property that many dialects [cannot hold](Self::CannotHold), where decoding is the remedy.
    pub const FP4_TO_DECODE: &str = "FP4 weights; decode them";
    /// The same of weights whose layers would have to transform their inputs.
    pub const TRANSFORMED_TO_DECODE: &str = "FP4 weights after a Hadamard transform; decode them";
    /// The same of FP8.
    pub const FP8_TO_DECODE: &str = "FP8 weights; decode them";
    /// The same of FP8 with one scale, in a dialect whose readers need a scale of the inputs too.
    pub const FP8_WITHOUT_INPUT_SCALE: &str =
        "FP8 weights with one scale and none for their inputs; decode them";
    /// The same of ggml's records other than FP4.
    pub const GGML_TO_DECODE: &str = "records of ggml; decode them";
    /// A property that a dialect of MXFP4 alone [cannot hold](Self::CannotHold).
    pub const NOT_MXFP4: &str = "FP4 other than MXFP4 in blocks of 32";
    /// A property that a dialect of stacked experts alone [cannot hold](Self::CannotHold).
    pub const NOT_EXPERTS: &str = "quantized layers other than stacked experts";
    /// A property that a dialect without tensor scales [cannot hold](Self::CannotHold), unless a
    /// user allows that values change.
    pub const NOT_FOLDED_EXACTLY: &str =
        "a tensor scale that cannot be folded exactly; allow it to be inexact";

    /// The remedy for a field that says something wrong.
    pub(crate) const CORRECT: &str = "correct it, or use another model";
    /// The remedy for a field that says something true.
    pub(crate) const ANOTHER: &str = "use another model";
    /// The remedy for a feature that is refused.
    pub(crate) const WITHOUT: &str = "use a model without it";

    /// Describes the error as `Display` does, with other words for choices of a user.
    ///
    /// ```
    /// use burn_fp4_checkpoints::{CheckpointError, ErrorWords};
    ///
    /// let error = CheckpointError::NoSpace { path: "out".into(), needed: 2048, free: 1024 };
    /// let words = ErrorWords {
    ///     keep: &|weight| format!("pass --keep '{weight}'"),
    ///     only: "--only",
    ///     bytes: &|bytes| format!("{} KiB", bytes / 1024),
    /// };
    /// let text = "out: 2 KiB are needed, but 1 KiB are free; free some, or write elsewhere";
    /// assert_eq!(error.described(&words), text);
    /// ```
    #[must_use]
    pub fn described(&self, words: &ErrorWords<'_>) -> String {
        match self {
            Self::Tensor { file, tensor, problem } => {
                of_tensor(file, tensor, &problem.described(&(words.keep)(tensor)))
            }
            Self::NoSpace { path, needed, free } => {
                no_space(path, &(words.bytes)(*needed), &(words.bytes)(*free))
            }
            Self::NothingSelected { tensors, reasons, remedy } => {
                nothing_selected(*tensors, reasons, &remedy.described(words.only))
            }
            other => other.to_string(),
        }
    }

    /// An error of the file system, of `path`.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    /// The error of a property of a weight that a dialect has no place for.
    pub(crate) fn cannot_hold(dialect: &'static str, weight: &str, what: &'static str) -> Self {
        Self::CannotHold { dialect, weight: weight.to_owned(), what }
    }

    /// An error about the tensor `tensor` of `file`.
    pub(crate) fn tensor(file: &Path, tensor: &str, problem: impl Into<TensorProblem>) -> Self {
        Self::Tensor { file: file.to_owned(), tensor: tensor.to_owned(), problem: problem.into() }
    }
}
