//! Llama and its relatives, as an ordinary Burn model that knows nothing of FP4: read from the
//! folders of Hugging Face, trained, measured, quantized and run.
//!
//! | file            | what it holds                                                            |
//! |-----------------|--------------------------------------------------------------------------|
//! | `config.rs`     | [`LlamaConfig`]: `config.json`                                           |
//! | `rotation.rs`   | rotary position embeddings                                               |
//! | `model.rs`      | [`Llama`], and its cache of keys and values                              |
//! | `folder.rs`     | [`Folder`]: a model, its tokenizer and its config, opened and saved      |
//! | `tokens.rs`     | [`Tokens`]: a text as a model reads it; a tokenizer of bytes             |
//! | `generate.rs`   | [`generate`]: a text continued                                           |
//! | `perplexity.rs` | [`perplexity`]: how well a text is predicted                             |
//! | `train.rs`      | training, and distillation behind fake quantization                      |
//! | `sensitivity.rs` | what FP4 costs each layer, predicted and measured                       |
//! | `quantize.rs`   | [`Recipe`]: a format and a method, applied to a model                    |

mod config;
mod folder;
mod generate;
mod model;
mod perplexity;
mod quantize;
mod rotation;
mod sensitivity;
mod tokens;
mod train;

pub use config::{LlamaConfig, ModelType};
pub use folder::{Folder, create, names};
pub use generate::{Generated, Sampling, generate};
pub use model::{Cache, Llama, Projection};
pub use perplexity::{Perplexity, Windows, perplexity};
pub use quantize::{CalibrationWindows, Recipe, fp4_config, methods};
pub use sensitivity::{divergence, quantized_alone, rank_correlation, sensitivity};
pub use tokens::{Tokens, byte_tokenizer};
pub use train::{Batches, distill, train};
