//! Decisions about the weights of a model: to keep a weight, or to quantize it by a scheme and
//! with which others it shares a tensor scale.
//!
//! A [`Recipe`] has the choices of a user, as TOML or as a value. The owner of the weights, which
//! may be files or a module, describes each as a [`WeightInfo`], and the reader of the result as
//! [`Constraints`]. [`Policy::decide`] is a pure function of the three.
//!
//! # Patterns
//!
//! Lists of names in a recipe, in options of `fp4` and in `Fp4Config` hold patterns:
//!
//! | pattern | matches |
//! |---|---|
//! | `lm_head` | this name |
//! | `*.down_proj`, `layers.1*` | `*` is any text, dots included, and `?` one character |
//! | `*.[kv]_proj`, `*.[!q]_proj` | `[kv]` is one of these characters, `[!q]` is another one |
//! | `**.output.*` | `**.` is any number of components, also none: `output.x`, `a.b.output.x` |
//! | `layers.0.`, `**.layers.0.` | names within this module; `**.` and wild cards may be before |
//! | `re:.*\.(o\|down)_proj$` | a regular expression, from the start of the name; `$` is its end |
//!
//! A pattern matches the whole name of a weight, `layers.0.up_proj.weight`, or of its module,
//! `layers.0.up_proj`. Upper and lower case differ. Braces and commas do not list names; write a
//! pattern for each.
//!
//! | file | what it holds |
//! |---|---|
//! | `recipe.rs` | [`Recipe`]: the choices for the weights of a model, as TOML |
//! | `recipe_file.rs` | [`RecipeFile`]: a recipe in a file, whose errors name the line |
//! | `decide.rs` | [`Policy`]: from choices and weights to decisions; [`families`] of weights |
//! | `weight.rs` | [`WeightInfo`] and [`Constraints`]: facts that the caller supplies |
//! | `preset.rs` | [`Preset`]: lists of names that are worth 4 bits |
//! | `reason.rs` | [`Reason`]: why a weight is kept |
//! | `pattern.rs` | [`Pattern`]: a name pattern in everyone's syntax; [`Patterns`]: a list |
//! | `nearest.rs` | the pattern that a user may have meant |
//! | `fold.rs` | names that differ in numbers as one, for tables |
//! | `error.rs` | [`RecipeError`], [`PolicyError`] |

#![warn(missing_debug_implementations)]
#![forbid(unsafe_code)]

mod decide;
mod error;
pub mod fold;
mod nearest;
mod pattern;
mod preset;
mod reason;
mod recipe;
mod recipe_file;
mod weight;

pub use burn_fp4_search as search;
pub use decide::{Decision, Decisions, Policy, families, keep_together};
pub use error::{PolicyError, RecipeError};
pub use pattern::{Matcher, Pattern, Patterns, Syntax, nearest_pattern};
pub use preset::{Preset, PresetRow};
pub use reason::Reason;
pub use recipe::{Recipe, RecipeFormat, RecipeWeights};
pub use recipe_file::RecipeFile;
pub use weight::{Constraints, Family, Fused, Role, WeightInfo, stem};
