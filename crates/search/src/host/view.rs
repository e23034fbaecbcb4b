//! [`View`]: the blocked axis of a dense tensor.

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
