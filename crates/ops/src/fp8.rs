//! [`Fp8Weight`]: facts about a packed weight for products in FP8, found once. [`Fp8Path`]: how
//! they run.

use core::fmt;

use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{DType, Tensor};

#[cfg(feature = "cube")]
use crate::devices::cube::device::with_products;
#[cfg(feature = "cube")]
use crate::devices::cube::matmul::Planner;
use crate::devices::extension::{Fp4Backend, is_host};
use crate::error::OpsError;
use crate::tensor::Fp4Tensor;

/// How a product asked for with [`Activations::Fp8`](crate::Activations::Fp8) runs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fp8Path {
    /// In FP8.
    Fp8,
    /// In FP8, after the products of some blocks of the weight were rounded, as
    /// [`Activations::Fp8Rounded`](crate::Activations::Fp8Rounded) allows.
    Rounded {
        /// Number of these blocks.
        blocks: usize,
    },
    /// On a host: rounded alike, and multiplied in f32.
    Emulated,
    /// Without FP8: E4M3 does not hold the products of some blocks of the weight.
    Inexact {
        /// Number of these blocks.
        blocks: usize,
    },
    /// Without FP8: the device does not multiply this input so.
    Unplanned {
        /// The reason.
        reason: String,
    },
}

impl fmt::Display for Fp8Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fp8 => write!(f, "in FP8"),
            Self::Rounded { blocks } => write!(f, "in FP8, {blocks} blocks of the weight rounded"),
            Self::Emulated => write!(f, "rounded to FP8, products in f32"),
            Self::Inexact { blocks } => write!(
                f,
                "without FP8, as E4M3 does not hold the products of {blocks} blocks of the weight"
            ),
            Self::Unplanned { reason } => write!(f, "without FP8: {reason}"),
        }
    }
}

/// Returns how the device of a weight multiplies an input of some rows and a dtype, if E4M3 holds
/// its products: in FP8, or emulated.
///
/// # Errors
/// The reason why it does not multiply in FP8.
pub(crate) fn plan_fp8(
    weight: &Fp4Tensor<2>,
    rows: usize,
    dtype: DType,
) -> Result<Fp8Path, String> {
    if is_host(&weight.device()) {
        return Ok(Fp8Path::Emulated);
    }
    #[cfg(feature = "cube")]
    if let Some(device) = with_products(&weight.device()) {
        let planner = Planner::new(&device, &device.client());
        let planned = planner.and_then(|planner| planner.plan_fp8(rows, weight.layout(), dtype));
        return planned.map(|_| Fp8Path::Fp8).map_err(|refusal| refusal.to_string());
    }
    let _ = (rows, dtype);
    Err(format!("{:?} has no products in FP8", weight.device()))
}

/// Facts about the rows of a packed weight for products with [`Activations::Fp8`].
///
/// Finding them reads a number per row back, so that a layer does it once. Without a number of
/// rows or a device at hand, [`inexact_blocks`](Self::inexact_blocks) tells if a weight can be
/// multiplied in FP8 at all.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{Fp4Scheme, Fp8Weight, quantize};
///
/// let device = Device::flex();
/// let weight = Tensor::<2>::full([32, 4], 1.5, &device);
/// let mxfp4 = Fp8Weight::of(&quantize(weight.clone(), 0, &Fp4Scheme::mxfp4())?)?;
/// assert_eq!(mxfp4.inexact_blocks(), 0);
/// // The largest scale of NVFP4 is 448, whose significand is 1.75.
/// let nvfp4 = Fp8Weight::of(&quantize(weight, 0, &Fp4Scheme::nvfp4())?)?;
/// assert_eq!(nvfp4.inexact_blocks(), 8);
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// [`Activations::Fp8`]: crate::Activations::Fp8
#[derive(Debug, Clone)]
pub struct Fp8Weight {
    /// f32 `[2, N]`, as [`fp8_rows`](burn_fp4_search::fp8_rows) gives it.
    rows: Tensor<2>,
    inexact_blocks: usize,
    rounds: bool,
}

impl Fp8Weight {
    /// Finds the facts about a weight `[K, N]` quantized along its first axis.
    ///
    /// # Errors
    /// [`OpsError::Contraction`] if it is quantized along the other axis, [`OpsError::Device`] if
    /// the device fails.
    pub fn of(weight: &Fp4Tensor<2>) -> Result<Self, OpsError> {
        let ([input, outputs], axis) = (weight.dims(), weight.axis());
        if axis != 0 {
            return Err(OpsError::Contraction { input, weight: input, axis });
        }
        let (packed, layout) = weight.clone().into_primitive();
        let rows = Tensor::<2>::from_dispatch(Dispatch::fp4_fp8_rows(packed, layout));
        let counts = rows.clone().slice([1..2, 0..outputs]).try_into_data();
        let counts = counts.map_err(OpsError::device)?;
        let counts = counts.as_slice::<f32>().map_err(OpsError::device)?;
        let inexact_blocks = counts.iter().map(|&count| count as usize).sum();
        Ok(Self { rows, inexact_blocks, rounds: false })
    }

    /// Sets whether products that E4M3 does not hold may be rounded.
    ///
    /// ```
    /// use burn::tensor::{DType, Device, Tensor};
    /// use burn_fp4_ops::{Fp4Scheme, Fp8Path, Fp8Weight, quantize};
    ///
    /// let weight = Tensor::<2>::full([32, 4], 1.5, &Device::flex());
    /// let weight = quantize(weight, 0, &Fp4Scheme::nvfp4())?;
    /// let facts = Fp8Weight::of(&weight)?;
    /// assert_eq!(facts.path(&weight, 128, DType::F32), Fp8Path::Inexact { blocks: 8 });
    /// let facts = facts.with_rounding(true);
    /// assert_eq!(facts.path(&weight, 128, DType::F32), Fp8Path::Emulated);
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    #[must_use]
    pub fn with_rounding(self, rounds: bool) -> Self {
        Self { rounds, ..self }
    }

    /// Returns how products with the weight run, for an input of some rows and a dtype.
    #[must_use]
    pub fn path(&self, weight: &Fp4Tensor<2>, rows: usize, dtype: DType) -> Fp8Path {
        match plan_fp8(weight, rows, dtype) {
            Err(reason) => Fp8Path::Unplanned { reason },
            Ok(_) if !self.is_multiplied() => Fp8Path::Inexact { blocks: self.inexact_blocks },
            Ok(Fp8Path::Fp8) if self.inexact_blocks > 0 => {
                Fp8Path::Rounded { blocks: self.inexact_blocks }
            }
            Ok(path) => path,
        }
    }

    /// Returns true if the weight is exact, or may be rounded.
    pub(crate) fn is_multiplied(&self) -> bool {
        self.rounds || self.inexact_blocks == 0
    }

    pub(crate) fn dims(&self) -> [usize; 2] {
        self.rows.dims()
    }

    pub(crate) fn rows(&self) -> DispatchTensor {
        self.rows.clone().into_dispatch()
    }

    /// Returns the number of blocks whose products E4M3 does not hold; see
    /// [`fp8_rows`](burn_fp4_search::fp8_rows). A weight with any is multiplied as without FP8,
    /// unless it [may be rounded](Self::with_rounding).
    #[must_use]
    pub fn inexact_blocks(&self) -> usize {
        self.inexact_blocks
    }
}
