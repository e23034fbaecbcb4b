//! Instructions of `ptx.rs` for builds without CUDA. No kernel that needs them is launched there.

use cubecl::prelude::*;

#[cube]
#[allow(unused_variables)]
pub(crate) fn prefetch_l2<T: CubePrimitive>(from: &[T], at: u32, bytes: u32) {}

#[cube]
#[allow(unused_variables)]
pub(crate) fn publish<T: CubePrimitive>(memory: &mut [T]) {}

#[cube]
#[allow(unused_variables)]
pub(crate) fn arrive(counters: &mut [u32], at: u32, #[comptime] acquires: bool) -> u32 {
    0u32.runtime()
}

#[cube]
#[allow(unused_variables)]
pub(crate) fn await_count(counters: &[u32], at: u32, count: u32) {}

#[cube]
#[allow(unused_variables)]
pub(crate) fn load_vector_in_place<T: CubePrimitive>(from: &[T], at: u32, words: &mut Array<u32>) {}
