//! Searches for the scale of a block: a file per method, named as in the search crate.

pub(crate) mod amax;
pub(crate) mod best;
pub(crate) mod block_hessian;
pub(crate) mod choose;
pub(crate) mod coordinate_descent;
pub(crate) mod four_over_six;
pub(crate) mod hessian;
pub(crate) mod quantize_args;
pub(crate) mod sse;
