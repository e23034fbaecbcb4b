//! The choice of the next token.

#[cfg(feature = "cube")]
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor, TensorData};

pub use crate::devices::decoder::SampleOptions;
#[cfg(feature = "cube")]
use crate::devices::decoder::{DecoderCode, SampleBackend, decoder_code};

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
    if decoder_code(&device, [logits.dtype()]) == Some(DecoderCode::Kernels) {
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
    let tokens = tokens.map(|(logits, uniform)| draw(logits, uniform, options)).collect();
    Tensor::from_data(TensorData::new::<i32, _>(tokens, [rows, 1]), &device)
}

/// Draws one token. NaN counts as the least logit.
fn draw(logits: &[f32], uniform: f32, options: SampleOptions) -> i32 {
    let SampleOptions { temperature, top_k, top_p } = options;
    let mut kept: Vec<_> = (0..logits.len()).filter(|&at| !logits[at].is_nan()).collect();
    kept.sort_by(|&left, &right| logits[right].total_cmp(&logits[left]));
    let keep = |kept: &mut Vec<usize>, count: usize| {
        let Some(&last) = count.checked_sub(1).and_then(|last| kept.get(last)) else { return };
        kept.retain(|&at| logits[at] >= logits[last]);
    };
    let Some(&largest) = kept.first() else { return 0 };
    let weight = |at: usize| match logits[at] == logits[largest] {
        // Also if it is infinite.
        true => 1.0,
        false => f64::from((logits[at] - logits[largest]) / temperature).exp(),
    };
    if let Some(top_k) = top_k {
        keep(&mut kept, top_k.max(1));
    }
    if let Some(top_p) = top_p {
        let needed = f64::from(top_p) * kept.iter().map(|&at| weight(at)).sum::<f64>();
        let mut sum = 0.0;
        let reached = kept.iter().position(|&at| {
            sum += weight(at);
            sum >= needed
        });
        if let Some(last) = reached {
            keep(&mut kept, last + 1);
        }
    }
    let total: f64 = kept.iter().map(|&at| weight(at)).sum();
    let mut left = total * f64::from(uniform);
    let drawn = kept.iter().find(|&&at| {
        left -= weight(at);
        left < 0.0
    });
    *drawn.unwrap_or(&largest) as i32
}
