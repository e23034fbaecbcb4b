//! Fusion of unmodified layers on Cube devices: products and lookups straight from the codes.
//!
//! On a Cube device operations wait in a stream before they run. A layer with a packed weight puts
//! two there that belong together, [`fp4_dequantize`](crate::Fp4Backend::fp4_dequantize) and the
//! reader of its output. The fuser finds them.
//!
//! - A product becomes one kernel, together with the reshapes in between, a transpose of the
//!   weight, and a bias that is added.
//! - An adapter that is added to the weight, `scale a b`, becomes two thin products, which are
//!   added to the output.
//! - Products with one input, such as queries, keys and values, become one launch if they have few
//!   rows.
//! - A lookup of an embedding gathers the codes and scales of its rows, and dequantizes only these.
//!
//! If a plan refuses the product, or a dense product is faster, the operations run one by one.
//!
//! | file         | what it holds                                                                |
//! |--------------|------------------------------------------------------------------------------|
//! | `mod.rs`     | the fuser, and its registration                                              |
//! | `pattern.rs` | the operations that are fused                                                |
//! | `pending.rs` | the operations that wait for another product of their family                 |
//! | `run.rs`     | the fused product or lookup                                                  |

mod pattern;
pub(crate) mod pending;
mod run;

use std::sync::OnceLock;

use burn::backend::fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn::backend::ir::OperationIr;
use burn::tensor::Device;
use burn_cubecl::CubeDevice;
use burn_cubecl::fusion::{
    CubeFuser, CubeOptimization, OptimizationProvider, RegistryError, register,
};

use self::pattern::Pattern;
use self::run::FusedProduct;
use crate::devices::cube::device::{may_multiply, with_products};
use crate::devices::cube::queues;
use crate::error::OpsError;

static REGISTERED: OnceLock<Result<(), RegistryError>> = OnceLock::new();

/// Registers the fuser; see [`init`](crate::init).
pub(crate) fn init() -> Result<(), OpsError> {
    #[cfg(feature = "cuda")]
    keep_kernels();
    REGISTERED
        .get_or_init(|| {
            register(Provider).inspect(|()| {
                queues::register();
                pending::watch();
            })
        })
        .clone()
        .map_err(|error| OpsError::Registration(error.to_string()))
}

/// Lets CubeCL keep compiled kernels on disk, unless its configuration is set or read already.
#[cfg(feature = "cuda")]
fn keep_kernels() {
    use burn_fp4_cubecl::cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    CubeClRuntimeConfig::try_set(config);
}

/// Returns true if products with packed weights on this device run straight from the codes.
pub(crate) fn is_active(device: &Device) -> bool {
    with_products(device).is_some() && matches!(REGISTERED.get(), Some(Ok(())))
}

/// Makes a fuser for each device.
struct Provider;

impl OptimizationProvider for Provider {
    type Operation = FusedProduct;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        // Without kernels it stays closed.
        let off = !may_multiply(device);
        let device = device.clone();
        let (pattern, ready) = (Pattern::default(), Pattern::default());
        CubeFuser::new(Fuser { device, off, closed: off, pattern, ready })
    }
}

/// Matches the pattern with a device's operations, one at a time.
#[derive(Clone)]
struct Fuser {
    device: CubeDevice,
    off: bool,
    closed: bool,
    pattern: Pattern,
    /// The pattern when it was last complete. Operations after it may be a part of what follows.
    ready: Pattern,
}

impl OperationFuser<CubeOptimization> for Fuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if !self.closed {
            let accepted = self.pattern.accept(operation);
            if accepted && self.pattern.is_ready() {
                self.ready = self.pattern.clone();
            }
            self.closed = !accepted || self.pattern.is_complete();
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        CubeOptimization::new(FusedProduct::new(self.device.clone(), self.ready.clone()))
    }

    fn reset(&mut self) {
        self.closed = self.off;
        self.pattern = Pattern::default();
        self.ready = Pattern::default();
    }

    fn status(&self) -> FuserStatus {
        if self.closed { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let ready = self.ready.len > 0;
        // Higher than any score of Burn's own fusers for the reader and its followers.
        FuserProperties { score: if ready { 1 << 20 } else { 0 }, ready }
    }

    fn len(&self) -> usize {
        self.ready.len
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}
