//! Along which axis of a dense tensor blocks run.

/// How the blocked axis lies in a dense tensor: value (o, k, i) is at `(o * axis + k) * inner + i`.
///
/// Quantized, the axis is moved last: row `o * inner + i` of the packed matrix holds the `axis`
/// values of (o, _, i).
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
    /// Most values of a tensor that is quantized as one, fewer than 2^32 - 2^24: kernels address
    /// them by 32 bits, with room for the strides of their grids, and every device keeps to that.
    pub const MAX_LEN: usize = u32::MAX as usize - (1 << 24);

    /// A row-major matrix whose blocks run along its rows.
    pub const fn rows(rows: usize, cols: usize) -> Self {
        Self { outer: rows, axis: cols, inner: 1 }
    }

    /// A contiguous tensor blocked along one of its axes.
    ///
    /// # Panics
    /// If the axis is not one of the shape's.
    pub fn along(shape: &[usize], axis: usize) -> Self {
        Self {
            outer: shape[..axis].iter().product(),
            axis: shape[axis],
            inner: shape[axis + 1..].iter().product(),
        }
    }

    /// Rows of the packed matrix.
    pub const fn packed_rows(&self) -> usize {
        self.outer * self.inner
    }

    /// Values of the tensor.
    pub const fn len(&self) -> usize {
        self.outer.saturating_mul(self.axis).saturating_mul(self.inner)
    }

    /// Whether there is nothing in it.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
