//! Report entries for packed weights: errors are measured on their devices and read back at once.

use std::collections::BTreeMap;

use burn::tensor::{DType, Tensor};
use burn_fp4_ops::{
    Fp4Layout, Fp4Scheme, Fp4Tensor, MatmulPath, OpsError, matmul_path, squared_sums,
};

use crate::error::Fp4Error;
use crate::report::{Outcome, ParameterReport, SquaredError};
use crate::transfer::read_vectors;
use crate::walk::parameters::Parameter;
use crate::walk::plan::WeightPlan;

use super::output_error::read_output_sums;
use super::weight::MethodUsed;

/// Facts about packed weights by path, of which the squared errors are still on their devices.
#[derive(Default)]
pub(crate) struct PackedWeights {
    facts: BTreeMap<String, PackedFacts>,
    /// Sums of squares as devices give them: `[6]` over the values, and behind these `[3]` over the
    /// outputs, if inputs are known.
    sums: Vec<(String, Tensor<1>)>,
}

/// Facts of a report entry for a packed weight.
pub(crate) struct PackedFacts {
    layout: Fp4Layout,
    /// The dtype that `val()` returns.
    dtype: DType,
    /// Bytes of codes and scales.
    bytes: usize,
    /// How Burn's layers multiply by it.
    products: MatmulPath,
    /// Known if the dense values were read, and once the sums are read back.
    weight_error: Option<SquaredError>,
    output_error: Option<SquaredError>,
}

impl PackedWeights {
    /// Adds a weight whose `val()` returns a dtype. Its errors are measured if there are `dense`
    /// values, with the sums over its outputs, if there are any.
    ///
    /// # Errors
    /// [`OpsError`] if the dense values do not have its shape and a dtype that is quantized.
    pub(crate) fn add<const D: usize>(
        &mut self,
        path: &str,
        packed: &Fp4Tensor<D>,
        dtype: DType,
        dense: Option<(Tensor<D>, Option<Tensor<1>>)>,
    ) -> Result<(), OpsError> {
        if let Some((dense, output_sums)) = dense {
            let sums = [packed.squared_error(dense)?].into_iter().chain(output_sums);
            self.sums.push((path.to_owned(), Tensor::cat(sums.collect(), 0)));
        }
        let layout = packed.layout().clone();
        let products = matmul_path(&layout, dtype, &packed.device());
        let facts = PackedFacts {
            layout,
            dtype,
            bytes: packed.bytes(),
            products,
            weight_error: None,
            output_error: None,
        };
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

    /// Reads the sums back, in one transfer per device.
    ///
    /// # Errors
    /// [`Fp4Error::Device`].
    pub(crate) fn read(self) -> Result<BTreeMap<String, PackedFacts>, Fp4Error> {
        let Self { mut facts, sums } = self;
        for (path, sums) in read_vectors(sums)? {
            if let Some((facts, (values, outputs))) =
                facts.get_mut(&path).zip(sums.split_at_checked(6))
            {
                facts.weight_error = squared_sums(values).map(SquaredError::new);
                facts.output_error = read_output_sums(outputs).map(SquaredError::new);
            }
        }
        Ok(facts)
    }
}

impl PackedFacts {
    /// Returns the report entry for a weight that was quantized by a plan.
    pub(crate) fn quantized(
        &self,
        parameter: &Parameter,
        plan: &WeightPlan,
        scheme: Fp4Scheme,
        choice: &MethodUsed,
    ) -> ParameterReport {
        let outcome = Outcome::Quantized {
            scheme,
            asked: plan.asked,
            chosen_by: choice.chosen_by,
            fallback: choice.fallback.clone(),
            axis: self.layout.axis,
            shares_scale_with: plan.shares.clone(),
            weight_error: self.weight_error.expect("compared with its dense values"),
            output_error: self.output_error,
            products: parameter.products(&self.products, self.layout.axis),
        };
        self.report(parameter, outcome)
    }

    /// Returns the report entry for a weight with provided codes. A parameter that was not
    /// initialized has the shape and dtype of these.
    pub(crate) fn provided(&self, parameter: &Parameter) -> ParameterReport {
        let Fp4Layout { format, block_size, axis, .. } = self.layout;
        let outcome = Outcome::Provided {
            format,
            block_size,
            axis,
            weight_error: self.weight_error,
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
