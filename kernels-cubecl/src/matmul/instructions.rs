//! [`WgmmaInstructions`]: asynchronous copies and matrix instructions of a warpgroup, which
//! `wgmma.rs` is built on. `ptx.rs` implements them for Hopper, `emulated.rs` with plain code.
//!
//! A warpgroup, 4 planes, multiplies 64 rows of A, in registers, with `columns` rows of B, in
//! shared memory, along 16 values of k: `sums[64, columns] += A x B^T`. Fragments of unit
//! `32 x plane + 4 x quad + part`:
//!
//! ```text
//! A: rows 16 x plane + ..             the sums: rows 16 x plane + .., columns 8 i + ..
//!          k                                   2 part, 2 part + 1
//!          2 part, + 1 | + 8, + 9     quad     | 4 i     | 4 i + 1 |
//! quad     | word 0    | word 2 |     quad + 8 | 4 i + 2 | 4 i + 3 |
//! quad + 8 | word 1    | word 3 |
//! ```
//!
//! B is 64 values of k wide in shared memory: a row has 128 bytes or eight vectors of 16. They are
//! swizzled within a row, so that the same vector of eight rows is in different banks. Eight rows
//! are 1024 bytes, aligned to 1024:
//!
//! ```text
//! row 0  | 0 | 1 | 2 | 3 | ..       vector v of row r is at place v ^ (r % 8)
//! row 1  | 1 | 0 | 3 | 2 | ..
//! row 2  | 2 | 3 | 0 | 1 | ..       16 values of k are two vectors
//! ```

use cubecl::prelude::*;

/// Asynchronous copies to shared memory, and matrix instructions of a warpgroup.
#[cube]
pub(super) trait WgmmaInstructions: 'static + Send + Sync {
    /// Returns the address of shared memory for these instructions.
    fn address<T: CubePrimitive>(shared: &[T]) -> u32;

    /// Starts to copy `each` elements from device memory to shared memory, which begins at
    /// `address`, if this is `wanted`. `at` and `to` count in runs of `each` elements. A branch
    /// around the call instead of `wanted` would serialize the multiplications.
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

    /// Groups the copies that the unit has started since the last group.
    fn commit_copies();

    /// Waits until all but the last `groups` groups of the unit's copies have arrived, and are
    /// visible to multiplications. The units still need a barrier after it.
    fn wait_for_copies(#[comptime] groups: u32);

    /// Returns the byte of a word that belongs to this `part`, with zeros above.
    fn byte(word: u32, part: u32) -> u32;

    /// Starts to add `A x B^T` to the sums, for the 16 values of k of B that begin with vector `at`
    /// of shared memory, which begins at `address`. The emulation writes the last vectors of
    /// `scratch`, one per unit, to show A to other units.
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

    /// Waits until the `count` sums are complete.
    fn wait_for_sums(sums: &mut Array<f32>, #[comptime] count: u32);
}
