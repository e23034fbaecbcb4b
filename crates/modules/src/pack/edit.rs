//! Packed weights of a module: found, edited in place, and alone of all attachments.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use burn::module::{LoraAdapter, Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::Tensor;

use crate::error::Fp4Error;
use crate::packed_weight::{Edit, PackedWeight, edit_next, with_edits};
use crate::walk::parameters::{Parameter, Walk};
use crate::walk::paths::{MapParameters, map_parameters};

use super::placeholder::lazy_zeros;

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
