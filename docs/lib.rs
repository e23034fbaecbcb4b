//! Figures are typed once, as JSON in `docs/benchmarks`; the tables in Markdown and the plots are
//! made from them by `cargo run -p docs`.
//!
//! | file       | what it holds                                                     |
//! |------------|-------------------------------------------------------------------|
//! | `table.rs` | [`Table`]: a file of figures, and its rows in Markdown            |
//! | `page.rs`  | the parts of pages that are made, between comments                |
//! | `plot.rs`  | the pictures                                                      |
//! | `tree.rs`  | all pages and pictures as they have to be                         |
//! | `main.rs`  | writes them                                                       |
//! | `pages.rs` | tests that the ones in the tree are these                         |

mod page;
mod plot;
mod table;
mod tree;

pub use page::{DocsError, fill, outside};
pub use table::{Cell, OtherRun, Table};
pub use tree::{PAGES, made, root, tables};
