//! The operations of a segment: dequantization of a weight, what stands between, and what reads it.

use burn::backend::ir::{
    BaseOperationIr, CustomOpIr, FloatOperationIr, MatmulOpIr, OperationIr, SelectOpIr, TensorIr,
};
use serde::{Deserialize, Serialize};

use super::adapter::Adapter;
use super::multiplication::Multiplication;
use super::streams::is_last_use;

/// The name that the extension's macro gives the operation.
const DEQUANTIZE: &str = "fp4_dequantize";

/// What was seen of a segment, an operation at a time.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Segment {
    pub(super) dequantize: Option<CustomOpIr>,
    /// The weight as it is read: the output of the first operation, or of what follows it.
    weight: Option<TensorIr>,
    /// Whether that is the transpose.
    pub(super) transposed: bool,
    /// What is added to the weight before it is read.
    pub(super) adapter: Option<Adapter>,
    /// Reshapes to be run before the weight is read: of anything else.
    pub(super) before: Vec<usize>,
    pub(super) end: Option<End>,
    /// Operations of the segment.
    pub(super) len: usize,
}

/// What reads the weight.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum End {
    Multiplication(Box<Multiplication>),
    /// Of rows of the weight.
    Lookup(Box<SelectOpIr>),
}

impl Segment {
    /// Takes the next operation, if it belongs.
    pub(super) fn take(&mut self, operation: &OperationIr) -> bool {
        match &mut self.end {
            Some(End::Multiplication(multiplication)) => multiplication.take(operation, self.len),
            Some(End::Lookup(_)) => false,
            None => match self.weight.clone() {
                Some(weight) => self.take_before_end(operation, &weight),
                None => self.take_dequantize(operation),
            },
        }
    }

    fn take_dequantize(&mut self, operation: &OperationIr) -> bool {
        let OperationIr::Custom(custom) = operation else { return false };
        let [output] = &custom.outputs[..] else { return false };
        if custom.id != DEQUANTIZE {
            return false;
        }
        self.weight = Some(output.clone());
        self.dequantize = Some(custom.clone());
        true
    }

    /// Takes what stands between dequantization and what reads the weight, or that.
    fn take_before_end(&mut self, operation: &OperationIr, weight: &TensorIr) -> bool {
        // The only reader: no other operation needs the dense weight, which is not made.
        let reads_weight = |tensor: &TensorIr| tensor.id == weight.id && is_last_use(tensor);
        let dequantized = |tensor: &TensorIr| {
            let made = self.dequantize.as_ref().and_then(|dequantize| dequantize.outputs.first());
            reads_weight(tensor) && made.is_some_and(|made| made.id == tensor.id)
        };
        if let Some(adapter) = &mut self.adapter
            && !adapter.added
        {
            return match adapter.take(operation, weight) {
                Some(weight) => {
                    self.weight = Some(weight);
                    true
                }
                None => false,
            };
        }
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape))
                if reshape.input.id == weight.id =>
            {
                let reads = reads_weight(&reshape.input);
                if reads {
                    self.weight = Some(reshape.out.clone());
                }
                reads
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(_))
            | OperationIr::BaseInt(BaseOperationIr::Reshape(_)) => {
                self.before.push(self.len);
                true
            }
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(swap)) => {
                let transposes = dequantized(&swap.input)
                    && swap.input.shape.num_dims() == 2
                    && swap.dim1 != swap.dim2;
                if transposes {
                    self.weight = Some(swap.out.clone());
                    self.transposed = true;
                }
                transposes
            }
            OperationIr::BaseFloat(BaseOperationIr::Select(select)) => {
                let reads = dequantized(&select.tensor) && select.dim == 0;
                if reads {
                    self.end = Some(End::Lookup(Box::new(select.clone())));
                }
                reads
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(matmul)) => {
                self.take_matmul(matmul, weight)
            }
            _ => false,
        }
    }

    /// Takes the product of an adapter's factors, or the product with the weight.
    fn take_matmul(&mut self, matmul: &MatmulOpIr, weight: &TensorIr) -> bool {
        if ![matmul.lhs.id, matmul.rhs.id].contains(&weight.id) {
            // Only right behind the dequantization.
            let adapts = self.len == 1 && matmul.out.shape == weight.shape;
            if adapts {
                self.adapter = Some(Adapter::new(matmul.clone()));
            }
            return adapts;
        }
        let is_right = matmul.rhs.id == weight.id && is_last_use(&matmul.rhs);
        let reads = is_right && matmul.lhs.id != weight.id;
        if reads {
            let multiplication = Multiplication::new(matmul.clone());
            self.end = Some(End::Multiplication(Box::new(multiplication)));
        }
        reads
    }

    /// Whether nothing can follow.
    pub(super) fn is_complete(&self) -> bool {
        match &self.end {
            Some(End::Multiplication(multiplication)) => multiplication.add.is_some(),
            Some(End::Lookup(_)) => true,
            None => false,
        }
    }
}
