//! Statistics of the inputs of layers, gathered from forward passes: recorded, then run.
//!
//! | file              | what it holds                                                        |
//! |-------------------|----------------------------------------------------------------------|
//! | `calibrate.rs`    | [`Calibrate`](crate::Calibrate): statistics of an unmodified module  |
//! | `sequential.rs`   | weights quantized layer by layer, by the inputs that these leave     |
//! | `parts.rs`        | [`Fp4Parts`](crate::Fp4Parts): modules that do not fit into memory   |
//! | `options.rs`      | [`CalibrationOptions`](crate::CalibrationOptions)                    |
//! | `recorder.rs`     | records forward passes                                               |
//! | `recording.rs`    | one forward pass as a list of operations                             |
//! | `values.rs`       | the tensors that recordings read, each kept once                     |
//! | `liveness.rs`     | when tensors are read last, and the memory that they take            |
//! | `layer_inputs.rs` | where a list of operations multiplies activations by weights         |
//! | `batches.rs`      | the recordings of all batches, and what is done with them on devices |
//! | `execution.rs`    | one recording that is run, operation by operation                    |
//! | `pipeline.rs`     | all batches run from one input of layers to the next                 |
//! | `cache.rs`        | statistics in files, for calibrations that are interrupted           |

pub(crate) mod batches;
pub(crate) mod cache;
pub(crate) mod calibrate;
pub(crate) mod execution;
pub(crate) mod layer_inputs;
pub(crate) mod liveness;
pub(crate) mod options;
pub(crate) mod parts;
pub(crate) mod pipeline;
pub(crate) mod recorder;
pub(crate) mod recording;
pub(crate) mod sequential;
pub(crate) mod values;
