//! `fp4 warnings`: the kinds of warnings, and the bounds from which on they are given.

use crate::error::CliError;
use crate::listed::listed;
use crate::print::print;
use crate::table::{width, wrapped};

/// List the kinds of warnings, with what is true of the weights.
///
/// The error of a weight is |Q - W| / |W|. The error of a block is the same of its values; the mean
/// error of blocks counts each of them once, so that a few large values do not hide the others.
/// Both formats leave 8 to 12 % of usual weights.
#[derive(clap::Args)]
pub(crate) struct Arguments {}

/// Percent above which the error of a weight is warned of: what NVFP4 and MXFP4 leave of any usual
/// weight is 8 to 12.
pub(crate) const ERROR: f64 = 20.0;
/// The same for a cast: bf16 rounds by 0.2 at most, unless values are too small for the dtype.
pub(crate) const CAST_ERROR: f64 = 1.0;
/// Percent of the blocks of a weight above which zeros that were no zeros are warned of. Weights of
/// trained models have none: their largest value is not half a million times that of a block.
pub(crate) const ZEROED: f64 = 1.0;
/// The factor by which the mean error of blocks is beyond that of the weight where a few large
/// values hide the others. In a usual weight both are about the same.
pub(crate) const HIDDEN: f64 = 1.5;
/// Percent above which the mean error of blocks is more than NVFP4, or MXFP4, leaves of usual ones.
pub(crate) const USUAL: [f64; 2] = [12.0, 15.0];
/// Percent of the blocks of a weight above which their scales are too small to be precise.
pub(crate) const SMALL: f64 = 50.0;

/// Every kind of warning, and what is true of the weights.
fn kinds() -> Vec<(&'static str, String)> {
    let [usual, usual_of_mxfp4] = USUAL;
    let unusual = format!("{usual} % (MXFP4: {usual_of_mxfp4} %)");
    let rows: [(&str, &str); 34] = [
        ("all-zero", "all values are zero"),
        ("cast-error", &format!("--cast-kept changes the weight by more than {CAST_ERROR} %")),
        ("embedding", "an embedding in FP4 that readers do not load"),
        ("fewer-layers", "the model has fewer layers than are to stay"),
        (
            "hidden-error",
            &format!(
                "the mean error of blocks is beyond {unusual} and {HIDDEN} times that of the weight"
            ),
        ),
        ("idle-pattern", "a pattern of --only quantizes no weight"),
        ("idle-table", "a table of the recipe quantizes no weight"),
        ("input-scale", "the scale of the input is the constant 1"),
        ("large-error", &format!("the error of the weight is beyond {ERROR} %")),
        (
            "large-value",
            "a value beyond 1e4; or next to the largest value most blocks are zero or have one of \
             the smallest scales",
        ),
        ("lost-blocks", "blocks have a scale of 0, and codes"),
        ("missing-layers", "config.json counts layers that are not there"),
        ("nan-scales", "block scales are NaN"),
        ("no-output-error", "the error of the outputs is not measured"),
        ("none-quantized", "the configs claim a quantization that is not there"),
        ("not-finite", "values are NaN or infinite"),
        ("reciprocal-scale", "a value beyond 1e4: the tensor scale may be its reciprocal"),
        (
            "saturated-blocks",
            "more than a quarter of the blocks have the largest scale there is, so that larger \
             values have no room",
        ),
        ("shard-alone", "the input is one of several files of a model"),
        (
            "small-scales",
            &format!(
                "more than {SMALL} % of the block scales are too small to be precise, and the mean \
                 error of blocks is beyond {unusual}"
            ),
        ),
        ("stacked-experts", "transformers leaves quantized experts out"),
        ("stacks-by-shape", "taken for stacks because of three axes"),
        ("stays", "chosen, and cannot be quantized"),
        ("tensor-scale", "the tensor scale is NaN or infinite"),
        ("tiny-values", "no value is beyond 1e-6, which no trained weight has"),
        ("turned-layers", "readers expect the other order of axes"),
        ("unconfirmed", "the disk has not confirmed the result"),
        ("unknown-architecture", "names and shapes alone decide"),
        ("unlike-formats", "layers that run as one differ in format"),
        ("unlike-scales", "layers that run as one differ in tensor scale"),
        ("unread-numbers", "the numbers are not read as floats"),
        ("unseen-inputs", "the statistics are all zero, and `sse` is used"),
        ("unusable-statistics", "the statistics cannot measure outputs"),
        (
            "zeroed-blocks",
            &format!("more than {ZEROED} % of the blocks become zero next to a large value"),
        ),
    ];
    rows.map(|(kind, what)| (kind, what.to_owned())).into()
}

/// Returns true for the name of a kind.
pub(crate) fn is_kind(name: &str) -> bool {
    kinds().iter().any(|(kind, _)| *kind == name)
}

/// The part of `--help` about warnings in JSON.
pub(crate) fn help() -> &'static str {
    "In --json, `warnings` has all warnings that are printed. Each has the `weights` that it is \
     about (none: the whole), its `text`, and a `kind`, whose name stays the same from version to \
     version; `fp4 warnings` lists the kinds. Numbers that JSON does not have are the texts \
     \"inf\", \"-inf\" and \"nan\"."
}

/// Runs the command.
pub(crate) fn run(_: &Arguments) -> Result<(), CliError> {
    print(&wrapped(&listed("Kinds of warnings", &kinds()), width()))
}
