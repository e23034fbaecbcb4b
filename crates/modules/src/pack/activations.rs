//! How the products of a module read their input:
//! [`Fp4Module::set_fp4_activations`](crate::Fp4Module::set_fp4_activations).

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::DType;
use burn_fp4_ops::{Activations, Fp8Path};

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::pack::packed_parameter::{edit_packed, packed_weights};
use crate::packed_weight::{Edit, PackedWeight};
use crate::walk::parameters::{Parameter, Walk};

/// See [`Fp4Module::set_fp4_activations`](crate::Fp4Module::set_fp4_activations).
pub(crate) fn set<M: Module>(module: &mut M, activations: Activations) -> Result<usize, Fp4Error> {
    let paths: Vec<_> = multiplied(module).into_keys().collect();
    if paths.is_empty() {
        return Err(Fp4Error::NoFp4Layers);
    }
    let count = paths.len();
    let edit = |path| {
        let edit: Edit = Box::new(move |packed| packed.with_activations(activations));
        (path, edit)
    };
    *module = edit_packed(module.clone(), paths.into_iter().map(edit).collect());
    Ok(count)
}

/// See [`Fp4Module::fp8_paths`](crate::Fp4Module::fp8_paths).
pub(crate) fn fp8_paths<M: Module>(
    module: &M,
    rows: usize,
    dtype: DType,
) -> Result<BTreeMap<String, Fp8Path>, Fp4Error> {
    let path_of = |(path, packed): (String, PackedWeight)| match packed.fp8_path(rows, dtype) {
        Ok(of_weight) => Ok((path, of_weight)),
        Err(problem) => Err(Fp4Error::at(path, problem)),
    };
    multiplied(module).into_iter().map(path_of).collect()
}

/// Returns the packed weights that layers of this crate multiply by, with their paths.
fn multiplied<M: Module>(module: &M) -> BTreeMap<String, PackedWeight> {
    let mut packed = packed_weights(module);
    let multiplied = |one: Parameter| {
        let weight = packed.remove(&one.path)?;
        let follows = ["Fp4Linear", "Fp4Embedding"].contains(&one.container.as_str());
        let axis = Fp4Config::axis_of_container(&one.container);
        (follows && axis == Some(weight.layout().axis)).then_some((one.path, weight))
    };
    Walk::over(module).parameters.into_iter().filter_map(multiplied).collect()
}
