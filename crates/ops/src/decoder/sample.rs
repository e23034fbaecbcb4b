//! The choice of the next token.

#[cfg(feature = "cube")]
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_fp4_search::host::{self, SampleOptions};

#[cfg(feature = "cube")]
use crate::devices::decoder::{SampleBackend, samples};

/// Draws a token for each row of logits `[rows, vocab_size]` from their softmax: `[rows, 1]`.
///
/// `uniform` holds a random value of `[0, 1)` for each row. Equal values draw equal tokens on one
/// kind of device; another kind may assign other tokens to them. On devices with kernels the host
/// waits for nothing. On others it reads the logits.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{SampleOptions, sample};
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::from_floats([[0.0, 5.0, 4.9], [9.0, 0.0, 0.0]], &device);
/// let options = SampleOptions { temperature: 0.7, top_k: Some(1), top_p: None };
/// let tokens = sample(logits, Tensor::from_floats([0.3, 0.6], &device), options);
/// assert_eq!(tokens.into_data().convert::<i32>(), TensorData::from([[1], [0]]));
/// ```
///
/// # Panics
/// If there is not one uniform value for each row, no logit in a row, the temperature or `top_p` is
/// not above 0, or the device fails to return the logits. NaN counts as the least logit.
#[must_use]
pub fn sample(logits: Tensor<2>, uniform: Tensor<1>, options: SampleOptions) -> Tensor<2, Int> {
    let [rows, vocab_size] = logits.dims();
    assert_eq!(uniform.dims(), [rows], "sample: one uniform value for each row");
    assert!(vocab_size > 0, "sample: rows have no logits; pass at least one");
    let SampleOptions { temperature, top_p, .. } = options;
    assert!(temperature > 0.0, "sample: temperature is {temperature}; pass one above 0");
    if let Some(top_p) = top_p {
        assert!(top_p > 0.0, "sample: top_p is {top_p}; pass one above 0, at most 1");
    }
    let device = logits.device();
    #[cfg(feature = "cube")]
    if samples(&logits) {
        let uniform = uniform.cast(DType::F32).into_dispatch();
        return Tensor::from_dispatch(Dispatch::decoder_sample(
            logits.into_dispatch(),
            uniform,
            options,
        ));
    }
    let [logits, uniform] = [logits.cast(DType::F32).into_data(), uniform.into_data()];
    let logits: Vec<f32> = logits.iter().collect();
    let tokens = logits.chunks(vocab_size).zip(uniform.iter::<f32>());
    let tokens = tokens.map(|(logits, uniform)| host::sample(logits, uniform, &options) as i32);
    let tokens = tokens.collect();
    Tensor::from_data(TensorData::new::<i32, _>(tokens, [rows, 1]), &device)
}

/// Returns the index of the first of the largest values of each row of `[rows, cols]`: `[rows, 1]`.
/// Kernels ignore NaN; other devices do as Burn's `argmax`.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::argmax;
///
/// let logits = Tensor::<2>::from_floats([[0.0, 5.0, 5.0], [9.0, 8.0, 0.0]], &Device::flex());
/// assert_eq!(argmax(logits).into_data().convert::<i32>(), TensorData::from([[1], [0]]));
/// ```
///
/// # Panics
/// If rows have no value.
#[must_use]
pub fn argmax(values: Tensor<2>) -> Tensor<2, Int> {
    let [_, cols] = values.dims();
    assert!(cols > 0, "argmax: rows have no values; pass at least one");
    #[cfg(feature = "cube")]
    if samples(&values) {
        return Tensor::from_dispatch(Dispatch::decoder_argmax(values.into_dispatch()));
    }
    values.argmax(1)
}
