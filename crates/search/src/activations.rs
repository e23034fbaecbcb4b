//! [`Activations`]: the input of a product with a packed weight, or with one of signed bytes.

/// Chooses how a product with a packed weight reads its input on a host, and one with signed bytes
/// on `flex` in f32.
///
/// Elements are multiples of 1/2, so that products of their codes with 8-bit integers are exact.
/// [`Int8`](Self::Int8) uses the processor's instructions for them. It changes outputs by 0.5 % if
/// the inputs are normal, and by about 1 % if some channels are 50 times as large as the others.
/// The rounding of a normal weight changes them by 9.5 % (NVFP4) or 11.5 % (MXFP4); both together
/// by 0.01 to 0.07 % more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Activations {
    /// Multiplies in f32.
    #[default]
    F32,
    /// Rounds each block of the input, as long as a block of the weight, to 8-bit integers: to the
    /// nearest multiple of a 127th of its largest magnitude. Block sums are exact, and scaled and
    /// added in f32, in an order that is the same on every processor. A block with NaN or infinity
    /// makes its row NaN. For signed bytes, values below 1.5e-36 become zeros.
    Int8,
}
