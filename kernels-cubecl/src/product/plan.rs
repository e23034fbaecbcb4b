//! Products with a packed weight: what they are, and how they are computed.

use burn_fp4_search::SearchError;
use burn_fp4_search::formats::{FormatError, Fp4Format};
use burn_fp4_search::host::View;

use crate::arith::scale_grid::f16_holds_products;
use crate::plan::{Capability, Dtype, Refusal, Share, UNITS, Warpgroups};

/// `input x weight^T` for an input `[inputs, channels]` and a packed weight of `outputs` rows of
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
    /// dtype of input, bias and output.
    pub dtype: Dtype,
}

/// A product straight from the codes, and how it is launched on the device that it was planned for:
/// by [`Product::plan`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlannedProduct {
    pub(super) product: Product,
    pub(super) device: Capability,
    pub(super) kernel: Kernel,
}

/// Which kernel a product is computed by, and how it is launched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kernel {
    /// By multiplications and additions.
    Gemv(Gemv),
    /// By matrix instructions.
    Mma(Mma),
    /// By matrix instructions, for few rows of the input.
    Few(Few),
    /// By the matrix instructions of warpgroups.
    Wgmma(Wgmma),
}

/// How the kernel of `wgmma.rs` is launched: each cube takes [`WGMMA_ROWS`] packed rows of the
/// weight, some rows of the input, and some of the contracted axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Wgmma {
    /// Cubes.
    pub cubes: u32,
    /// Rows of the input of a cube.
    pub inputs: u32,
    /// Rounds of channels that shared memory holds.
    pub stages: u32,
    /// Cubes that divide the contracted axis.
    pub splits: u32,
    /// Vectors of shared memory by which the units exchange decoded weights.
    pub exchange: u32,
}

/// Packed rows of a cube of `wgmma.rs`.
pub(super) const WGMMA_ROWS: usize = 128;

/// A way to launch `wgmma.rs`, for shared memory of 228 KiB a processor.
struct WgmmaWay {
    inputs: u32,
    stages: u32,
    /// Cubes of a processor that a round was measured with, at once.
    resident: usize,
    /// Nanoseconds that these take for a round, measured on an H200.
    round: usize,
}

const WGMMA_WAYS: [WgmmaWay; 5] = [
    WgmmaWay { inputs: 32, stages: 6, resident: 1, round: 790 },
    WgmmaWay { inputs: 64, stages: 4, resident: 1, round: 880 },
    WgmmaWay { inputs: 64, stages: 3, resident: 2, round: 1600 },
    WgmmaWay { inputs: 128, stages: 5, resident: 1, round: 1100 },
    WgmmaWay { inputs: 256, stages: 3, resident: 1, round: 1750 },
];

/// Nanoseconds that it takes to launch the kernel that adds what cubes have computed of the
/// contracted axis, and sums that it reads in one.
const ADD_PARTS: (usize, usize) = (3000, 1000);

/// The most cubes that divide the contracted axis.
const MOST_SPLITS: usize = 8;

/// How the kernel of `few.rs` is launched: each cube takes some packed rows of the weight and all
/// rows of the input. Its planes divide the packed rows and the contracted axis among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Few {
    /// Cubes.
    pub cubes: u32,
    /// Planes with 16 packed rows of their own.
    pub row_planes: u32,
    /// Planes that divide the contracted axis.
    pub depth: u32,
    /// Rows of the input, rounded up to a power of two.
    pub inputs: u32,
}

impl Few {
    /// Units of a cube.
    pub(super) const fn units(&self) -> u32 {
        32 * self.row_planes * self.depth
    }

    /// Packed rows of a cube.
    pub(super) const fn rows(&self) -> u32 {
        16 * self.row_planes
    }

    /// Tiles of 8 rows of the input.
    pub(super) const fn input_tiles(&self) -> u32 {
        self.inputs.div_ceil(8)
    }

    /// Rows of the input that a plane copies to shared memory.
    pub(super) const fn copies(&self) -> u32 {
        self.inputs.div_ceil(self.row_planes)
    }
}

/// Channels that a plane of `few.rs` takes at a time.
pub(super) const FEW_STEP: usize = 256;

/// Rows of an input that are few, for `few.rs`.
const FEW: usize = 16;

