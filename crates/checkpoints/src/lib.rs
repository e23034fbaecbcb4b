//! FP4 checkpoints of other projects: read, converted and written.
//!
//! ```text
//! file or folder --container--> tensors --dialect--> weights --dialect--> tensors --> new files
//!  (memory map)     (names, shapes, bytes)   (dense, FP8, FP4 with scales as stated)
//! ```
//!
//! A checkpoint is a *container* (which bytes are which tensor) in a *dialect* (which tensors are
//! a weight, and what its scales mean):
//!
//! | dialect | codes | block scales (s) | tensor scale (g) | value |
//! |---|---|---|---|---|
//! | modelopt, miles | `weight` | `weight_scale` | `weight_scale_2` | `x * (s * g)` |
//! | compressed-tensors | `weight_packed` | `weight_scale` | `weight_global_scale` | `x * (s/g)` |
//! | gpt-oss | `X_blocks` | `X_scales` | none | `x * s` |
//! | gguf | `weight` | in its records | `scale` | `(x * s) * g` |
//! | mlx | `weight` | `scales` | none | `x * s` |
//! | deepseek, read only | `weight` | `scale` | none | `x * s` |
//! | quark, read only | `weight` | `weight_scale` | `weight_scale_2` | `x * (s * g)` |
//! | torchao, read only | `qdata` | `scale` | `per_tensor_scale` | `x * (s * g)` |
//! | comfyui, read only | `weight` | `weight_scale` | `weight_scale_2` | `x * (s * g)` |
//! | fp-quant | `qweight` | `scales` | `weight_global_scale` | `H (x * (s/g))` |
//!
//! The configs and metadata of a checkpoint name its dialect. One that names none is read in the
//! one dialect that explains its tensors, if there is one. For all others, name the dialect with
//! [`Checkpoint::open_as`]. Layers of FP-Quant transform their inputs by a Hadamard matrix H, as
//! their weights were. Shapes of ComfyUI's NVFP4 weights include their padding to multiples of 16.
//! GGUF is written to a path that ends in `.gguf`, as one file, for which [`WriteOptions::shards`]
//! does nothing; all others to a folder. GGUF, gpt-oss, miles, FP-Quant and plain hold no FP8,
//! which [`WriteOptions::decode_fp8`] makes floats of.
//!
//! [Many of ggml's quantized types](DataType::decoded_ggml) are read as floats,
//! [bit for bit](Tensor::to_f32) as Python's gguf does. Only GGUF holds them as they are;
//! [`WriteOptions::decode_ggml`] makes floats of them for the others.
//!
//! ```no_run
//! # fn main() -> Result<(), burn_fp4_checkpoints::CheckpointError> {
//! use burn_fp4_checkpoints::{Checkpoint, WriteOptions};
//!
//! let checkpoint = Checkpoint::open("Qwen3-8B-NVFP4")?;
//! let report =
//!     checkpoint.model()?.write("out", "compressed-tensors", &WriteOptions::default())?;
//! println!("{} tensor scales were inverted", report.inverted);
//! # Ok(())
//! # }
//! ```
//!
//! | file            | what it holds                                                              |
//! |-----------------|----------------------------------------------------------------------------|
//! | `container/`    | [`Container`]: safetensors files and folders, GGUF                         |
//! | `tensor.rs`     | [`Tensor`], a view; `dtype.rs`: its numbers; `ggml.rs`: ggml's as f32      |
//! | `weight.rs`     | [`Weight`], [`Model`]: tensors put together to weights                     |
//! | `fp4.rs`        | [`Fp4Weight`], [`TensorScale`] as stated; `storage.rs`: the order of bytes |
//! | `stacked.rs`    | [`Fp4Weight::split`] and [`Fp4Weight::join`]: experts                      |
//! | `fp8.rs`        | [`Fp8Weight`], and its values                                              |
//! | `dialect/`      | [`Dialect`], one file for each, and [`DIALECTS`]                           |
//! | `checkpoint.rs` | [`Checkpoint`]: a container in its dialect                                 |
//! | `cast.rs`       | [`cast`](cast::cast): NVFP4 to MXFP4 and back                              |
//! | `write.rs`      | [`Model::write`]: planned, streamed, all or nothing; its steps in `write/` |
//! | `facts.rs`      | [`Fp4Facts`]: codes and scales, counted; `defects.rs`: [`defects`]         |
//! | `reader.rs`     | [`Reader`]: bytes by reading files, which may change, instead of maps      |
//! | `system.rs`     | calls of the system on files: offsets, space, hints                        |
//! | `architecture/` | roles of weights: `table.rs` has a row for each architecture               |
//! | `selection/`    | [`Selection`](selection::Selection): which weights become FP4              |
//! | `json.rs`       | JSON text as Python's `json` module writes it                              |
//! | `error.rs`      | [`CheckpointError`]                                                        |

#![warn(missing_debug_implementations)]

mod architecture;
pub mod cast;
mod checkpoint;
mod container;
mod defects;
pub mod dialect;
mod dtype;
mod error;
mod facts;
mod fp4;
mod fp8;
mod ggml;
mod json;
mod reader;
pub mod selection;
mod stacked;
mod storage;
mod system;
mod tensor;
mod weight;
mod write;

pub use architecture::TransformersLoad;
pub use burn_fp4_policy::{Matcher, Pattern, Syntax};
pub use checkpoint::Checkpoint;
pub use container::gguf::Metadata as GgufMetadata;
pub use container::safetensors::Metadata as SafetensorsMetadata;
pub use container::{CONFIG, Container, Metadata};
pub use defects::{
    ALL_ZERO, Defect, DefectKind, defects, implausible, missing_layers, packed_embedding,
    planned_defects, unlike_scales,
};
pub use dialect::{DIALECTS, Dialect, KnownBy};
pub use dtype::{DataType, Dtype, GgmlRow};
pub use error::{CheckpointError, ErrorWords, Remedy, TensorProblem};
pub use facts::Fp4Facts;
pub use fp4::{Fp4Weight, Numbers, Order, TensorScale};
pub use fp8::{Fp8Weight, Granularity};
pub use reader::Reader;
pub use storage::Storage;
pub use tensor::{Data, NewTensor, Tensor};
pub use weight::{Model, Quantization, Value, Weight};
pub use write::{Kept, Output, Piece, Planned, Shards, Start, WriteOptions, WriteReport};
