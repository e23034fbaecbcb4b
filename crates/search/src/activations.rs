//! [`Activations`]: the input of a product with a packed weight.

/// Chooses how a product with a packed weight reads its input on a host.
///
/// Elements are multiples of 1/2, so that products of their codes with 8-bit integers are exact.
/// [`Int8`](Self::Int8) uses the processor's instructions for them and adds a relative error of
/// about 0.5 % for normal inputs, a twentieth of what the weight's own rounding adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Activations {
    /// Multiplies in f32.
    #[default]
    F32,
    /// Rounds each block of the input, as long as a block of the weight, to 8-bit integers: to the
    /// nearest multiple of a 127th of its largest magnitude. Block sums are exact, and scaled and
    /// added in f32, in an order that is the same on every processor. A block with NaN or infinity
    /// makes its row NaN.
    Int8,
}
