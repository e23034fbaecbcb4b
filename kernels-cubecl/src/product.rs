//! Products with a packed weight: what they are, and how they are computed.

use burn_fp4_search::SearchError;
use burn_fp4_search::formats::{FormatError, Fp4Format};
use burn_fp4_search::host::View;

use crate::plan::{Conversion, Refusal, Share, Tile, UNITS};
use crate::{Capability, Dtype};

/// `input x weight^T + bias` for an input `[inputs, channels]` and a packed weight of `outputs` rows of
/// `channels` elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// Rows of the input.
    pub inputs: usize,
    /// Packed rows of the weight.
    pub outputs: usize,
    /// Elements of each: the contracted axis.
    pub channels: usize,
    /// Format of the weight.
    pub format: Fp4Format,
    /// Elements that share a block scale.
    pub block_size: usize,
    /// Tensor scales of the weight: 1, or one per row.
    pub tensor_scales: usize,
    /// dtype of input, bias and output.
    pub dtype: Dtype,
    /// Whether a bias is added.
    pub bias: bool,
}

/// How a product is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ProductPlan {
    /// Straight from the codes, by multiplications and additions.
    Gemv(Gemv),
    /// Straight from the codes, by matrix instructions.
    Mma(Mma),
    /// The weight is dequantized first, and the product left to a dense one.
    Dense,
}

/// How [`mma`](crate::mma()) is launched: each cube takes some packed rows of the weight and some rows of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mma {
    /// Cubes.
    pub cubes: u32,
    /// Tiles of 16 packed rows of a cube.
    pub row_tiles: u32,
    /// Tiles of 8 rows of the input.
    pub input_tiles: u32,
}

/// Planes of a cube, which divide the contracted axis.
pub(crate) const PLANES: u32 = UNITS / 32;

/// Channels that a plane takes at a time.
pub(crate) const STEP: usize = 128;

/// How [`gemv`](crate::gemv()) is launched: each plane takes some packed rows of the weight and multiplies them
/// with some rows of the input, all of the contracted axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gemv {
    /// Cubes in two dimensions.
    pub cubes: [u32; 2],
    /// Units of a plane.
    pub plane: u32,
    /// Words of eight codes that a unit loads at a time.
    pub words: u32,
    /// Packed rows of a plane.
    pub rows: u32,
    /// Rows of the input that a plane multiplies them with.
    pub inputs: u32,
    /// How a unit loads the input.
    pub share: Share,
}

/// Rows of an input up to which it is faster to decode the weight again for every eight of them than to write it
/// down dense; measured on an H200.
const MOST_INPUTS: usize = 24;

/// The same by matrix instructions, which take 64 at a time.
const MOST_MMA_INPUTS: usize = 1024;

impl Product {
    /// How the product is computed on a device.
    ///
    /// # Errors
    /// [`Refusal`] if blocks do not divide the channels, or a tensor has too many values.
    pub fn plan(&self, device: &Capability) -> Result<ProductPlan, Refusal> {
        if let Some(mma) = self.mma(device)?
            && self.inputs <= MOST_MMA_INPUTS
        {
            return Ok(ProductPlan::Mma(mma));
        }
        if self.inputs > MOST_INPUTS {
            self.check()?;
            return Ok(ProductPlan::Dense);
        }
        self.gemv(device).map(ProductPlan::Gemv)
    }

