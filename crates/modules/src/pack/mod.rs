//! Codes and scales in the place of the dense values of weights.
//!
//! | file             | what it holds                                                        |
//! |------------------|----------------------------------------------------------------------|
//! | `quantize.rs`    | [`quantize_fp4`](crate::Fp4Module::quantize_fp4)                     |
//! | `given.rs`       | [`pack_fp4`](crate::Fp4Module::pack_fp4): codes from elsewhere       |
//! | `record.rs`      | records into fresh or quantized modules                              |
//! | `measure.rs`     | what is measured before the first weight is quantized: amax, ties    |
//! | `inputs.rs`      | statistics of the inputs of a weight                                 |
//! | `weight.rs`      | one weight: its method, its codes                                    |
//! | `family.rs`      | weights of the same inputs, which GPTQ quantizes side by side        |
//! | `divide.rs`      | weights divided among devices                                        |
//! | `attach.rs`      | packed weights attached where dense ones were, one after the other   |
//! | `outcome.rs`     | what is reported of packed weights                                   |
//! | `output_error.rs` | squared errors of the outputs of layers                            |
//! | `edit.rs`        | packed weights of a module: found, edited, alone of all attachments  |
//! | `placeholder.rs` | what a packed parameter stores in the place of its values            |
//! | `compact.rs`     | placeholders without their zeros                                     |

pub(crate) mod attach;
pub(crate) mod compact;
pub(crate) mod divide;
pub(crate) mod edit;
pub(crate) mod family;
pub(crate) mod given;
pub(crate) mod inputs;
pub(crate) mod measure;
pub(crate) mod outcome;
pub(crate) mod output_error;
pub(crate) mod placeholder;
pub(crate) mod quantize;
pub(crate) mod record;
pub(crate) mod weight;
