//! Threads in a line: some read ahead, some quantize, one writes behind. What lies between them is
//! bounded by the memory that is allowed.
//!
//! The host quantizes a group of weights on all cores: one thread of each kind is enough. A device
//! is kept busy by several, each of which sends values, waits, and fetches codes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use burn_fp4_checkpoints::{Model, Output, Piece, Planned, Reader, Value, Weight};
use burn_fp4_search::Fp4Scheme;
use indicatif::ProgressBar;

use super::budget::{Budget, Taken};
use super::jobs::Job;
use super::matrix::{Floats, Quantized, Quantizer, read};
use super::readahead::Readahead;
use crate::accuracy::{Blocks, Tally, TallyAt};
use crate::cast::error_of_cast;
use crate::error::CliError;
use crate::finite::Copied;

/// The state that all threads share.
pub(super) struct Work<'w, 'c> {
    pub(super) reader: Reader<'c>,
    pub(super) model: &'w Model<'c>,
    pub(super) outline: &'w Model<'c>,
    pub(super) planned: &'w Planned<'w>,
    pub(super) jobs: &'w [&'w Job],
    pub(super) quantizer: &'w Quantizer<'w>,
    pub(super) budget: &'w Budget,
    pub(super) readahead: &'w Readahead,
    pub(super) bar: &'w ProgressBar,
    /// Values that are not finite, in weights that are copied.
    pub(super) copied: &'w Copied,
}

/// A job that is read, and will be quantized.
struct ReadJob<'w> {
    job: &'w Job,
    how: Fp4Scheme,
    floats: Floats,
    taken: Taken<'w>,
}

/// A part of the result that is ready to be written.
enum Made<'w, 'c> {
    /// A job that is quantized.
    Quantized { job: &'w Job, weights: Vec<Quantized>, taken: Taken<'w> },
    /// A weight that stays quantized as it was, or is cast.
    Kept { job: &'w Job, weight: Box<Weight<'c>>, cast: Option<Tally>, taken: Taken<'w> },
    /// A part of one that is copied.
    Piece { piece: Piece<'w>, bytes: Vec<u8>, taken: Taken<'w> },
}

/// Does all of the work. Returns the errors of what it has quantized or cast, by places in the
/// model.
pub(super) fn run(work: &Work<'_, '_>, output: &mut Output<'_>) -> Result<Vec<TallyAt>, CliError> {
    let mut errors = Vec::new();
    // The budget bounds what is quantized; small tensors that are copied are bounded by number.
    let (to_quantize, loaded) = sync_channel(64);
    let (to_write, made) = sync_channel(64);
    // Dropped with the last who quantizes: who reads then has no one to send to.
    let loaded = Arc::new(Mutex::new(loaded));
    let jobs = Mutex::new(work.jobs.iter());
    let failed = AtomicBool::new(false);
    let threads = work.quantizer.engine.threads();
    thread::scope(|scope| {
        // Who fails stops those who read, and so in the end everyone.
        let noted = |result: Result<(), CliError>| {
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            result
        };
        let next = || {
            let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).next().copied();
            job.filter(|_| !failed.load(Ordering::Relaxed))
        };
        let mut running: Vec<_> = (0..threads.quantizers)
            .map(|_| {
                let (loaded, to_write) = (Arc::clone(&loaded), to_write.clone());
                scope.spawn(move || noted(quantize(work, &loaded, &to_write)))
            })
            .collect();
        running.extend((0..threads.readers).map(|_| {
            let (to_quantize, to_write) = (to_quantize.clone(), to_write.clone());
            scope.spawn(move || noted(read_ahead(work, next, &to_quantize, &to_write)))
        }));
        let errors = &mut errors;
        running.push(scope.spawn(move || noted(write(work, &made, output, errors))));
        drop((loaded, to_quantize, to_write));
        let ended = |thread: thread::ScopedJoinHandle<'_, Result<(), CliError>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        // All of them end before one of them is blamed.
        running.into_iter().map(ended).fold(Ok(()), Result::and)
    })?;
    Ok(errors)
}

fn read_ahead<'w, 'c>(
    work: &'w Work<'w, 'c>,
    next: impl Fn() -> Option<&'w Job>,
    to_quantize: &SyncSender<ReadJob<'w>>,
    to_write: &SyncSender<Made<'w, 'c>>,
) -> Result<(), CliError> {
    while let Some(job) = next() {
        work.readahead.advance(job.bytes);
        // Who takes no more has failed, and says so.
        let all = if let Some(how) = job.how {
            let taken = work.budget.take(job.memory);
            let floats = read(work.model, &job.weights, &work.reader)?;
            to_quantize.send(ReadJob { job, how, floats, taken }).is_ok()
        } else {
            read_kept(work, job, to_write)?
        };
        if !all {
            break;
        }
    }
    Ok(())
}

