//! Three threads in a line: one reads ahead, this one quantizes on all cores, one writes behind.
//! What lies between them is bounded by the memory that is allowed.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use burn_fp4_checkpoints::{Container, Model, Output, Reader, Weight};
use indicatif::ProgressBar;

use super::budget::{Budget, Taken};
use super::matrix::{Floats, Quantizer, read};
use super::plan::Unit;
use crate::convert::convert;
use crate::error::CliError;

/// What all three threads know.
pub(super) struct Work<'w, 'c> {
    pub(super) container: &'c Container,
    pub(super) model: &'w Model<'c>,
    pub(super) outline: &'w Model<'c>,
    pub(super) units: &'w [&'w Unit],
    pub(super) quantizer: &'w Quantizer<'w>,
    pub(super) budget: &'w Budget,
    pub(super) bar: &'w ProgressBar,
}

/// A unit that is read.
struct Loaded<'w> {
    unit: &'w Unit,
    /// None: it is copied by who writes.
    floats: Option<Floats>,
    taken: Taken<'w>,
}

/// A unit that is ready to be written.
struct Made<'w> {
    unit: &'w Unit,
    weights: Vec<(usize, Weight<'static>)>,
    taken: Taken<'w>,
}

/// Does all of the work.
pub(super) fn run(work: &Work<'_, '_>, output: &mut Output<'_>) -> Result<(), CliError> {
    // The budget bounds what is quantized; small tensors that are copied are bounded by number.
    let (to_quantize, loaded) = sync_channel(64);
    let (to_write, made) = sync_channel(64);
    thread::scope(|scope| {
        let reader = scope.spawn(move || -> Result<(), CliError> {
            let mut reader = Reader::new(work.container);
            for &unit in work.units {
                let taken = work.budget.take(unit.memory);
                let floats = match unit.quantized {
                    true => Some(read(work.model, &unit.weights, &mut reader)?),
                    false => None,
                };
                // Who quantizes has failed, and says so.
                if to_quantize.send(Loaded { unit, floats, taken }).is_err() {
                    break;
                }
            }
            Ok(())
        });
        let writer = scope.spawn(move || write(work, &made, output));
        let quantized = (move || -> Result<(), CliError> {
            for Loaded { unit, floats, taken } in loaded {
                let weights = match floats {
                    Some(floats) => {
                        let (model, outline) = (work.model, work.outline);
                        work.quantizer.quantize(model, outline, &unit.weights, floats)?
                    }
                    None => Vec::new(),
                };
                if to_write.send(Made { unit, weights, taken }).is_err() {
                    break;
                }
            }
            Ok(())
        })();
        let ended = |thread: thread::ScopedJoinHandle<'_, Result<(), CliError>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        // The first that failed stopped the others.
        quantized.and(ended(reader)).and(ended(writer))
    })
}

fn write<'w>(
    work: &Work<'w, '_>,
    made: &Receiver<Made<'w>>,
    output: &mut Output<'_>,
) -> Result<(), CliError> {
    let mut reader = Reader::new(work.container);
    for Made { unit, weights, taken } in made {
        work.bar.set_message(work.model.weights[unit.weights[0]].name.clone());
        for (at, weight) in &weights {
            output.write(*at, weight)?;
        }
        if !unit.quantized {
            for &at in &unit.weights {
                convert(output, at, &work.model.weights[at], &mut reader)?;
            }
        }
        drop((weights, taken));
        work.bar.inc(unit.bytes);
    }
    Ok(())
}
