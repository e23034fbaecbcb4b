//! Where the values and blocks of a unit lie, and how they come and go.

pub(crate) mod indexing;
pub(crate) mod load_store;
pub(crate) mod smem_transpose;
pub(crate) mod tile_reduce;
