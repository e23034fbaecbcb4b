//! Arithmetic of values, scales and blocks, without memory accesses.

pub(crate) mod codes;
pub(crate) mod element;
pub(crate) mod hadamard;
pub(crate) mod normal;
pub(crate) mod rule;
pub(crate) mod scale_grid;
pub(crate) mod stochastic;
