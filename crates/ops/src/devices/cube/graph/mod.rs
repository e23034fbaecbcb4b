//! Captured forward passes: [`CapturedGraph`]. A captured pass is one launch on CUDA; on wgpu
//! CubeCL encodes the prepared launches again, and refuses to capture a pass that uploads values.
//!
//! A graph is bound to memory: every replay reads and writes the addresses of the capture. So a
//! graph has buffers of its own; inputs are copied into them and outputs out of them. State that is
//! carried from one replay to the next stays in its buffers. Operations write it in place where
//! they can; otherwise the graph ends with a copy into the buffer. CubeCL keeps all memory that a
//! graph uses for as long as the graph lives.
//!
//! CubeCL has one stream for each thread, with a memory pool of its own. A launch that reads memory
//! of another stream holds it until the launch is over, and a thread waits for that. The driver
//! voids a capture as soon as anything waits for it, or any other wait begins. So a capture reads
//! only memory of its own stream.
//!
//! | file           | what it holds                                                              |
//! |----------------|----------------------------------------------------------------------------|
//! | `replay.rs`    | [`CapturedGraph`]: captures a pass and replays it                          |
//! | `capture.rs`   | the runs of a pass before the capture, and the capture                     |
//! | `state.rs`     | [`GraphState`]: tensors that are carried from replay to replay             |
//! | `constants.rs` | tensors that are neither parameters nor arguments, in that stream's memory |
//! | `memory.rs`    | tensors in and out of Burn's stream of operations, and copies of them      |

mod capture;
mod constants;
mod memory;
mod replay;
mod state;

use burn::tensor::Device;
use burn_cubecl::CubeDevice;

use super::queues;

pub(crate) use self::constants::readable;
pub use self::replay::CapturedGraph;
pub use self::state::GraphState;

/// Returns true if a device captures passes: the first CUDA device, and Burn's default devices of
/// wgpu and Vulkan, after [`init`](crate::init). An autodiff device does not.
#[must_use]
pub fn captures_graphs(device: &Device) -> bool {
    // Queues keep other threads out during a capture.
    match device.as_dispatch() {
        burn::backend::DispatchDevice::Cube(
            device @ (CubeDevice::Cuda(_) | CubeDevice::Wgpu(_)),
        ) => queues::is_registered(device),
        _ => false,
    }
}
