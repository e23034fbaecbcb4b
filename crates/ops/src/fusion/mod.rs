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
//! A product is found only if no other operation waits in the stream, so a layer with a packed
//! weight runs what waits, before it dequantizes. But the products of a family wait for each other:
//! nothing is run if all that waits is the begin of a family.
//!
//! If a plan refuses the product, or a dense product is faster, the operations run one by one.
//!
//! | file         | what it holds                                                                |
//! |--------------|------------------------------------------------------------------------------|
//! | `mod.rs`     | the fuser, its registration, and what waits for it                           |
//! | `pattern.rs` | the operations that are fused                                                |
//! | `run.rs`     | the fused product or lookup                                                  |

mod pattern;
mod run;

use core::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use burn::backend::fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn::backend::fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn::backend::ir::OperationIr;
use burn::tensor::Device;
use burn_backend::StreamId;
use burn_cubecl::CubeDevice;
use burn_cubecl::fusion::{
    CubeFuser, CubeOptimization, OptimizationProvider, RegistryError, register,
};

use self::pattern::Pattern;
use self::run::FusedProduct;
use crate::devices::cube::device::{may_multiply, with_products};
use crate::devices::cube::queues;
use crate::error::OpsError;

/// Threads that may have a family at a time. Others run what waits.
const MAX_THREADS: usize = 64;

thread_local! {
    /// On the thread that runs the stream of operations: the operations that a thread has
    /// registered since it last ran all before them, if all are part of one pattern.
    static PENDING: RefCell<HashMap<StreamId, Pattern>> = RefCell::default();
}

static WATCHED: OnceLock<FusionObservation> = OnceLock::new();
static REGISTERED: OnceLock<Result<(), RegistryError>> = OnceLock::new();

/// Registers the fuser; see [`init`](crate::init).
pub(crate) fn init() -> Result<(), OpsError> {
    #[cfg(feature = "cuda")]
    keep_kernels();
    REGISTERED
        .get_or_init(|| {
            register(Provider).inspect(|()| {
                queues::register();
                WATCHED.get_or_init(|| FusionObservation::new(Arc::new(Watch)));
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

/// Flushes this thread's pending operations, unless all that is pending is the begin of a family of
/// products, which the next product may join.
pub(crate) fn flush_for_product(device: &Device) {
    queues::submit_with_sync(device, |sync| {
        let stream = StreamId::current();
        let awaits = PENDING
            .with_borrow(|pending| pending.get(&stream).is_some_and(Pattern::awaits_a_member));
        if awaits {
            return;
        }
        sync();
        PENDING.with_borrow_mut(|pending| {
            if pending.len() >= MAX_THREADS {
                pending.clear();
            }
            pending.insert(stream, Pattern::default());
        });
    });
}

/// Follows what waits, on the thread that runs the stream of operations.
struct Watch;

impl FusionObserver for Watch {
    fn registered(&self, operation: &OperationIr) {
        PENDING.with_borrow_mut(|pending| {
            let stream = StreamId::current();
            let accepted = pending.get_mut(&stream).map(|pattern| pattern.accept(operation));
            if accepted == Some(false) {
                pending.remove(&stream);
            }
        });
    }

    fn block_starts(&self, _block: BlockOperations<'_>) {}

    fn block_ran(&self) {}
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
