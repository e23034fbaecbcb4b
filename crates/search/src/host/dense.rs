//! Dense tensors in memory: their float types ([`HostElement`]) and their blocked axis ([`View`]).

use burn_fp4_formats::{bf16, f16};
use half::slice::HalfFloatSliceExt;

/// A float type that the host engine reads and writes.
///
/// Arithmetic is f32 for all of them: reading is exact, writing rounds once to nearest even.
///
/// ```
/// use burn_fp4_search::host::HostElement;
///
/// let largest = HostElement::magnitude(1.5f32).max(HostElement::magnitude(-2.5f32));
/// assert_eq!(<f32 as HostElement>::from_bits(largest), 2.5);
/// ```
pub trait HostElement: Copy + Send + Sync + Default + 'static {
    /// Integer type of the bits.
    type Bits: Copy + Ord + Default + Send;

    /// Smallest f32 magnitude that becomes infinite when written.
    const OVERFLOW: f32;

    /// Returns the bits without the sign. They order like the magnitudes, with NaN above infinity.
    fn magnitude(self) -> Self::Bits;
    /// Returns the value with these bits.
    fn from_bits(bits: Self::Bits) -> Self;
    /// Converts the value to f32.
    fn to_f32(self) -> f32;
    /// Reads a slice into f32.
    fn read(source: &[Self], target: &mut [f32]);
    /// Returns a slice of f32 as such; any other type has to be [read](Self::read).
    #[inline(always)]
    fn as_f32(_source: &[Self]) -> Option<&[f32]> {
        None
    }
    /// Writes f32 into a slice.
    fn write(source: &[f32], target: &mut [Self]);
}

impl HostElement for f32 {
    type Bits = u32;

    const OVERFLOW: f32 = f32::INFINITY;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_bits() & 0x7FFF_FFFF
    }
    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn read(source: &[Self], target: &mut [f32]) {
        target.copy_from_slice(source);
    }
    #[inline(always)]
    fn as_f32(source: &[Self]) -> Option<&[f32]> {
        Some(source)
    }
    #[inline(always)]
    fn write(source: &[f32], target: &mut [Self]) {
        target.copy_from_slice(source);
    }
}

impl HostElement for bf16 {
    type Bits = u16;

    /// Half a step above the largest number.
    const OVERFLOW: f32 = f32::from_bits(0x7F7F_8000);

    #[inline(always)]
    fn magnitude(self) -> u16 {
        self.to_bits() & 0x7FFF
    }
    #[inline(always)]
    fn from_bits(bits: u16) -> Self {
        bf16::from_bits(bits)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }
    #[inline(always)]
    fn read(source: &[Self], target: &mut [f32]) {
        for (target, source) in target.iter_mut().zip(source) {
            *target = source.to_f32();
        }
    }
    /// Writes without branches, so that the compiler vectorizes it. A NaN stays one because its
    /// quiet bit survives.
    #[inline(always)]
    fn write(source: &[f32], target: &mut [Self]) {
        for (target, source) in target.iter_mut().zip(source) {
            let bits = source.to_bits();
            let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
            let quiet_nan = bits >> 16 | 0x40;
            let is_nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
            *target = bf16::from_bits(if is_nan { quiet_nan } else { rounded } as u16);
        }
    }
}

impl HostElement for f16 {
    type Bits = u16;

    /// Half a step above the largest number, 65504.
    const OVERFLOW: f32 = 65520.0;

    #[inline(always)]
    fn magnitude(self) -> u16 {
        self.to_bits() & 0x7FFF
    }
    #[inline(always)]
    fn from_bits(bits: u16) -> Self {
        f16::from_bits(bits)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn read(source: &[Self], target: &mut [f32]) {
        source.convert_to_f32_slice(target);
    }
    #[inline(always)]
    fn write(source: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(source);
    }
}

/// Locates the blocked axis of a dense tensor: value (o, k, i) is at `(o * axis + k) * inner + i`.
///
/// Quantization moves the axis last: row `o * inner + i` of the packed matrix holds the `axis`
/// values of (o, _, i).
///
/// ```
/// use burn_fp4_search::host::View;
///
/// let view = View::along(&[3, 32, 2], 1);
/// assert_eq!(view, View { outer: 3, axis: 32, inner: 2 });
/// assert_eq!((view.packed_rows(), view.len()), (6, 192));
/// assert_eq!(View::along(&[4, 16], 1), View::rows(4, 16));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Product of the dimensions before the axis.
    pub outer: usize,
    /// Length of the blocked axis.
    pub axis: usize,
    /// Product of the dimensions after the axis.
    pub inner: usize,
}

impl View {
    /// Maximum number of values of a tensor that is quantized at once. Kernels address values by 32
    /// bits, with room for the strides of their grids, and every device keeps to that limit.
    pub const MAX_LEN: usize = u32::MAX as usize - (1 << 24);

    /// A row-major matrix whose blocks run along its rows.
    #[must_use]
    pub const fn rows(rows: usize, cols: usize) -> Self {
        Self { outer: rows, axis: cols, inner: 1 }
    }

    /// A contiguous tensor, blocked along one of its axes.
    ///
    /// # Panics
    /// If the axis is not one of the shape's.
    #[must_use]
    pub fn along(shape: &[usize], axis: usize) -> Self {
        Self {
            outer: shape[..axis].iter().product(),
            axis: shape[axis],
            inner: shape[axis + 1..].iter().product(),
        }
    }

    /// Number of rows of the packed matrix.
    #[must_use]
    pub const fn packed_rows(&self) -> usize {
        self.outer * self.inner
    }

    /// Number of values of the tensor.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.outer.saturating_mul(self.axis).saturating_mul(self.inner)
    }

    /// Returns true if the tensor is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
