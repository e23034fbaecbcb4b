//! Packed weights of a module: found, and edited in place.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use burn::module::{Module, Param, Reparameterization};
use burn::tensor::Tensor;

use crate::packed_weight::{Edit, PackedWeight, edit_next, with_edits};
use crate::walk::parameters::Walk;
use crate::walk::paths::{MapParameters, map_parameters};

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
