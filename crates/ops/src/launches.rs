//! [`Launches`]: what a pass launches, recorded by a device and run again as one.

use burn::backend::DispatchTensor;
use burn::tensor::Device;

#[cfg(feature = "cube")]
use crate::devices::cube::graph::{Recorded, State, has_graphs};
use crate::error::OpsError;
use crate::pass::Pass;

/// Whether a device can record what a pass launches: the first CUDA device, after
/// [`init`](crate::init). One that is differentiated cannot.
#[must_use]
pub fn records_launches(device: &Device) -> bool {
    #[cfg(feature = "cube")]
    if let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() {
        return has_graphs(device);
    }
    let _ = device;
    false
}

/// Tensors that are carried from one run of [`Launches`] to the next. They stay in their memory.
#[derive(Debug)]
pub struct LaunchState {
    #[cfg(feature = "cube")]
    state: State,
    #[cfg(not(feature = "cube"))]
    never: core::convert::Infallible,
}

impl LaunchState {
    /// Copies of these tensors on a device that [`records_launches`], for passes that read these
    /// weights.
    ///
    /// A device has a stream of launches for each thread, with memory of its own. That of the
    /// thread that made the weights, or most of their bytes, is the one that records, whichever
    /// thread asks for it. A recording reads memory of that stream alone: other weights have to be
    /// [gathered](Self::gather).
    ///
    /// # Errors
    /// [`OpsError::Recording`] if a tensor is on another device, or the device records nothing.
    pub fn new(
        device: &Device,
        weights: Vec<DispatchTensor>,
        tensors: Vec<DispatchTensor>,
    ) -> Result<Self, OpsError> {
        #[cfg(feature = "cube")]
        if let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() {
            #[cfg(feature = "cuda")]
            crate::devices::cube::lane::relax_this_thread(device);
            return Ok(Self { state: State::new(device, weights, tensors)? });
        }
        drop((weights, tensors));
        Err(OpsError::Recording(format!("{device:?} has no graphs")))
    }

    /// Whether some of the weights are in memory of another stream than the one that records.
    pub fn is_mixed(&self) -> bool {
        #[cfg(feature = "cube")]
        return self.state.is_mixed();
        #[cfg(not(feature = "cube"))]
        match self.never {}
    }

    /// A copy of a tensor that is in memory of another stream, with the same layout in memory of
    /// the one that records; `None` for what is there already, and for what cannot be recorded: on
    /// another device, differentiated, or quantized by Burn. Tensors that share memory share the
    /// copy, which is kept as long as this.
    ///
    /// # Errors
    /// [`OpsError::Device`] if the tensor could not be computed; [`OpsError::Recording`] if the
    /// device records nothing.
    pub fn gather(&mut self, tensor: DispatchTensor) -> Result<Option<DispatchTensor>, OpsError> {
        #[cfg(feature = "cube")]
        return self.state.gather(tensor);
        #[cfg(not(feature = "cube"))]
        {
            let _ = tensor;
            match self.never {}
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        #[cfg(feature = "cube")]
        return self.state.is_empty();
        #[cfg(not(feature = "cube"))]
        match self.never {}
    }

    /// Copies of what the tensors are after all runs so far.
    pub fn read(&mut self) -> Vec<DispatchTensor> {
        #[cfg(feature = "cube")]
        return self.state.read();
        #[cfg(not(feature = "cube"))]
        match self.never {}
    }
}

/// What a pass launches, recorded by a device, which runs it again as one: nothing is launched from
/// the host any more. A recording is bound to shapes and dtypes of its inputs, and to whatever else
/// the pass reads, which must not change as long as the recording is used.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{LaunchState, Launches, records_launches};
///
/// let device = Device::flex(); // with `Device::cuda(0)`, after `init`, it is recorded
/// let x = vec![Tensor::<1>::from_floats([1.0, 2.0], &device).into_dispatch()];
/// let doubled = LaunchState::new(&device, vec![], vec![]).and_then(|mut state| {
///     let launches = Launches::record(&mut state, x.clone(), &|state, mut inputs| {
///         let x = Tensor::<1>::from_dispatch(inputs.remove(0));
///         (state, vec![(x * 2.0).into_dispatch()])
///     })?;
///     launches.run(&mut state, x)
/// });
/// assert_eq!(doubled.is_ok(), records_launches(&device));
/// ```
#[derive(Debug)]
pub struct Launches {
    #[cfg(feature = "cube")]
    recorded: Recorded,
    #[cfg(not(feature = "cube"))]
    never: core::convert::Infallible,
}

impl Launches {
    /// Runs a pass on these inputs a few times, on copies of the state, and records it. The pass
    /// uses the device from the thread that it is called on, and from no other, which would wait
    /// for ever.
    ///
    /// # Errors
    /// [`OpsError::Recording`] if the pass cannot be recorded: it reads values, waits for the
    /// device, takes memory that it did not take before, has tensors on another device, or of
    /// another stream, or shapes that differ between runs. The state is as it was, but other
    /// recordings on it are void, unless it is empty.
    pub fn record(
        state: &mut LaunchState,
        inputs: Vec<DispatchTensor>,
        pass: &Pass<'_>,
    ) -> Result<Self, OpsError> {
        #[cfg(feature = "cube")]
        return Ok(Self { recorded: Recorded::new(&mut state.state, inputs, pass)? });
        #[cfg(not(feature = "cube"))]
        {
            let _ = (inputs, pass);
            match state.never {}
        }
    }

    /// The outputs for inputs of the shapes and dtypes that were recorded, in the same order, in
    /// memory of their own. The state is the one that it was recorded on.
    ///
    /// # Errors
    /// [`OpsError::Recording`] for another state, also one that a later recording failed on, and
    /// for inputs on another device, or of another number, shape or dtype.
    pub fn run(
        &self,
        state: &mut LaunchState,
        inputs: Vec<DispatchTensor>,
    ) -> Result<Vec<DispatchTensor>, OpsError> {
        #[cfg(feature = "cube")]
        return self.recorded.run(&mut state.state, inputs);
        #[cfg(not(feature = "cube"))]
        {
            let _ = (state, inputs);
            match self.never {}
        }
    }
}
