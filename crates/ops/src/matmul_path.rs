//! [`MatmulPath`]: how layers multiply by a packed weight.

use core::fmt;

use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};

#[cfg(feature = "cube")]
use crate::devices::cube::device::{is_tested, with_products};
#[cfg(feature = "cube")]
use crate::devices::cube::matmul::Planner;
use crate::devices::extension::is_host;
#[cfg(feature = "cube")]
use crate::fusion::is_active;
use crate::layout::Fp4Layout;

/// Path of a layer's products with a packed weight: straight from the codes, or dequantized.
///
/// `Display` names the reason for a dequantized path, and a remedy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum MatmulPath {
    /// From the codes, for any number of rows of the input.
    FromCodes,
    /// From the codes for few rows of the input; for more rows a dense product is faster.
    FewRows {
        /// Most rows that are multiplied straight from the codes.
        rows: usize,
    },
    /// Lookups decode only the rows they read, and products with the transpose run from the codes.
    /// A product with the weight itself dequantizes it.
    Rows {
        /// Most rows of the input whose product with the transpose does so, if there is a limit.
        most: Option<usize>,
    },
    /// Lookups decode only the rows they read; products dequantize the weight.
    Lookups,
    /// The weight is dequantized for every product.
    Dequantized(DequantizeReason),
}

/// Reason why a weight is dequantized for every product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DequantizeReason {
    /// The device is the host, where Burn's layers cannot do otherwise.
    Host,
    /// The device is the host, and the layer is part of one of Burn's layers.
    Inside {
        /// The outer layer, such as `MultiHeadAttention`.
        layer: String,
    },
    /// The device has no kernels for these products.
    Device,
    /// The device lacks what kernels need, or its driver is not trusted with them.
    Driver {
        /// The problem, such as a failed self-test.
        problem: String,
    },
    /// [`init`](crate::init) was not called, or in a browser [`init_async`](crate::init_async) not
    /// awaited.
    NotInitialized,
    /// Blocks run along another axis than the layer reads them.
    Axis {
        /// Axis of the weight that the blocks run along.
        axis: usize,
    },
    /// The weight is not a matrix.
    Rank {
        /// Rank of the weight.
        rank: usize,
    },
    /// Kernels do not have the dtype that the layer computes in.
    DType {
        /// The dtype.
        dtype: DType,
    },
    /// Kernels do not take a weight of this shape.
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
                "from the codes up to {rows} rows of input, dequantized for more; for any number \
                 of rows use a GPU with matrix instructions, bf16 (or f16 for NVFP4), and input \
                 channels divisible by 128"
            ),
            Self::Rows { most } => {
                write!(f, "lookups and products with the transpose from the codes")?;
                if let Some(rows) = most {
                    write!(f, ", the latter up to {rows} rows of input")?;
                }
                write!(f, "; for products with the weight itself pack it along axis 0")
            }
            Self::Lookups => write!(
                f,
                "lookups from the codes, products dequantize the weight; on Cube devices call \
                 burn_fp4::init() to run products from the codes too"
            ),
            Self::Dequantized(why) => write!(f, "dequantized for every product; {why}"),
        }
    }
}

impl fmt::Display for DequantizeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => write!(
                f,
                "on the CPU convert the layer with `Fp4Linear::from` or `Fp4Embedding::from`"
            ),
            Self::Inside { layer } => write!(
                f,
                "on the CPU Burn's `{layer}` cannot multiply from the codes; use \
                 `exclude` to keep it dense, or write a layer of its kind with `Fp4Linear`"
            ),
            Self::Device => {
                write!(f, "the device has no kernels for it; use CUDA or wgpu")
            }
            Self::Driver { problem } => {
                write!(f, "{problem}; update its driver, or use another device")
            }
            Self::NotInitialized => write!(
                f,
                "call burn_fp4::init() at the start of the program; in a browser await \
                 burn_fp4::init_async"
            ),
            Self::Axis { axis } => write!(
                f,
                "lookups need a table packed along axis 1, but it is packed along axis {axis}"
            ),
            Self::Rank { rank } => {
                write!(f, "its rank is {rank}; split it into matrices")
            }
            Self::DType { dtype } => {
                let found = dtype.name();
                write!(f, "its layer computes in {found}; cast the module to f32, f16 or bf16")
            }
            Self::Shape { shape } => write!(f, "no kernel takes its shape {shape:?}; split it"),
        }
    }
}

/// Returns how Burn's layers that compute in this dtype multiply by a weight of this layout. On
/// hosts, where they dequantize it, [`matmul`](crate::matmul) and [`embedding`](crate::embedding)
/// run from the codes.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use burn_fp4_ops::{Fp4Layout, Fp4Scheme, DequantizeReason, MatmulPath, matmul_path};
///
/// let layout = Fp4Layout::new(&[64, 32].into(), 0, &Fp4Scheme::nvfp4())?;
/// let found = matmul_path(&layout, DType::F32, &Device::flex());
/// assert_eq!(found, MatmulPath::Dequantized(DequantizeReason::Host));
/// assert!(found.to_string().contains("Fp4Linear")); // what to do about it
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
#[must_use]
pub fn matmul_path(layout: &Fp4Layout, dtype: DType, device: &Device) -> MatmulPath {
    let rank = layout.shape.len();
    if rank != 2 {
        return MatmulPath::Dequantized(DequantizeReason::Rank { rank });
    }
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return MatmulPath::Dequantized(DequantizeReason::DType { dtype });
    }
    if is_host(device) {
        return MatmulPath::Dequantized(DequantizeReason::Host);
    }
    #[cfg(feature = "cube")]
    if let Some(cube) = with_products(device) {
        if !device.supports_dtype(dtype) {
            return MatmulPath::Dequantized(DequantizeReason::DType { dtype });
        }
        return match is_active(device) {
            true => planned(layout, dtype, &cube),
            false => MatmulPath::Dequantized(DequantizeReason::NotInitialized),
        };
    }
    MatmulPath::Dequantized(DequantizeReason::Device)
}

/// Asks the plans of the kernels.
#[cfg(feature = "cube")]
fn planned(layout: &Fp4Layout, dtype: DType, device: &burn_cubecl::CubeDevice) -> MatmulPath {
    // Plans are the same for all larger inputs, and no weight is too large for this one.
    const MANY: usize = 1024;
    let mut planner = match Planner::new(device, &device.client()) {
        Ok(planner) => planner,
        Err(_) if !is_tested(device) => {
            return MatmulPath::Dequantized(DequantizeReason::NotInitialized);
        }
        Err(refusal) => {
            let problem = refusal.to_string();
            return MatmulPath::Dequantized(DequantizeReason::Driver { problem });
        }
    };
    let contracted = if layout.axis == 0 { layout.clone() } else { layout.transposed() };
    let mut from_codes = |rows: &usize| planner.plan(*rows, &contracted, dtype).is_some();
    let most = match from_codes(&MANY) {
        true => None,
        false => Some((1..MANY).take_while(from_codes).last().unwrap_or(0)),
    };
    match most {
        Some(0) => MatmulPath::Dequantized(DequantizeReason::Shape { shape: layout.shape.clone() }),
        most if layout.axis == 1 => MatmulPath::Rows { most },
        Some(rows) => MatmulPath::FewRows { rows },
        None => MatmulPath::FromCodes,
    }
}
