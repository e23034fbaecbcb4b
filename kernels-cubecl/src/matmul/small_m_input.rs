//! The input of `small_m.rs` in shared memory: copied step by step, or a row that is normalized
//! (RMSNorm) as a whole before the first step.
//!
//! A product of one row that follows a norm computes the norm itself. Each cube then reads the row,
//! its update and the weight of the norm, before the first codes, and normalizes while these are on
//! their way. The bits are those of `decoder/norm.rs`: sums have its order.
//!
//! ```text
//! load the row, its update and the weight                              (load_row)
//! add the row and its update; the first cube stores the sums           (share_normalized)
//! factor = 1 / sqrt(mean of squares + epsilon): units, planes, then planes in order
//! shared memory = sums x factor x weight, in the order of decoded codes
//! ```

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::operands::MatmulBlueprint;
use super::plan::{NormPlan, SMALL_M_K_TILE, SMALL_M_VECTOR as VECTOR, SmallM};
use super::small_m_link::load_made;
use crate::decoder::norm::{add_squares, scaled, sum_of};
use crate::numeric::scale_grid::{decoded_shift, power};
use crate::plan::{Dtype, UNITS};

/// Vectors of the input in a k tile.
pub(super) const K_TILE_VECTORS: u32 = SMALL_M_K_TILE as u32 / VECTOR;
/// Vectors between the four parts of a row of the input in shared memory. One vector of padding
/// puts the eight lanes of two rows in different banks.
pub(super) const QUARTER_STRIDE_PADDED: u32 = K_TILE_VECTORS / 4 + 1;
/// Vectors between the rows of the input in shared memory.
pub(super) const ROW_STRIDE_PADDED: u32 = 4 * QUARTER_STRIDE_PADDED;

/// Returns the vectors of the input in shared memory: a whole normalized row, or the k tiles of all
/// stages for one row, or those of two steps.
pub(super) fn input_vectors(plan: &SmallM) -> u32 {
    let k_tiles = match plan.norm {
        Some(norm) => norm.vectors / K_TILE_VECTORS,
        None if plan.is_row() => plan.stages * plan.k_planes,
        None => 2 * plan.k_planes,
    };
    k_tiles * plan.tile_m * ROW_STRIDE_PADDED
}