/// How the kernel of `mma.rs` is launched: each cube takes some packed rows of the weight and some
/// rows of the input. Its planes divide these among them, and what is left of them the contracted
/// axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Mma {
    /// Cubes.
    pub cubes: u32,
    /// Tiles of 16 packed rows of a plane.
    pub row_tiles: u32,
    /// Tiles of 8 rows of the input of a plane.
    pub input_tiles: u32,
    /// Planes with rows of their own.
    pub row_planes: u32,
    /// Planes with rows of the input of their own.
    pub input_planes: u32,
}

impl Mma {
    /// Packed rows of a cube.
    pub(super) const fn rows(&self) -> u32 {
        16 * self.row_tiles * self.row_planes
    }

    /// Rows of the input of a cube.
    pub(super) const fn inputs(&self) -> u32 {
        8 * self.input_tiles * self.input_planes
    }

    /// Planes that divide the contracted axis.
    pub(super) const fn depth(&self) -> u32 {
        PLANES / (self.row_planes * self.input_planes)
    }

    /// Whether a plane loads its part of the input with the codes it is multiplied with: a tile of
    /// its own.
    pub(super) const fn takes_input(&self) -> bool {
        !self.shares_input() && self.input_tiles == 1
    }

    /// Whether planes have the same rows of the input, which come through shared memory then.
    pub(super) const fn shares_input(&self) -> bool {
        self.row_planes > 1
    }
}

/// Planes of a cube.
pub(super) const PLANES: u32 = UNITS / 32;

/// Channels that a plane takes at a time.
pub(super) const STEP: usize = 128;

/// The ways of [`Mma`] for ever fewer rows of the input, chosen by measurements on an H200.
const WAYS: [Mma; 6] = [
    way(2, 8, 8, 1),
    way(1, 8, 4, 1),
    way(1, 4, 4, 1),
    way(2, 2, 1, 1),
    way(2, 1, 1, 1),
    way(1, 1, 1, 1),
];

const fn way(row_tiles: u32, input_tiles: u32, row_planes: u32, input_planes: u32) -> Mma {
    Mma { cubes: 0, row_tiles, input_tiles, row_planes, input_planes }
}

/// How the kernel of `gemv.rs` is launched: each plane takes some packed rows of the weight and
/// multiplies them with some rows of the input, all of the contracted axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Gemv {
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

/// Rows of an input up to which it is faster to decode the weight again for every eight of them
/// than to write it down dense; measured on an H200.
const MOST_INPUTS: usize = 24;

impl Product {
    /// The product straight from the codes, by the kernel that is faster on a device; none where it
    /// is faster still to dequantize the weight and to leave the product to a dense one.
    ///
    /// # Errors
    /// [`Refusal`] if blocks do not divide the channels, or a tensor has too many values.
    pub fn plan(&self, device: &Capability) -> Result<Option<PlannedProduct>, Refusal> {
        let wgmma = || match device.warpgroups {
            Warpgroups::Ptx => self.wgmma(device),
            Warpgroups::Plain | Warpgroups::None => self.mma(device),
        };
        match self.few(device).or_else(|_| wgmma()).or_else(|_| self.mma(device)) {
            Err(Refusal::Instructions { .. }) if self.inputs > MOST_INPUTS => Ok(None),
            Err(Refusal::Instructions { .. }) => self.gemv(device).map(Some),
            planned => planned.map(Some),
        }
    }

    /// The product by matrix instructions, which decode the weight in registers: exact products of
    /// `element x block scale`, sums in f32, for f16 and bf16.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), and [`Refusal::Instructions`] where they do not fit.
    pub fn mma(&self, device: &Capability) -> Result<PlannedProduct, Refusal> {
        let kernel = Kernel::Mma(self.mma_launch(device)?);
        Ok(PlannedProduct { product: *self, device: *device, kernel })
    }

    /// The product by matrix instructions, of at most 16 rows of the input: see [`mma`](Self::mma).
    ///
    /// # Errors
    /// As [`mma`](Self::mma).
    pub fn few(&self, device: &Capability) -> Result<PlannedProduct, Refusal> {
        let kernel = Kernel::Few(self.few_launch(device)?);
        Ok(PlannedProduct { product: *self, device: *device, kernel })
    }

