//! The guide: a page for each job. `cargo test` compiles every block of Rust on these pages, and
//! runs all but two, which read or write folders of yours; figures come from `docs/benchmarks`.
//!
//! | page            | after it you can                                                          |
//! |-----------------|---------------------------------------------------------------------------|
//! | [`quantize`]    | quantize any module in place, choose its weights, read the report         |
//! | [`methods`]     | choose how scales and codes are found                                     |
//! | [`calibrate`]   | gather statistics of the inputs of layers, and quantize by them           |
//! | [`sensitivity`] | learn which layers can take FP4, and choose formats within a budget       |
//! | [`train`]       | train weights to be quantized, adapt a quantized model, train in NVFP4    |
//! | [`products`]    | have layers multiply straight from their codes, on a GPU and on a host    |
//! | [`files`]       | load and write checkpoints of other projects; the command `fp4`           |
//! | [`readers`]     | know which programs read what is written, and how that is known           |
//! | [`records`]     | save and load a quantized module, and move it between devices             |
//! | [`errors`]      | tell from an error what was wrong, and what to do                         |
//! | [`numerics`]    | decode a tensor by hand, and know why every engine gives the same bits    |
//! | [`extend`]      | find where a rule, a method, a dialect or a device is added               |

#[doc = include_str!("quantize.md")]
pub mod quantize {}

#[doc = include_str!("methods.md")]
pub mod methods {}

#[doc = include_str!("calibrate.md")]
pub mod calibrate {}

#[doc = include_str!("sensitivity.md")]
pub mod sensitivity {}

#[doc = include_str!("train.md")]
pub mod train {}

#[doc = include_str!("products.md")]
pub mod products {}

#[doc = include_str!("files.md")]
pub mod files {}

#[doc = include_str!("readers.md")]
pub mod readers {}

#[doc = include_str!("records.md")]
pub mod records {}

#[doc = include_str!("errors.md")]
pub mod errors {}

#[doc = include_str!("numerics.md")]
pub mod numerics {}

#[doc = include_str!("extend.md")]
pub mod extend {}
