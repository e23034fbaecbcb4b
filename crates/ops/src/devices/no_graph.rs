//! Captured passes in a build without Cube devices: no device captures any.

use burn::backend::DispatchTensor;
use burn::module::ParamId;
use burn::tensor::Device;

use crate::error::OpsError;

/// Returns true if a device captures passes: the first CUDA device, and Burn's default devices of
/// wgpu and Vulkan, after [`init`](crate::init), in a build with the feature `cuda` or `wgpu`.
#[must_use]
pub fn captures_graphs(_device: &Device) -> bool {
    false
}

/// Tensors that replays of a [`CapturedGraph`] carry from one to the next. Exists only in builds
/// with Cube devices.
#[derive(Debug)]
pub enum GraphState {}

impl GraphState {
    /// Copies tensors to the device, for passes that read these weights.
    ///
    /// # Errors
    /// [`OpsError::Capture`], in this build.
    pub fn new(
        device: &Device,
        _weights: Vec<DispatchTensor>,
        _tensors: Vec<DispatchTensor>,
    ) -> Result<Self, OpsError> {
        let reason = format!("{device:?} captures no passes; use a CUDA or wgpu device");
        Err(OpsError::Capture(reason))
    }

    /// Returns true if some weights are in memory of another stream than the one that captures.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        match *self {}
    }

    /// Copies a tensor to memory of the stream that captures.
    ///
    /// # Errors
    /// None in this build.
    pub fn gather(&mut self, _tensor: DispatchTensor) -> Result<Option<DispatchTensor>, OpsError> {
        match *self {}
    }

    /// Returns true if there are no tensors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match *self {}
    }

    /// Copies the tensors as they are after all replays so far.
    pub fn read(&mut self) -> Vec<DispatchTensor> {
        match *self {}
    }
}

/// Returns plain tensors of a module where they are.
pub(crate) fn readable<const N: usize>(
    _id: ParamId,
    tensors: [DispatchTensor; N],
) -> [DispatchTensor; N] {
    tensors
}

/// A captured forward pass: one launch on CUDA; on wgpu CubeCL encodes the prepared launches again.
/// Exists only in builds with Cube devices.
#[derive(Debug)]
pub enum CapturedGraph {}

impl CapturedGraph {
    /// Captures a pass for inputs of these shapes and dtypes.
    ///
    /// # Errors
    /// None in this build.
    pub fn capture(
        state: &mut GraphState,
        _inputs: Vec<DispatchTensor>,
        _pass: &Pass<'_>,
    ) -> Result<Self, OpsError> {
        match *state {}
    }

    /// Returns true if the graph was captured on the memory that the state has now.
    #[must_use]
    pub fn is_of(&self, _state: &GraphState) -> bool {
        match *self {}
    }

    /// Replays the graph on inputs.
    ///
    /// # Errors
    /// None in this build.
    pub fn replay(
        &self,
        _state: &mut GraphState,
        _inputs: Vec<DispatchTensor>,
    ) -> Result<Vec<DispatchTensor>, OpsError> {
        match *self {}
    }
}

/// Maps the state and the inputs to the next state and the outputs.
type Pass<'a> = dyn Fn(Tensors, Tensors) -> (Tensors, Tensors) + Sync + 'a;

type Tensors = Vec<DispatchTensor>;
