//! [`Fp4Module::pack_fp4`](crate::Fp4Module::pack_fp4): packed weights that come from elsewhere.

use std::any::Any;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

use burn::module::{Module, Param, Reparameterizer};
use burn::tensor::{Device, Tensor};

use crate::error::Fp4Error;
use crate::packed_weight::PackedWeight;
use crate::report::{Fp4Report, KeepReason, Outcome};
use crate::walk::parameters::{Parameter, Walk};

use super::job::PackedFacts;
use super::packed_parameter::{float_dtype, placeholder};

/// A dense parameter, for which [`pack_fp4`](crate::Fp4Module::pack_fp4) may provide codes and
/// scales.
pub struct DenseWeight<'a> {
    parameter: &'a Parameter,
    shape: Vec<usize>,
    device: Device,
    param: &'a dyn Any,
    /// Set once its values were asked for.
    read: Cell<bool>,
}

impl fmt::Debug for DenseWeight<'_> {
    /// Without the values, which may not be initialized.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DenseWeight")
            .field("path", &self.path())
            .field("container", &self.container())
            .field("shape", &self.shape)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl DenseWeight<'_> {
    /// Path in the module, such as `layers.0.attention.query.weight`.
    pub fn path(&self) -> &str {
        &self.parameter.path
    }

    /// Name of the struct that holds it, such as `Linear`.
    pub fn container(&self) -> &str {
        &self.parameter.container
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Where it is, and where its codes have to be.
    pub fn device(&self) -> Device {
        self.device.clone()
    }

    /// Its values, if `D` is its rank. A parameter that is not initialized is initialized by that;
    /// the report compares the codes with the values only if they were asked for.
    pub fn tensor<const D: usize>(&self) -> Option<Tensor<D>> {
        let param = self.param.downcast_ref::<Param<Tensor<D>>>()?;
        self.read.set(true);
        Some(param.base().without_autodiff())
    }
}

/// See [`Fp4Module::pack_fp4`](crate::Fp4Module::pack_fp4).
pub(crate) fn pack_provided<M: Module>(
    module: &mut M,
    give: impl FnMut(&DenseWeight<'_>) -> Result<Option<PackedWeight>, Fp4Error>,
) -> Result<Fp4Report, Fp4Error> {
    let parameters = Walk::over(module).parameters;
    let numbers = parameters.iter().enumerate().map(|(at, one)| (one.path.as_str(), at)).collect();
    let facts = parameters.iter().map(|_| None).collect();
    let mut attach = AttachProvided { give, parameters: &parameters, numbers, facts, error: None };
    let packed = module.clone().apply_reparameterization(&mut attach);
    let AttachProvided { mut facts, error, .. } = attach;
    if let Some(error) = error {
        return Err(error);
    }
    if facts.iter().all(Option::is_none) {
        return Err(Fp4Error::NothingSelected("\n  no codes were provided".to_owned()));
    }
    PackedFacts::read(facts.iter_mut().flatten())?;
    *module = packed;
    // As they are now: what is not packed may not be initialized.
    let parameters = parameters.iter().zip(&facts).map(|(parameter, facts)| match facts {
        Some(facts) => facts.provided(parameter),
        None => {
            let reason = parameter.attached().unwrap_or(KeepReason::NotProvided);
            parameter.report(Outcome::Kept { reason }, parameter.bytes_now())
        }
    });
    Ok(Fp4Report { parameters: parameters.collect(), unused: Vec::new() })
}

/// Attaches the provided codes.
struct AttachProvided<'a, F> {
    give: F,
    parameters: &'a [Parameter],
    numbers: BTreeMap<&'a str, usize>,
    /// By parameter, once it is packed.
    facts: Vec<Option<PackedFacts>>,
    error: Option<Fp4Error>,
}

impl<F> Reparameterizer for &mut AttachProvided<'_, F>
where
    F: FnMut(&DenseWeight<'_>) -> Result<Option<PackedWeight>, Fp4Error>,
{
    type Reparam = PackedWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<PackedWeight>) {
        let Some(&at) = self.numbers.get(path) else { return (param, None) };
        let parameter = &self.parameters[at];
        // Statistics that run along are vectors too.
        if D < 2 || self.error.is_some() || parameter.attached().is_some() {
            return (param, None);
        }
        match self.pack(at, &param) {
            Ok(Some((placeholder, packed))) => (placeholder, Some(packed)),
            Ok(None) => (param, None),
            Err(error) => {
                self.error = Some(error);
                (param, None)
            }
        }
    }
}

/// A placeholder, and the codes in its place.
type Attached<const D: usize> = (Param<Tensor<D>>, PackedWeight);

impl<F> AttachProvided<'_, F>
where
    F: FnMut(&DenseWeight<'_>) -> Result<Option<PackedWeight>, Fp4Error>,
{
    fn pack<const D: usize>(
        &mut self,
        at: usize,
        param: &Param<Tensor<D>>,
    ) -> Result<Option<Attached<D>>, Fp4Error> {
        let parameter = &self.parameters[at];
        let path = &parameter.path;
        let dtype = float_dtype(param);
        if !dtype.is_float() {
            return Ok(None);
        }
        let placeholder = placeholder(param.clone(), dtype);
        let weight = DenseWeight {
            parameter,
            shape: placeholder.lazy_shape().to_vec(),
            device: param.lazy_device().inner(),
            param,
            read: Cell::new(false),
        };
        let Some(packed) = (self.give)(&weight)? else { return Ok(None) };
        let layout = packed.layout();
        let refuse = |what, expected: &dyn fmt::Debug, found: &dyn fmt::Debug| {
            let (expected, found) = (format!("{expected:?}"), format!("{found:?}"));
            Err(Fp4Error::Provided { path: path.clone(), what, expected, found })
        };
        if weight.shape != layout.shape {
            return refuse("shape", &weight.shape, &layout.shape);
        }
        if weight.device != packed.device() {
            return refuse("device", &weight.device, &packed.device());
        }
        let dense = weight.read.get().then(|| (param.base().without_autodiff(), None));
        let facts = PackedFacts::new(&packed.tensor::<D>(), dtype, dense);
        self.facts[at] = Some(facts.map_err(|problem| Fp4Error::at(path, problem))?);
        Ok(Some((placeholder, packed)))
    }
}