/// Operands of a norm in device memory, besides the row that it normalizes.
#[derive(Debug, Clone)]
pub struct NormOperands {
    /// Added to the row first, in its shape; none if nothing is added.
    pub update: Option<Handle>,
    /// A factor for each channel.
    pub weight: Handle,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// A norm, as a kernel takes it.
#[derive(CubeType, CubeLaunch)]
pub(super) struct NormArgs<F: Float, V: Size> {
    input: &'static [Vector<F, V>],
    /// A dummy binding when nothing is added; never read.
    update: &'static [Vector<F, V>],
    weight: &'static [Vector<F, V>],
    /// The row plus the update; not written when nothing is added.
    pub(super) sums: &'static mut [Vector<F, V>],
    epsilon: f32,
}

impl<F: Float, V: Size> NormArgsLaunch<F, V> {
    /// Returns the argument for a row of `k` values.
    ///
    /// # Safety
    /// All handles hold a row.
    pub(super) unsafe fn of(norm: NormOperands, input: Handle, sums: Handle, k: usize) -> Self {
        let NormOperands { update, weight, epsilon } = norm;
        let update = update.unwrap_or_else(|| input.clone());
        let vectors = k / VECTOR as usize;
        // SAFETY: as above.
        let [input, update, weight, sums] = [input, update, weight, sums]
            .map(|handle| unsafe { BufferArg::from_raw_parts(handle, vectors) });
        Self::new(input, update, weight, sums, epsilon)
    }
}

/// Stores a vector of the input in shared memory: `from` is the place of its k tile.
#[cube]
pub(super) fn share<X: Size>(
    shared: &mut [Vector<u32, X>],
    from: u32,
    row: u32,
    vector: u32,
    values: Vector<u32, X>,
) {
    let to = from + row * ROW_STRIDE_PADDED + place_in_row(vector);
    shared[to as usize] = pairs::<X>(values);
}

/// Returns the place of a vector of a k tile among those of a row in shared memory.
#[cube]
pub(super) fn place_in_row(vector: u32) -> u32 {
    vector / 8 * QUARTER_STRIDE_PADDED + vector % 8
}

/// Exponent of the factor of the input in bf16.
const INPUT_SHIFT: i32 = 62;

/// Where the factor of the products of a k tile is, behind the vectors of the first part.
pub(super) const FACTOR_AT: u32 = K_TILE_VECTORS / 4;

/// Vectors of zeros: what a lane reads of a k tile of the input.
pub(super) const ZERO_VECTORS: u32 = K_TILE_VECTORS / 4;

/// Writes the zeros at the end of shared memory.
#[cube]
pub(super) fn share_zeros<X: Size>(shared: &mut [Vector<u32, X>]) {
    if UNIT_POS < ZERO_VECTORS {
        let first = shared.len() - comptime!(ZERO_VECTORS as usize);
        shared[first + UNIT_POS as usize] = Vector::new(0u32);
    }
}

/// Returns true if a vector of the input, in bf16, has a value of 2^65 or more, an infinity or NaN.
#[cube]
pub(super) fn is_large<X: Size>(values: Vector<u32, X>) -> bool {
    // Both highest bits of the exponent.
    let mut found = 0u32;
    #[unroll]
    for pair in 0..4usize {
        let pair = values.extract(pair);
        found |= pair & (pair << 1u32);
    }
    found & 0x4000_4000u32 != 0u32
}

/// Stores a lane's vector of a k tile in shared memory, and the factor that restores products.
/// `large` is true if one of the k tile's vectors [is large](is_large).
#[cube]
pub(super) fn share_row<F: Float, X: Size>(
    shared: &mut [Vector<u32, X>],
    from: u32,
    vector: u32,
    values: Vector<u32, X>,
    large: bool,
    #[comptime] dtype: Dtype,
) {
    if comptime!(dtype == Dtype::Bf16) {
        let shift = comptime!(power(INPUT_SHIFT));
        let factor = select(large, F::cast_from(1.0f32), F::cast_from(shift));
        let scaled = Vector::<F, Const<8>>::reinterpret(values) * Vector::new(factor);
        share::<X>(shared, from, 0u32.runtime(), vector, Vector::reinterpret(scaled));
        if vector == 0 {
            let restored = comptime!(decoded_shift(dtype));
            let factor = select(large, restored, comptime!(restored / shift));
            shared[(from + FACTOR_AT) as usize] = Vector::new(u32::reinterpret(factor));
        }
    } else {
        share::<X>(shared, from, 0u32.runtime(), vector, values);
    }
}

/// Returns eight values in the order in which codes are decoded, each with the fourth after it.
#[cube]
fn pairs<X: Size>(values: Vector<u32, X>) -> Vector<u32, X> {
    let mut pairs = Vector::<u32, X>::empty();
    #[unroll]
    for half in 0..2usize {
        let (low, high) = (values.extract(half), values.extract(comptime!(half + 2)));
        pairs.insert(comptime!(2 * half), (low & 0xFFFFu32) | (high << 16u32));
        pairs.insert(comptime!(2 * half + 1), (low >> 16u32) | (high & 0xFFFF_0000u32));
    }
    pairs
}

/// Vectors of a row that is normalized, in the registers of a unit.
#[derive(CubeType)]
pub(super) struct NormRow<F: Float, V: Size> {
    values: Array<Vector<F, V>>,
    updates: Array<Vector<F, V>>,
    weights: Array<Vector<F, V>>,
}

impl NormPlan {
    /// Returns how many units of a cube of `UNITS` one of a cube of `units` does the work of, and
    /// the vectors of each.
    const fn shares(&self, units: u32) -> (u32, u32) {
        (UNITS / units, self.vectors.div_ceil(UNITS))
    }

    /// Returns the vectors in the registers of a unit.
    const fn held(&self, units: u32) -> u32 {
        let (unit_count, turns) = self.shares(units);
        unit_count * turns
    }

