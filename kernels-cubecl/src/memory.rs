//! A packed tensor in device memory, as handles for callers and as arguments for kernels. Checks of
//! the length of memory, because kernels are launched without bounds checks.

use burn_fp4_search::TensorScaling;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::plan::{Blueprint, Problem, Refusal};

/// Checks that a handle holds at least `expected` bytes.
///
/// # Errors
/// [`Refusal::Memory`], which names the argument.
pub(crate) fn check_memory(
    what: &'static str,
    memory: &Handle,
    expected: usize,
) -> Result<(), Refusal> {
    let found = memory.size_in_used();
    if found < expected as u64 { Err(Refusal::Memory { what, expected, found }) } else { Ok(()) }
}

impl Problem {
    /// Checks that memory holds the dense tensor.
    pub(crate) fn check_values(&self, values: &Handle) -> Result<(), Refusal> {
        check_memory("values", values, self.view.len() * self.dtype.size())
    }

    /// Checks that memory holds an f32 for every tensor scale, if these are computed from it.
    pub(crate) fn check_amax(&self, amax: &Handle) -> Result<(), Refusal> {
        let scheme = &self.scheme;
        let given = matches!(scheme.tensor_scale, TensorScaling::Multiplier(_));
        if given || !scheme.rule.row().tensor_scale {
            return Ok(());
        }
        check_memory("amax", amax, 4 * scheme.tensor_scales(self.view.packed_rows()))
    }

    /// Checks that memory holds the packed tensor of the problem.
    pub(crate) fn check_packed(&self, packed: &PackedHandles) -> Result<(), Refusal> {
        check_memory("codes", &packed.codes, self.code_bytes())?;
        check_memory("scales", &packed.scales, self.scale_bytes())?;
        packed.check_tensor_scales(self.view.packed_rows())
    }
}

/// Counters in device memory, with which cubes of a launch know that others have ended. They are 0
/// between launches, and only one launch at a time may have them: launches of one thread, which
/// follow each other.
///
/// ```no_run
/// use burn_fp4_cubecl::Counters;
/// use burn_fp4_cubecl::cubecl::Device;
///
/// let client = Device::cuda(0).expect("a GPU").client();
/// let counters = Counters::new(&client); // for `attend`
/// ```
#[derive(Debug)]
pub struct Counters(Handle);

impl Counters {
    /// Number of counters.
    pub(crate) const LEN: usize = 1024;

    /// Writes zeros to new memory of a device.
    #[must_use]
    pub fn new(client: &Client) -> Self {
        Self(client.create_from_slice(&[0; 4 * Self::LEN]))
    }

    /// Returns their memory.
    pub(crate) fn handle(&self) -> Handle {
        self.0.clone()
    }
}

/// The memory of a packed tensor on a device. The shape comes from the [`Problem`].
#[derive(Debug, Clone)]
pub struct PackedHandles {
    /// `[packed_rows, axis / 2]` bytes.
    pub codes: Handle,
    /// `[packed_rows, axis / block_size]` bytes.
    pub scales: Handle,
    /// Bits of the f32 tensor scale, 1 or `packed_rows`.
    pub tensor_scale: Handle,
    /// Number of tensor scales.
    pub tensor_scales: usize,
}

impl PackedHandles {
    /// Allocates the packed tensor of a problem.
    pub(crate) fn empty(client: &Client, problem: &Problem) -> Self {
        let tensor_scales = problem.scheme.tensor_scales(problem.view.packed_rows());
        Self {
            codes: client.empty(problem.code_bytes()),
            scales: client.empty(problem.scale_bytes()),
            tensor_scale: client.empty(4 * tensor_scales),
            tensor_scales,
        }
    }

    /// Returns the kernel argument for `values` elements. A kernel loads `codes` codes at a time,
    /// and the block scales of `scales` elements.
    ///
    /// # Safety
    /// Codes and scales must hold `values` elements.
    pub(crate) unsafe fn read<S: Int, W: Size>(
        self,
        values: usize,
        codes: usize,
        scales: usize,
    ) -> PackedInLaunch<S, W> {
        // SAFETY: callers have checked that the memory holds `values` elements.
        unsafe {
            PackedInLaunch::new(
                BufferArg::from_raw_parts(self.codes, values / codes),
                BufferArg::from_raw_parts(self.scales, values.div_ceil(scales)),
                BufferArg::from_raw_parts(self.tensor_scale, self.tensor_scales),
            )
        }
    }

    /// Returns the argument of a kernel that stores `words` words of eight codes at a time.
    pub(crate) fn write<W: Size>(&self, problem: &Problem, words: usize) -> PackedOutLaunch<W> {
        let Self { codes, scales, tensor_scale, tensor_scales } = self.clone();
        // SAFETY: the lengths are those that [`empty`](Self::empty) made it with.
        unsafe {
            PackedOutLaunch::new(
                BufferArg::from_raw_parts(codes, problem.code_bytes() / 4 / words),
                BufferArg::from_raw_parts(scales, problem.scale_bytes()),
                BufferArg::from_raw_parts(tensor_scale, tensor_scales),
            )
        }
    }

    /// Checks that there is one tensor scale, or one per row.
    pub(crate) fn check_tensor_scales(&self, rows: usize) -> Result<(), Refusal> {
        let found = self.tensor_scales;
        if found != 1 && found != rows {
            return Err(Refusal::TensorScales { expected: rows, found });
        }
        check_memory("tensor_scale", &self.tensor_scale, 4 * found)
    }
}

/// A packed tensor that a kernel reads. `S` holds the block scales of one load.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PackedIn<S: Int, W: Size> {
    pub(crate) codes: &'static [Vector<u32, W>],
    pub(crate) scales: &'static [S],
    /// Bits of the tensor scales.
    pub(crate) tensor_scale: &'static [u32],
}

/// A packed tensor that a kernel writes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PackedOut<W: Size> {
    pub(crate) codes: &'static mut [Vector<u32, W>],
    pub(crate) scales: &'static mut [u8],
    /// Bits of the tensor scales.
    pub(crate) tensor_scale: &'static mut [u32],
}

/// Stores the tensor scale of a row, or the only one.
#[cube]
pub(crate) fn store_tensor_scale<W: Size>(
    packed: &mut PackedOut<W>,
    row: u32,
    decode: f32,
    #[comptime] blueprint: Blueprint,
) {
    let at = if comptime!(blueprint.by_row) { row } else { 0u32.runtime() };
    packed.tensor_scale[at as usize] = u32::reinterpret(decode);
}

/// Loads the code of a block scale. Devices of the wgpu runtime load four at a time, as a word:
/// WGSL has no bytes in memory.
#[cube]
pub(crate) fn load_scale<S: Int>(scales: &[S], block: u32, #[comptime] in_words: bool) -> u32 {
    if comptime!(in_words) {
        (u32::cast_from(scales[(block / 4) as usize]) >> (block % 4 * 8)) & 0xFFu32
    } else {
        u32::cast_from(scales[block as usize])
    }
}
