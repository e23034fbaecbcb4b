//! From a module to a decision about each of its float parameters.
//!
//! | file             | what it holds                                                        |
//! |------------------|----------------------------------------------------------------------|
//! | `paths.rs`       | the path of a parameter, kept once for all visitors and mappers      |
//! | `parameters.rs`  | every parameter of a module: shape, container, what is attached      |
//! | `policy.rs`      | a configuration and the parameters, as the policy has them           |
//! | `plan.rs`        | how a parameter is quantized: layout, scheme and method              |
//! | `scale_groups.rs` | which weights share a tensor scale                                  |
//! | `select.rs`      | the decision about every parameter                                   |

pub(crate) mod parameters;
pub(crate) mod paths;
pub(crate) mod plan;
pub(crate) mod policy;
pub(crate) mod scale_groups;
pub(crate) mod select;
