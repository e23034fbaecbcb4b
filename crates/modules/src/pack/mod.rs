//! Codes and scales in the place of the dense values of weights.
//!
//! | file              | what it holds                                                       |
//! |-------------------|---------------------------------------------------------------------|
//! | `quantize.rs`     | [`quantize_fp4`](crate::Fp4Module::quantize_fp4)                    |
//! | `provided.rs`     | [`pack_fp4`](crate::Fp4Module::pack_fp4): codes from elsewhere      |
//! | `record.rs`       | records into fresh or quantized modules                             |
//! | `measure.rs`      | amax of weights and tied weights, before the first is quantized     |
//! | `inputs.rs`       | statistics of the inputs of a weight                                |
//! | `weight.rs`       | one weight: its method, its codes                                   |
//! | `family.rs`       | weights of the same inputs, which GPTQ quantizes side by side       |
//! | `schedule.rs`     | weights assigned to devices and quantized there                     |
//! | `install.rs`      | packed weights in the place of dense ones, one after the other      |
//! | `gram_cache.rs`   | Gram matrices on the devices of weights                             |
//! | `output_error.rs` | squared errors of the outputs of layers                             |
//! | `outcome.rs`      | report entries for packed weights                                   |
//! | `edit.rs`         | packed weights of a module: found, edited, alone of all attachments |
//! | `placeholder.rs`  | the value that a packed parameter stores in the place of its own    |
//! | `compact.rs`      | placeholders without their zeros                                    |

pub(crate) mod compact;
pub(crate) mod edit;
pub(crate) mod family;
pub(crate) mod gram_cache;
pub(crate) mod inputs;
pub(crate) mod install;
pub(crate) mod measure;
pub(crate) mod outcome;
pub(crate) mod output_error;
pub(crate) mod placeholder;
pub(crate) mod provided;
pub(crate) mod quantize;
pub(crate) mod record;
pub(crate) mod schedule;
pub(crate) mod weight;
