//! A row that the units of a cube divide.

use cubecl::prelude::*;

use crate::plan::Dtype;

/// Returns the number of values of the widest vector of up to 16 bytes that divides a row.
pub(super) fn widest_vector(row: usize, dtype: Dtype) -> usize {
    let widest = 16 / dtype.size();
    [8, 4, 2].into_iter().find(|&width| width <= widest && row.is_multiple_of(width)).unwrap_or(1)
}

/// Vectors of a row that a unit loads before it uses the first.
pub(super) const TOGETHER: u32 = 4;

/// Loads [`TOGETHER`] vectors of a row: every `units`-th from the one at `at` on. Those beyond the
/// last repeat it.
#[cube]
pub(super) fn load_together<F: Float, N: Size>(
    values: &[Vector<F, N>],
    first: u32,
    at: u32,
    vectors: u32,
    #[comptime] units: u32,
) -> Array<Vector<F, N>> {
    let mut loaded = Array::<Vector<F, N>>::new(comptime!(TOGETHER as usize));
    #[unroll]
    for turn in 0..TOGETHER {
        let own = min(at + comptime!(turn * units), vectors - 1);
        loaded[turn as usize] = values[(first + own) as usize];
    }
    loaded
}

/// Adds a value of every unit of a cube: in a plane, then the planes in order; by halves without
/// planes. Every unit has the sum.
#[cube]
pub(super) fn sum_of_cube(own: f32, #[comptime] plane: u32, #[comptime] units: u32) -> f32 {
    let of_plane = if comptime!(plane > 1) { plane_sum(own) } else { own };
    let planes = comptime!(units / plane);
    let mut sum = of_plane;
    if comptime!(plane == 1 && units > 1) {
        let mut shared = Shared::<[f32]>::new_slice(comptime!(units as usize));
        shared[UNIT_POS as usize] = own;
        #[unroll]
        for halving in 0..comptime!(units.ilog2()) {
            let half = comptime!(units >> (halving + 1));
            sync_cube();
            if UNIT_POS < half {
                shared[UNIT_POS as usize] += shared[(UNIT_POS + half) as usize];
            }
        }
        sync_cube();
        sum = shared[0];
    } else if comptime!(planes > 1) {
        let mut shared = Shared::<[f32]>::new_slice(comptime!(planes as usize));
        let lane = UNIT_POS % plane;
        if lane == 0u32 {
            shared[(UNIT_POS / plane) as usize] = of_plane;
        }
        sync_cube();
        sum = shared[0];
        #[unroll]
        for at in 1..planes {
            sum += shared[at as usize];
        }
    }
    sum
}

/// Returns the largest value of the units of a cube, on every unit.
#[cube]
pub(crate) fn max_of_cube<T: Numeric + CubePrimitive<Scalar: PlaneNumeric>>(
    own: T,
    #[comptime] plane: u32,
    #[comptime] units: u32,
) -> T {
    let of_plane = if comptime!(plane > 1) { plane_max(own) } else { own };
    let planes = comptime!(units / plane);
    let mut largest = of_plane;
    if comptime!(plane == 1 && units > 1) {
        let mut shared = Shared::<[T]>::new_slice(comptime!(units as usize));
        shared[UNIT_POS as usize] = own;
        #[unroll]
        for halving in 0..comptime!(units.ilog2()) {
            let half = comptime!(units >> (halving + 1));
            sync_cube();
            if UNIT_POS < half {
                let other = shared[(UNIT_POS + half) as usize];
                shared[UNIT_POS as usize] = max(shared[UNIT_POS as usize], other);
            }
        }
        sync_cube();
        largest = shared[0];
    } else if comptime!(planes > 1) {
        let mut shared = Shared::<[T]>::new_slice(comptime!(planes as usize));
        let lane = UNIT_POS % plane;
        if lane == 0u32 {
            shared[(UNIT_POS / plane) as usize] = of_plane;
        }
        sync_cube();
        #[unroll]
        for at in 0..planes {
            largest = max(largest, shared[at as usize]);
        }
    }
    largest
}
