//! The one definition of the values of codes and scales: the oracle of every engine.

use crate::format::Fp4Format;
use crate::minifloat::E2M1;
use crate::packed::Packed;

/// Computes the value of one element: `(element x block scale) x tensor scale` in f32.
///
/// The first product is exact (at most 2 and 4 significant bits); the second rounds once.
///
/// ```
/// use burn_fp4_formats::{Fp4Format, element_value};
///
/// // Element 0.5, block scale 2, tensor scale 3.
/// assert_eq!(element_value(Fp4Format::NvFp4, 0x1, 0x40, 3.0), 3.0);
/// ```
#[must_use]
pub fn element_value(format: Fp4Format, code: u8, block_scale: u8, tensor_scale: f32) -> f32 {
    (E2M1.decode(code) * format.row().block_scale.decode(block_scale)) * tensor_scale
}

impl Packed {
    /// Computes the `[rows, cols]` values of the codes and scales. This is **the oracle**.
    ///
    /// Every engine has to produce these bits. A narrower output is this f32 rounded once.
    ///
    /// # Panics
    /// If the lengths do not fit the shape; see [`validate`](Self::validate).
    #[must_use]
    pub fn dequantize(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.rows * self.cols);
        for row in 0..self.rows {
            for col in 0..self.cols {
                let byte = self.codes[(row * self.cols + col) / 2];
                let code = if col % 2 == 0 { byte & 0xF } else { byte >> 4 };
                let scale = self.scales[row * self.blocks() + col / self.block_size];
                values.push(element_value(self.format, code, scale, self.tensor_scale.of_row(row)));
            }
        }
        values
    }
}
