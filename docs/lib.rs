//! Makes the tables and figures in Markdown, and the picture, from `docs/benchmarks/*.json`, where
//! every figure is typed once: `cargo run -p docs`.
//!
//! | file           | what it holds                                                      |
//! |----------------|--------------------------------------------------------------------|
//! | `table.rs`     | [`Table`]: a file of figures, and its rows in Markdown             |
//! | `page.rs`      | the parts of pages that are made: tables, and figures in sentences |
//! | `plot.rs`      | the picture of the README, light and dark                          |
//! | `tree.rs`      | all pages and pictures as they have to be                          |
//! | `main.rs`      | writes them                                                        |
//! | `pages.rs`     | tests that the ones in the tree are these                          |
//! | `files.rs`     | the files of the project, and blocks of pages, for tests           |
//! | `documents.rs` | tests that code on pages is run, and that links lead somewhere     |

#![allow(clippy::must_use_candidate, reason = "no user calls it")]

mod files;
mod page;
mod plot;
mod table;
mod tree;

pub use files::{Block, blocks, field, files, matches, packages, read, root, sources};
pub use page::{DocsError, fill, outside, without_figures};
pub use table::{Cell, OtherRun, Table};
pub use tree::{PAGES, made, tables};
