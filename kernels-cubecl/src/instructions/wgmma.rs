//! [`WgmmaInstructions`]: asynchronous copies and matrix instructions of a warpgroup, for matmuls
//! and attention. `ptx.rs` implements them for Hopper, `emulated.rs` with plain code.
//!
//! A warpgroup, 4 planes, multiplies 64 rows of A, in registers, with `columns` rows of B, in
//! shared memory, along 32 bytes of k: `sums[64, columns] += A x B^T`. Fragments of unit
//! `32 x plane + 4 x quad + part`, of f16 and bf16; E4M3 has four values in a word, from `4 part`
//! and `16 + 4 part` on:
//!
//! ```text
//! A: rows 16 x plane + ..             the sums: rows 16 x plane + .., columns 8 i + ..
//!          k                                   2 part, 2 part + 1
//!          2 part, + 1 | + 8, + 9     quad     | 4 i     | 4 i + 1 |
//! quad     | word 0    | word 2 |     quad + 8 | 4 i + 2 | 4 i + 3 |
//! quad + 8 | word 1    | word 3 |
//! ```
//!
//! B is 128 bytes of k wide in shared memory: a row has eight vectors of 16 bytes. They are
//! swizzled within a row, so that the same vector of eight rows is in different banks. Eight rows
//! are 1024 bytes, aligned to 1024:
//!
//! ```text
//! row 0  | 0 | 1 | 2 | 3 | ..       vector v of row r is at place v ^ (r % 8)
//! row 1  | 1 | 0 | 3 | 2 | ..
//! row 2  | 2 | 3 | 0 | 1 | ..       a multiplication reads two vectors
//! ```
//!
//! In 16 bits B may be transposed: a row then is one of k, with 64 columns, and a multiplication
//! reads 16 rows.

use cubecl::prelude::*;

use crate::plan::Dtype;

/// Values of A and B.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Operand {
    F16,
    Bf16,
    E4m3,
}

impl From<Dtype> for Operand {
    /// f32 is never planned for these instructions.
    fn from(dtype: Dtype) -> Self {
        if dtype == Dtype::Bf16 { Self::Bf16 } else { Self::F16 }
    }
}

/// Asynchronous copies to shared memory, and matrix instructions of a warpgroup.
#[cube]
pub(crate) trait WgmmaInstructions: 'static + Send + Sync {
    /// Returns the address of shared memory for these instructions.
    fn address<T: CubePrimitive>(shared: &[T]) -> u32;

    /// Starts to copy `each` elements from device memory to shared memory, which begins at
    /// `address`, if this is `wanted`. `at` and `to` count in runs of `each` elements, and `offset`
    /// counts further ones from `at`. A branch around the call instead of `wanted` would serialize
    /// the multiplications.
    fn copy<T: CubePrimitive>(
        wanted: bool,
        shared: &mut [T],
        address: u32,
        to: u32,
        from: &[T],
        at: u32,
        #[comptime] offset: u32,
        #[comptime] each: u32,
        #[comptime] bytes: u32,
    );

    /// Groups the copies that the unit has started since the last group.
    fn commit_copies();

    /// Waits until all but the last `groups` groups of the unit's copies have arrived, and are
    /// visible to multiplications. The units still need a barrier after it.
    fn wait_for_copies(#[comptime] groups: u32);

    /// Waits until all but the last `groups` groups of the unit's copies have arrived, which
    /// multiplications may not see yet. Other units see them after a barrier.
    fn wait_for_own_copies(#[comptime] groups: u32);

    /// Loads vector `at + offset` of shared memory, which begins at `address`.
    fn load_shared<X: Size>(
        shared: &[Vector<u32, X>],
        address: u32,
        at: u32,
        #[comptime] offset: u32,
    ) -> Vector<u32, X>;

    /// Makes `count` barriers for [`copy_rows`](Self::copy_rows), of eight bytes each. The units
    /// still need a barrier after it.
    fn start_barriers(address: u32, #[comptime] count: u32);

    /// Starts to copy `each` neighbouring vectors of 16 bytes from device memory to shared memory,
    /// which begins at `address`, if this is `wanted`. A single unit wants it. The barrier at the
    /// address `barrier` counts the bytes. `at` and `to` count in vectors.
    fn copy_rows<X: Size>(
        wanted: bool,
        shared: &mut [Vector<u32, X>],
        address: u32,
        to: u32,
        from: &[Vector<u32, X>],
        at: u32,
        barrier: u32,
        #[comptime] each: u32,
    );

    /// Waits until the rows that a barrier counts have arrived. `parity` is 0 for the first rows, 1
    /// for the second, and so on. The units still need a barrier after it.
    fn wait_for_rows(barrier: u32, parity: u32);

    /// Loads a word from device memory. The load keeps its place: a plain one may be moved to its
    /// use, which then waits for it.
    fn load_word(from: &[u32], at: u32) -> u32;

    /// Loads the four words of a vector as [`load_word`](Self::load_word) does.
    fn load_vector<W: Size>(from: &[Vector<u32, W>], at: u32) -> Array<u32>;

    /// Rounds four floats to E4M3, to nearest, and to the largest finite number beyond it. The
    /// first is in the lowest byte.
    fn round_to_e4m3(values: &Array<f32>) -> u32;

    /// Returns 2 to the power of a value, with a relative error of at most 2^-22; below 2^-126 it
    /// may be 0. The emulation's error is about `|value| / 2^24`.
    fn exp2(value: f32) -> f32;

    /// Returns the byte of a word that belongs to this `part`, with zeros above.
    fn byte(word: u32, part: u32) -> u32;

    /// Returns four of eight bytes. The low four selectors of three bits, at a distance of four,
    /// count from the lowest byte of `low`; the bits between are zeros.
    fn select_bytes(low: u32, high: u32, selectors: u32) -> u32;

    /// Starts to add `A x B^T` to the sums, for the 32 bytes of k of B that begin with vector `at`
    /// of shared memory, which begins at `address`; `A x B` for the 16 rows from there on if B is
    /// `transposed`, which has 64 columns of 16 bits. The emulation writes the last vectors of
    /// `scratch`, one per unit, to show A to other units.
    fn multiply<F: Float, X: Size, W: Size>(
        a: &Array<u32>,
        b: &[Vector<u32, X>],
        address: u32,
        at: u32,
        sums: &mut Array<f32>,
        scratch: &mut [Vector<u32, W>],
        #[comptime] columns: u32,
        #[comptime] operand: Operand,
        #[comptime] transposed: bool,
    );

    /// Waits until all but the last `groups` multiplications have read A and B.
    fn wait_for_products(#[comptime] groups: u32);

    /// Waits until the `count` sums are complete.
    fn wait_for_sums(sums: &mut Array<f32>, #[comptime] count: u32);
}
