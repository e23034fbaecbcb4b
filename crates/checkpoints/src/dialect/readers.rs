//! Programs that read what is written here: the rows from which the help of the command line and
//! the guide take them.

/// A program that reads checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Program {
    /// vLLM.
    Vllm,
    /// SGLang.
    SgLang,
    /// TensorRT-LLM.
    TensorRtLlm,
    /// Transformers of Hugging Face.
    Transformers,
    /// llama.cpp.
    LlamaCpp,
    /// MLX, by mlx-lm.
    Mlx,
}

/// The facts of a [`Program`].
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProgramRow {
    /// Its name in tables.
    pub name: &'static str,
    /// The version that was run or read. TensorRT-LLM: the files name commits.
    pub version: &'static str,
    /// True if it runs query, key and value as one layer, and gate and up.
    pub fuses: bool,
}

impl Program {
    /// Every program.
    pub const ALL: [Self; 6] = [
        Self::Vllm,
        Self::SgLang,
        Self::TensorRtLlm,
        Self::Transformers,
        Self::LlamaCpp,
        Self::Mlx,
    ];

    /// The facts of the program.
    #[must_use]
    pub const fn row(self) -> &'static ProgramRow {
        match self {
            Self::Vllm => &ProgramRow { name: "vLLM", version: "0.33.0", fuses: true },
            Self::SgLang => &ProgramRow { name: "SGLang", version: "0.5.23", fuses: true },
            Self::TensorRtLlm => &ProgramRow { name: "TensorRT-LLM", version: "main", fuses: true },
            Self::Transformers => {
                &ProgramRow { name: "transformers", version: "5.23.0", fuses: false }
            }
            Self::LlamaCpp => {
                &ProgramRow { name: "llama.cpp", version: "xllamacpp 2026.10.11549", fuses: false }
            }
            Self::Mlx => &ProgramRow { name: "MLX", version: "mlx-lm 0.32.2", fuses: false },
        }
    }
}

/// The evidence that a program reads a format in a dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// `tests/interop/readers.py` runs a model that was written here.
    Test,
    /// This file of the program accepts every field and tensor. Nobody ran it here.
    Source(&'static str),
}

/// A program that reads a format in a dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadBy {
    /// The program.
    pub program: Program,
    /// The evidence.
    pub known: Known,
    /// Verb and object for what the program does to the inputs of a layer. Empty: nothing.
    pub inputs: &'static str,
}

/// A program that a test runs.
pub(super) const fn tested(program: Program) -> ReadBy {
    ReadBy { program, known: Known::Test, inputs: "" }
}

/// A program whose source says so.
pub(super) const fn source(program: Program, file: &'static str) -> ReadBy {
    ReadBy { program, known: Known::Source(file), inputs: "" }
}

impl ReadBy {
    /// The same, of a program that rounds the inputs of a layer.
    pub(super) const fn rounding(self, inputs: &'static str) -> Self {
        Self { inputs, ..self }
    }
}
