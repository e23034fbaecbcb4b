//! Threads in a line: some read ahead, some quantize, one writes behind. What lies between them is
//! bounded by the memory that is allowed.
//!
//! The host quantizes a group of weights on all cores: one thread of each kind is enough. A device
//! is kept busy by several, each of which sends values, waits, and fetches codes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use burn_fp4_checkpoints::{Container, Model, Output, Reader, Weight};
use indicatif::ProgressBar;

use super::budget::{Budget, Taken};
use super::matrix::{Floats, Quantizer, read};
use super::plan::Unit;
use crate::convert::convert;
use crate::error::CliError;

/// What all threads know.
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
    // Dropped with the last who quantizes: who reads then has no one to send to.
    let loaded = Arc::new(Mutex::new(loaded));
    let units = Mutex::new(work.units.iter());
    let failed = AtomicBool::new(false);
    let threads = work.quantizer.engine.threads();
    thread::scope(|scope| {
        // Who fails stops those who read, and so in the end everyone.
        let noted = |result: Result<(), CliError>| {
            failed.fetch_or(result.is_err(), Ordering::Relaxed);
            result
        };
        let next = || {
            let unit = units.lock().unwrap_or_else(PoisonError::into_inner).next().copied();
            unit.filter(|_| !failed.load(Ordering::Relaxed))
        };
        let mut running: Vec<_> = (0..threads.quantizers)
            .map(|_| {
                let (loaded, to_write) = (Arc::clone(&loaded), to_write.clone());
                scope.spawn(move || noted(quantize(work, &loaded, &to_write)))
            })
            .collect();
        running.extend((0..threads.readers).map(|_| {
            let to_quantize = to_quantize.clone();
            scope.spawn(move || noted(read_ahead(work, next, &to_quantize)))
        }));
        running.push(scope.spawn(move || noted(write(work, &made, output))));
        drop((loaded, to_quantize, to_write));
        let ended = |thread: thread::ScopedJoinHandle<'_, Result<(), CliError>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        // All of them end before one of them is blamed.
        running.into_iter().map(ended).fold(Ok(()), Result::and)
    })
}

fn read_ahead<'w>(
    work: &Work<'w, '_>,
    next: impl Fn() -> Option<&'w Unit>,
    to_quantize: &SyncSender<Loaded<'w>>,
) -> Result<(), CliError> {
    let mut reader = Reader::new(work.container);
    while let Some(unit) = next() {
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
}

fn quantize<'w>(
    work: &Work<'w, '_>,
    loaded: &Mutex<Receiver<Loaded<'w>>>,
    to_write: &SyncSender<Made<'w>>,
) -> Result<(), CliError> {
    let next = || loaded.lock().unwrap_or_else(PoisonError::into_inner).recv();
    while let Ok(Loaded { unit, floats, mut taken }) = next() {
        let weights = match floats {
            Some(floats) => {
                let (model, outline) = (work.model, work.outline);
                work.quantizer.quantize(model, outline, &unit.weights, floats)?
            }
            None => Vec::new(),
        };
        taken.keep(unit.made);
        if to_write.send(Made { unit, weights, taken }).is_err() {
            break;
        }
    }
    Ok(())
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
