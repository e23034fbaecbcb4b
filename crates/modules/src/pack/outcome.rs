//! What is reported of packed weights: measured where they are, and read back at once.

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};
use burn_fp4_ops::{
    Fp4Layout, Fp4Scheme, Fp4Tensor, MatmulPath, OpsError, matmul_path, squared_sums,
};

use crate::error::Fp4Error;
use crate::report::{Outcome, ParameterReport};
use crate::transfer::read_vectors;
use crate::walk::parameters::Parameter;
use crate::walk::plan::WeightPlan;

use super::weight::Choice;

/// Facts about packed weights by path, of which the squared errors are still on their devices.
#[derive(Default)]
pub(crate) struct PackedWeights {
    facts: BTreeMap<String, PackedFacts>,
    /// Squared error and energy, as devices give them.
    squares: Vec<(String, Tensor<1>)>,
}

/// What is reported of a packed weight.
pub(crate) struct PackedFacts {
    layout: Fp4Layout,
    /// That `val()` returns.
    dtype: DType,
    /// Bytes of codes and scales.
    bytes: usize,
    /// Whether Burn's layers multiply straight from its codes.
    products: MatmulPath,
    /// Squared error and energy, if the dense values were looked at and the two are read back.
    squares: Option<[f64; 2]>,
}

impl PackedWeights {
    /// Adds a weight whose `val()` returns a dtype; its error is that of its `dense` values, if
    /// these are to be looked at.
    ///
    /// # Errors
    /// [`OpsError`] if the dense values are not those of such a weight.
    pub(crate) fn add<const D: usize>(
        &mut self,
        path: &str,
        packed: &Fp4Tensor<D>,
        dtype: DType,
        dense: Option<Tensor<D>>,
    ) -> Result<(), OpsError> {
        if let Some(dense) = dense {
            self.squares.push((path.to_owned(), packed.squared_error(dense)?));
        }
        let layout = packed.layout().clone();
        let products = matmul_path(&layout, dtype, &packed.device());
        let facts = PackedFacts { layout, dtype, bytes: packed.bytes(), products, squares: None };
        self.facts.insert(path.to_owned(), facts);
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.facts.is_empty()
    }

    /// Paths of the weights.
    pub(crate) fn paths(&self) -> Vec<String> {
        self.facts.keys().cloned().collect()
    }

    /// Reads the squared errors back.
    ///
    /// # Errors
    /// [`Fp4Error::Device`].
    pub(crate) fn read(self) -> Result<BTreeMap<String, PackedFacts>, Fp4Error> {
        let Self { mut facts, squares } = self;
        for (path, squares) in read_vectors(squares)? {
            if let Some(facts) = facts.get_mut(&path) {
                facts.squares = squared_sums(&squares);
            }
        }
        Ok(facts)
    }
}

impl PackedFacts {
    /// What is reported of a weight that was quantized by a plan.
    pub(crate) fn quantized(
        &self,
        parameter: &Parameter,
        plan: &WeightPlan,
        scheme: Fp4Scheme,
        choice: &Choice,
    ) -> ParameterReport {
        let [squared_error, energy] = self.squares.expect("compared with its dense values");
        let outcome = Outcome::Quantized {
            scheme,
            asked: plan.asked,
            chosen_by: choice.chosen_by,
            fallback: choice.fallback.clone(),
            axis: self.layout.axis,
            shares_scale_with: plan.shares.clone(),
            squared_error,
            energy,
            products: parameter.products(&self.products, self.layout.axis),
        };
        self.report(parameter, outcome)
    }

    /// What is reported of a weight whose codes were handed over. A parameter that was not
    /// initialized has the shape and dtype of these.
    pub(crate) fn given(&self, parameter: &Parameter) -> ParameterReport {
        let Fp4Layout { format, block_size, axis, .. } = self.layout;
        let outcome = Outcome::Given {
            format,
            block_size,
            axis,
            squared_error: self.squares.map(|[error, _]| error),
            energy: self.squares.map(|[_, energy]| energy),
            products: parameter.products(&self.products, axis),
        };
        let known = parameter.clone().with_values(&self.layout.shape, self.dtype);
        self.report(&known, outcome)
    }

    /// With the bytes of the placeholder, which stores one value.
    fn report(&self, parameter: &Parameter, outcome: Outcome) -> ParameterReport {
        parameter.report(outcome, self.bytes + self.dtype.size())
    }
}