    /// How it is computed by matrix instructions, whether that pays or not; not at all for f32, which they round,
    /// for MXFP4 in f16, which has no room for its scales, and where steps do not divide the channels.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn mma(&self, device: &Capability) -> Result<Option<Mma>, Refusal> {
        self.check()?;
        let fits = match self.dtype {
            Dtype::F32 => false,
            Dtype::F16 => self.format == Fp4Format::NvFp4,
            Dtype::Bf16 => true,
        };
        if !(fits && device.mma && self.channels.is_multiple_of(STEP)) {
            return Ok(None);
        }
        let input_tiles = self.inputs.div_ceil(8).next_power_of_two().min(8);
        let row_tiles = if input_tiles > 1 { 2 } else { 1 };
        let cubes = self.outputs.div_ceil(16 * row_tiles) * self.inputs.div_ceil(8 * input_tiles);
        let (row_tiles, input_tiles) = (row_tiles as u32, input_tiles as u32);
        let mma = Mma { cubes: cubes as u32, row_tiles, input_tiles };
        Ok((mma.cubes <= device.max_cubes).then_some(mma))
    }

    /// How it is computed straight from the codes, whether that pays or not.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn gemv(&self, device: &Capability) -> Result<Gemv, Refusal> {
        self.check()?;
        let widest = 16 / self.dtype.size() as u32;
        let inputs = self.inputs.next_power_of_two().min(8) as u32;
        let planes = UNITS / device.plane;
        // Fewer rows a plane where there are too few to keep the device busy.
        let rows = [4, 2].into_iter().find(|rows| {
            self.outputs.div_ceil((rows * planes) as usize) >= (device.cubes / 4) as usize
        });
        let rows = rows.unwrap_or(1);
        let groups = self.outputs.div_ceil((rows * planes) as usize);
        let cubes = (groups * self.inputs.div_ceil(inputs as usize)) as u32;
        let lines = cubes.div_ceil(device.max_cubes).max(1);
        let bits = self.dtype == Dtype::Bf16 && !device.converts_bf16;
        Ok(Gemv {
            cubes: [cubes.div_ceil(lines), lines],
            plane: device.plane,
            words: if self.channels.is_multiple_of(32) { 4 } else { 2 },
            rows,
            inputs,
            share: Share {
                vector: widest,
                along: true,
                rows: 1,
                lanes: 1,
                spread: 1,
                staged: false,
                tile: Tile::None,
                dtype: self.dtype,
                conversion: if bits { Conversion::Bf16Bits } else { Conversion::Device },
            },
        })
    }

    pub(crate) fn check(&self) -> Result<(), Refusal> {
        let Self { inputs, outputs, channels: cols, block_size, .. } = *self;
        self.format.check_block_size(block_size).map_err(SearchError::from)?;
        if !cols.is_multiple_of(block_size) {
            return Err(SearchError::from(FormatError::Indivisible { cols, block_size }).into());
        }
        let expected = View::MAX_LEN;
        for (rows, cols) in [(inputs, cols), (outputs, cols), (inputs, outputs)] {
            let found = rows.saturating_mul(cols);
            if found > expected {
                return Err(Refusal::TooLarge { found, expected });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: Capability = Capability {
        plane: 32,
        cubes: 528,
        max_cubes: u32::MAX,
        converts_bf16: true,
        stages: true,
        mma: true,
    };

    fn product(inputs: usize, outputs: usize, channels: usize) -> Product {
        let (format, block_size) = (Fp4Format::NvFp4, 16);
        let (dtype, bias) = (Dtype::Bf16, false);
        Product { inputs, outputs, channels, format, block_size, tensor_scales: 1, dtype, bias }
    }

    #[test]
    fn few_inputs_are_multiplied_straight_from_codes() {
        let gemv = |inputs, outputs, channels| match product(inputs, outputs, channels)
            .plan(&GPU)
            .unwrap()
        {
            ProductPlan::Gemv(gemv) => gemv,
            other => panic!("{other:?}"),
        };
        let one = product(1, 8192, 8192).gemv(&GPU).unwrap();
        assert_eq!((one.cubes, one.words, one.rows, one.inputs), ([256, 1], 4, 4, 1));
        let matrix = Mma { cubes: 512, row_tiles: 1, input_tiles: 1 };
        assert_eq!(product(1, 8192, 8192).plan(&GPU), Ok(ProductPlan::Mma(matrix)));
        let matrix = Mma { cubes: 256 * 2, row_tiles: 2, input_tiles: 8 };
        assert_eq!(product(65, 8192, 8192).plan(&GPU), Ok(ProductPlan::Mma(matrix)));
        let odd = gemv(9, 10, 48);
        assert_eq!((odd.cubes, odd.words, odd.rows, odd.inputs), ([4, 1], 2, 1, 8));
        assert_eq!(product(1025, 8192, 8192).plan(&GPU), Ok(ProductPlan::Dense));
        assert_eq!(product(65, 8192, 48).plan(&GPU), Ok(ProductPlan::Dense));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(matches!(product(1, 8, 24).plan(&GPU), Err(Refusal::Scheme(_))));
        let large = product(1, 1 << 16, 1 << 16).plan(&GPU);
        assert!(matches!(large, Err(Refusal::TooLarge { .. })));
    }
}
