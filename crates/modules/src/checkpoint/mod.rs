//! Checkpoints of other projects, into modules and out of them.
//!
//! | file            | what it holds                                                          |
//! |-----------------|------------------------------------------------------------------------|
//! | `map.rs`        | [`CheckpointMap`]: which tensor is which parameter, and how it lies    |
//! | `mismatch.rs`   | [`Mismatch`]: a parameter and a tensor that do not go together         |
//! | `names.rs`      | the names by which parameters and tensors find each other              |
//! | `outline.rs`    | the tensors that parameters are in files, without values               |
//! | `decide.rs`     | decisions about parameters, from those about their tensors in files    |
//! | `report.rs`     | [`LoadReport`]: where every parameter came from                        |
//! | `bytes.rs`      | values of tensors: turned, stacked, in the dtypes of Burn              |
//! | `plan.rs`       | every parameter with its tensors, checked before anything changes      |
//! | `load.rs`       | [`LoadCheckpoint`]: into a module                                      |
//! | `save.rs`       | out of a module                                                        |
//! | `statistics.rs` | statistics of inputs, for the command `fp4`                            |
//! | `recipe.rs`     | a recipe of what was done to a module, for the command `fp4`           |

pub(crate) mod bytes;
pub(crate) mod decide;
pub(crate) mod load;
pub(crate) mod map;
pub(crate) mod mismatch;
pub(crate) mod names;
pub(crate) mod outline;
pub(crate) mod plan;
mod recipe;
pub(crate) mod report;
pub(crate) mod save;
mod statistics;
