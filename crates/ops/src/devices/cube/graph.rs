//! Launches of a pass, recorded by a device and run again as one: CUDA graphs.
//!
//! A recording is bound to memory: what it read and wrote then, it reads and writes in every run.
//! So it has buffers of its own, into which inputs are copied and out of which outputs are. State
//! that is carried from one run to the next stays in its buffers, which operations write in place
//! where they can; where they cannot, the recording ends with a copy into them. CubeCL gives no
//! memory that a recording uses to anything else for as long as the recording lives.
//!
//! CubeCL has a stream of launches for each thread, whose memory is its own. What a launch reads of
//! another stream it holds until the launch has run, and a thread waits for that. The driver voids
//! a recording as soon as anything waits for it, or begins to wait for any other launch: so all
//! that a recording reads has to be memory of the stream that records.

use core::cell::Cell;
use core::fmt;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::fusion::FusionTensor;
use burn::backend::fusion::custom::{
    CustomOpIr, HandleContainer, Operation, OperationIr, StreamId, TensorId, TensorIr,
};
use burn::backend::fusion::get_client;
use burn::backend::{
    Backend, BackendGraph, BackendTensor, Cube, DispatchAutodiffContext, DispatchTensor,
    DispatchTensorKind, ExecutionError, TensorMetadata,
};
use burn::tensor::{DType, Shape};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::fusion::{CubeFusionHandle, FusionCubeRuntime};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::cubecl::MemoryScope;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::cubecl::std::tensor::copy_into;

use super::device::beside;
use super::lane;
use super::prefetch::Notes;
use crate::error::{OpsError, panic_message};
use crate::pass::Pass;

/// Runs before the recording, besides the one that compiles and tunes: they take memory as it does.
const WARM_UPS: usize = 3;

/// Held by who records, from the first run of the pass on: what a pass puts on the device goes past
/// the lane, and to the stream that another thread may be recording.
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    /// Whether this thread runs a pass that is being recorded: its turn is taken.
    static RECORDS: Cell<bool> = const { Cell::new(false) };
}

/// Says so for as long as it lives; what was said before, afterwards.
struct InPass(bool);

impl InPass {
    fn begin() -> Self {
        Self(RECORDS.replace(true))
    }
}

impl Drop for InPass {
    fn drop(&mut self) {
        RECORDS.set(self.0);
    }
}

/// Whether launches can be recorded: by a GPU, with a lane to keep other threads out meanwhile.
pub(crate) fn has_graphs(device: &CubeDevice) -> bool {
    matches!(device, CubeDevice::Cuda(_)) && lane::is_open(device)
}

/// Tensors that stay in their memory from one run to the next.
#[derive(Debug)]
pub(crate) struct State {
    device: CubeDevice,
    /// Contiguous, with no other owner.
    tensors: Vec<CubeTensor>,
    /// The stream that records and runs on them, so that runs happen one after the other: that of
    /// most of the weights.
    stream: StreamId,
    /// Whether some of the weights are memory of another stream.
    mixed: bool,
    /// What was copied into memory of the stream, by where it was.
    gathered: HashMap<Place, Handle>,
    /// The stream in whose queue the latest of them is.
    latest: StreamId,
    /// Of the memory that they are in: a recording on other memory is void.
    memory: Arc<()>,
}

impl State {
    /// Copies of tensors, for passes that read these weights.
    pub(crate) fn new(
        device: &CubeDevice,
        weights: Vec<DispatchTensor>,
        tensors: Vec<DispatchTensor>,
    ) -> Result<Self, OpsError> {
        let latest = StreamId::current();
        let (stream, mixed) = stream_of(device, weights).unwrap_or((latest, false));
        let sources = resolved(device, tensors)?;
        let tensors = match sources.is_empty() {
            true => Vec::new(),
            false => launched_on(device, stream, || sources.iter().map(copy).collect())?,
        };
        Ok(Self {
            device: device.clone(),
            tensors,
            stream,
            mixed,
            gathered: HashMap::new(),
            latest,
            memory: Arc::new(()),
        })
    }

