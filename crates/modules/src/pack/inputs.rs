//! Statistics of the inputs of a weight: one Gram matrix for each of its slices.

use std::borrow::Cow;
use std::collections::BTreeMap;

use burn_fp4_ops::Gram;
use burn_fp4_ops::formats::check_length;
use burn_fp4_ops::search::SearchError;

use crate::error::Fp4Error;
use crate::statistics::Calibration;
use crate::walk::parameters::Parameter;
use crate::walk::plan::{Decision, Selection};

use super::measure::Measured;

/// Statistics of the inputs of a weight: one Gram matrix for each slice over its leading axes, such
/// as the experts of `[experts, in, out]`; a matrix is one slice.
#[derive(Default, Clone)]
pub(crate) struct Inputs<'a> {
    slices: Vec<Option<Cow<'a, Gram>>>,
}

impl<'a> Inputs<'a> {
    /// Without any statistics.
    pub(crate) fn new(slices: usize) -> Self {
        Self { slices: vec![None; slices] }
    }

    /// Adds statistics of a slice to those there are.
    pub(crate) fn add(&mut self, slice: usize, gram: Cow<'a, Gram>) -> Result<(), SearchError> {
        match &mut self.slices[slice] {
            Some(sum) => sum.to_mut().merge(&gram)?,
            none => *none = Some(gram),
        }
        Ok(())
    }

    pub(crate) fn into_owned(self) -> Inputs<'static> {
        let owned = |gram: Option<Cow<'a, Gram>>| gram.map(|gram| Cow::Owned(gram.into_owned()));
        Inputs { slices: self.slices.into_iter().map(owned).collect() }
    }

    /// The Gram matrix of a slice, if inputs other than zeros were seen.
    pub(crate) fn of(&self, slice: usize) -> Option<&Gram> {
        let gram = self.slices.get(slice)?.as_deref()?;
        (gram.tokens() > 0).then_some(gram)
    }

    /// Returns the Gram matrices of all slices that have one.
    pub(crate) fn grams(&self) -> impl Iterator<Item = &Gram> {
        self.slices.iter().flatten().map(|gram| &**gram)
    }
}

/// Statistics of the inputs of weights along the axis that they are quantized along; a tied weight
/// is multiplied by the inputs of all its places.
///
/// # Errors
/// [`Fp4Error::Calibration`] for a path that no parameter has, or an axis or a slice that it does
/// not have, [`Fp4Error::Parameter`] if the statistics are of another number of inputs than the
/// weight has.
pub(crate) fn inputs_by_weight<'a>(
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
        if plan.layout.axis != axis {
            continue;
        }
        let slices = plan.slices();
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
