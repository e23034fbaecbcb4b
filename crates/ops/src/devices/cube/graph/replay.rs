//! [`CapturedGraph`]: captures a pass and replays it.

use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::fusion::FusionTensor;
use burn::backend::fusion::custom::{
    CustomOpIr, HandleContainer, Operation, OperationIr, StreamId, TensorId, TensorIr,
};
use burn::backend::fusion::get_client;
use burn::backend::{Backend, BackendGraph, DispatchTensor, ExecutionError, TensorMetadata};
use burn_cubecl::fusion::{CubeFusionHandle, FusionCubeRuntime};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};

use super::super::device::{copy, write};
use super::super::queues;
use super::capture::{Pass, PassRuns, Uncaptured};
use super::constants::in_pass;
use super::memory::{
    check_same, dispatch_tensor, fused_on, not_captured, resolve_all, specs, to_this_stream,
};
use super::state::GraphState;
use crate::error::OpsError;

/// Held by the thread that captures, from the first run of the pass on. The launches of a pass go
/// past the queues, to the stream that another thread may be capturing.
static CAPTURING: Mutex<()> = Mutex::new(());

/// Most attempts to capture a pass, if the recording is refused.
const MOST_ATTEMPTS: usize = 3;

/// A captured forward pass: one launch on CUDA; on wgpu CubeCL encodes the prepared launches again.
/// It is bound to the shapes and dtypes of its inputs, and to everything else the pass reads, which
/// must not change as long as it is used.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{CapturedGraph, GraphState, captures_graphs};
///
/// let device = Device::flex(); // on CUDA and wgpu, after `init`, it is captured
/// let x = vec![Tensor::<1>::from_floats([1.0, 2.0], &device).into_dispatch()];
/// let doubled = GraphState::new(&device, vec![], vec![]).and_then(|mut state| {
///     let graph = CapturedGraph::capture(&mut state, x.clone(), &|state, mut inputs| {
///         let x = Tensor::<1>::from_dispatch(inputs.remove(0));
///         (state, vec![(x * 2.0).into_dispatch()])
///     })?;
///     assert!(graph.is_of(&state));
///     graph.replay(&mut state, x)
/// });
/// assert_eq!(doubled.is_ok(), captures_graphs(&device));
/// ```
pub struct CapturedGraph {
    graph: Arc<Graph>,
}

impl fmt::Debug for CapturedGraph {
    /// Leaves out the graph itself, which is the driver's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedGraph")
            .field("device", &self.graph.device)
            .field("inputs", &self.graph.inputs)
            .field("outputs", &self.graph.outputs)
            .finish_non_exhaustive()
    }
}

struct Graph {
    device: CubeDevice,
    /// Taken only when it is dropped.
    graph: Option<BackendGraph<CubeBackend>>,
    /// The stream that was captured.
    stream: StreamId,
    /// Identifies the memory of the state.
    memory: Arc<()>,
    /// Contiguous.
    inputs: Vec<CubeTensor>,
    outputs: Vec<CubeTensor>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let graph = self.graph.take();
        // CubeCL waits for the device before it drops a graph, which would void the capture of
        // another thread. Without queues nothing is captured.
        let _ = queues::run_exclusive(&self.device, || drop(graph));
    }
}

impl CapturedGraph {
    /// Runs a pass on these inputs a few times, on copies of the state, and captures it. Repeats
    /// this up to twice if the device refuses the recording, which another thread may have
    /// disturbed: other graphs captured on the state are void then, unless it is empty. The pass
    /// must use the device only from the thread that calls it: another thread would wait for ever.
    ///
    /// # Errors
    /// [`OpsError::Capture`] if the pass cannot be captured: it reads values, uploads values
    /// (`from_data`) on wgpu, waits for the device, takes memory that it did not take before, has
    /// tensors on another device, or of another stream, or shapes that differ between runs. The
    /// state keeps its values, but other graphs captured on it are void, unless it is empty.
    pub fn capture(
        state: &mut GraphState,
        inputs: Vec<DispatchTensor>,
        pass: &Pass<'_>,
    ) -> Result<Self, OpsError> {
        if in_pass() {
            return Err(not_captured("the pass that is being captured captures another"));
        }
        state.wait_for_other_queues();
        let (device, stream) = (state.device.clone(), state.stream);
        let sources = resolve_all(&device, inputs)?;
        let _turn = CAPTURING.lock().unwrap_or_else(PoisonError::into_inner);
        let constants = state.constants.clone();
        stream.executes(|| {
            let inputs: Vec<_> = sources.iter().map(copy).collect();
            let runs = PassRuns { device: &device, inputs: &inputs, pass, constants: &constants };
            let mut attempts = 0;
            let (graph, result) = loop {
                attempts += 1;
                let backup: Vec<_> = state.tensors.iter().map(copy).collect();
                let mut taken = false;
                let captured = runs.capture(&backup, || {
                    taken = true;
                    core::mem::take(&mut state.tensors)
                });
                if captured.is_err() && taken && !backup.is_empty() {
                    state.tensors = backup;
                    state.memory = Arc::new(());
                }
                match captured {
                    Ok(captured) => break captured,
                    Err(Uncaptured::Recording(_)) if attempts < MOST_ATTEMPTS => {}
                    Err(Uncaptured::Pass(error) | Uncaptured::Recording(error)) => {
                        return Err(error);
                    }
                }
            };
            state.tensors = result.state;
            let (graph, device) = (Some(graph), device.clone());
            let (outputs, memory) = (result.outputs, state.memory.clone());
            let graph = Graph { device, graph, stream, memory, inputs, outputs };
            Ok(Self { graph: Arc::new(graph) })
        })
    }