    /// Whether some of the weights have to be [gathered](Self::gather).
    pub(crate) fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// The same values in memory of the stream that records, if they are in that of another.
    pub(crate) fn gather(
        &mut self,
        tensor: DispatchTensor,
    ) -> Result<Option<DispatchTensor>, OpsError> {
        let autodiff = tensor.autodiff;
        // Tensors that cannot be recorded stay as they are.
        let Ok(tensor) = on(&self.device, tensor) else { return Ok(None) };
        let source = resolve(tensor)?;
        if source.handle.stream == self.stream {
            return Ok(None);
        }
        let place = place(&source);
        let handle = match self.gathered.get(&place).cloned() {
            Some(handle) => handle,
            None => {
                let launch = || copy_of_memory(&source);
                let handle = launched_on(&self.device, self.stream, launch)?;
                self.gathered.insert(place, handle.clone());
                handle
            }
        };
        let moved = vec![CubeTensor { handle, ..source }];
        let given = self.stream.executes(|| give(&self.device, moved)).pop();
        Ok(given.map(|tensor| DispatchTensor { autodiff, ..tensor }))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Copies of what the tensors are after all runs so far.
    pub(crate) fn read(&mut self) -> Vec<DispatchTensor> {
        if self.is_empty() {
            return Vec::new();
        }
        self.wait_for_other_queues();
        let copies = launched_on(&self.device, StreamId::current(), || {
            let copies = self.stream.executes(|| self.tensors.iter().map(copy).collect());
            readable(copies, self.stream)
        });
        give(&self.device, copies.expect("copied as when it was made"))
    }

    /// Has the runs that wait in the queue of another thread go before what follows in this one's.
    fn wait_for_other_queues(&mut self) {
        let current = StreamId::current();
        for queue in [core::mem::replace(&mut self.latest, current), current] {
            queue.executes(|| get_client::<CubeBackend>(&self.device).sync(|| ()));
        }
    }
}

/// The stream that most of the bytes of these tensors are memory of, and whether others are of
/// another.
fn stream_of(device: &CubeDevice, tensors: Vec<DispatchTensor>) -> Option<(StreamId, bool)> {
    let mut bytes = HashMap::<StreamId, u64>::new();
    for tensor in tensors {
        if let Ok(found) = resolved(device, vec![tensor]) {
            let handles = found.iter().map(|tensor| &tensor.handle);
            handles.for_each(|handle| *bytes.entry(handle.stream).or_default() += handle.size());
        }
    }
    let mixed = bytes.len() > 1;
    bytes.into_iter().max_by_key(|&(_, bytes)| bytes).map(|(stream, _)| (stream, mixed))
}

/// A pass whose launches a device has recorded.
pub(crate) struct Recorded {
    graph: Arc<Graph>,
}

impl fmt::Debug for Recorded {
    /// Without the graph itself, which is the driver's.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorded")
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
    /// That the launches were recorded on.
    stream: StreamId,
    /// Of the state.
    memory: Arc<()>,
    /// Contiguous.
    inputs: Vec<CubeTensor>,
    outputs: Vec<CubeTensor>,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let graph = self.graph.take();
        // CubeCL waits for the device before it drops a graph, which would void what another
        // thread records. Without a lane nothing records.
        let _ = lane::alone(&self.device, || drop(graph));
    }
}

