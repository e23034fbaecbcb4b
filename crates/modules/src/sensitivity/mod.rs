//! Which weights can take which format, and a choice for each under a budget.
//!
//! | file           | what it holds                                                          |
//! |----------------|------------------------------------------------------------------------|
//! | `candidate.rs` | [`Candidate`]: a format, or none                                       |
//! | `measure.rs`   | what every candidate costs every group of weights                      |
//! | `loss.rs`      | what it costs the model's loss, by second order                        |
//! | `report.rs`    | [`Sensitivity`]: the results, as a table                               |
//! | `page.rs`      | the results as a page with bars                                        |
//! | `budget.rs`    | [`BudgetChoice`]: the candidates with the least error under a budget   |
//! | `knapsack.rs`  | one item of each group, the lightest error within a weight             |

pub(crate) mod budget;
pub(crate) mod candidate;
mod knapsack;
#[cfg(feature = "autodiff")]
pub(crate) mod loss;
pub(crate) mod measure;
mod page;
pub(crate) mod report;
