//! [`MmaInstructions`]: the matrix instruction of a plane, for matmuls. [`PlaneMma`] is CubeCL's;
//! `emulated.rs` has plain code.
//!
//! A plane multiplies 16 rows of A with 8 columns of B along 16 elements of k. Fragments of unit
//! `4 x quad + part`, two values in each vector:
//!
//! ```text
//! A: rows of k 2 part, + 1 | + 8, + 9     B: columns      quad     the sums: columns 2 part, + 1
//! quad     | vector 0      | vector 2 |   k 2 part, + 1 | vector 0   quad     | vector 0
//! quad + 8 | vector 1      | vector 3 |     + 8, + 9    | vector 1   quad + 8 | vector 1
//! ```

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

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

    /// Waits for the units of the plane.
    fn sync_plane();
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

    fn sync_plane() {
        sync_plane();
    }
}
