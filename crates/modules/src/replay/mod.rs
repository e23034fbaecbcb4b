//! [`Replay`]: a forward pass captured once and replayed, without launching anything from the host.
//!
//! | module       | what it holds                                                          |
//! |--------------|------------------------------------------------------------------------|
//! | `tensors.rs` | [`ReplayTensors`]: what goes into a replay and comes out of it         |
//! | `weights.rs` | the tensors of a model that a capture reads                            |

mod tensors;
mod weights;

use std::fmt;
use std::sync::OnceLock;

use burn::backend::DispatchTensor;
use burn::module::Module;
use burn::tensor::Device;
use burn_fp4_ops::{
    CapturedGraph, GraphState, OpsError, captures_graphs, is_host, on_awake_threads,
};

use self::tensors::Signature;
use self::weights::{gathered, weights};

pub use self::tensors::{ReplayParts, ReplayTensors};

/// Captures that are kept, unless [set otherwise](Replay::with_most_captures).
const MOST: usize = 16;

/// The forward pass of a model, captured for the shapes of its inputs by a device that can (CUDA,
/// wgpu), and replayed from then on. A captured pass is one launch on CUDA, instead of hundreds; on
/// wgpu CubeCL encodes the prepared launches again. Elsewhere the pass itself runs, with the same
/// results; [`is_graph`](Self::is_graph) says which. On hosts a thread of rayon's pool runs it, and
/// the others stay awake while it has tasks for them: operations need not wake one up each.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_modules::{Fp4Config, Fp4Module, Replay};
///
/// let device = Device::flex();
/// let mut layer = LinearConfig::new(64, 32).init(&device);
/// layer.quantize_fp4(&Fp4Config::nvfp4())?;
///
/// let mut replay = Replay::new(layer, |layer: &Linear, x: Tensor<2>| layer.forward(x))
///     .with_most_captures(4);
/// let output = replay.run(Tensor::ones([1, 64], &device))?;
/// assert_eq!(output.dims(), [1, 32]);
/// let layer = replay.into_model();
/// assert_eq!(layer.weight.dims(), [64, 32]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// **What is captured.** What the pass does for inputs of these shapes and dtypes: one capture
/// for each, of which the 16 used last are kept. Before it captures, it runs the pass four times.
/// Inputs are copied in and outputs copied out, so that tensors that were handed out do not change.
/// Numbers that the pass draws or computes on the host are captured too: every replay has the same.
///
/// **What it reads.** Inputs, state, and the model, which the replay owns, so that nothing that
/// happens elsewhere to the weights of a clone, quantized, trained, moved or dropped, changes it.
/// The pass is a function that captures nothing for the same reason.
/// [`change`](Self::change) gives the model to whoever wants to change it, and forgets the
/// captures.
///
/// **State** is what a run hands to the next, such as the keys and values of a decoder. What the
/// pass does to it in place, as `select_assign` at a position that is a tensor, is done in place in
/// every replay; what it makes anew is copied back.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor};
/// use burn_fp4_modules::Replay;
///
/// // Keys [context, channels], the key of a token [1, channels], its position [1].
/// type Inputs = (Tensor<2>, Tensor<1, Int>);
/// fn step(layer: &Linear, keys: Tensor<2>, (x, position): Inputs) -> (Tensor<2>, Tensor<2>) {
///     let keys = keys.select_assign(0, position, layer.forward(x.clone()), IndexingUpdateOp::Add);
///     let scores = x.matmul(keys.clone().transpose());
///     (keys, scores)
/// }
///
/// let device = Device::flex();
/// let layer = LinearConfig::new(64, 64).init(&device);
/// let mut replay = Replay::with_state(layer, Tensor::zeros([16, 64], &device), step);
/// for position in 0..4 {
///     let position = Tensor::from_ints([position], &device);
///     let scores = replay.run((Tensor::ones([1, 64], &device), position))?;
///     assert_eq!(scores.dims(), [1, 16]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// **Where passes are captured.** On the first CUDA device, and on Burn's default devices of wgpu
/// and Vulkan, after [`init`](burn_fp4_ops::init), for inputs that are not differentiated; the
/// device of the first input counts. On wgpu a pass that uploads values (`from_data`) cannot be
/// captured.
///
/// **Threads.** A replay may run on any thread, threads may have replays of one model, and a model
/// may have been made by several: the device captures on the stream of the thread that made most of
/// its bytes, and parameters of the others are copied into memory of that stream, once. So are
/// the tensors of a [`RotaryEmbedding`](burn_fp4_ops::RotaryEmbedding) and of an
/// [`Int8Matrix`](burn_fp4_ops::Int8Matrix). Other tensors of other threads that are no
/// parameters, as a field that is a plain tensor, cannot be captured.
///
/// While a replay captures, operations of other threads wait, and so do other replays, also while
/// kernels are compiled by which products read ahead; one that its own pass would capture is an
/// error. Other threads may quantize, load, take memory and read meanwhile: a thread that uses
/// packed weights is exempt from what the driver forbids while a stream is captured. Two limits
/// remain. Data that are put on the device (`from_data`) by the thread on whose stream is
/// captured, or by one that has the same stream (CubeCL has 128, which threads get in turn), may
/// be lost without an error. A thread that has used no packed weight yet, and waits for a result
/// at the moment when a capture begins, can fail, and so can the capture, which is tried three
/// times. To be safe from either, capture first, by a run for each combination of shapes, and
/// serve then.
///
/// **CUDA graphs of your own.** A thread's first use of a packed weight sets its capture mode to
/// relaxed (`cuThreadExchangeStreamCaptureMode` of the driver), and the mode stays so. If the
/// thread captures a graph of its own, the driver then no longer refuses calls that no graph
/// can hold, such as allocations. To have them refused, call that function after the first
/// use, with the mode global or thread-local, and with relaxed again before a replay of another
/// thread captures.
///
/// The pass uses the device from the thread that it is called on, and from no other, which would
/// wait for ever. So would a lock that another thread holds while it uses the device: clones of a
/// `BatchNorm` have one.
pub struct Replay<M, I, O, S = ()> {
    model: M,
    /// `None` if a pass panicked with it.
    state: Option<Held<S>>,
    forward: Forward<M, S, I, O>,
    /// In the order of their last use.
    captures: Vec<Capture>,
    most: usize,
    is_graph: bool,
}

