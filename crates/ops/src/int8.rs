//! [`Int8Matrix`]: an output layer of signed bytes.

use burn::backend::{Dispatch, DispatchTensor};
use burn::module::{Module, ParamId};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_fp4_search::Activations;
use burn_fp4_search::host::{INT8_BLOCK, quantize_int8};

use crate::devices::decoder::{
    DecoderBackend, HostDecoderBackend, has_host_decoder, multiplies_int8,
};
use crate::devices::extension::{Fp4Backend, weight_data};
use crate::devices::readable;
use crate::error::OpsError;
use crate::matmul::product_of_nothing;

/// Number of values that [`Int8Matrix::quantize`] reads from the device at a time, as f32.
const PART: usize = 1 << 24;

/// A matrix `[N, K]` of signed bytes with an f32 scale for each 32 neighbours in a row, 28 % of its
/// size in f32: for the output layer of a language model, which FP4 costs more accuracy than it
/// costs other layers.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::Int8Matrix;
///
/// let weight = Tensor::<2>::full([3, 32], 0.5, &Device::flex());
/// let matrix = Int8Matrix::quantize(weight)?;
/// let product = matrix.product(Tensor::<2>::full([1, 32], 2.0, &Device::flex()));
/// assert_eq!(product.into_data(), TensorData::from([[32f32; 3]]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
#[derive(Module, Debug)]
pub struct Int8Matrix {
    /// i8, `[N, K]`.
    codes: Tensor<2, Int>,
    /// f32, `[N, K / 32]`.
    scales: Tensor<2>,
    /// Identifies the values, for copies that captures read.
    #[module(skip)]
    id: ParamId,
    /// How products read their input on `flex`. Not part of records.
    #[module(skip)]
    pub activations: Activations,
}

impl Int8Matrix {
    /// Rounds each value to the nearest of 255 multiples of its scale, 1/127 of the largest
    /// magnitude of its block. Runs on the host.
    ///
    /// # Errors
    /// [`OpsError::Indivisible`] if 32 does not divide the rows, [`OpsError::Device`] if the weight
    /// cannot be read.
    pub fn quantize(weight: Tensor<2>) -> Result<Self, OpsError> {
        let ([rows, cols], device) = (weight.dims(), weight.device().inner());
        if !cols.is_multiple_of(INT8_BLOCK) {
            return Err(OpsError::Indivisible { axis: 1, length: cols, block_size: INT8_BLOCK });
        }
        let (mut codes, mut scales) = (Vec::with_capacity(rows * cols), Vec::new());
        let step = (PART / cols.max(1)).max(1);
        for first in (0..rows).step_by(step) {
            let part = weight.clone().narrow(0, first, step.min(rows - first));
            let part = part.cast(DType::F32).try_into_data().map_err(OpsError::device)?;
            let part = quantize_int8(part.as_slice::<f32>().expect("cast to f32"))?;
            codes.extend(part.0);
            scales.extend(part.1);
        }
        let codes = TensorData::new(codes, [rows, cols]);
        let scales = TensorData::new(scales, [rows, cols / INT8_BLOCK]);
        Ok(Self {
            codes: Tensor::from_data(weight_data(codes, &device), (&device, DType::I8)),
            scales: Tensor::from_data(weight_data(scales, &device), (&device, DType::F32)),
            id: ParamId::new(),
            activations: Activations::F32,
        })
    }

    /// Sets how products read their input on `flex`: in f32, or rounded to 8 bits, which is the
    /// fastest. Other devices read it in its dtype.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, TensorData};
    /// use burn_fp4_ops::{Activations, Int8Matrix};
    ///
    /// let weight = Tensor::<2>::full([3, 32], 0.5, &Device::flex());
    /// let matrix = Int8Matrix::quantize(weight)?.with_activations(Activations::Int8);
    /// let product = matrix.product(Tensor::<2>::full([1, 32], 2.0, &Device::flex()));
    /// assert!((product.into_data().as_slice::<f32>().unwrap()[0] - 32.0).abs() < 1e-4);
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    #[must_use]
    pub fn with_activations(mut self, activations: Activations) -> Self {
        self.activations = activations;
        self
    }

