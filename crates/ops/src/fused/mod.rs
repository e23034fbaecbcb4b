//! Products of unmodified layers and their lookups of rows, straight from the codes of the weight.
//!
//! On a Cube device operations wait in a stream before they run. A layer with a packed weight puts
//! two there that belong together, [`fp4_dequantize`](crate::Fp4Backend::fp4_dequantize) and what
//! reads its output. A fuser finds them. A product is one kernel, with the reshapes that stand
//! between, a transpose of the weight, and the addition of a bias behind. An adapter that is added
//! to the weight, `scale a b`, becomes two thin products that are added to the output. Of an
//! embedding, codes and scales of the rows are gathered, and only these dequantized. Where a plan
//! refuses, or a dense product is faster, the operations run one by one.

mod adapter;
mod fuser;
mod multiplication;
mod run;
mod segment;
mod streams;

use std::sync::OnceLock;

use burn::backend::DispatchDevice;
use burn::tensor::Device;
use burn_cubecl::fusion::{RegistryError, register};

use self::fuser::Provider;
use crate::devices::cube::device::with_kernels;
use crate::devices::cube::lane;
use crate::error::OpsError;

static REGISTERED: OnceLock<Result<(), RegistryError>> = OnceLock::new();

/// See [`init`](crate::init).
pub(crate) fn init() -> Result<(), OpsError> {
    REGISTERED
        .get_or_init(|| register(Provider).inspect(|()| lane::open()))
        .clone()
        .map_err(|error| OpsError::Registration(error.to_string()))
}

/// Whether products with packed weights on this device run straight from the codes.
pub(crate) fn is_active(device: &Device) -> bool {
    with_kernels(device).is_some() && matches!(REGISTERED.get(), Some(Ok(())))
}

/// [`drain`] where products are looked for in the stream.
pub(crate) fn drain_if_active(device: &Device) {
    if is_active(device) {
        drain(device);
    }
}

/// Lets this thread read results of a device while another thread records there.
pub(crate) fn read_beside_recordings(device: &Device) {
    #[cfg(feature = "cuda")]
    if let DispatchDevice::Cube(device) = device.clone().inner().as_dispatch() {
        lane::relax_this_thread(device);
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
}

/// Has what waits in the stream of a device begin to run, rather than when more is there.
pub(crate) fn run_now(device: &Device) {
    if let DispatchDevice::Cube(device) = device.clone().inner().as_dispatch() {
        lane::run_now(device);
    }
}

/// Has the operations that wait in the stream of this thread run before those that follow, without
/// waiting for it.
pub(crate) fn drain(device: &Device) {
    if let DispatchDevice::Cube(device) = device.clone().inner().as_dispatch() {
        lane::drain(device);
    }
}