impl<M, I, O, S> fmt::Debug for Replay<M, I, O, S> {
    /// Without the model, the state and the pass.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inputs: Vec<_> = self.captures.iter().map(|capture| &capture.inputs).collect();
        f.debug_struct("Replay")
            .field("captures", &inputs)
            .field("most", &self.most)
            .field("is_graph", &self.is_graph)
            .finish_non_exhaustive()
    }
}

type Forward<M, S, I, O> = Box<dyn Fn(&M, S, I) -> (S, O) + Send + Sync>;

/// The state, as long as nothing is captured, or where captures have it.
enum Held<S> {
    Tensors(S),
    Captured { state: GraphState, lengths: Vec<usize> },
}

struct Capture {
    inputs: Signature,
    graph: CapturedGraph,
    /// Tensors in each output.
    lengths: Vec<usize>,
}

/// Why a pass cannot be run or replayed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The pass reads values, uploads values (`from_data`) on wgpu, waits for the device, takes
    /// more memory in one run than in another, has tensors on other devices than its first input,
    /// or of other threads that are no parameters, or gives other shapes in another run. Or other
    /// threads put data on a device, or read from one, while it was captured.
    #[error(
        "the pass cannot be captured: {reason}; it may not read values (`into_data`, \
         `into_scalar`), nor on wgpu upload them (`from_data`), nor depend on anything but its \
         arguments, and tensors of other threads have to be parameters"
    )]
    Capture {
        /// The message of the device.
        reason: String,
    },
    /// The pass gives a state of other shapes or dtypes than it is given.
    #[error("the pass changes its state: {0}")]
    State(String),
    /// An earlier run panicked, and with it the state was lost.
    #[error("an earlier run panicked, and took the state with it: give it one by `set_state`")]
    Lost,
    /// The device failed.
    #[error("device: {0}")]
    Device(String),
}

