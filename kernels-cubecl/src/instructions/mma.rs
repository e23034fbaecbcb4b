//! [`MmaInstructions`]: the matrix instruction of a plane, and what decodes its operands, for
//! matmuls. [`PlaneMma`] is CubeCL's; `ptx.rs` has faster decoding, and `emulated.rs` plain code.
//!
//! A plane multiplies 16 rows of A with 8 columns of B along 16 elements of k. Fragments of unit
//! `4 x quad + part`, two values in each vector:
//!
//! ```text
//! A: rows of k 2 part, + 1 | + 8, + 9     B: columns      quad     the sums: columns 2 part, + 1
//! quad     | vector 0      | vector 2 |   k 2 part, + 1 | vector 0   quad     | vector 0
//! quad + 8 | vector 1      | vector 3 |     + 8, + 9    | vector 1   quad + 8 | vector 1
//! ```

use burn_fp4_search::formats::ScaleGrid;
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use crate::numeric::scale_grid::scale_pair;

/// Values of a vector of a fragment.
pub(crate) type Pair = Const<2>;

/// The matrix instruction `m16n8k16` of a plane, for f16 and bf16 with sums in f32.
#[cube]
pub(crate) trait MmaInstructions: Send + Sync + 'static {
    /// Adds the product of `a` and `b` to the sums. An emulated instruction needs shared memory:
    /// [`mma_scratch`](crate::Capability::mma_scratch) values of `scratch`, from `from` on.
    fn multiply<F: Float>(
        a: &Array<Vector<F, Pair>>,
        b: &Array<Vector<F, Pair>>,
        sums: &mut Array<Vector<f32, Pair>>,
        scratch: &mut [f32],
        #[comptime] from: u32,
    );

    /// Returns the bits of `ones` where a mask has ones, and those of `zeros` elsewhere.
    fn merge_bits(ones: u32, zeros: u32, #[comptime] mask: u32) -> u32;

    /// Returns the values of the block scales in two bytes of a word: the lower ones, or the upper
    /// ones.
    fn scale_pair(
        word: u32,
        #[comptime] pair: u32,
        #[comptime] grid: ScaleGrid,
    ) -> Vector<f32, Pair>;

    /// Waits for the units of the plane.
    fn sync_plane();

    /// Limits registers to as many as let a number of cubes run at once on a multiprocessor, where
    /// the compiler can be told.
    fn limit_registers(#[comptime] cubes: u32);

    /// Returns true if a condition holds for a unit of the plane. `scratch` is as above.
    fn any_of_plane(holds: bool, scratch: &mut [f32], #[comptime] from: u32) -> bool;

    /// Returns the sum of the values of the four units of a quad: of two, and of the other two.
    /// `scratch` is as above.
    fn sum_of_quad(value: f32, scratch: &mut [f32], #[comptime] from: u32) -> f32;
}

/// The instruction itself.
pub(crate) struct PlaneMma;

#[cube]
impl MmaInstructions for PlaneMma {
    #[allow(unused_variables)]
    fn multiply<F: Float>(
        a: &Array<Vector<F, Pair>>,
        b: &Array<Vector<F, Pair>>,
        sums: &mut Array<Vector<f32, Pair>>,
        scratch: &mut [f32],
        #[comptime] from: u32,
    ) {
        let definition = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
        definition.execute_inplace(a, b, sums);
    }

    fn merge_bits(ones: u32, zeros: u32, #[comptime] mask: u32) -> u32 {
        (ones & mask) | (zeros & !mask)
    }

    fn scale_pair(
        word: u32,
        #[comptime] pair: u32,
        #[comptime] grid: ScaleGrid,
    ) -> Vector<f32, Pair> {
        scale_pair(word, pair, grid)
    }

    fn sync_plane() {
        sync_plane();
    }

    #[allow(unused_variables)]
    fn limit_registers(#[comptime] cubes: u32) {}

    #[allow(unused_variables)]
    fn any_of_plane(holds: bool, scratch: &mut [f32], #[comptime] from: u32) -> bool {
        plane_any(holds)
    }

    #[allow(unused_variables)]
    fn sum_of_quad(value: f32, scratch: &mut [f32], #[comptime] from: u32) -> f32 {
        let pair = value + plane_shuffle_xor(value, 1u32);
        pair + plane_shuffle_xor(pair, 2u32)
    }
}