impl Recorded {
    /// Runs a pass on these inputs a few times, on copies of the state, and records it.
    ///
    /// # Errors
    /// [`OpsError::Recording`] if it cannot be recorded, shapes differ between runs, or the state
    /// changes its shapes. The state is as it was, but in other memory: other recordings on it are
    /// void.
    pub(crate) fn new(
        state: &mut State,
        inputs: Vec<DispatchTensor>,
        pass: &Pass<'_>,
    ) -> Result<Self, OpsError> {
        if RECORDS.get() {
            return Err(not_recorded("the pass that is being recorded records another"));
        }
        state.wait_for_other_queues();
        let (device, stream) = (state.device.clone(), state.stream);
        let sources = resolved(&device, inputs)?;
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        stream.executes(|| {
            let inputs: Vec<_> = sources.iter().map(copy).collect();
            let backup: Vec<_> = state.tensors.iter().map(copy).collect();
            let round = Rounds { device: &device, inputs: &inputs, pass };
            let mut taken = false;
            let recorded = round.record(&backup, || {
                taken = true;
                core::mem::take(&mut state.tensors)
            });
            if recorded.is_err() && taken && !backup.is_empty() {
                state.tensors = backup;
                state.memory = Arc::new(());
            }
            let (graph, left) = recorded?;
            state.tensors = left.state;
            let (graph, device) = (Some(graph), device.clone());
            let (outputs, memory) = (left.outputs, state.memory.clone());
            let graph = Graph { device, graph, stream, memory, inputs, outputs };
            Ok(Self { graph: Arc::new(graph) })
        })
    }

    /// Runs the recording on inputs, in the order of the stream of operations.
    ///
    /// # Errors
    /// [`OpsError::Recording`] for another state than that it was recorded on, or inputs of other
    /// devices, shapes or dtypes.
    pub(crate) fn run(
        &self,
        state: &mut State,
        inputs: Vec<DispatchTensor>,
    ) -> Result<Vec<DispatchTensor>, OpsError> {
        if !Arc::ptr_eq(&state.memory, &self.graph.memory) {
            return Err(not_recorded("the state is not the one that it was recorded on"));
        }
        let inputs = inputs.into_iter().map(|input| on(&self.graph.device, input));
        let inputs: Vec<_> = inputs.collect::<Result<_, _>>()?;
        let given = inputs.iter().map(|input| (input.shape(), input.dtype)).collect::<Vec<_>>();
        same("the inputs", &specs(&self.graph.inputs), &given)?;
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
        let operation = Run {
            graph: self.graph.clone(),
            inputs: read.clone(),
            outputs: written.iter().map(|output| output.id).collect(),
        };
        let repr = OperationIr::Custom(CustomOpIr::new("fp4_replay", &read, &written));
        let outputs = client.register(StreamId::current(), repr, operation);
        client.flush_queue();
        Ok(outputs.into_iter().map(dispatch).collect())
    }
}

type Fused = FusionTensor<FusionCubeRuntime>;

/// The runs of a pass of which the last is recorded.
struct Rounds<'a> {
    device: &'a CubeDevice,
    inputs: &'a [CubeTensor],
    pass: &'a Pass<'a>,
}

/// What a round leaves: the state in the buffers that are kept, and the outputs.
struct Left {
    state: Vec<CubeTensor>,
    outputs: Vec<CubeTensor>,
}

