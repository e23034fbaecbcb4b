//! The work in parts, and the memory that each takes: known from headers alone.

use burn_fp4_checkpoints::selection::Selection;
use burn_fp4_checkpoints::{Model, Piece, Planned, Reader};
use burn_fp4_policy::Decision;
use burn_fp4_search::Fp4Scheme;

use super::group::{Group, native};
use super::statistics::StatisticsFile;

/// Weights that are quantized together, or one that is copied, and what that takes.
pub(super) struct Job {
    /// The weights, by their place in the model.
    pub(super) weights: Vec<usize>,
    /// Their scheme. None: they are copied.
    pub(super) how: Option<Fp4Scheme>,
    /// Bytes to read.
    pub(super) bytes: u64,
    /// Bytes of memory: of one that is copied piece by piece, the bytes of a piece.
    pub(super) memory: u64,
    /// Bytes that are still taken when it is quantized and not yet written.
    pub(super) made: u64,
}

/// The jobs in the order of the model.
pub(super) fn jobs(
    model: &Model<'_>,
    selection: &Selection,
    planned: &Planned<'_>,
    statistics: Option<&StatisticsFile>,
) -> Vec<Job> {
    let after = planned.bytes();
    let mut jobs = Vec::new();
    for (at, decision) in selection.decisions.iter().enumerate() {
        let (weights, how) = match decision {
            Decision::Keep(_) => (vec![at], None),
            Decision::Quantize { scheme, group } => {
                (selection.groups[*group].clone(), Some(*scheme))
            }
        };
        // A group is where its first member is.
        if weights[0] != at {
            continue;
        }
        let bytes: u64 = weights.iter().map(|&at| model.weights[at].bytes() as u64).sum();
        let whole = !planned.copies(at);
        // Each tensor is put into the order of the file by itself.
        let largest = weights.iter().map(|&at| after[at]).max().unwrap_or(0);
        let made = weights.iter().map(|&at| after[at]).sum::<u64>() + largest;
        let memory = match how {
            Some(how) => memory(model, &weights, &how, statistics).max(made),
            None if whole => bytes + made,
            None => bytes.min(Piece::MOST as u64),
        };
        let made = if how.is_some() { made } else { memory };
        jobs.push(Job { weights, how, bytes, memory, made });
    }
    jobs
}

/// Bytes of memory that it takes to read and quantize a group of weights.
fn memory(
    model: &Model<'_>,
    group: &[usize],
    how: &Fp4Scheme,
    statistics: Option<&StatisticsFile>,
) -> u64 {
    let method = how.method;
    let members = || group.iter().map(|&at| &model.weights[at]);
    let bytes: u64 = members().map(|weight| weight.bytes() as u64).sum();
    let values: u64 = members().map(|weight| weight.len() as u64).sum();
    let native = native(&members());
    // The values as they are or in f32; what is decoded is there in the bytes of the file as well,
    // or in a piece of them, one after another, and one that is not alone a second time in f32.
    let decoded = members().map(|weight| {
        let second = if group.len() > 1 { 4 * weight.len() as u64 } else { 0 };
        let bytes = match weight.is_quantized() {
            true => weight.bytes(),
            false => weight.bytes().min(Reader::PIECE),
        };
        bytes as u64 + second
    });
    let held = if native { bytes } else { 4 * values };
    let read = if native { bytes } else { held + decoded.max().unwrap_or(0) };
    // Transformed values are f32, beside those that were read.
    let (held, read) = match how.hadamard {
        Some(_) => (4 * values, read.max(held + 4 * values)),
        None => (held, read),
    };
    let whole = Group::of(model, group);
    let (matrix, square) = (whole.view.len() as u64, (whole.first.cols as u64).pow(2));
    let names = || whole.members.iter().map(|weight| weight.name.as_str());
    let measured =
        statistics.is_some_and(|file| names().any(|weight| file.has_gram(weight, &whole.first)));
    let scratch = match method.gptq() {
        // The rows in f32: as they are, in the order of rounding, and with the errors so far; the
        // elements, what they leave, and its change. Before, with the first, the Hessian factor is
        // made: H in f32, and in f64, which becomes the inverse of its factor, and that in f32. To
        // measure the errors of outputs afterwards takes less than either.
        Some(_) => (28 * matrix).max(4 * matrix + 16 * square),
        // The rows and their errors in f32, whose outputs are summed.
        None if measured => 8 * matrix,
        None => 0,
    };
    // Of one member after another.
    let known = |file: &StatisticsFile| {
        names().map(|weight| file.memory(weight, &whole.first, method)).max()
    };
    let known = statistics.and_then(known).unwrap_or(0);
    // Codes and scales in the order of the search and of the file.
    read.max(held + 2 * values + scratch + known)
}
