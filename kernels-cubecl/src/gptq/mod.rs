//! GPTQ: codes that compensate each other's rounding errors; see `host/gptq.rs` in the search
//! crate.
//!
//! With `H = X^T X` of the inputs X of a layer, what matters is `(w - q) H (w - q)^T` over a whole
//! row w of the weight. Matrices lie channel by channel, `[channels, rows]`, so that the units of a
//! cube, one for every row, load and store neighbours:
//!
//! ```text
//!             rows: a unit each                groups of 128 channels, blocks of 16 or 32
//! channel 0  +------------------+  block 0  \
//!   ..       | rounded          |            | group 0: steps of a group are kept, so that
//!            +------------------+  block 1   | channels beyond it are updated by one product
//!            | being rounded    |           /
//!            +------------------+
//!   ..       | updated by       |             group 1
//!            | steps x factor   |
//!            +------------------+
//!
//! rounding: for every block of every group                               (quantize.rs)
//!     1. choose the scales for the weights as they are by now             quantize_weighted
//!     2. round the channels in turn, errors spread within the block       round_kernel
//!     3. update the rest of the group, at its end the channels beyond     spread.rs
//! refinement: sweeps over all blocks
//!     4. R = (w - q) H                                                    change_kernel, spread.rs
//!     5. move every code to where it is best while all others stay        move_kernel
//!     6. choose scale and codes anew:
//!        a. where would the cost of the block be 0?                       aim_kernel
//!        b. scale and codes nearest to that, by H of the block            quantize_by_hessian
//!        c. take them where they cost less                                accept_kernel
//!     after 5 and 6, R is updated as in 3
//!     7. codes and scales, their blocks back where they came from         pack_kernel
//! ```
//!
//! Sums are fused multiply-adds in a fixed order: a device always finds the same codes.

mod block_update;
mod hessian_factor;
mod propagate;
mod quantize;

pub use hessian_factor::{HessianFactorHandles, hessian_factor};
pub use quantize::quantize_gptq;
