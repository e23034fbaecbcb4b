//! Codes and scales in the place of the dense values of weights.
//!
//! One list of jobs goes through all steps: a job is a weight, its plan, its statistics and, in the
//! end, its codes.
//!
//! | file                  | what it holds                                                      |
//! |-----------------------|--------------------------------------------------------------------|
//! | `quantize.rs`         | [`quantize_fp4`](crate::Fp4Module::quantize_fp4)                  |
//! | `job.rs`              | a weight to be quantized: amax, ties, statistics, report entry     |
//! | `devices.rs`          | weights divided among several devices                              |
//! | `weight.rs`           | one weight or family: its values, method, codes, errors of outputs |
//! | `packed_parameter.rs` | placeholders; packed weights of a module                           |
//! | `provided.rs`         | [`pack_fp4`](crate::Fp4Module::pack_fp4): codes from elsewhere     |
//! | `activations.rs`      | how products with packed weights read their input                  |
//! | `record.rs`           | records into fresh or quantized modules                            |

pub(crate) mod activations;
pub(crate) mod devices;
pub(crate) mod job;
pub(crate) mod packed_parameter;
pub(crate) mod provided;
pub(crate) mod quantize;
pub(crate) mod record;
pub(crate) mod weight;
