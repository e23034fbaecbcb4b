//! [`Fp4Module::compact_fp4`](crate::Fp4Module::compact_fp4): placeholders without their zeros.

use std::collections::BTreeSet;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use crate::pack::edit::packed_paths;
use crate::pack::placeholder::lazy_zeros;
use crate::walk::paths::{MapParameters, map_parameters};

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