/// Reads a job that is not quantized, of which no more than a piece has to be in memory unless it
/// was quantized before or is cast. Returns true if all of it was taken.
fn read_kept<'w, 'c>(
    work: &'w Work<'w, 'c>,
    job: &'w Job,
    to_write: &SyncSender<Made<'w, 'c>>,
) -> Result<bool, CliError> {
    for &at in &job.weights {
        let weight = &work.model.weights[at];
        if !work.planned.copies(at) {
            let taken = work.budget.take(job.memory);
            let weight = Box::new(work.reader.weight(weight)?);
            let mut cast = None;
            if let Value::Plain(tensor) = &weight.value {
                work.copied.look(work.model, at, &tensor.bytes);
                let dtype = work.planned.decoded_to(at);
                cast = dtype.and_then(|dtype| error_of_cast(tensor, dtype));
            }
            if to_write.send(Made::Kept { job, weight, cast, taken }).is_err() {
                return Ok(false);
            }
            continue;
        }
        for piece in work.planned.pieces(at)? {
            let taken = work.budget.take(piece.len() as u64);
            let bytes = piece.read(&work.reader)?;
            work.copied.look(work.model, at, &bytes);
            if to_write.send(Made::Piece { piece, bytes, taken }).is_err() {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn quantize<'w>(
    work: &Work<'w, '_>,
    loaded: &Mutex<Receiver<ReadJob<'w>>>,
    to_write: &SyncSender<Made<'w, '_>>,
) -> Result<(), CliError> {
    let next = || loaded.lock().unwrap_or_else(PoisonError::into_inner).recv();
    while let Ok(ReadJob { job, how, floats, mut taken }) = next() {
        let (model, outline) = (work.model, work.outline);
        let weights = work.quantizer.quantize(model, outline, &job.weights, &how, floats)?;
        taken.keep(job.made);
        if to_write.send(Made::Quantized { job, weights, taken }).is_err() {
            break;
        }
    }
    Ok(())
}

/// The sums of a weight as the note on it, exactly.
fn note(Tally { values, outputs, blocks, other, unseen }: Tally) -> String {
    let Blocks { all, zeroed, small, errors, peak } = blocks;
    let counts = [all, zeroed, small].into_iter().chain(unseen).map(|count| count.to_string());
    let sums = errors.into_iter().chain([peak]).chain(other).chain(values);
    let sums = sums.chain(outputs.into_iter().flatten());
    counts.chain(sums.map(|sum| sum.to_string())).collect::<Vec<_>>().join(" ")
}

/// The sums of a weight that a note has.
fn of_note(note: &str) -> Option<Tally> {
    let words: Vec<&str> = note.split(' ').collect();
    let (counts, sums) = words.split_at_checked(5)?;
    let counts: Vec<u64> = counts.iter().filter_map(|count| count.parse().ok()).collect();
    let sums: Vec<f64> = sums.iter().filter_map(|sum| sum.parse().ok()).collect();
    let &[all, zeroed, small, unseen, of] = &counts[..] else { return None };
    let &[errors, blocks, peak, other, number, change, energy, ref outputs @ ..] = &sums[..] else {
        return None;
    };
    let blocks = Blocks { all, zeroed, small, errors: [errors, blocks], peak };
    let (outputs, other) = (<[f64; 2]>::try_from(outputs).ok(), [other, number]);
    Some(Tally { values: [change, energy], outputs, blocks, other, unseen: [unseen, of] })
}

/// The sums of weights that an earlier run has quantized or cast, by their places in the model.
pub(super) fn noted(output: &Output<'_>) -> BTreeMap<usize, Tally> {
    output.earlier().filter_map(|(at, note)| Some((at, of_note(note)?))).collect()
}

fn write(
    work: &Work<'_, '_>,
    made: &Receiver<Made<'_, '_>>,
    output: &mut Output<'_>,
    errors: &mut Vec<TallyAt>,
) -> Result<(), CliError> {
    let begin = |at: usize| work.bar.set_message(work.model.weights[at].name.clone());
    for made in made {
        // What was taken is given back when its bytes are dropped.
        match made {
            Made::Quantized { job, weights, taken } => {
                begin(job.weights[0]);
                for made in &weights {
                    output.write_noting(made.at, &made.weight, &note(made.tally))?;
                }
                errors.extend(weights.iter().map(|made| (made.at, made.tally)));
                drop((weights, taken));
                work.bar.inc(job.bytes);
            }
            Made::Kept { job, weight, cast, taken } => {
                let at = job.weights[0];
                begin(at);
                // The error of values that are not finite says nothing.
                let (not_finite, cast) = (work.copied.note(at), cast.map(|cast| (at, cast)));
                let cast = cast.filter(|_| not_finite.is_empty());
                let note = cast.map_or(not_finite, |(_, cast)| note(cast));
                output.write_noting(at, &weight, &note)?;
                errors.extend(cast);
                drop((weight, taken));
                work.bar.inc(job.bytes);
            }
            Made::Piece { piece, bytes, taken } => {
                begin(piece.weight());
                let note = work.copied.note(piece.weight());
                output.put_noting(&piece, &bytes, &note)?;
                work.bar.inc(bytes.len() as u64);
                drop((bytes, taken));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_has_all_sums_and_no_other_note_is_taken_for_one() {
        let tally = Tally {
            values: [0.1, 1e-300],
            outputs: Some([2.5, 1.0 / 3.0]),
            blocks: Blocks { all: 9, zeroed: 3, small: 4, errors: [0.7, 9.0], peak: 448.0 },
            other: [0.6, 8.0],
            unseen: [0, 1],
        };
        for tally in [tally, Tally { outputs: None, ..tally }] {
            assert_eq!(of_note(&note(tally)), Some(tally));
        }
        // A count of values that are not finite, and nothing.
        assert_eq!((of_note("17"), of_note("")), (None, None));
    }
}
