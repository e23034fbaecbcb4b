//! GPTQ: codes that compensate each other's rounding errors; see `host/gptq.rs` in the search
//! crate.
//!
//! With `H = X^T X` of the inputs X of a layer, the cost is `(w - q) H (w - q)^T` over a whole row
//! w of the weight. Matrices are stored by channel, `[channels, rows]`, so that the units of a
//! cube, one for every row, load and store neighbours:
//!
//! ```text
//!             rows: a unit each                groups of 128 channels, blocks of 16 or 32
//! channel 0  +------------------+  block 0  \
//!   ..       | rounded          |            | group 0: the errors of a group are kept, so that
//!            +------------------+  block 1   | later channels are updated by one matmul
//!            | being rounded    |           /
//!            +------------------+
//!   ..       | updated by       |             group 1
//!            | errors x factor  |
//!            +------------------+
//!
//! rounding: for every block of every group                               (quantize.rs)
//!     1. choose the scales for the updated weights                        quantize_weighted
//!     2. round the channels in turn, propagate errors within the block    round_kernel
//!     3. update the rest of the group, at its end the later channels      propagate.rs
//! refinement: sweeps over all blocks
//!     4. R = (w - q) H                                             change_kernel, propagate.rs
//!     5. move every code to the best one while all others stay            move_kernel
//!     6. choose scale and codes again:
//!        a. find the minimum of the cost of the block                     aim_kernel
//!        b. choose scale and codes nearest to it, by H of the block       quantize_by_hessian
//!        c. take them if they cost less                                   accept_kernel
//!     after 5 and 6, update R as in 3
//!     7. write codes and scales, with the blocks in their old order       pack_kernel
//! ```
//!
//! Sums are fused multiply-adds in a fixed order: a device always finds the same codes.

mod block_update;
mod hessian_factor;
mod propagate;
mod quantize;

pub use hessian_factor::{HessianFactorHandles, hessian_factor};
pub use quantize::quantize_gptq;
