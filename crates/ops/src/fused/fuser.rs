//! Finds segments in the stream of operations of a device.

use burn::backend::fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn::backend::ir::OperationIr;
use burn_cubecl::CubeDevice;
use burn_cubecl::fusion::{CubeFuser, CubeOptimization, OptimizationProvider};

use super::run::FusedProduct;
use super::segment::Segment;
use crate::devices::cube::device::has_kernels;

/// A segment that grows an operation at a time, until it is closed.
#[derive(Debug, Clone)]
struct State {
    segment: Segment,
    closed: bool,
    /// Whether it never opens.
    off: bool,
}

impl State {
    fn new(off: bool) -> Self {
        Self { segment: Segment::default(), closed: off, off }
    }
}

/// Looks for segments among the operations of a device.
#[derive(Clone)]
struct Fuser {
    device: CubeDevice,
    state: State,
}

impl OperationFuser<CubeOptimization> for Fuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if self.state.closed {
            return;
        }
        if self.state.segment.take(operation) {
            self.state.segment.len += 1;
            self.state.closed = self.state.segment.is_complete();
        } else {
            self.state.closed = true;
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let (device, segment) = (self.device.clone(), self.state.segment.clone());
        CubeOptimization::new(FusedProduct::new(device, segment))
    }

    fn reset(&mut self) {
        self.state = State::new(self.state.off);
    }

    fn status(&self) -> FuserStatus {
        if self.state.closed { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let ready = self.state.segment.end.is_some();
        // More than any of Burn's own gives for what reads the weight, and what follows it.
        FuserProperties { score: if ready { 1 << 20 } else { 0 }, ready }
    }

    fn len(&self) -> usize {
        self.state.segment.len
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// Makes a fuser for a device; one without kernels is off.
pub(super) struct Provider;

impl OptimizationProvider for Provider {
    type Operation = FusedProduct;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        let closed = !has_kernels(device);
        CubeFuser::new(Fuser { device: device.clone(), state: State::new(closed) })
    }
}