impl Rounds<'_> {
    /// Runs the pass on copies of the state, then records it on the state itself, which is taken
    /// when all else has been done.
    fn record(
        &self,
        state: &[CubeTensor],
        take: impl FnOnce() -> Vec<CubeTensor> + Send,
    ) -> Result<(BackendGraph<CubeBackend>, Left), OpsError> {
        // The first run compiles and tunes, which takes long, and may panic where the pass does.
        // Products that read ahead are compiled later, by the second of the other runs.
        let buffers: Vec<_> = state.iter().map(copy).collect();
        let places: Vec<_> = buffers.iter().map(place).collect();
        let (after, outputs) = self.run(buffers)?;
        // Which tensors of the state operations write where they are.
        let mut in_place: Vec<_> = after.iter().zip(&places).map(|(a, b)| is_at(a, b)).collect();
        same("the state", &specs(state), &specs(&after))?;
        let shapes = specs(&outputs);
        Cube::sync(self.device).map_err(OpsError::device)?;
        drop((after, outputs));
        // The others take and free memory as the recording does: no other thread may in between.
        lane::alone(self.device, || {
            wait_for_all_streams(self.device)?;
            let window = Window::prepare(self.device)?;
            // From the second of them on products read ahead: the recording compiles nothing.
            let notes = Notes::begin();
            // Closing the window waits for the device, which may not be done while unwinding.
            caught(|| {
                for _ in 0..WARM_UPS {
                    notes.next_run();
                    let buffers = state.iter().map(copy).collect();
                    let left = self.run_and_keep(buffers, &mut in_place)?;
                    same("the outputs", &shapes, &specs(&left.outputs))?;
                    Cube::sync(self.device).map_err(OpsError::device)?;
                }
                Ok(())
            })?;
            let (buffers, expected) = (take(), in_place.clone());
            notes.next_run();
            let (graph, left) = window.record(|| self.run_and_keep(buffers, &mut in_place))?;
            same("the outputs", &shapes, &specs(&left.outputs))?;
            if in_place != expected {
                let reason = "the state is written in place in one run and not in another";
                return Err(not_recorded(reason));
            }
            Ok((graph, left))
        })
        .unwrap_or_else(|panic| Err(not_recorded(panic)))
    }

    /// Runs the pass on these buffers, and leaves the state in them, unless it finds that what was
    /// written in place in an earlier run is not in this one.
    fn run_and_keep(
        &self,
        buffers: Vec<CubeTensor>,
        in_place: &mut [bool],
    ) -> Result<Left, OpsError> {
        let places: Vec<_> = buffers.iter().map(place).collect();
        let is_of_state =
            |tensor: &CubeTensor| places.iter().any(|place| place.0 == self::place(tensor).0);
        // What is written in place has no other owner.
        let kept: Vec<_> = (buffers.iter().zip(in_place.iter()))
            .map(|(buffer, &in_place)| (!in_place).then(|| buffer.clone()))
            .collect();
        let (after, outputs) = self.run(buffers)?;
        // Copies first of what is in a buffer that a copy below, or the next run, overwrites.
        let own = |output| if is_of_state(&output) { copy(&output) } else { output };
        let outputs = outputs.into_iter().map(own).collect();
        let after: Vec<_> = (after.into_iter().zip(&kept))
            .map(|(after, kept)| match kept {
                Some(_) if is_of_state(&after) => copy(&after),
                _ => after,
            })
            .collect();
        let mut state = Vec::with_capacity(kept.len());
        for (at, (after, kept)) in after.into_iter().zip(kept).enumerate() {
            state.push(match kept {
                Some(kept) => {
                    write(after, &kept);
                    kept
                }
                None => {
                    in_place[at] = is_at(&after, &places[at]);
                    after
                }
            });
        }
        Ok(Left { state, outputs })
    }

    /// State and outputs of a run.
    fn run(&self, state: Vec<CubeTensor>) -> Result<(Vec<CubeTensor>, Vec<CubeTensor>), OpsError> {
        let inputs = give(self.device, self.inputs.to_vec());
        let state = give(self.device, state);
        let (state, outputs) = {
            let _in_pass = InPass::begin();
            (self.pass)(state, inputs)
        };
        // Outputs first: what is also kept as state has two owners then, as in every run.
        let outputs = resolved(self.device, outputs)?;
        Ok((resolved(self.device, state)?, outputs))
    }
}

/// Waits for the launches of all threads: CubeCL's waits for them, which would begin while one
/// records, are over then.
fn wait_for_all_streams(device: &CubeDevice) -> Result<(), OpsError> {
    let streams = device.client().memory_report(MemoryScope::Device).streams;
    streams.into_iter().try_for_each(|report| {
        let synced = report.stream.executes(|| CubeBackend::sync(device));
        synced.map_err(OpsError::device)
    })
}

/// From the first run before a recording to its end.
struct Window<'a> {
    device: &'a CubeDevice,
    open: bool,
}

impl<'a> Window<'a> {
    fn prepare(device: &'a CubeDevice) -> Result<Self, OpsError> {
        #[cfg(feature = "cuda")]
        lane::relax_launching(device).map_err(not_recorded)?;
        Cube::graph_prepare(device).map_err(not_recorded)?;
        Ok(Self { device, open: true })
    }

