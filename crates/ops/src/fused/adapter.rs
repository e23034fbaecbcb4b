//! Adapters of a weight: `scale a b`, multiplied by the input as two thin products.

use burn::backend::ir::{
    BaseOperationIr, MatmulOpIr, NumericOperationIr, OperationIr, ScalarIr, TensorIr,
};
use burn::backend::ops::FloatTensorOps;
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use serde::{Deserialize, Serialize};

use super::streams::{Streams, float, is_last_use, scalar};

/// `scale a b`, in the shape of the weight.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Adapter {
    product: MatmulOpIr,
    pub(super) scale: Option<ScalarIr>,
    /// What came of it so far.
    delta: TensorIr,
    /// Whether the weight has it.
    pub(super) added: bool,
}

impl Adapter {
    /// The product of its factors, which is in the shape of the weight.
    pub(super) fn new(product: MatmulOpIr) -> Self {
        let delta = product.out.clone();
        Self { product, scale: None, delta, added: false }
    }

    /// Takes what follows the product of its factors, and gives the weight as it is then.
    pub(super) fn take(&mut self, operation: &OperationIr, weight: &TensorIr) -> Option<TensorIr> {
        let reads = |tensor: &TensorIr, id| tensor.id == id && is_last_use(tensor);
        match operation {
            OperationIr::NumericFloat(_, NumericOperationIr::MulScalar(scaled))
                if self.scale.is_none() && reads(&scaled.lhs, self.delta.id) =>
            {
                self.scale = Some(scaled.rhs);
                self.delta = scaled.out.clone();
                Some(weight.clone())
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape))
                if reads(&reshape.input, self.delta.id) && reshape.out.shape == weight.shape =>
            {
                self.delta = reshape.out.clone();
                Some(weight.clone())
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(add))
                if reads(&add.lhs, weight.id) && reads(&add.rhs, self.delta.id) =>
            {
                self.added = true;
                Some(add.out.clone())
            }
            _ => None,
        }
    }

    /// What it adds to the product of an input with the weight, as a matrix.
    pub(super) fn multiply(
        &self,
        input: CubeTensor,
        channels: usize,
        context: &mut Streams,
    ) -> CubeTensor {
        let [a, b] = [&self.product.lhs, &self.product.rhs].map(|factor| float(context, factor));
        let rows = input.meta.num_elements() / channels;
        let input = CubeBackend::float_reshape(input, Shape::new([rows, channels]));
        let product = CubeBackend::float_matmul(CubeBackend::float_matmul(input, a), b);
        match self.scale.and_then(|scale| scalar(context, scale)) {
            Some(scale) => CubeBackend::float_mul_scalar(product, scale.into()),
            None => product,
        }
    }
}
