//! Runs a pass until its memory is settled, then captures it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::{Backend, BackendGraph, Cube, DispatchTensor};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::cubecl::MemoryScope;

use super::super::device::{copy, write};
use super::super::matmul::{Notes, launch_chain};
use super::super::queues;
use super::constants::{Constants, Run};
use super::memory::{
    MemoryRange, check_same, fills, memory_range, not_captured, register, resolve_all, specs,
};
use crate::error::{OpsError, panic_message};

/// Maps the state and the inputs to the next state and the outputs.
pub(super) type Pass<'a> = dyn Fn(Tensors, Tensors) -> (Tensors, Tensors) + Sync + 'a;

type Tensors = Vec<DispatchTensor>;

/// Runs before the capture, after the one that compiles and tunes: they take memory as it does.
const WARM_UPS: usize = 3;

/// A pass with the buffers of its inputs.
pub(super) struct PassRuns<'a> {
    pub(super) device: &'a CubeDevice,
    pub(super) inputs: &'a [CubeTensor],
    pub(super) pass: &'a Pass<'a>,
    pub(super) constants: &'a Constants,
}

/// Why there is no graph.
pub(super) enum Uncaptured {
    /// The pass, or a run of it, failed.
    Pass(OpsError),
    /// All launches were made, but the recording is of no use: the device refused it, or the state
    /// was written in place in another way than before. Another thread may have used the device.
    Recording(OpsError),
}

impl From<OpsError> for Uncaptured {
    fn from(error: OpsError) -> Self {
        Self::Pass(error)
    }
}

/// State, in the buffers that are kept, and outputs of a run.
pub(super) struct RunResult {
    pub(super) state: Vec<CubeTensor>,
    pub(super) outputs: Vec<CubeTensor>,
}

impl PassRuns<'_> {
    /// Runs the pass on copies of the state, then captures it on the state itself, which is taken
    /// last.
    pub(super) fn capture(
        &self,
        state: &[CubeTensor],
        take: impl FnOnce() -> Vec<CubeTensor> + Send,
    ) -> Result<(BackendGraph<CubeBackend>, RunResult), Uncaptured> {
        // The first run compiles and tunes, which takes long, and may panic where the pass does.
        // Products that prefetch are compiled by the second warm-up.
        let buffers = self.copies(state)?;
        let ranges: Vec<_> = buffers.iter().map(memory_range).collect();
        let RunResult { state: after, outputs } = self.run(buffers, Run::First)?;
        // True for each tensor of the state that operations write in place.
        let mut in_place: Vec<_> = after.iter().zip(&ranges).map(|(a, b)| fills(a, b)).collect();
        check_same("the state", &specs(state), &specs(&after))?;
        let shapes = specs(&outputs);
        Cube::sync(self.device).map_err(OpsError::device)?;
        drop((after, outputs));
        // Warm-ups take and free memory as the capture does: no other thread may in between.
        queues::run_exclusive(self.device, || {
            wait_for_all_streams(self.device)?;
            let window = CaptureWindow::prepare(self.device)?;
            // Products prefetch from the second warm-up on, so that the capture compiles nothing.
            let notes = Notes::begin();
            // Closing the window waits for the device, which may not be done while unwinding.
            catch_panic(|| {
                for _ in 0..WARM_UPS {
                    notes.next_run();
                    let buffers = self.copies(state)?;
                    let result = self.run_and_keep(buffers, &mut in_place)?;
                    check_same("the outputs", &shapes, &specs(&result.outputs))?;
                    Cube::sync(self.device).map_err(OpsError::device)?;
                }
                Ok(())
            })?;
            let (buffers, expected) = (take(), in_place.clone());
            notes.next_run();
            let (graph, result) = window.capture(|| self.run_and_keep(buffers, &mut in_place))?;
            check_same("the outputs", &shapes, &specs(&result.outputs))?;
            let graph = graph.map_err(Uncaptured::Recording)?;
            if in_place != expected {
                let reason = "the state is written in place in one run and not in another";
                return Err(Uncaptured::Recording(not_captured(reason)));
            }
            Ok((graph, result))
        })
        .unwrap_or_else(|panic| Err(not_captured(panic).into()))
    }

    /// Copies the state to buffers that operations can write in place; see
    /// [`writable`](super::super::device::writable) for the reason to wait.
    fn copies(&self, state: &[CubeTensor]) -> Result<Vec<CubeTensor>, OpsError> {
        let buffers = state.iter().map(copy).collect();
        if !state.is_empty() {
            Cube::sync(self.device).map_err(OpsError::device)?;
        }
        Ok(buffers)
    }

    /// Runs the pass on these buffers and leaves the state in them. A tensor that is no longer
    /// written in place has lost its buffer; `in_place` then says so.
    fn run_and_keep(
        &self,
        buffers: Vec<CubeTensor>,
        in_place: &mut [bool],
    ) -> Result<RunResult, OpsError> {
        let ranges: Vec<_> = buffers.iter().map(memory_range).collect();
        let in_buffers = |tensor: &CubeTensor| {
            let (allocation, ..) = memory_range(tensor);
            ranges.iter().any(|range: &MemoryRange| range.0 == allocation)
        };
        // A tensor that is written in place may have no other owner.
        let kept: Vec<_> = (buffers.iter().zip(in_place.iter()))
            .map(|(buffer, &in_place)| (!in_place).then(|| buffer.clone()))
            .collect();
        let RunResult { state, outputs } = self.run(buffers, Run::Later)?;
        // Copies first: the writes below, or the next run, overwrite the buffers.
        let outputs = outputs
            .into_iter()
            .map(|output| if in_buffers(&output) { copy(&output) } else { output })
            .collect();
        let state: Vec<_> = (state.into_iter().zip(&kept))
            .map(|(after, kept)| match kept {
                Some(_) if in_buffers(&after) => copy(&after),
                _ => after,
            })
            .collect();
        let mut buffers = Vec::with_capacity(kept.len());
        for (at, (after, kept)) in state.into_iter().zip(kept).enumerate() {
            buffers.push(match kept {
                Some(kept) => {
                    write(after, &kept);
                    kept
                }
                None => {
                    in_place[at] = fills(&after, &ranges[at]);
                    after
                }
            });
        }
        Ok(RunResult { state: buffers, outputs })
    }

    /// Runs the pass, and takes the memory of its results.
    fn run(&self, state: Vec<CubeTensor>, run: Run) -> Result<RunResult, OpsError> {
        let inputs = register(self.device, self.inputs.to_vec());
        let state = register(self.device, state);
        let (state, outputs) = self.constants.during(run, || (self.pass)(state, inputs));
        // Outputs first: one that is also kept as state has two owners then, in every run.
        let outputs = resolve_all(self.device, outputs)?;
        let result = RunResult { state: resolve_all(self.device, state)?, outputs };
        launch_chain();
        Ok(result)
    }
}