    /// The product by the matrix instructions of warpgroups: see [`mma`](Self::mma).
    ///
    /// # Errors
    /// As [`mma`](Self::mma).
    pub fn wgmma(&self, device: &Capability) -> Result<PlannedProduct, Refusal> {
        let kernel = Kernel::Wgmma(self.wgmma_launch(device)?);
        Ok(PlannedProduct { product: *self, device: *device, kernel })
    }

    /// The product by multiplications and additions in f32.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn gemv(&self, device: &Capability) -> Result<PlannedProduct, Refusal> {
        let kernel = Kernel::Gemv(self.gemv_launch(device)?);
        Ok(PlannedProduct { product: *self, device: *device, kernel })
    }

    /// Whether matrix instructions of a device compute the product exactly enough, and take its
    /// channels in these steps.
    fn check_instructions(&self, has_any: bool, step: usize) -> Result<(), Refusal> {
        self.check()?;
        let refuse = |reason| Err(Refusal::Instructions { reason });
        if !has_any {
            return refuse("the device has none");
        }
        match self.dtype {
            Dtype::F32 => return refuse("they would round f32"),
            Dtype::F16 if !f16_holds_products(self.format.row().scale_grid()) => {
                return refuse("f16 has no room for the block scales");
            }
            Dtype::F16 | Dtype::Bf16 => {}
        }
        if !self.channels.is_multiple_of(step) {
            return refuse("their steps do not divide the channels");
        }
        Ok(())
    }

    fn few_launch(&self, device: &Capability) -> Result<Few, Refusal> {
        self.check_instructions(device.mma, FEW_STEP)?;
        let refuse = |reason| Err(Refusal::Instructions { reason });
        let processors = device.cubes / 4;
        let cubes = |row_planes| self.outputs.div_ceil(16 * row_planes as usize);
        let busy = |row_planes, least| cubes(row_planes) >= least as usize;
        // By measurements on an H200. More packed rows a cube read the input less often.
        let (row_planes, depth) = match self.inputs {
            // All cubes at once: of smaller ones there is room for more.
            0..=4 if busy(1, 2 * processors + 1) => (1, 4),
            0..=4 => (1, 8),
            5..=8 if busy(2, processors) => (2, 4),
            5..=8 => (1, 8),
            // More cubes than run at once: small ones, whose planes have no sums to add.
            9..=FEW if busy(4, 3 * processors) => (4, 1),
            // One cube a processor, all at once.
            9..=FEW if busy(4, processors * 2 / 3) && !busy(4, processors + 1) => (4, 4),
            9..=FEW if busy(2, processors * 3 / 4) => (2, 4),
            9..=FEW => return refuse("there are too few packed rows for them"),
            _ => return refuse("there are too many rows of the input for them"),
        };
        let inputs = self.inputs.next_power_of_two() as u32;
        match u32::try_from(cubes(row_planes)) {
            Ok(cubes) if cubes <= device.max_cubes => Ok(Few { cubes, row_planes, depth, inputs }),
            _ => refuse("there are too many cubes"),
        }
    }

    fn mma_launch(&self, device: &Capability) -> Result<Mma, Refusal> {
        self.check_instructions(device.mma, STEP)?;
        let refuse = |reason| Err(Refusal::Instructions { reason });
        let cubes = |way: &Mma| {
            self.outputs.div_ceil(way.rows() as usize) * self.inputs.div_ceil(way.inputs() as usize)
        };
        // Three of four processors have something to do, and twice that where it is a single tile
        // of the input.
        let enough =
            |way: &Mma| device.cubes as usize / 4 * 3 / 4 * if way.takes_input() { 2 } else { 1 };
        let most = self.inputs.next_power_of_two().max(8) as u32;
        let mut fits = WAYS.iter().filter(|way| way.inputs() <= most);
        let last = &WAYS[WAYS.len() - 1];
        let way = fits.find(|way| cubes(way) >= enough(way)).unwrap_or(last);
        match u32::try_from(cubes(way)) {
            Ok(cubes) if cubes <= device.max_cubes => Ok(Mma { cubes, ..*way }),
            _ => refuse("there are too many cubes"),
        }
    }

    fn wgmma_launch(&self, device: &Capability) -> Result<Wgmma, Refusal> {
        self.check_instructions(device.warpgroups != Warpgroups::None, STEP)?;
        let refuse = |reason| Err(Refusal::Instructions { reason });
        if !self.outputs.is_multiple_of(8) {
            return refuse("they store eight outputs at a time");
        }
        let rounds = self.channels / STEP;
        let cubes = |way: &WgmmaWay, splits| {
            let groups = self.inputs.div_ceil(way.inputs as usize);
            self.outputs.div_ceil(WGMMA_ROWS) * groups * splits
        };
        // The cubes of a processor one after the other, or as many at once as fit.
        let time = |&(way, splits): &(&WgmmaWay, usize)| {
            let at_once = (device.cubes / 4) as usize * way.resident;
            let turns = cubes(way, splits).div_ceil(at_once);
            let (launch, sums) = ADD_PARTS;
            let added = launch + splits * self.inputs * self.outputs / sums;
            turns * rounds.div_ceil(splits) * way.round + if splits > 1 { added } else { 0 }
        };
        // None of the cubes has nothing to do.
        let splits = || (1..=MOST_SPLITS).filter(|&n| rounds.div_ceil(rounds.div_ceil(n)) == n);
        let ways = WGMMA_WAYS.iter().flat_map(|way| splits().map(move |splits| (way, splits)));
        let (way, splits) = ways.min_by_key(time).expect("one cube may take all rounds");
        let &WgmmaWay { inputs, stages, .. } = way;
        let exchange = if device.warpgroups == Warpgroups::Ptx { 0 } else { UNITS };
        match u32::try_from(cubes(way, splits)) {
            Ok(cubes) if cubes <= device.max_cubes => {
                Ok(Wgmma { cubes, inputs, stages, splits: splits as u32, exchange })
            }
            _ => refuse("there are too many cubes"),
        }
    }

    fn gemv_launch(&self, device: &Capability) -> Result<Gemv, Refusal> {
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
        Ok(Gemv {
            cubes: [cubes.div_ceil(lines), lines],
            plane: device.plane,
            words: if self.channels.is_multiple_of(32) { 4 } else { 2 },
            rows,
            inputs,
            share: Share { vector: widest, ..Share::one_row(true, self.dtype, device) },
        })
    }

    fn check(&self) -> Result<(), Refusal> {
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
    use crate::plan::GPU;

    fn product(inputs: usize, outputs: usize, channels: usize) -> Product {
        let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, Dtype::Bf16);
        Product { inputs, outputs, channels, format, block_size, dtype }
    }

    fn gemv(inputs: usize, outputs: usize, channels: usize) -> (Gemv, [u32; 4]) {
        let gemv = product(inputs, outputs, channels).gemv_launch(&GPU).unwrap();
        (gemv, [gemv.cubes[0], gemv.words, gemv.rows, gemv.inputs])
    }

    #[test]
    fn few_inputs_are_multiplied_straight_from_codes() {
        assert_eq!(gemv(1, 8192, 8192).1, [256, 4, 4, 1]);
        let (odd, numbers) = gemv(9, 10, 48);
        assert_eq!(numbers, [4, 2, 1, 8]);
        let planned = product(9, 10, 48).plan(&GPU).unwrap().expect("few rows");
        assert_eq!(planned.kernel, Kernel::Gemv(odd));
        assert_eq!(product(65, 8192, 48).plan(&GPU), Ok(None));
    }

    #[test]
    fn few_inputs_are_multiplied_by_matrix_instructions() {
        let of = |inputs, outputs| match product(inputs, outputs, 8192)
            .plan(&GPU)
            .unwrap()
            .expect("few rows")
            .kernel
        {
            Kernel::Few(few) => Some((few.cubes, few.row_planes, few.depth, few.inputs)),
            _ => None,
        };
        assert_eq!(of(1, 8192), Some((512, 1, 4, 1)));
        assert_eq!(of(1, 4096), Some((256, 1, 8, 1)));
        assert_eq!(of(1, 20), Some((2, 1, 8, 1)));
        assert_eq!(of(3, 8192), Some((512, 1, 4, 4)));
        assert_eq!(of(3, 4096), Some((256, 1, 8, 4)));
        assert_eq!(of(5, 8192), Some((256, 2, 4, 8)));
        assert_eq!(of(16, 6144), Some((96, 4, 4, 16)));
        assert_eq!(of(16, 8192), Some((128, 4, 4, 16)));
        assert_eq!(of(9, 11008), Some((344, 2, 4, 16)));
        assert_eq!(of(16, 28672), Some((448, 4, 1, 16)));
        assert_eq!(of(9, 4096), Some((128, 2, 4, 16)));
        assert_eq!(of(9, 1024), None);
        assert_eq!(of(17, 8192), None);
        let odd = product(1, 8192, 384).few(&GPU);
        assert!(matches!(odd, Err(Refusal::Instructions { .. })), "{odd:?}");
    }

    #[test]
    fn matrix_instructions_keep_the_processors_busy() {
        let of = |inputs, outputs| match product(inputs, outputs, 8192).mma(&GPU).unwrap().kernel {
            Kernel::Mma(mma) => (mma.cubes, mma.rows(), mma.inputs(), mma.depth()),
            other => panic!("{other:?}"),
        };
        assert_eq!(of(1, 8192), (256, 32, 8, 8));
        assert_eq!(of(1, 4096), (256, 16, 8, 8));
        assert_eq!(of(16, 8192), (256, 32, 16, 8));
        assert_eq!(of(17, 8192), (128, 64, 32, 2));
        assert_eq!(of(64, 8192), (128, 64, 64, 2));
        assert_eq!(of(128, 8192), (256, 64, 64, 2));
        assert_eq!(of(256, 8192), (128, 256, 64, 1));
        assert_eq!(of(2048, 8192), (1024, 256, 64, 1));
        assert_eq!(of(2048, 8), (128, 32, 16, 8));
    }

    #[test]
    fn warpgroups_take_what_is_fastest() {
        let device = Capability { warpgroups: Warpgroups::Ptx, ..GPU };
        let of = |inputs, outputs, channels| match product(inputs, outputs, channels)
            .plan(&device)
            .unwrap()
            .expect("a plan")
            .kernel
        {
            Kernel::Wgmma(wgmma) => Some((wgmma.cubes, wgmma.inputs, wgmma.splits)),
            _ => None,
        };
        assert_eq!(of(16, 8192, 8192), None);
        assert_eq!(of(64, 8192, 8192), Some((256, 64, 4)));
        assert_eq!(of(256, 8192, 8192), Some((128, 256, 2)));
        assert_eq!(of(2048, 8192, 8192), Some((512, 256, 1)));
        assert_eq!(of(64, 4096, 4096), Some((128, 64, 4)));
        assert_eq!(of(100, 8192, 128), Some((128, 64, 1)));
        // Outputs that are no multiple of eight.
        assert_eq!(of(100, 8100, 8192), None);
        let fits = product(64, 8, 128);
        for product in [Product { outputs: 12, ..fits }, Product { channels: 192, ..fits }] {
            let found = product.wgmma(&device);
            assert!(matches!(found, Err(Refusal::Instructions { .. })), "{found:?}");
        }
        assert!(matches!(fits.wgmma(&GPU), Err(Refusal::Instructions { .. })));
        assert!(fits.wgmma(&Capability { mma: false, ..device }).is_ok());
    }

    #[test]
    fn matrix_instructions_are_refused_for_a_reason() {
        let fits = product(1, 8, 128);
        let refused = [
            Product { dtype: Dtype::F32, ..fits },
            Product { dtype: Dtype::F16, format: Fp4Format::MxFp4, block_size: 32, ..fits },
            Product { channels: 64, ..fits },
        ];
        for product in refused {
            let found = product.mma(&GPU);
            assert!(matches!(found, Err(Refusal::Instructions { .. })), "{found:?}");
        }
        let none = Capability { mma: false, ..GPU };
        assert!(matches!(fits.mma(&none), Err(Refusal::Instructions { .. })));
        assert!(fits.mma(&GPU).is_ok());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(matches!(product(1, 8, 24).plan(&GPU), Err(Refusal::Scheme(_))));
        let large = product(1, 1 << 16, 1 << 16).plan(&GPU);
        assert!(matches!(large, Err(Refusal::TooLarge { .. })));
    }
}
