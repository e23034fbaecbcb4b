//! [`Fp4Module::quantize_fp4`](crate::Fp4Module::quantize_fp4).

use std::borrow::Cow;
use std::collections::BTreeMap;

use burn::module::Module;
use burn_fp4_ops::formats::check_length;

use crate::calibrated::divided;
use crate::measure::{Measured, measure};
use crate::pack::{Source, pack};
use crate::report::Fp4Report;
use crate::select::{Decision, Parameter, Selection, select};
use crate::weight::{Inputs, Task, slices_of};
use crate::{Calibration, Fp4Config, Fp4Error};

/// Checks everything, then [packs](pack).
pub(crate) fn quantize<M: Module>(
    module: &mut M,
    config: &Fp4Config,
) -> Result<Fp4Report, Fp4Error> {
    let selection = select(module, config)?;
    // No reference says what GPTQ makes of a value that is not finite.
    let measured = measure(module, &selection, false)?;
    let inputs = inputs_by_weight(&selection, &measured, &config.calibration)?;
    let usable = |at: usize, plan| {
        let inputs = inputs.get(&measured.tied_to(at));
        Task { plan, amax: None, inputs }.method().chosen_by.needs_inputs()
    };
    selection.check_calibrated(usable)?;
    let devices = config.calibration.devices();
    let packed = divided(module, &selection, devices, &inputs, &measured)?;
    pack(module, &selection, Source { measured, inputs, packed, dense: None })
}

/// Statistics of the inputs of weights along the axis that they are quantized along; a tied weight
/// is multiplied by the inputs of all its places.
///
/// # Errors
/// [`Fp4Error::Calibration`] for a path that no parameter has, or an axis or a slice that it does
/// not have, [`Fp4Error::Parameter`] if the statistics are of another number of inputs than the
/// weight has.
fn inputs_by_weight<'a>(
    selection: &Selection,
    measured: &Measured,
    calibration: &'a Calibration,
) -> Result<BTreeMap<usize, Inputs<'a>>, Fp4Error> {
    let numbers: BTreeMap<&str, usize> = selection
        .decisions
        .iter()
        .enumerate()
        .map(|(at, (parameter, _))| (parameter.path.as_str(), at))
        .collect();
    let mut inputs: BTreeMap<usize, Inputs<'a>> = BTreeMap::new();
    for (path, axis, slice, gram) in calibration.iter() {
        let unknown = || Fp4Error::Calibration { path: path.to_owned(), axis, slice };
        let &at = numbers.get(path).ok_or_else(unknown)?;
        let (Parameter { shape, .. }, decision) = &selection.decisions[at];
        if axis >= shape.len() || slice >= shape.iter().product::<usize>().max(1) {
            return Err(unknown());
        }
        let Decision::Quantize(plan) = decision else { continue };
        if plan.layout.axis != axis || !plan.asked.needs_inputs() {
            continue;
        }
        let slices = slices_of(&plan.layout);
        if slice >= slices {
            return Err(unknown());
        }
        check_length("calibrated inputs", plan.layout.shape[axis], gram.channels())
            .map_err(|error| Fp4Error::at(path, error))?;
        let of = inputs.entry(measured.tied_to(at)).or_insert_with(|| Inputs::new(slices));
        of.add(slice, Cow::Borrowed(gram)).map_err(|error| Fp4Error::at(path, error))?;
    }
    Ok(inputs)
}
