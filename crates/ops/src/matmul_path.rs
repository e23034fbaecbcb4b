//! [`MatmulPath`]: whether layers multiply by a packed weight straight from its codes, or why not.

use core::fmt;

use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};

#[cfg(feature = "cube")]
use crate::devices::cube::device::{kernel_dtype, with_kernels};
#[cfg(feature = "cube")]
use crate::devices::cube::product;
use crate::devices::is_host;
#[cfg(feature = "cube")]
use crate::fused::is_active;
use crate::layout::Fp4Layout;

/// Whether layers multiply by a packed weight straight from its codes.
///
/// Displayed, it says why not, and what to do about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MatmulPath {
    /// From the codes, however many rows the input has.
    FromCodes,
    /// From the codes for inputs of few rows; of more a dense product is faster.
    FewRows {
        /// The most rows of an input that is multiplied straight from the codes.
        rows: usize,
    },
    /// Rows that are looked up are decoded alone, and products with the transpose run from the
    /// codes; a product with the weight itself dequantizes it.
    Rows {
        /// The most rows of an input whose product with the transpose does so, if there is a limit.
        most: Option<usize>,
    },
    /// Rows that are looked up are decoded alone, products dequantize the weight.
    Lookups,
    /// The weight is dequantized for every product.
    Dequantized(Why),
}

/// Why a weight is dequantized for every product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Why {
    /// The device is the host, where Burn's layers have no other way.
    Host,
    /// The device is the host, and the layer is part of a layer of Burn.
    Inside {
        /// The outer layer, such as `MultiHeadAttention`.
        layer: String,
    },
    /// The device has no kernels for these products.
    Device,
    /// [`init`](crate::init) was not called.
    NotInitialized,
    /// Blocks run along another axis than the layer reads them.
    Axis {
        /// The axis.
        axis: usize,
    },
    /// Only matrices are multiplied from their codes.
    Rank {
        /// Rank of the weight.
        rank: usize,
    },
    /// The layer computes in a dtype that the kernels do not have.
    DType {
        /// The dtype.
        dtype: DType,
    },
    /// No kernel takes a weight of this shape.
    Shape {
        /// The shape.
        shape: Vec<usize>,
    },
}

impl fmt::Display for MatmulPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FromCodes => write!(f, "from the codes"),
            Self::FewRows { rows } => write!(
                f,
                "from the codes up to {rows} rows of input, dequantized for more: there is no such \
                 limit with matrix instructions of a GPU, in bf16 (NVFP4 in f16 too), where 128 \
                 divides the input channels"
            ),
            Self::Rows { most } => {
                write!(f, "rows are looked up from the codes, products with the transpose are ")?;
                match most {
                    Some(rows) => write!(f, "from the codes up to {rows} rows of input")?,
                    None => write!(f, "from the codes")?,
                }
                write!(f, "; for products with the weight itself pack it along axis 0")
            }
            Self::Lookups => write!(
                f,
                "rows are looked up from the codes, products dequantize the weight: on Cube \
                 devices burn_fp4::init() has them run from the codes too"
            ),
            Self::Dequantized(why) => write!(f, "dequantized for every product; {why}"),
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => write!(
                f,
                "on the CPU use `Fp4Linear::from(linear)` or `Fp4Embedding::from(embedding)` in \
                 its place"
            ),
            Self::Inside { layer } => write!(
                f,
                "on the CPU Burn's `{layer}` has no other way, a module of your own with \
                 `Fp4Linear` has"
            ),
            Self::Device => write!(
                f,
                "the device has no kernels for it: those of CUDA and of CubeCL's CPU runtime have"
            ),
            Self::NotInitialized => {
                write!(f, "call burn_fp4::init() at the start of the program")
            }
            Self::Axis { axis } => write!(
                f,
                "rows are looked up from the codes of a table packed along axis 1, not {axis}"
            ),
            Self::Rank { rank } => {
                write!(
                    f,
                    "its rank is {rank}: make it matrices, which are multiplied from the codes"
                )
            }
            Self::DType { dtype } => {
                let found = dtype.name();
                write!(f, "its layer computes in {found}: cast the module to f32, f16 or bf16")
            }
            Self::Shape { shape } => write!(f, "no kernel takes its shape {shape:?}: divide it"),
        }
    }
}

/// How Burn's layers that compute in this dtype multiply by a weight of this layout on a device; on
/// hosts, [`matmul`](crate::matmul) and [`embedding`](crate::embedding) do so from the codes.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use burn_fp4_ops::{Fp4Layout, Fp4Scheme, MatmulPath, Why, matmul_path};
///
/// let layout = Fp4Layout::new(&[64, 32].into(), 0, &Fp4Scheme::nvfp4())?;
/// let found = matmul_path(&layout, DType::F32, &Device::flex());
/// assert_eq!(found, MatmulPath::Dequantized(Why::Host));
/// assert!(found.to_string().contains("Fp4Linear")); // what to do about it
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
#[must_use]
pub fn matmul_path(layout: &Fp4Layout, dtype: DType, device: &Device) -> MatmulPath {
    let rank = layout.shape.len();
    if rank != 2 {
        return MatmulPath::Dequantized(Why::Rank { rank });
    }
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return MatmulPath::Dequantized(Why::DType { dtype });
    }
    if is_host(device) {
        return MatmulPath::Dequantized(Why::Host);
    }
    #[cfg(feature = "cube")]
    if let Some(cube) = with_kernels(device) {
        return match is_active(device) {
            true => planned(layout, dtype, &cube),
            false => MatmulPath::Dequantized(Why::NotInitialized),
        };
    }
    MatmulPath::Dequantized(Why::Device)
}

/// What the plans of kernels say.
#[cfg(feature = "cube")]
fn planned(layout: &Fp4Layout, dtype: DType, device: &burn_cubecl::CubeDevice) -> MatmulPath {
    // More rows than any plan tells apart, few enough for every weight.
    const MANY: usize = 1024;
    let capability = burn_fp4_cubecl::Capability::of(&device.client());
    let dtype = kernel_dtype(dtype);
    let contracted = if layout.axis == 0 { layout.clone() } else { layout.transposed() };
    let from_codes =
        |rows: &usize| product::planned(*rows, &contracted, dtype, &capability).is_some();
    let most = match from_codes(&MANY) {
        true => None,
        false => Some((1..MANY).take_while(from_codes).last().unwrap_or(0)),
    };
    match most {
        Some(0) => MatmulPath::Dequantized(Why::Shape { shape: layout.shape.clone() }),
        most if layout.axis == 1 => MatmulPath::Rows { most },
        Some(rows) => MatmulPath::FewRows { rows },
        None => MatmulPath::FromCodes,
    }
}
