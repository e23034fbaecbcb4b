//! Checks of the length of device memory, because kernels are launched without bounds checks.

use burn_fp4_search::TensorScaling;
use cubecl::server::Handle;

use crate::packed::PackedHandles;
use crate::plan::{Problem, Refusal};

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

impl PackedHandles {
    /// Checks that there is one tensor scale, or one per row.
    pub(crate) fn check_tensor_scales(&self, rows: usize) -> Result<(), Refusal> {
        let found = self.tensor_scales;
        if found != 1 && found != rows {
            return Err(Refusal::TensorScales { expected: rows, found });
        }
        check_memory("tensor_scale", &self.tensor_scale, 4 * found)
    }
}
