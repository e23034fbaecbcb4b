//! Thread tiles: indexing, loads and stores, and exchange between units.

pub(crate) mod indexing;
pub(crate) mod load_store;
pub(crate) mod smem_transpose;
pub(crate) mod tile_reduce;
