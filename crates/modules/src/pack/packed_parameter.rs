//! Packed parameters: the placeholder that one stores, and the packed weights of a module.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use burn::module::{LoraAdapter, Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Device, Tensor};
use burn_fp4_ops::repeats_values;

use crate::error::Fp4Error;
use crate::packed_weight::{Edit, PackedWeight, edit_next, with_edits};
use crate::walk::parameters::{
    MapParameters, ModulePath, Parameter, VisitParameters, Walk, map_parameters, visit_parameters,
};

/// Gives a quantized parameter its placeholder: one value, expanded to the shape of the weight,
/// which Burn shows and counts. It is made when it is first asked for.
///
/// Everything else about the parameter stays: its id, its mappers, whether it is trained. Its value
/// has no gradient, since nothing reads it. A record holds one value for it.
pub(crate) fn placeholder<const D: usize>(
    param: Param<Tensor<D>>,
    dtype: DType,
) -> Param<Tensor<D>> {
    let (id, value, mapper) = settled(param, dtype).consume();
    let save = mapper.clone();
    let param = Param::from_mapped_value(id, value, mapper);
    lazy_zeros(param.save_mapper(move |values| save.on_save(one_if_placeholder(values))), dtype)
}

/// The parameter with these values, which have the shape that layers see, whatever its mappers make
/// of records. What would have initialized it does not run.
pub(crate) fn with_values<const D: usize>(
    param: Param<Tensor<D>>,
    values: Tensor<D>,
) -> Param<Tensor<D>> {
    settled(param, values.dtype()).map(|before| match before.is_require_grad() {
        true => values.require_grad(),
        false => values,
    })
}

/// The shape that layers see, of a parameter that need not be initialized.
pub(crate) fn settled_shape<const D: usize>(param: &Param<Tensor<D>>, dtype: DType) -> [usize; D] {
    settled(param.clone(), dtype).dims()
}

/// The dtype of a parameter: if it is not initialized, that which its device gives new tensors.
pub(crate) fn float_dtype<const D: usize>(param: &Param<Tensor<D>>) -> DType {
    match param.is_initialized() {
        true => param.dtype(),
        false => param.lazy_device().settings().float_dtype.into(),
    }
}

/// The float parameters of a module, none of which need be initialized, with the shapes that layers
/// see and the dtypes that they have or will have.
pub(crate) fn settled_parameters<M: Module>(module: &M) -> Vec<Parameter> {
    struct Settled(BTreeMap<String, (Vec<usize>, DType)>);

    impl VisitParameters for Settled {
        fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
            let dtype = float_dtype(param);
            self.0.insert(path.join(), (settled_shape(param, dtype).to_vec(), dtype));
        }
    }

    let mut settled = Settled(BTreeMap::new());
    visit_parameters(module, &mut settled);
    let known = |parameter: Parameter| match settled.0.get(&parameter.path) {
        Some((shape, dtype)) => parameter.with_values(shape, *dtype),
        None => parameter,
    };
    Walk::over(module).parameters.into_iter().map(known).collect()
}

/// Loading zeros into a parameter that is not initialized keeps its shape, mappers and training
/// without running its initializer.
fn settled<const D: usize>(param: Param<Tensor<D>>, dtype: DType) -> Param<Tensor<D>> {
    if param.is_initialized() {
        return param;
    }
    let (id, shape, device) = (param.id, param.lazy_shape().dims(), param.lazy_device());
    param.transform_for_load(zeros(shape, &device, dtype), id)
}

/// Zeros in the place of the values of a parameter, to be made when they are asked for.
pub(crate) fn lazy_zeros<const D: usize>(
    param: Param<Tensor<D>>,
    dtype: DType,
) -> Param<Tensor<D>> {
    let (id, device, dims) = (param.id, param.device(), param.dims());
    let param = param.map(|_| zeros([1; D], &device, dtype));
    let trained = is_trained(&param);
    let (_, _, mapper) = param.consume();
    let init = move |device: &Device, require_grad: bool| {
        let zeros = zeros(dims, device, dtype);
        if require_grad { zeros.detach().require_grad() } else { zeros }
    };
    let save = mapper.clone();
    Param::uninitialized(id, init, device, trained, dims.into())
        .load_mapper(move |values| mapper.on_load(values))
        .save_mapper(move |values| save.on_save(values))
}

/// Returns true if a parameter is trained once its module is. Burn tells by training it.
#[cfg(feature = "autodiff")]
fn is_trained<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    use burn::module::Module;

    param.clone().map(|value| value.without_autodiff()).train().base().is_require_grad()
}

/// Nothing is trained without autodiff; Burn's parameters are made to be.
#[cfg(not(feature = "autodiff"))]
fn is_trained<const D: usize>(_param: &Param<Tensor<D>>) -> bool {
    true
}

/// Makes a one-element tensor of -0.0 expanded to a shape. The negative sign marks a placeholder,
/// so it cannot be confused with a weight of zeros. A device that cannot expand a value gets zeros
/// of which the first is negative.
fn zeros<const D: usize>(dims: [usize; D], device: &Device, dtype: DType) -> Tensor<D> {
    // As data: kernels may change the sign of a zero that they compute.
    let one = || Tensor::<1>::from_data([-0.0f32], (device, dtype)).reshape([1; D]);
    // Burn repeats no value zero times.
    let empty = dims.contains(&0);
    if repeats_values(device) && !empty {
        return one().expand(dims);
    }
    // Zeros that are never touched take no memory.
    let zeros = Tensor::zeros(dims, (device, dtype));
    if empty { zeros } else { zeros.slice_assign(first::<D>(), one()) }
}