impl From<OpsError> for ReplayError {
    fn from(error: OpsError) -> Self {
        match error {
            OpsError::Capture(reason) => Self::Capture { reason },
            OpsError::Device(problem) => Self::Device(problem),
            other => Self::Device(other.to_string()),
        }
    }
}

impl<M: Module + Sync, I: ReplayTensors, O: ReplayTensors> Replay<M, I, O> {
    /// Makes a replay of a pass without state.
    #[must_use]
    pub fn new(model: M, forward: fn(&M, I) -> O) -> Self
    where
        M: 'static,
        I: 'static,
        O: 'static,
    {
        let forward = move |model: &M, (): (), inputs: I| ((), forward(model, inputs));
        Self::of(model, (), Box::new(forward))
    }
}

impl<M: Module + Sync, I: ReplayTensors, O: ReplayTensors, S: ReplayTensors> Replay<M, I, O, S> {
    /// Makes a replay of a pass that hands a state from each run to the next.
    #[must_use]
    pub fn with_state(model: M, state: S, forward: fn(&M, S, I) -> (S, O)) -> Self
    where
        M: 'static,
        I: 'static,
        O: 'static,
        S: 'static,
    {
        Self::of(model, state, Box::new(forward))
    }

    fn of(model: M, state: S, forward: Forward<M, S, I, O>) -> Self {
        let state = Some(Held::Tensors(state));
        Self { model, state, forward, captures: Vec::new(), most: MOST, is_graph: false }
    }

    /// How many captures are kept at most, one for each combination of shapes; at least one.
    #[must_use]
    pub fn with_most_captures(self, most: usize) -> Self {
        Self { most: most.max(1), ..self }
    }

    /// The outputs for these inputs, in memory of their own. The first run with inputs of these
    /// shapes and dtypes captures.
    ///
    /// # Errors
    /// [`ReplayError::Capture`]; the state is then what it was before. [`ReplayError::State`], if
    /// the pass gives another kind of state than it is given; which of the two it has then is not
    /// said: [`set_state`](Self::set_state) gives it one.
    /// An error of the device that comes while a replay runs is found where its outputs are read.
    pub fn run(&mut self, inputs: I) -> Result<O, ReplayError> {
        let inputs = ReplayParts::of(inputs);
        let device = inputs.device().filter(captures_graphs);
        self.is_graph = device.is_some();
        match device {
            Some(device) => self.replay(&device, inputs),
            None => {
                self.captures.clear();
                self.run_parts(inputs)
            }
        }
    }

    /// Returns true if the latest run replayed a captured pass, or captured it. Otherwise it ran
    /// the pass itself.
    pub fn is_graph(&self) -> bool {
        self.is_graph
    }

