//! What is asked for: an operation, and the shape, axis, dtype and scheme of its problem.

use burn_fp4_search::Fp4Scheme;
use burn_fp4_search::host::View;

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
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Shape, axis, dtype and scheme of an operation.
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
    pub const fn blocks(&self) -> usize {
        self.view.axis / self.scheme.block_size
    }

    /// Bytes of the codes.
    pub const fn code_bytes(&self) -> usize {
        self.view.len() / 2
    }

    /// Bytes of the block scales.
    pub const fn scale_bytes(&self) -> usize {
        self.view.len() / self.scheme.block_size
    }
}

/// What is to be launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Largest magnitude of the tensor.
    Amax,
    /// Largest magnitude of each packed row.
    RowAmax,
    /// Codes and scales.
    Quantize,
    /// Codes and scales by the activations that each block is multiplied with.
    QuantizeByHessian,
    /// Codes and scales that compensate each other's rounding errors: GPTQ.
    Gptq,
    /// The values of codes and scales, from the dense tensor.
    FakeQuantize,
    /// The transform of every 16 neighbours.
    Hadamard,
    /// Values of codes and scales.
    Dequantize,
    /// Sums of squares.
    SquaredError,
}