/// The first value alone of what [`zeros`] made. Any other value stays whole, also that of a weight
/// that was packed and is dense again, whatever its values.
fn one_if_placeholder<const D: usize>(values: Tensor<D>) -> Tensor<D> {
    let dims: [usize; D] = values.dims();
    let len: usize = dims.iter().product();
    if len <= 1 || !values.dtype().is_float() {
        return values;
    }
    // Signs are looked at here, some along the longest axis: kernels may not see that of a zero.
    let longest = (0..D).max_by_key(|&axis| dims[axis]).unwrap_or(0);
    let some = values.clone().slice(core::array::from_fn::<_, D, _>(|axis| {
        if axis == longest { 0..dims[axis].min(SIGNS) } else { 0..1 }
    }));
    let some = some.into_data();
    let negative = |value: f32| value == 0.0 && value.is_sign_negative();
    let first_is_negative = some.iter::<f32>().next().is_some_and(negative);
    let others = some.iter::<f32>().skip(1).filter(|&value| negative(value)).count();
    let all_or_one = others == 0 || others + 1 == some.num_elements();
    if !first_is_negative || !all_or_one {
        return values;
    }
    let zeros = values.clone().equal_elem(0.0).int().sum().into_scalar::<i64>();
    if zeros as usize == len { values.slice(first::<D>()) } else { values }
}

/// Values that tell [`zeros`] from a weight that was masked, whose zeros have the signs of its
/// values.
const SIGNS: usize = 64;

/// Where the first value of a tensor is.
fn first<const D: usize>() -> [Range<usize>; D] {
    core::array::from_fn(|_| 0..1)
}

/// Gives every quantized parameter a fresh placeholder.
pub(crate) fn compact<M: Module>(module: &mut M) {
    struct Compact {
        packed: BTreeSet<String>,
    }

    impl MapParameters for Compact {
        fn float<const D: usize>(
            &mut self,
            path: &str,
            param: Param<Tensor<D>>,
        ) -> Param<Tensor<D>> {
            if self.packed.contains(path) {
                let dtype = param.base().dtype();
                lazy_zeros(param, dtype)
            } else {
                param
            }
        }
    }

    let packed = packed_paths(module).collect();
    *module = map_parameters(module.clone(), &mut Compact { packed });
}

/// Edits the packed weights of a module, each as the closure for its path says.
pub(crate) fn edit_packed<M: Module>(module: M, edits: BTreeMap<String, Edit>) -> M {
    struct SetEdits {
        edits: BTreeMap<String, Edit>,
    }

    impl MapParameters for SetEdits {
        fn float<const D: usize>(
            &mut self,
            path: &str,
            param: Param<Tensor<D>>,
        ) -> Param<Tensor<D>> {
            if let Some(edit) = self.edits.remove(path) {
                edit_next(edit);
            }
            param
        }
    }

    with_edits(|| map_parameters(module, &mut SetEdits { edits }))
}

/// The packed weights of a module, by path.
pub(crate) fn packed_weights<M: Module>(module: &M) -> BTreeMap<String, PackedWeight> {
    let found = Rc::new(RefCell::new(BTreeMap::new()));
    let edits = packed_paths(module).map(|path| {
        let (found, key) = (found.clone(), path.clone());
        let look: Edit = Box::new(move |packed| {
            found.borrow_mut().insert(key, packed.clone());
            packed
        });
        (path, look)
    });
    drop(edit_packed(module.clone(), edits.collect()));
    found.take()
}

/// Paths of the packed weights of a module.
pub(crate) fn packed_paths<M: Module>(module: &M) -> impl Iterator<Item = String> {
    Walk::over(module).parameters.into_iter().filter_map(|parameter| {
        (parameter.reparameterization.as_deref() == Some(PackedWeight::NAME))
            .then_some(parameter.path)
    })
}

/// Checks that parameters have nothing attached but packed weights without adapters.
///
/// # Errors
/// [`Fp4Error::Attached`] naming the first that has.
pub(crate) fn check_nothing_trained(
    parameters: &[Parameter],
    packed: &BTreeMap<String, PackedWeight>,
) -> Result<(), Fp4Error> {
    for Parameter { path, reparameterization, .. } in parameters {
        let other = reparameterization.as_deref().filter(|name| *name != PackedWeight::NAME);
        let adapted = packed.get(path).is_some_and(PackedWeight::is_adapted);
        if let Some(name) = other.or(adapted.then_some(LoraAdapter::NAME)) {
            return Err(Fp4Error::Attached { path: path.clone(), name: name.to_owned() });
        }
    }
    Ok(())
}

/// Folds every attachment of a module into the values of its parameter, but for packed weights, in
/// the place of which these are put: for each that the module has, by path.
pub(crate) fn with_packed<M: Module>(module: M, packed: BTreeMap<String, PackedWeight>) -> M {
    struct PutBack {
        packed: BTreeMap<String, PackedWeight>,
    }

    impl Reparameterizer for &mut PutBack {
        type Reparam = PackedWeight;

        fn reparameterize<const D: usize>(
            &mut self,
            path: &str,
            param: Param<Tensor<D>>,
        ) -> (Param<Tensor<D>>, Option<PackedWeight>) {
            match self.packed.remove(path) {
                Some(packed) => {
                    let dtype = param.base().dtype();
                    (lazy_zeros(param, dtype), Some(packed))
                }
                None => (param, None),
            }
        }
    }

    // Burn takes attachments off a module as a whole. To dequantize what is put back would take
    // the memory of the dense module.
    let absent = packed.keys().map(|path| (path.clone(), Box::new(PackedWeight::absent) as Edit));
    let plain = edit_packed(module, absent.collect()).materialize();
    plain.apply_reparameterization(&mut PutBack { packed })
}
