//! Generates Markdown tables and plots from the figures in `docs/benchmarks`, which are typed once,
//! as JSON: `cargo run -p docs`.
//!
//! | file       | what it holds                                                     |
//! |------------|-------------------------------------------------------------------|
//! | `table.rs` | [`Table`]: a file of figures, and its rows in Markdown            |
//! | `page.rs`  | generated parts of pages, between comments                        |
//! | `plot.rs`  | plots                                                             |
//! | `tree.rs`  | all generated pages and plots                                     |
//! | `main.rs`  | writes the generated files                                        |
//! | `pages.rs` | tests that the files in the tree are the generated ones           |

mod page;
mod plot;
mod table;
mod tree;

pub use page::{DocsError, fill, written};
pub use table::{Cell, OtherRun, Table};
pub use tree::{PAGES, generated, root, tables};
