//! From a module to a decision about each of its float parameters.
//!
//! | file             | what it holds                                                        |
//! |------------------|----------------------------------------------------------------------|
//! | `parameters.rs`  | every parameter of a module: path, container, shape, what is attached |
//! | `select.rs`      | the plan for every parameter: kept, or its layout and scheme         |

pub(crate) mod parameters;
pub(crate) mod select;