    /// Returns the distance of a vector in the registers of a unit from the unit's first.
    const fn offset(&self, index: u32, units: u32) -> u32 {
        let (_, turns) = self.shares(units);
        index / turns * units + index % turns * UNITS
    }
}

/// Loads the row. Vectors beyond the last repeat it. `made` if other cubes of this launch make it.
#[cube]
pub(super) fn load_row<F: Float, V: Size>(
    norm: &NormArgs<F, V>,
    #[comptime] plan: NormPlan,
    #[comptime] units: u32,
    #[comptime] made: bool,
) -> NormRow<F, V> {
    let count = comptime!(plan.held(units) as usize);
    let mut values = Array::<Vector<F, V>>::new(count);
    let mut updates = Array::<Vector<F, V>>::new(count);
    let mut weights = Array::<Vector<F, V>>::new(count);
    #[unroll]
    for index in 0..comptime!(plan.held(units)) {
        let at = UNIT_POS + comptime!(plan.offset(index, units));
        let at = min(at, comptime!(plan.vectors - 1));
        values[index as usize] = load_vector::<F, V>(norm.input, at, made);
        if comptime!(plan.adds) {
            updates[index as usize] = load_vector::<F, V>(norm.update, at, made);
        }
        weights[index as usize] = norm.weight[at as usize];
    }
    NormRow::<F, V> { values, updates, weights }
}

/// Loads eight values; `made` if another cube of this launch makes them.
#[cube]
fn load_vector<F: Float, V: Size>(
    from: &[Vector<F, V>],
    at: u32,
    #[comptime] made: bool,
) -> Vector<F, V> {
    if comptime!(made) {
        Vector::<F, V>::reinterpret(load_made::<Vector<F, V>, Const<4>>(from, at))
    } else {
        from[at as usize]
    }
}

/// Stores the normalized row in shared memory, one k tile after the other. The first cube also
/// stores the sums.
#[cube]
#[allow(clippy::collapsible_if, reason = "outer conditions are those of the compilation")]
pub(super) fn share_normalized<F: Float, V: Size, X: Size>(
    norm: &mut NormArgs<F, V>,
    row: &mut NormRow<F, V>,
    shared: &mut [Vector<u32, X>],
    cube: u32,
    #[comptime] plan: NormPlan,
    #[comptime] units: u32,
    #[comptime] blueprint: MatmulBlueprint,
) {
    let conversion = comptime!(blueprint.conversion);
    let (unit_count, turns) = comptime!(plan.shares(units));
    let vectors = comptime!(plan.vectors);
    let mut of_planes = Shared::<[f32]>::new_slice(comptime!((UNITS / 32) as usize));
    #[unroll]
    for unit in 0..unit_count {
        let mut squares = 0.0f32.runtime();
        #[unroll]
        for turn in 0..turns {
            let index = comptime!((unit * turns + turn) as usize);
            let at = UNIT_POS + comptime!(plan.offset(unit * turns + turn, units));
            if comptime!(plan.adds) {
                let (values, updates) = (row.values[index], row.updates[index]);
                row.values[index] = sum_of::<F, V>(values, updates, VECTOR, conversion);
            }
            if at < vectors {
                if comptime!(plan.adds) {
                    if cube == 0 {
                        norm.sums[at as usize] = row.values[index];
                    }
                }
                squares = add_squares::<F, V>(squares, row.values[index], VECTOR);
            }
        }
        let of_plane = plane_sum(squares);
        let lane = UNIT_POS % 32;
        if lane == 0 {
            of_planes[(UNIT_POS / 32 + comptime!(unit * units / 32)) as usize] = of_plane;
        }
    }
    sync_cube();
    let mut sum = of_planes[0];
    #[unroll]
    for plane in 1..comptime!(UNITS / 32) {
        sum += of_planes[plane as usize];
    }
    let mean = sum / f32::cast_from(comptime!(plan.vectors * VECTOR));
    let factor = 1.0f32 / (mean + norm.epsilon).sqrt();
    #[unroll]
    for index in 0..comptime!(plan.held(units)) {
        let at = UNIT_POS + comptime!(plan.offset(index, units));
        if at < vectors {
            let (values, weights) = (row.values[index as usize], row.weights[index as usize]);
            let normalized = scaled::<F, V>(values, weights, factor, VECTOR, conversion);
            let from = at / K_TILE_VECTORS * ROW_STRIDE_PADDED;
            let words = Vector::<u32, X>::reinterpret(normalized);
            let dtype = comptime!(blueprint.dtype);
            let mut large = false.runtime();
            if comptime!(dtype == Dtype::Bf16) {
                // The vectors of a plane are those of a k tile.
                large = plane_any(is_large::<X>(words));
            }
            share_row::<F, X>(shared, from, at % K_TILE_VECTORS, words, large, dtype);
        }
    }
    sync_cube();
}
