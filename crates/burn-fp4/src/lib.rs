//! Quantizes any [Burn](https://burn.dev) module to 4-bit floating point, in place. NVFP4 output is
//! bit-identical to NVIDIA's reference quantizer; MXFP4 follows the OCP specification.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn_fp4::prelude::*;
//!
//! let device = Device::flex();
//! let mut layer = LinearConfig::new(64, 32).init(&device); // or a whole model
//! let report = layer.quantize_fp4(&Fp4Config::nvfp4())?;
//! println!("{report}");
//! let output = layer.forward(Tensor::<2>::ones([1, 64], &device)); // works as before
//! # assert_eq!(output.dims(), [1, 32]);
//! # Ok::<(), Fp4Error>(())
//! ```
//!
//! The [`guide`] has a page for each job. The [`prelude`] imports what most programs need.
//!
//! | layer           | for                                                                   |
//! |-----------------|-----------------------------------------------------------------------|
//! | [`Fp4Module`]   | modules: `quantize_fp4`, `fake_quantize_fp4`, `lora_fp4`, records     |
//! | [`LoadCheckpoint`] | files of other projects into modules; `save_fp4` out of them       |
//! | [`ops`]         | tensors: `quantize`, `dequantize`, `fake_quantize`, `matmul`          |
//! | [`search`]      | slices: the reference quantizer, and the fast host engine             |
//! | [`formats`]     | bits: what codes and scales mean                                      |
//!
//! | file         | what it holds                                                            |
//! |--------------|--------------------------------------------------------------------------|
//! | `lib.rs`     | the names of the other crates, in one place                              |
//! | `prelude.rs` | the names that most programs need                                        |
//! | `guide/`     | the guide: pages whose code is compiled, and mostly run                  |

#![forbid(unsafe_code)]

pub mod guide;
pub mod prelude;

pub use burn_fp4_modules::{
    ActivationRange, Budget, BudgetChoice, Calibrate, Calibrated, Calibration, CalibrationOptions,
    CalibrationProgress, Candidate, CandidateSensitivity, Change, Checkpoint, CheckpointError,
    CheckpointMap, Container, DenseWeight, FakeQuantWeight, FakeQuantize, FakeQuantizeConfig,
    Fallback, FileChoices, FileLayout, Fp4Config, Fp4Embedding, Fp4Error, Fp4Linear, Fp4Module,
    Fp4Parts, Fp4Report, Fp4TrainLinear, GroupSensitivity, Indivisible, KeepReason, LoadCheckpoint,
    LoadReport, Loaded, LoadedFrom, LoadedParameter, Method, Mismatch, Outcome, Override,
    PackedWeight, ParameterReport, Recipe, RecipeError, RecipeFormat, RecipeWeights, Replay,
    ReplayError, ReplayParts, ReplayTensors, Sensitivity, SquaredError, Unused, WriteReport,
    checkpoints, ops, policy,
};
pub use ops::search::formats;
pub use ops::{
    Activations, Admm, BlockOrder, Blocks, DequantizeReason, Draw, E4m3Range, ErrorMetric,
    Fp4Format, Fp4Layout, Fp4Scheme, Fp4Tensor, Gptq, Gram, Hadamard, MatmulPath, NonFinite,
    OpsError, Rounding, Saturated, ScaleRule, Sse, TensorScaling, TrainRecipe, search,
};
pub use ops::{init, init_async};
