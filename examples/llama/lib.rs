//! Llama, Mistral, Qwen2 and Qwen3 as an ordinary Burn model that does not know of FP4. Loads
//! Hugging Face folders; trains, measures, quantizes and runs the model.
//!
//! | file                 | what it holds                                                  |
//! |----------------------|----------------------------------------------------------------|
//! | `config.rs`          | [`LlamaConfig`]: `config.json`                                 |
//! | `model.rs`           | [`Llama`] and its [`KvCaches`]                                 |
//! | `part.rs`            | [`Part`]: the weights of one [`Stage`] of a model              |
//! | `folder.rs`          | [`Folder`]: config, tokenizer and weights, opened and saved    |
//! | `tokens.rs`          | [`Tokens`]: the tokens of a text; a tokenizer of bytes         |
//! | `sampling.rs`        | [`Sampling`]: the choice of the next token                     |
//! | `generate.rs`        | [`generate`]: prompt and decode steps                          |
//! | `bandwidth.rs`       | [`Bandwidth`]: how fast decode steps read memory               |
//! | `perplexity.rs`      | [`perplexity`] over overlapping windows; [`Losses`] by window  |
//! | `fidelity.rs`        | [`fidelity`]: distance of models from a reference              |
//! | `train.rs`           | [`train`] and [`distill`]                                      |
//! | `sensitivity.rs`     | [`sensitivity`]: loss of each layer in each format             |
//! | `quantize.rs`        | [`QuantizeOptions`]: format, method and calibration of a model |
//! | `quantize_folder.rs` | [`QuantizeFolder`]: a model of any size, stage by stage        |

#![allow(clippy::must_use_candidate, reason = "no user calls it")]

mod bandwidth;
mod config;
mod fidelity;
mod folder;
mod generate;
mod model;
mod part;
mod perplexity;
mod quantize;
mod quantize_folder;
mod sampling;
mod sensitivity;
mod tokens;
mod train;

pub use bandwidth::Bandwidth;
pub use config::{LlamaConfig, ModelType};
pub use fidelity::{Divergence, Fidelity, fidelity};
pub use folder::{Folder, create, create_random, names};
pub use generate::{Generated, generate};
pub use model::{KvCaches, Llama, Projection};
pub use part::{Activations, Part, Stage};
pub use perplexity::{Difference, Losses, Perplexity, WindowLoss, Windows, perplexity};
pub use quantize::{
    CalibrationWindows, QuantizeOptions, at_least, fp4_config, methods, methods_where, positive,
    scheme,
};
pub use quantize_folder::{QuantizeFolder, QuantizedFolder, Seconds};
pub use sampling::Sampling;
pub use sensitivity::{divergence, quantized_alone, rank_correlation, sensitivity};
pub use tokens::{Tokens, batch_of, byte_tokenizer};
pub use train::{Batches, distill, train};
