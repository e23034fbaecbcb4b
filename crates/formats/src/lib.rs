//! The meaning of the bits: element and scale formats of FP4, their packing, and the one definition
//! of their values.
//!
//! ```text
//! element (E2M1)      block scale                      value
//! s e e m             NVFP4: E4M3  0 e e e e m m m     element x block scale x tensor scale
//! 3 2 1 0             MXFP4: E8M0  e e e e e e e e     element x block scale
//!
//! byte k of a row     [ element 2k+1 | element 2k ]    the even element is the low nibble
//! ```
//!
//! | thing        | shape                       | type                                         |
//! |--------------|-----------------------------|----------------------------------------------|
//! | dense        | `[rows, cols]`              | f32, f16 or bf16                             |
//! | codes        | `[rows, cols / 2]`          | u8, two 4-bit codes each                     |
//! | block scales | `[rows, cols / block_size]` | u8, one E4M3 (NVFP4) or E8M0 (MXFP4) code    |
//! | tensor scale | `[1]`, or `[rows]`          | f32, always the *multiplier* (amax / 2688)   |
//!
//! Blocks run along the last axis. Files and kernels may order the block scales differently; see
//! [`ScaleLayout`].
//!
//! | file              | what it holds                                                         |
//! |-------------------|-----------------------------------------------------------------------|
//! | `minifloat.rs`    | a row for each number format: [`E2M1`], [`E4M3`], [`E8M0`]            |
//! | `format.rs`       | [`Fp4Format`]: the block scales of NVFP4 and MXFP4                    |
//! | `nibbles.rs`      | two codes per byte                                                    |
//! | `scale_layout.rs` | [`ScaleLayout`]: the order of block scales in memory                  |
//! | `packed.rs`       | [`Packed`]: a quantized matrix, and its strict validation             |
//! | `dequantize.rs`   | [`Packed::dequantize`], the oracle that every engine is compared with |
//! | `error.rs`        | [`FormatError`]: problems of codes, scales and names                  |

#![forbid(unsafe_code)]
#![warn(missing_debug_implementations)]

mod dequantize;
mod error;
mod format;
mod minifloat;
mod nibbles;
mod packed;
mod scale_layout;

pub use dequantize::element_value;
pub use error::{FormatError, check_length};
pub use format::{BLOCK_SIZES, FormatRow, Fp4Format, ScaleGrid};
pub use half::{bf16, f16};
pub use minifloat::{
    E2M1, E2M1_VALUES, E4M3, E4M3_VALUES, E8M0, E8M0_VALUES, Minifloat, Nan, power_of_two,
};
pub use nibbles::{pack_nibbles, unpack_nibbles};
pub use packed::{Packed, TensorScale, check_scales};
pub use scale_layout::ScaleLayout;