    /// Returns `[N, K]`.
    #[must_use]
    pub fn dims(&self) -> [usize; 2] {
        self.codes.dims()
    }

    /// Bytes of codes and scales.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.codes.shape().num_elements() + 4 * self.scales.shape().num_elements()
    }

    /// Returns true if [`product`](Self::product) multiplies an input of some rows by the codes of
    /// an `[N, K]` matrix: on `flex`, and at most 16 rows on CUDA, CubeCL's CPU runtime and devices
    /// of wgpu whose planes have one size. Elsewhere it dequantizes the whole matrix for each call.
    #[must_use]
    pub fn multiplies_codes(
        device: &Device,
        dtype: DType,
        rows: usize,
        [n, k]: [usize; 2],
    ) -> bool {
        multiplies_int8(device, computed_in(device, dtype), rows, [n, k])
    }

    /// Multiplies an input `[.., K]` by the transpose: `[.., N]`. Sums are f32 where it
    /// [multiplies by the codes](Self::multiplies_codes).
    ///
    /// # Panics
    /// If the last axis of the input is not `K`.
    #[must_use]
    pub fn product<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let [outputs, channels] = self.codes.dims();
        let mut shape = input.dims();
        let found = core::mem::replace(&mut shape[D - 1], outputs);
        assert_eq!(found, channels, "int8 product: last axis of the input");
        let rows = shape[..D - 1].iter().product();
        if rows == 0 {
            return product_of_nothing(input, outputs);
        }
        let (dtype, input) = (input.dtype(), input.reshape([rows, channels]));
        let device = input.device();
        let product = if Self::multiplies_codes(&device, dtype, rows, [outputs, channels]) {
            let [codes, scales] = self.parts();
            let computed = computed_in(&device, dtype);
            let input = input.cast(computed).into_dispatch();
            let rounds = self.activations == Activations::Int8;
            let product = if rounds && has_host_decoder(&device, [computed]) {
                Dispatch::decoder_int8_int8_matmul(input, codes, scales)
            } else {
                Dispatch::decoder_int8_weight_matmul(input, codes, scales)
            };
            Tensor::<2>::from_dispatch(product).cast(dtype)
        } else {
            input.matmul(self.dequantize().cast(dtype).transpose())
        };
        product.reshape(shape)
    }

    /// Multiplies each code by its scale, in f32.
    #[must_use]
    pub fn dequantize(&self) -> Tensor<2> {
        let [codes, scales] = self.parts();
        Tensor::from_dispatch(Dispatch::fp4_dequantize_int8(codes, scales))
    }

    /// Returns codes and scales, which a capture may read.
    fn parts(&self) -> [DispatchTensor; 2] {
        let (codes, scales) = (self.codes.clone(), self.scales.clone());
        readable(self.id, [codes.into_dispatch(), scales.into_dispatch()])
    }
}

/// Returns the dtype that products by the codes are computed in: hosts read 16 bits in f32.
fn computed_in(device: &Device, dtype: DType) -> DType {
    let halves = matches!(dtype, DType::F16 | DType::BF16);
    if halves && has_host_decoder(device, [DType::F32]) { DType::F32 } else { dtype }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn a_weight_of_several_parts_has_the_rows_of_each() {
        let cols = 64;
        let rows = PART / cols + 3;
        let device = Device::flex();
        let value = |at: usize| (at as u32).wrapping_mul(2_654_435_761) as f32;
        let values: Vec<_> = (0..rows * cols).map(value).collect();
        let (codes, scales) = quantize_int8(&values).unwrap();
        let weight = Tensor::from_data(TensorData::new(values, [rows, cols]), &device);
        let found = Int8Matrix::quantize(weight).unwrap();
        assert!(found.codes.into_data().as_slice::<i8>().unwrap() == codes);
        assert!(found.scales.into_data().as_slice::<f32>().unwrap() == scales);
    }
}