    /// Records what is launched meanwhile.
    fn record<R>(
        mut self,
        launch: impl FnOnce() -> Result<R, OpsError>,
    ) -> Result<(BackendGraph<CubeBackend>, R), OpsError> {
        Cube::graph_start_capture(self.device).map_err(not_recorded)?;
        // A pass that reads values panics here, and the recording has to end all the same.
        let launched = caught(launch);
        self.open = false;
        let graph = Cube::graph_stop_capture(self.device).map_err(not_recorded);
        let launched = launched?;
        Ok((graph?, launched))
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        if self.open {
            // It was only prepared: there is nothing to stop but that.
            let _ = Cube::graph_stop_capture(self.device);
        }
    }
}

/// An operation of the stream: copies inputs in, runs the launches, copies outputs out.
struct Run {
    graph: Arc<Graph>,
    inputs: Vec<TensorIr>,
    outputs: Vec<TensorId>,
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

impl Operation<FusionCubeRuntime> for Run {
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
            // SAFETY: CubeCL gives the memory that the launches read and write to nothing else for
            // as long as the graph lives. Everything that touches it, the copies here and the runs
            // of other recordings on the same state, is launched on the stream of the graph.
            unsafe { CubeBackend::graph_replay(device, graph) }?;
            Ok::<_, ExecutionError>(outputs.iter().map(copy).collect())
        })?;
        for (id, output) in self.outputs.iter().zip(readable(outputs, *stream)) {
            handles.register_float_tensor::<CubeBackend>(id, output);
        }
        Ok(())
    }
}

/// An operation of the stream that makes tensors of what is in memory already.
struct Give {
    tensors: Mutex<Vec<(TensorId, CubeTensor)>>,
}

impl fmt::Debug for Give {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Give").finish_non_exhaustive()
    }
}

impl Operation<FusionCubeRuntime> for Give {
    fn execute(
        &self,
        handles: &mut HandleContainer<CubeFusionHandle>,
    ) -> Result<(), ExecutionError> {
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, tensor) in tensors.drain(..) {
            handles.register_float_tensor::<CubeBackend>(&id, tensor);
        }
        Ok(())
    }
}

/// Tensors of the stream that are what is in this memory, of which they are the owners.
fn give(device: &CubeDevice, tensors: Vec<CubeTensor>) -> Vec<DispatchTensor> {
    if tensors.is_empty() {
        return Vec::new();
    }
    let client = get_client::<CubeBackend>(device);
    let given: Vec<_> =
        tensors.into_iter().map(|tensor| (client.create_empty_handle(), tensor)).collect();
    let outputs: Vec<_> = (given.iter())
        .map(|(id, tensor)| TensorIr::uninit(*id, tensor.shape(), tensor.dtype))
        .collect();
    let repr = OperationIr::Custom(CustomOpIr::new("fp4_give", &[], &outputs));
    let tensors = client.register(StreamId::current(), repr, Give { tensors: Mutex::new(given) });
    tensors.into_iter().map(dispatch).collect()
}

/// The memory of tensors, once all that goes before is launched.
fn resolved(
    device: &CubeDevice,
    tensors: Vec<DispatchTensor>,
) -> Result<Vec<CubeTensor>, OpsError> {
    tensors.into_iter().map(|tensor| on(device, tensor).and_then(resolve)).collect()
}

fn resolve(tensor: Fused) -> Result<CubeTensor, OpsError> {
    let client = tensor.client.clone();
    // An operation that failed panics where its result is asked for.
    catch_unwind(AssertUnwindSafe(|| client.resolve_tensor_float::<CubeBackend>(tensor)))
        .map_err(|panic| OpsError::Device(panic_message(&*panic)))
}

/// Runs what launches on a stream while no thread records: it might be on this stream.
fn launched_on<R: Send>(
    device: &CubeDevice,
    stream: StreamId,
    launch: impl FnOnce() -> R + Send,
) -> Result<R, OpsError> {
    lane::alone(device, || stream.executes(launch)).map_err(not_recorded)
}

/// A tensor of the stream of operations of a device.
fn on(device: &CubeDevice, tensor: DispatchTensor) -> Result<Fused, OpsError> {
    let found = tensor.device();
    fused(tensor)
        .filter(|tensor| tensor.client.device() == device)
        .ok_or_else(|| not_recorded(format!("a tensor on {found:?} in a pass on {device:?}")))
}