    /// How many captures there are.
    ///
    /// ```
    /// use burn::nn::Relu;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::Replay;
    ///
    /// let mut replay = Replay::new(Relu::new(), |relu: &Relu, x: Tensor<1>| relu.forward(x));
    /// replay.run(Tensor::ones([2], &Device::flex()))?;
    /// assert_eq!(replay.captures(), 0); // a CPU runs the pass; CUDA and wgpu have a capture now
    /// # Ok::<(), burn_fp4_modules::ReplayError>(())
    /// ```
    pub fn captures(&self) -> usize {
        self.captures.len()
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Changes the model, and forgets the captures.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::{Fp4Config, Fp4Module, PackedWeight, Replay};
    ///
    /// let layer = LinearConfig::new(64, 32).init(&Device::flex());
    /// let mut replay = Replay::new(layer, |layer: &Linear, x: Tensor<2>| layer.forward(x));
    /// replay.change(|layer| layer.quantize_fp4(&Fp4Config::nvfp4()))?;
    /// let weight = &replay.model().weight;
    /// assert!(weight.reparameterization::<PackedWeight>().is_some());
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    pub fn change<R>(&mut self, change: impl FnOnce(&mut M) -> R) -> R {
        self.captures.clear();
        self.state = match self.state.take() {
            Some(Held::Captured { mut state, lengths }) => {
                Some(Held::Tensors(ReplayParts::new(state.read(), &lengths).into()))
            }
            other => other,
        };
        change(&mut self.model)
    }

    /// Ends it and gives the model back.
    #[must_use]
    pub fn into_model(self) -> M {
        self.model
    }

    /// A copy of the state after all runs so far.
    ///
    /// ```
    /// use burn::nn::Relu;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::Replay;
    ///
    /// let device = Device::flex();
    /// let count = |_: &Relu, total: Tensor<1>, x: Tensor<1>| (total + x.clone(), x);
    /// let mut replay = Replay::with_state(Relu::new(), Tensor::zeros([2], &device), count);
    /// for total in [1.0, 2.0] {
    ///     replay.run(Tensor::ones([2], &device))?;
    ///     let expected = Tensor::<1>::full([2], total, &device);
    ///     assert_eq!(replay.state()?.into_data(), expected.into_data());
    /// }
    /// # Ok::<(), burn_fp4_modules::ReplayError>(())
    /// ```
    ///
    /// # Errors
    /// [`ReplayError::Lost`] if an earlier run panicked.
    pub fn state(&mut self) -> Result<S, ReplayError>
    where
        S: Clone,
    {
        match self.state.as_mut().ok_or(ReplayError::Lost)? {
            Held::Tensors(state) => Ok(state.clone()),
            Held::Captured { state, lengths } => Ok(ReplayParts::new(state.read(), lengths).into()),
        }
    }

    /// Replaces the state, and forgets the captures.
    ///
    /// ```
    /// use burn::nn::Relu;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::Replay;
    ///
    /// let device = Device::flex();
    /// let count = |_: &Relu, total: Tensor<1>, x: Tensor<1>| (total.clone() + x, total);
    /// let mut replay = Replay::with_state(Relu::new(), Tensor::zeros([2], &device), count);
    /// replay.run(Tensor::ones([2], &device))?;
    /// replay.set_state(Tensor::ones([2], &device));
    /// let before = replay.run(Tensor::ones([2], &device))?;
    /// assert_eq!(before.into_data(), Tensor::<1>::ones([2], &device).into_data());
    /// # Ok::<(), burn_fp4_modules::ReplayError>(())
    /// ```
    pub fn set_state(&mut self, state: S) {
        self.captures.clear();
        self.state = Some(Held::Tensors(state));
    }

    /// Runs the pass without capturing it, for inputs of shapes that come once, such as a prompt.
    /// Forgets the captures.
    ///
    /// ```
    /// use burn::nn::Relu;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::Replay;
    ///
    /// let device = Device::flex();
    /// let sum = |_: &Relu, total: Tensor<1>, x: Tensor<1>| (total + x.clone().sum(), x);
    /// let mut replay = Replay::with_state(Relu::new(), Tensor::zeros([1], &device), sum);
    /// replay.run_once(Tensor::ones([5], &device))?; // a prompt of five tokens
    /// replay.run(Tensor::ones([1], &device))?; // then one at a time
    /// assert_eq!(replay.state()?.into_scalar::<f32>(), 6.0);
    /// # Ok::<(), burn_fp4_modules::ReplayError>(())
    /// ```
    ///
    /// # Errors
    /// [`ReplayError::State`] and [`ReplayError::Lost`], as [`run`](Self::run).
    pub fn run_once(&mut self, inputs: I) -> Result<O, ReplayError> {
        self.captures.clear();
        self.is_graph = false;
        self.run_parts(ReplayParts::of(inputs))
    }

    /// Runs the pass itself: on hosts by a thread of the pool that its operations share. From any
    /// other thread each operation would wait until one of the pool has woken up and ended it.
    fn run_parts(&mut self, inputs: ReplayParts) -> Result<O, ReplayError> {
        let state = match self.state.take().ok_or(ReplayError::Lost)? {
            Held::Tensors(state) => state,
            Held::Captured { mut state, lengths } => {
                ReplayParts::new(state.read(), &lengths).into()
            }
        };
        let state = ReplayParts::of(state);
        let before = state.signature();
        let on_host = inputs.device().is_some_and(|device| is_host(&device));
        let (model, forward) = (&self.model, &self.forward);
        let pass = move || {
            let (state, outputs) = forward(model, state.into(), inputs.into());
            (ReplayParts::of(state), ReplayParts::of(outputs))
        };
        let (state, outputs) = if on_host { on_awake_threads(pass) } else { pass() };
        let after = state.signature();
        self.state = Some(Held::Tensors(state.into()));
        if before == after { Ok(outputs.into()) } else { Err(changed(&before, &after)) }
    }

    fn replay(&mut self, device: &Device, inputs: ReplayParts) -> Result<O, ReplayError> {
        let signature = inputs.signature();
        let known = self.captures.iter().position(|known| known.inputs == signature);
        let tensors = match known {
            Some(known) => {
                // The one used last is dropped last.
                self.captures[known..].rotate_left(1);
                inputs.into_tensors()
            }
            None => {
                let (lengths, tensors) = (inputs.lengths(), inputs.into_tensors());
                let capture = self.capture(device, signature, tensors.clone(), &lengths)?;
                let surplus = (self.captures.len() + 1).saturating_sub(self.most);
                self.captures.drain(..surplus);
                self.captures.push(capture);
                tensors
            }
        };
        let Some(Held::Captured { state, .. }) = &mut self.state else {
            return Err(ReplayError::Lost);
        };
        let capture = self.captures.last().expect("found or captured");
        let outputs = capture.graph.replay(state, tensors)?;
        Ok(ReplayParts::new(outputs, &capture.lengths).into())
    }

    fn capture(
        &mut self,
        device: &Device,
        inputs: Signature,
        tensors: Vec<DispatchTensor>,
        lengths: &[usize],
    ) -> Result<Capture, ReplayError> {
        self.have_captured_state(device)?;
        let Some(Held::Captured { state, lengths: of_state }) = &mut self.state else {
            return Err(ReplayError::Lost);
        };
        let (model, forward) = (&self.model, &self.forward);
        let (of_outputs, other_state) = (OnceLock::new(), OnceLock::new());
        let graph = CapturedGraph::capture(state, tensors, &|state, inputs| {
            let state = ReplayParts::new(state, of_state);
            let before = state.signature();
            let inputs = ReplayParts::new(inputs, lengths).into();
            let (state, outputs) = forward(model, state.into(), inputs);
            let (state, outputs) = (ReplayParts::of(state), ReplayParts::of(outputs));
            if before != state.signature() {
                other_state.get_or_init(|| changed(&before, &state.signature()));
            }
            of_outputs.get_or_init(|| outputs.lengths());
            (state.into_tensors(), outputs.into_tensors())
        });
        self.captures.retain(|known| known.graph.is_of(state));
        if let Some(error) = other_state.into_inner() {
            return Err(error);
        }
        let lengths = of_outputs.into_inner().unwrap_or_default();
        Ok(Capture { inputs, graph: graph?, lengths })
    }

    /// Puts the state where captures have it.
    fn have_captured_state(&mut self, device: &Device) -> Result<(), ReplayError> {
        let tensors = match self.state.take().ok_or(ReplayError::Lost)? {
            Held::Tensors(tensors) => ReplayParts::of(tensors),
            captured => {
                self.state = Some(captured);
                return Ok(());
            }
        };
        let (lengths, tensors) = (tensors.lengths(), tensors.into_tensors());
        // What follows may fail, or panic where a lazy parameter does.
        let again = ReplayParts::new(tensors.clone(), &lengths).into();
        self.state = Some(Held::Tensors(again));
        let mut state = GraphState::new(device, weights(&self.model), tensors)?;
        if state.is_mixed() {
            self.model = gathered(&self.model, &mut state)?;
        }
        self.state = Some(Held::Captured { state, lengths });
        Ok(())
    }
}

fn changed(before: &Signature, after: &Signature) -> ReplayError {
    ReplayError::State(format!("it was {before:?}, and is {after:?}"))
}
