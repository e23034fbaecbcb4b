//! The problem of an operation: shape, axis, dtype and scheme.

use std::fmt;

use burn_fp4_search::Fp4Scheme;
use burn_fp4_search::host::{HostElement, View};
use half::{bf16, f16};

/// A float type that kernels read and write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Bytes of a value.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The smallest f32 magnitude that becomes infinite in this type.
    pub(crate) const fn overflow(self) -> f32 {
        match self {
            Self::F32 => f32::OVERFLOW,
            Self::F16 => f16::OVERFLOW,
            Self::Bf16 => bf16::OVERFLOW,
        }
    }
}

/// Shape, axis, dtype and scheme of an operation.
///
/// ```
/// use burn_fp4_cubecl::{Dtype, Problem};
/// use burn_fp4_search::Fp4Scheme;
/// use burn_fp4_search::host::View;
///
/// // 32 values along the axis, in blocks of 16, for each of four columns.
/// let view = View::along(&[32, 4], 0);
/// let problem = Problem { view, dtype: Dtype::Bf16, scheme: Fp4Scheme::nvfp4() };
/// assert_eq!(problem.blocks(), 2);
/// assert_eq!((problem.code_bytes(), problem.scale_bytes()), (64, 8));
/// assert_eq!(view.len() * problem.dtype.size(), 256); // bytes of the dense tensor
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Problem {
    /// How the blocked axis lies in the dense tensor.
    pub view: View,
    /// dtype of the dense tensor.
    pub dtype: Dtype,
    /// How it is quantized.
    pub scheme: Fp4Scheme,
}

impl Problem {
    /// Blocks along the axis.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        self.view.axis / self.scheme.block_size
    }

    /// Bytes of the codes.
    #[must_use]
    pub const fn code_bytes(&self) -> usize {
        self.view.len() / 2
    }

    /// Bytes of the block scales.
    #[must_use]
    pub const fn scale_bytes(&self) -> usize {
        self.view.len() / self.scheme.block_size
    }
}

/// An operation that can be launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Largest magnitude of the tensor.
    Amax,
    /// Largest magnitude of each packed row.
    RowAmax,
    /// Codes and scales.
    Quantize,
    /// Codes and scales that minimize `r^T H r` of each block.
    QuantizeByHessian,
    /// GPTQ: codes and scales that compensate each other's rounding errors.
    Gptq,
    /// Quantization and dequantization in one pass over the dense tensor.
    FakeQuantize,
    /// Hadamard transform of every 16 neighbours.
    Hadamard,
    /// Dense values of codes and scales.
    Dequantize,
    /// Sums of squared differences and of squares.
    SquaredError,
}

/// Writes its name.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Amax => "amax",
            Self::RowAmax => "row_amax",
            Self::Quantize => "quantize",
            Self::QuantizeByHessian => "quantize_by_hessian",
            Self::Gptq => "quantize_gptq",
            Self::FakeQuantize => "fake_quantize",
            Self::Hadamard => "hadamard",
            Self::Dequantize => "dequantize",
            Self::SquaredError => "squared_error",
        })
    }
}