/// A tensor of the stream, unless it is of another device, differentiated, or quantized by Burn.
fn fused(tensor: DispatchTensor) -> Option<Fused> {
    match tensor.kind {
        DispatchTensorKind::Cube(
            BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
        ) => Some(tensor),
        _ => None,
    }
}

fn dispatch(tensor: Fused) -> DispatchTensor {
    let tensor = match tensor.dtype {
        dtype if dtype.is_float() => BackendTensor::Float(tensor),
        dtype if dtype.is_bool() => BackendTensor::Bool(tensor),
        _ => BackendTensor::Int(tensor),
    };
    let kind = DispatchTensorKind::Cube(tensor);
    DispatchTensor { kind, autodiff: DispatchAutodiffContext::Disabled }
}

/// Which memory a tensor is in: an allocation, and the part of it.
type Place = (usize, Option<u64>, Option<u64>);

fn place(tensor: &CubeTensor) -> Place {
    let handle = &tensor.handle;
    (handle.memory.descriptor().id.value, handle.offset_start, handle.offset_end)
}

/// Whether a tensor is all that is in this memory, in order.
fn is_at(tensor: &CubeTensor, before: &Place) -> bool {
    place(tensor) == *before && tensor.is_contiguous() && !tensor.meta.is_tiled()
}

/// What was made on a stream, for the stream of this thread. Whoever reads memory of another stream
/// has CubeCL mark a point in that one, which must not happen while it records.
fn readable(tensors: Vec<CubeTensor>, stream: StreamId) -> Vec<CubeTensor> {
    if StreamId::current() == stream { tensors } else { tensors.iter().map(copy).collect() }
}

/// The same values in contiguous memory of their own.
fn copy(tensor: &CubeTensor) -> CubeTensor {
    let shape = tensor.meta.shape().clone();
    let bytes = shape.num_elements() * dtype_to_storage_type(tensor.dtype).size();
    let made = beside(tensor, tensor.client.empty(bytes), shape, tensor.dtype);
    write(tensor.clone(), &made);
    made
}

/// A copy of all the memory behind a tensor, for its layout: products may sum in another order
/// for another.
fn copy_of_memory(tensor: &CubeTensor) -> Handle {
    let (handle, dtype) = (&tensor.handle, tensor.dtype);
    let bytes = handle.size_in_used() as usize;
    let flat = |handle| {
        let shape = Shape::new([bytes / dtype_to_storage_type(dtype).size()]);
        beside(tensor, handle, shape, dtype)
    };
    let made = tensor.client.empty(bytes);
    write(flat(handle.clone()), &flat(made.clone()));
    made
}

/// Copies values into contiguous memory.
fn write(values: CubeTensor, memory: &CubeTensor) {
    if memory.meta.num_elements() > 0 {
        let (values, storage) = (into_contiguous(values), dtype_to_storage_type(memory.dtype));
        copy_into(&memory.client, values.binding(), memory.clone().binding(), storage);
    }
}

/// # Errors
/// [`OpsError::Recording`] if shapes or dtypes differ between runs.
fn same(what: &str, expected: &[(Shape, DType)], found: &[(Shape, DType)]) -> Result<(), OpsError> {
    if expected == found {
        return Ok(());
    }
    Err(not_recorded(format!("{what}: {expected:?} when first run, and then {found:?}")))
}

fn specs(tensors: &[CubeTensor]) -> Vec<(Shape, DType)> {
    tensors.iter().map(|tensor| (tensor.meta.shape().clone(), tensor.dtype)).collect()
}

/// Runs what may panic as the pass does.
fn caught<R>(run: impl FnOnce() -> Result<R, OpsError>) -> Result<R, OpsError> {
    catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|panic| Err(not_recorded(panic_message(&*panic))))
}

fn not_recorded(reason: impl ToString) -> OpsError {
    OpsError::Recording(reason.to_string())
}
