//! Training: of weights and activations as if they were quantized, by quantized products, and of
//! adapters over codes.
//!
//! | file              | what it holds                                                       |
//! |-------------------|---------------------------------------------------------------------|
//! | `weights.rs`      | weights fake-quantized while they are trained, then packed          |
//! | `activations.rs`  | [`FakeQuantize`](crate::FakeQuantize): activations                  |
//! | `train_linear.rs` | [`Fp4TrainLinear`](crate::Fp4TrainLinear): three quantized products |
//! | `lora.rs`         | adapters trained over codes, and merged into them                   |

pub(crate) mod activations;
pub(crate) mod lora;
pub(crate) mod train_linear;
pub(crate) mod weights;
