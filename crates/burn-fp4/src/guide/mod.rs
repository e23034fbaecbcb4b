//! The guide. `cargo test` compiles every block of Rust on these pages.
//!
//! | page           | for                                                         |
//! |----------------|-------------------------------------------------------------|
//! | [`quantize`]   | quantizing a Burn model                                     |
//! | [`serve`]      | quantizing a Hugging Face folder, and serving it            |
//! | [`accuracy`]   | keeping accuracy                                            |
//! | [`speed`]      | running fast on a GPU or a CPU                              |
//! | [`fp8`]        | many tokens on an H100: products in FP8                     |
//! | [`decoder`]    | a decoder of your own, with a KV cache                      |
//! | [`cpu_layers`] | layers that multiply by codes on a CPU                      |
//! | [`cpu_speed`]  | a language model on a CPU, step by step                     |
//! | [`browser`]    | a page that multiplies through WebGPU                       |
//! | [`fine_tune`]  | LoRA, quantization-aware training, training in NVFP4        |
//! | [`faq`]        | GPUs, models, comparisons                                   |
//! | [`glossary`]   | the words of this project                                   |
//!
//! | reference       | about                                                      |
//! |-----------------|------------------------------------------------------------|
//! | [`methods`]     | methods and scale rules, and the error of each             |
//! | [`hadamard`]    | transforms that spread outliers                            |
//! | [`calibrate`]   | statistics of the inputs of layers                         |
//! | [`sensitivity`] | the error of each layer, budgets, recipes                  |
//! | [`files`]       | checkpoints of other projects                              |
//! | [`readers`]     | programs that read them                                    |
//! | [`records`]     | saving, loading, moving; limits of devices                 |
//! | [`errors`]      | every error, with its cause and fix                        |
//! | [`numerics`]    | bits of the formats, and why engines agree                 |
//! | [`burn_quantization`] | Burn's own quantized tensors, converted               |

#[doc = include_str!("links.txt")]
#[doc = include_str!("quantize.md")]
pub mod quantize {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("serve.md")]
pub mod serve {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("accuracy.md")]
pub mod accuracy {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("speed.md")]
pub mod speed {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("fp8.md")]
pub mod fp8 {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("decoder.md")]
pub mod decoder {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("cpu_layers.md")]
pub mod cpu_layers {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("cpu_speed.md")]
pub mod cpu_speed {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("browser.md")]
pub mod browser {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("fine_tune.md")]
pub mod fine_tune {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("faq.md")]
pub mod faq {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("glossary.md")]
pub mod glossary {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("methods.md")]
pub mod methods {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("hadamard.md")]
pub mod hadamard {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("calibrate.md")]
pub mod calibrate {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("sensitivity.md")]
pub mod sensitivity {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("files.md")]
pub mod files {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("readers.md")]
pub mod readers {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("records.md")]
pub mod records {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("errors.md")]
pub mod errors {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("numerics.md")]
pub mod numerics {}

#[doc = include_str!("links.txt")]
#[doc = include_str!("burn_quantization.md")]
pub mod burn_quantization {}