/// Waits for the launches of all threads, so that none of CubeCL's own waits begins during the
/// capture.
fn wait_for_all_streams(device: &CubeDevice) -> Result<(), OpsError> {
    let streams = device.client().memory_report(MemoryScope::Device).streams;
    streams.into_iter().try_for_each(|report| {
        let synced = report.stream.executes(|| CubeBackend::sync(device));
        synced.map_err(OpsError::device)
    })
}

/// The time from the first warm-up to the end of the capture.
struct CaptureWindow<'a> {
    device: &'a CubeDevice,
    open: bool,
}

impl<'a> CaptureWindow<'a> {
    fn prepare(device: &'a CubeDevice) -> Result<Self, OpsError> {
        #[cfg(feature = "cuda")]
        if matches!(device, CubeDevice::Cuda(_)) {
            queues::relax_launches(device).map_err(not_captured)?;
        }
        Cube::graph_prepare(device).map_err(not_captured)?;
        Ok(Self { device, open: true })
    }

    /// Captures the launches of a task. Returns the graph, or why the device refused it, and the
    /// result of the task.
    fn capture<R>(
        mut self,
        launch: impl FnOnce() -> Result<R, OpsError>,
    ) -> Result<(Result<BackendGraph<CubeBackend>, OpsError>, R), OpsError> {
        Cube::graph_start_capture(self.device).map_err(not_captured)?;
        // A pass that reads values panics here, and the capture has to end all the same.
        let launched = catch_panic(launch);
        self.open = false;
        let graph = Cube::graph_stop_capture(self.device).map_err(not_captured);
        Ok((graph, launched?))
    }
}

impl Drop for CaptureWindow<'_> {
    fn drop(&mut self) {
        if self.open {
            // Undoes the preparation.
            let _ = Cube::graph_stop_capture(self.device);
        }
    }
}

fn catch_panic<R>(run: impl FnOnce() -> Result<R, OpsError>) -> Result<R, OpsError> {
    catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|panic| Err(not_captured(panic_message(&*panic))))
}