    /// Returns true if the graph was captured on the memory that the state has now.
    #[must_use]
    pub fn is_of(&self, state: &GraphState) -> bool {
        Arc::ptr_eq(&state.memory, &self.graph.memory)
    }

    /// Replays the graph on inputs of the captured shapes and dtypes, in the same order. Outputs
    /// are in memory of their own. The state has to be the one that the graph was captured on.
    ///
    /// # Errors
    /// [`OpsError::Capture`] for another state, also one on which a later capture failed or was
    /// repeated, and for inputs on another device, or of another number, shape or dtype.
    pub fn replay(
        &self,
        state: &mut GraphState,
        inputs: Vec<DispatchTensor>,
    ) -> Result<Vec<DispatchTensor>, OpsError> {
        if !self.is_of(state) {
            return Err(not_captured("the state is not the one that the graph was captured on"));
        }
        let inputs = inputs.into_iter().map(|input| fused_on(&self.graph.device, input));
        let inputs: Vec<_> = inputs.collect::<Result<_, _>>()?;
        let found = inputs.iter().map(|input| (input.shape(), input.dtype)).collect::<Vec<_>>();
        check_same("the inputs", &specs(&self.graph.inputs), &found)?;
        if state.latest != StreamId::current() && !state.tensors.is_empty() {
            state.wait_for_other_queues();
        }
        let client = get_client::<CubeBackend>(&self.graph.device);
        let read: Vec<_> = inputs.into_iter().map(FusionTensor::into_ir).collect();
        let written: Vec<_> = (self.graph.outputs.iter())
            .map(|output| {
                let id = client.create_empty_handle();
                TensorIr::uninit(id, output.meta.shape().clone(), output.dtype)
            })
            .collect();
        let operation = Replay {
            graph: self.graph.clone(),
            inputs: read.clone(),
            outputs: written.iter().map(|output| output.id).collect(),
        };
        let repr = OperationIr::Custom(CustomOpIr::new("fp4_replay", &read, &written));
        let outputs = client.register(StreamId::current(), repr, operation);
        client.flush_queue();
        Ok(outputs.into_iter().map(dispatch_tensor).collect())
    }
}

/// An operation of the stream: copies inputs in, replays the graph, copies outputs out.
struct Replay {
    graph: Arc<Graph>,
    inputs: Vec<TensorIr>,
    outputs: Vec<TensorId>,
}

impl fmt::Debug for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replay").field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

impl Operation<FusionCubeRuntime> for Replay {
    fn execute(
        &self,
        handles: &mut HandleContainer<CubeFusionHandle>,
    ) -> Result<(), ExecutionError> {
        let Graph { device, graph, stream, inputs, outputs, .. } = &*self.graph;
        let graph = graph.as_ref().expect("taken only when it is dropped");
        let sources: Vec<_> =
            self.inputs.iter().map(|ir| handles.get_float_tensor::<CubeBackend>(ir)).collect();
        let outputs: Vec<_> = stream.executes(|| {
            sources.into_iter().zip(inputs).for_each(|(source, input)| write(source, input));
            // SAFETY: CubeCL gives the memory of the graph's launches to nothing else for as long
            // as the graph lives. Everything that touches it, the copies here and the replays of
            // other graphs on the same state, is launched on the stream of the graph.
            unsafe { CubeBackend::graph_replay(device, graph) }?;
            Ok::<_, ExecutionError>(outputs.iter().map(copy).collect())
        })?;
        for (id, output) in self.outputs.iter().zip(to_this_stream(outputs, *stream)) {
            handles.register_float_tensor::<CubeBackend>(id, output);
        }
        Ok(())
    }
}
