//! The operations that are fused: dequantization of a weight, an adapter and reshapes in between,
//! the product or the lookup that reads the weight, and a bias.

use burn::backend::ir::{
    BaseOperationIr, BinaryOpIr, CustomOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr,
    OperationIr, ScalarIr, SelectOpIr, TensorIr, TensorStatus,
};
use serde::{Deserialize, Serialize};

/// Name that the extension's macro gives the operation.
const DEQUANTIZE: &str = "fp4_dequantize";

/// The operations matched so far.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Pattern {
    pub(super) dequantize: Option<CustomOpIr>,
    /// The weight in its latest form: dequantized, reshaped, transposed, or with the adapter.
    weight: Option<TensorIr>,
    /// Set once the weight is transposed.
    pub(super) transposed: bool,
    pub(super) adapter: Option<Adapter>,
    /// Positions of the reshapes of other tensors before the reader.
    pub(super) reshapes: Vec<usize>,
    pub(super) reader: Option<Reader>,
    /// Number of operations.
    pub(super) len: usize,
}

/// The operation that reads the weight.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Reader {
    Product(Box<Product>),
    /// Selects rows.
    Lookup(Box<SelectOpIr>),
}

/// The product with the weight, and the addition of a bias.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Product {
    pub(super) matmul: MatmulOpIr,
    /// Position of the reshape of a bias.
    pub(super) bias_reshape: Option<usize>,
    /// Adds to the output; only `run` knows if the other operand is a bias.
    pub(super) add: Option<BinaryOpIr>,
}

/// `scale a b`, in the shape of the weight.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Adapter {
    /// The product `a b`.
    pub(super) matmul: MatmulOpIr,
    pub(super) scale: Option<ScalarIr>,
    /// The product in its latest form: scaled, reshaped.
    delta: TensorIr,
    /// Set once it is added to the weight.
    added: bool,
}

impl Pattern {
    /// Matches the next operation. Returns false if it is not part of the pattern.
    pub(super) fn accept(&mut self, operation: &OperationIr) -> bool {
        let pending = self.adapter.as_ref().is_some_and(|adapter| !adapter.added);
        let accepted = match self.weight.clone() {
            None => self.accept_dequantize(operation),
            Some(_) if self.reader.is_some() => self.accept_bias(operation),
            Some(weight) if pending => self.accept_adapter(operation, &weight),
            Some(weight) => self.accept_reader(operation, &weight),
        };
        self.len += usize::from(accepted);
        accepted
    }

    /// Returns true if nothing can follow.
    pub(super) fn is_complete(&self) -> bool {
        match &self.reader {
            Some(Reader::Product(product)) => product.add.is_some(),
            Some(Reader::Lookup(_)) => true,
            None => false,
        }
    }

    fn accept_dequantize(&mut self, operation: &OperationIr) -> bool {
        let OperationIr::Custom(custom) = operation else { return false };
        let [output] = &custom.outputs[..] else { return false };
        if custom.id != DEQUANTIZE {
            return false;
        }
        self.weight = Some(output.clone());
        self.dequantize = Some(custom.clone());
        true
    }

    /// Matches operations between the product of an adapter's factors and its addition.
    fn accept_adapter(&mut self, operation: &OperationIr, weight: &TensorIr) -> bool {
        let Some(adapter) = &mut self.adapter else { return false };
        match operation {
            OperationIr::NumericFloat(_, NumericOperationIr::MulScalar(scaled))
                if adapter.scale.is_none() && reads_last(&scaled.lhs, &adapter.delta) =>
            {
                adapter.scale = Some(scaled.rhs);
                adapter.delta = scaled.out.clone();
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape))
                if reads_last(&reshape.input, &adapter.delta)
                    && reshape.out.shape == weight.shape =>
            {
                adapter.delta = reshape.out.clone();
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(add))
                if reads_last(&add.lhs, weight) && reads_last(&add.rhs, &adapter.delta) =>
            {
                adapter.added = true;
                self.weight = Some(add.out.clone());
            }
            _ => return false,
        }
        true
    }

    /// Matches operations from dequantization to the reader of the weight, which has to be the only
    /// one: the dense weight is never written.
    fn accept_reader(&mut self, operation: &OperationIr, weight: &TensorIr) -> bool {
        let dequantized =
            self.dequantize.as_ref().and_then(|dequantize| dequantize.outputs.first());
        let unchanged = dequantized.is_some_and(|output| output.id == weight.id);
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape))
                if reshape.input.id == weight.id =>
            {
                if !reads_last(&reshape.input, weight) {
                    return false;
                }
                self.weight = Some(reshape.out.clone());
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(_))
            | OperationIr::BaseInt(BaseOperationIr::Reshape(_)) => self.reshapes.push(self.len),
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(swap))
                if unchanged
                    && reads_last(&swap.input, weight)
                    && swap.input.shape.num_dims() == 2
                    && swap.dim1 != swap.dim2 =>
            {
                self.weight = Some(swap.out.clone());
                self.transposed = true;
            }
            OperationIr::BaseFloat(BaseOperationIr::Select(select))
                if unchanged && reads_last(&select.tensor, weight) && select.dim == 0 =>
            {
                self.reader = Some(Reader::Lookup(Box::new(select.clone())));
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(matmul))
                if reads_last(&matmul.rhs, weight) && matmul.lhs.id != weight.id =>
            {
                let product = Product { matmul: matmul.clone(), bias_reshape: None, add: None };
                self.reader = Some(Reader::Product(Box::new(product)));
            }
            // The factors of an adapter follow the dequantization at once.
            OperationIr::Float(_, FloatOperationIr::Matmul(matmul))
                if self.len == 1
                    && ![matmul.lhs.id, matmul.rhs.id].contains(&weight.id)
                    && matmul.out.shape == weight.shape =>
            {
                let (matmul, delta) = (matmul.clone(), matmul.out.clone());
                self.adapter = Some(Adapter { matmul, scale: None, delta, added: false });
            }
            _ => return false,
        }
        true
    }

    /// Matches the reshape of a bias, and its addition.
    fn accept_bias(&mut self, operation: &OperationIr) -> bool {
        let Some(Reader::Product(product)) = &mut self.reader else { return false };
        let output = &product.matmul.out;
        match operation {
            _ if product.add.is_some() => return false,
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape))
                if product.bias_reshape.is_none() && reshape.input.id != output.id =>
            {
                product.bias_reshape = Some(self.len);
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(add))
                if reads_last(&add.lhs, output) && add.rhs.id != output.id =>
            {
                product.add = Some(add.clone());
            }
            _ => return false,
        }
        true
    }
}

/// Returns true if an operand is this tensor, and no later operation reads it.
fn reads_last(operand: &TensorIr, tensor: &TensorIr) -> bool {
    operand.id == tensor.id && operand.status == TensorStatus::ReadWrite
}
