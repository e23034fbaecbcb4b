//! Whether device memory is as long as a kernel takes it to be: kernels are launched unchecked.

use burn_fp4_search::TensorScaling;
use cubecl::server::Handle;

use crate::packed::PackedHandles;
use crate::plan::{Problem, Refusal};

/// Whether memory has at least so many bytes.
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
    /// Whether memory holds the dense tensor.
    pub(crate) fn check_values(&self, values: &Handle) -> Result<(), Refusal> {
        check_memory("values", values, self.view.len() * self.dtype.size())
    }

    /// Whether memory holds an f32 for every tensor scale, where these are made from it.
    pub(crate) fn check_amax(&self, amax: &Handle) -> Result<(), Refusal> {
        let scheme = &self.scheme;
        let given = matches!(scheme.tensor_scale, TensorScaling::Multiplier(_));
        if given || !scheme.rule.row().tensor_scale {
            return Ok(());
        }
        check_memory("amax", amax, 4 * scheme.tensor_scales(self.view.packed_rows()))
    }

    /// Whether memory holds what becomes of the problem.
    pub(crate) fn check_packed(&self, packed: &PackedHandles) -> Result<(), Refusal> {
        check_memory("codes", &packed.codes, self.code_bytes())?;
        check_memory("scales", &packed.scales, self.scale_bytes())?;
        packed.check_tensor_scales(self.view.packed_rows())
    }
}

impl PackedHandles {
    /// Whether there is a tensor scale for all rows, or one for each.
    pub(crate) fn check_tensor_scales(&self, rows: usize) -> Result<(), Refusal> {
        let found = self.tensor_scales;
        if found != 1 && found != rows {
            return Err(Refusal::TensorScales { expected: rows, found });
        }
        check_memory("tensor_scale", &self.tensor_scale, 4 * found)
    }
}
