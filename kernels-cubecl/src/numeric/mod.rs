//! Arithmetic of one value, one scale or one group: no memory is read or written here.

pub(crate) mod codes;
pub(crate) mod element;
pub(crate) mod hadamard;
pub(crate) mod rule;
pub(crate) mod scale_grid;
pub(crate) mod stochastic;
