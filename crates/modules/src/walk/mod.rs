//! From a module to a decision about each of its float parameters.
//!
//! | file             | what it holds                                                        |
//! |------------------|----------------------------------------------------------------------|
//! | `paths.rs`       | the path of a parameter, kept once for all visitors and mappers      |
//! | `parameters.rs`  | every parameter of a module: shape, container, what is attached      |
//! | `plan.rs`        | how a parameter is quantized: layout, scheme and method              |
//! | `select.rs`      | the decision about every parameter                                   |

pub(crate) mod parameters;
pub(crate) mod paths;
pub(crate) mod plan;
pub(crate) mod select;
