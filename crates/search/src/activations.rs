//! [`Activations`]: the input of a product with a packed weight, or with one of signed bytes.

/// Chooses how a product with a packed weight reads its input, and one with signed bytes on `flex`.
/// Devices without such products read it unrounded.
///
/// Elements are multiples of 1/2, so that products of their codes with 8-bit integers are exact.
/// [`Int8`](Self::Int8) uses the processor's instructions for them. It changes outputs by 0.5 % if
/// the inputs are normal, and by about 1 % if some channels are 50 times as large as the others.
/// The rounding of a normal weight changes them by 9.5 % (NVFP4) or 11.5 % (MXFP4); both together
/// by 0.01 to 0.07 % more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Activations {
    /// Reads the input unrounded, and multiplies in f32 on hosts.
    #[default]
    F32,
    /// On hosts, rounds each block of the input, as long as a block of the weight, to 8-bit
    /// integers: to the nearest multiple of a 127th of its largest magnitude. Block sums are exact,
    /// and scaled and added in f32, in an order that is the same on every processor. A block with
    /// NaN or infinity makes its row NaN. For signed bytes, values below 1.5e-36 become zeros.
    Int8,
    /// Rounds each row of the input to E4M3: to the nearest, as multiples of a 448th of its largest
    /// magnitude. A row with NaN or infinity gives NaN, one below 2^-118 is zeros. Products with a
    /// weight for which [`fp8_rows`](crate::fp8_rows) counts blocks, as most of NVFP4, and with
    /// signed bytes, read the input unrounded. So do gradients: they are those of such products.
    ///
    /// GPUs of compute capability 9.0 multiply in FP8 for more than 128 rows in f16 or bf16, a
    /// multiple of 128 channels, at most 65536, and a multiple of 8 outputs; other products read
    /// the input unrounded. Products with the weight are exact, but the instructions add with about
    /// 14 bits: on an H100 sums of 8192 products of one sign are 10 % too small, and with random
    /// signs outputs are off by 0.2 %.
    ///
    /// `flex` and `ndarray` round alike and multiply in f32, which shows what FP8 costs, slowly.
    Fp8,
    /// [`Fp8`](Self::Fp8) with every weight: products `element x block scale` that E4M3 does not
    /// hold are rounded too ([`fp8_values`](crate::fp8_values)). For a weight in NVFP4 that adds an
    /// error of 1.9 % of it, to one of 7.9 % by `sse`
    /// ([`fp8_rounding_error`](crate::fp8_rounding_error)).
    Fp8Rounded,
}
