//! The product with a weight, and the addition of a bias behind it.

use burn::backend::ir::{BaseOperationIr, BinaryOpIr, MatmulOpIr, NumericOperationIr, OperationIr};
use serde::{Deserialize, Serialize};

use super::streams::is_last_use;

/// A product with the weight, and what follows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Multiplication {
    pub(super) matmul: MatmulOpIr,
    /// Reshapes after it, of what may be a bias.
    pub(super) after: Vec<usize>,
    /// The addition of what may be a bias.
    pub(super) add: Option<BinaryOpIr>,
}

impl Multiplication {
    /// Of which nothing is seen yet but the product.
    pub(super) fn new(matmul: MatmulOpIr) -> Self {
        Self { matmul, after: Vec::new(), add: None }
    }

    /// Takes what follows it, the operation at this place of the segment.
    pub(super) fn take(&mut self, operation: &OperationIr, at: usize) -> bool {
        let output = self.matmul.out.id;
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape)) => {
                let of_bias =
                    self.add.is_none() && self.after.is_empty() && reshape.input.id != output;
                if of_bias {
                    self.after.push(at);
                }
                of_bias
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(add)) => {
                let of_product = self.add.is_none()
                    && add.lhs.id == output
                    && is_last_use(&add.lhs)
                    && add.rhs.id != output;
                if of_product {
                    self.add = Some(add.clone());
                }
                of_product
            }
            _ => false,
        }
    }
}
