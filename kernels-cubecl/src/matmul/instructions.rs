//! What the kernel of `wgmma.rs` does by instructions of a warpgroup: [`Instructions`], by those of
//! Hopper in `ptx.rs`, by plain ones in `plain.rs`.
//!
//! A warpgroup, 4 planes, multiplies 64 rows of A, in registers, with `columns` rows of B, in
//! shared memory, along 16 channels: `sums[64, columns] += A x B^T`. Unit
//! `32 x plane + 4 x quad + part` holds
//!
//! ```text
//! A: rows 16 x plane + ..             the sums: rows 16 x plane + .., columns 8 i + ..
//!          channels                            2 part, 2 part + 1
//!          2 part, + 1 | + 8, + 9     quad     | 4 i     | 4 i + 1 |
//! quad     | word 0    | word 2 |     quad + 8 | 4 i + 2 | 4 i + 3 |
//! quad + 8 | word 1    | word 3 |
//! ```
//!
//! B lies in shared memory 64 channels wide, a row in 128 bytes or eight vectors of 16. Vectors
//! change places within a row, so that the same vector of eight rows is in different banks; eight
//! rows are 1024 bytes, aligned to as many:
//!
//! ```text
//! row 0  | 0 | 1 | 2 | 3 | ..       vector v of row r is at place v ^ (r % 8)
//! row 1  | 1 | 0 | 3 | 2 | ..
//! row 2  | 2 | 3 | 0 | 1 | ..       16 channels are two vectors
//! ```

use cubecl::prelude::*;

/// Asynchronous copies to shared memory, and multiplications of a warpgroup.
#[cube]
pub(super) trait WgmmaInstructions: 'static + Send + Sync {
    /// Where shared memory begins, for these operations.
    fn address<T: CubePrimitive>(shared: &[T]) -> u32;

    /// Starts to copy `each` elements, the `at`-th as many of device memory, to the `to`-th place
    /// of as many in shared memory, which begins at `address`, if this is `wanted`. A branch around
    /// it would have multiplications wait for each other.
    fn copy<T: CubePrimitive>(
        wanted: bool,
        shared: &mut [T],
        address: u32,
        to: u32,
        from: &[T],
        at: u32,
        #[comptime] each: u32,
        #[comptime] bytes: u32,
    );

    /// The copies that the unit has started since the last group are a group.
    fn commit_copies();

    /// Waits until all but the last `groups` groups of copies of the unit have arrived, for the
    /// multiplications too; the units wait for each other after that.
    fn wait_for_copies(#[comptime] groups: u32);

    /// The byte of a word that belongs to this `part`, the rest being zeros.
    fn byte(word: u32, part: u32) -> u32;

    /// Starts to add `A x B^T` to the sums, for the 16 channels of B that begin with vector `at`
    /// of shared memory, which begins at `address`. The last vectors of `exchange`, one for each
    /// unit, are written where units have to show each other A.
    fn multiply<F: Float, X: Size, W: Size>(
        a: &Array<u32>,
        b: &[Vector<u32, X>],
        address: u32,
        at: u32,
        sums: &mut Array<f32>,
        scratch: &mut [Vector<u32, W>],
        #[comptime] columns: u32,
        #[comptime] bf16: bool,
    );

    /// Waits until all but the last `groups` multiplications have read A and B.
    fn wait_for_products(#[comptime] groups: u32);

    /// Waits until the sums, `count` of them, are complete.
    fn wait_for_sums(sums: &mut Array<f32>, #[comptime] count: u32);
}
