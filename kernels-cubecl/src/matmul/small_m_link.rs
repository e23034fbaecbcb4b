//! Synchronization between the links of a chain in `small_m.rs`. Each may read outputs of those
//! before.
//!
//! ```text
//! cubes:     first link | second link      | third link
//! they start in the order of their numbers; some of the second link when some of the first end
//!     start to copy codes of the first steps                          (copy_codes)
//!     wait until all cubes of the link before have counted themselves (wait_for_link)
//!     copy the input, multiply, store
//!     count this cube; the last of all sets the counters back to 0    (end_in_link)
//! ```
//!
//! A cube only waits for cubes with lower numbers, which have started before it, so that none waits
//! forever. NVIDIA's documents do not promise that order. GPUs of compute capability 9.0, on which
//! alone there are chains, have it.

use cubecl::prelude::*;

use crate::instructions::{arrive, await_count, load_vector_in_place};

/// Most links of a chain: the products of a layer of a decoder from one attention to the next.
pub(super) const MAX_LINKS: usize = 4;

/// A cube of a link.
#[derive(CubeType, Clone, Copy)]
pub(super) struct LinkCube {
    /// Its number in the link.
    pub(super) cube: u32,
    /// Cubes of the link.
    pub(super) cubes: u32,
    /// Number of the link.
    #[cube(comptime)]
    pub(super) link: u32,
    /// Cubes of the link before.
    pub(super) before: u32,
}

/// Waits until all `cubes` cubes of a link have ended. All units of this cube then see their
/// outputs, by [`load_made`] or in asynchronous copies.
#[cube]
pub(super) fn wait_for_link(counters: &[u32], link: u32, cubes: u32) {
    if UNIT_POS == 0 {
        await_count(counters, link, cubes);
    }
    sync_cube();
}

/// Counts a cube of a link of `cubes` cubes, which has stored its outputs. `links` is the number of
/// links for the last one, and 0 for others.
#[cube]
#[allow(clippy::collapsible_if, reason = "outer conditions are those of the compilation")]
pub(super) fn end_in_link(counters: &mut [u32], link: u32, cubes: u32, #[comptime] links: u32) {
    sync_cube();
    if UNIT_POS == 0 {
        let before = arrive(counters, link, false);
        if comptime!(links > 0) {
            if before + 1 == cubes {
                #[unroll]
                for link in 0..links {
                    counters[link as usize] = 0u32;
                }
            }
        }
    }
}

/// Loads a vector of 16 bytes that another cube of this launch may have made.
#[cube]
pub(super) fn load_made<T: CubePrimitive, X: Size>(from: &[T], at: u32) -> Vector<u32, X> {
    let mut words = Array::<u32>::new(4usize);
    load_vector_in_place::<T>(from, at, &mut words);
    let mut vector = Vector::<u32, X>::empty();
    #[unroll]
    for word in 0..4usize {
        vector.insert(word, words[word]);
    }
    vector
}
