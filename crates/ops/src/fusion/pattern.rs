//! The operations that are fused: a norm, for each weight of a family dequantization, an adapter
//! and reshapes in between, the product or the lookup that reads the weight, and a bias; and the
//! SwiGLU of two products.

use burn::backend::ir::{
    BaseOperationIr, BinaryOpIr, CustomOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr,
    OperationIr, ScalarIr, SelectOpIr, TensorId, TensorIr, TensorStatus,
};
use burn::tensor::DType;
use serde::{Deserialize, Serialize};

/// Name that the extension's macro gives the operation.
const DEQUANTIZE: &str = "fp4_dequantize";

/// Names of the norms, and of the one that adds an update first.
const NORM: &str = "decoder_rms_norm";
const ADD_NORM: &str = "decoder_add_rms_norm";

/// Name of the SwiGLU.
const SWIGLU: &str = "decoder_swiglu";

/// Most weights of a family: queries, keys and values.
const MAX_MEMBERS: usize = 3;

/// The operations matched so far.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Pattern {
    /// True on devices whose kernels take a norm.
    takes_norms: bool,
    /// The norm before the products: the first operation.
    pub(super) norm: Option<Norm>,
    /// Weights that multiply one input. Only the last one's operations may be incomplete.
    pub(super) members: Vec<Member>,
    /// Reshapes of tensors that no member makes: of inputs, biases and indices.
    pub(super) reshapes: Vec<Reshape>,
    /// Views of outputs between the operations of members.
    pub(super) views: Vec<Reshape>,
    pub(super) swiglu: Option<SwiGlu>,
    /// Drops of tensors between the others. They run last.
    pub(super) drops: Vec<Dropped>,
    /// Number of operations.
    pub(super) len: usize,
}

/// A tensor that nothing reads anymore.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Dropped {
    /// Its position.
    pub(super) at: usize,
    pub(super) tensor: TensorId,
}

/// An RMSNorm, also of a sum.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Norm {
    pub(super) operation: CustomOpIr,
    /// True if it adds an update to its input first.
    pub(super) adds: bool,
}

impl Norm {
    /// Returns what the products read.
    fn normalized(&self) -> Option<TensorId> {
        self.operation.outputs.last().map(|output| output.id)
    }
}

/// SwiGLU of the outputs of two members.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SwiGlu {
    /// Its position.
    pub(super) at: usize,
    /// Number of the member that makes the gate.
    pub(super) gate: usize,
    pub(super) output: TensorIr,
}

/// A reshape or a transpose, which changes no value.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Reshape {
    /// Its position.
    pub(super) at: usize,
    input: TensorIr,
    pub(super) output: TensorId,
}

/// Operations of a weight: the only one of a pattern, or a member of a family of one input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) dequantize: CustomOpIr,
    /// Position of the dequantization.
    pub(super) at: usize,
    /// The weight in its latest form: dequantized, reshaped, transposed, or with the adapter.
    weight: TensorIr,
    /// Set once the weight is transposed.
    pub(super) transposed: bool,
    pub(super) adapter: Option<Adapter>,
    pub(super) reader: Option<Reader>,
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
    /// Position of the matmul.
    pub(super) at: usize,
    pub(super) add: Option<Addition>,
}

impl Product {
    /// Returns the position of its last operation.
    pub(super) fn end(&self) -> usize {
        self.add.as_ref().map_or(self.at, |add| add.at)
    }

    /// Returns its output, after the addition.
    fn output(&self) -> &TensorIr {
        self.add.as_ref().map_or(&self.matmul.out, |add| &add.operation.out)
    }
}

/// Adds to the output; only `run` knows if the other operand is a bias.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Addition {
    pub(super) operation: BinaryOpIr,
    /// Its position.
    pub(super) at: usize,
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

/// Returns true for the first operation of a pattern: a norm, or the dequantization of a weight.
pub(super) fn may_begin(operation: &OperationIr) -> bool {
    let OperationIr::Custom(custom) = operation else { return false };
    [DEQUANTIZE, NORM, ADD_NORM].contains(&custom.id.as_str())
}

impl Pattern {
    /// Returns a pattern without operations.
    pub(super) fn new(takes_norms: bool) -> Self {
        Self { takes_norms, ..Self::default() }
    }

    /// Returns a pattern without operations for the same device.
    pub(super) fn anew(&self) -> Self {
        Self::new(self.takes_norms)
    }

    /// Matches the next operation. Returns false if it is not part of the pattern.
    pub(super) fn accept(&mut self, operation: &OperationIr) -> bool {
        // A first one would only keep the stream waiting.
        if let (OperationIr::Drop(tensor), 1..) = (operation, self.len) {
            self.drops.push(Dropped { at: self.len, tensor: tensor.id });
            self.len += 1;
            return true;
        }
        let accepted = match self.members.last() {
            None => {
                self.accept_norm(operation)
                    || self.norm.is_some() && self.accept_reshape(operation)
                    || self.accept_dequantize(operation)
            }
            Some(member) if member.reader.is_some() => self.accept_follower(operation),
            Some(_) => self.accept_reshape(operation) || self.accept_reader(operation),
        };
        self.len += usize::from(accepted);
        accepted
    }

    /// Returns true if the last operation completed the operations of a weight.
    pub(super) fn is_ready(&self) -> bool {
        let last = self.len.saturating_sub(1);
        if let Some(swiglu) = &self.swiglu {
            return swiglu.at == last;
        }
        match self.members.last().and_then(|member| member.reader.as_ref()) {
            Some(Reader::Product(product)) => product.end() == last,
            Some(Reader::Lookup(_)) => true,
            None => false,
        }
    }

    /// Returns true if nothing can follow.
    pub(super) fn is_complete(&self) -> bool {
        if self.swiglu.is_some() {
            return true;
        }
        match self.members.last().and_then(|member| member.reader.as_ref()) {
            Some(Reader::Product(product)) => product.add.is_some() && !self.takes_a_member(),
            Some(Reader::Lookup(_)) => true,
            None => false,
        }
    }

    /// Returns true if another weight may follow.
    fn takes_a_member(&self) -> bool {
        self.swiglu.is_none()
            && self.members.len() < MAX_MEMBERS
            && self.members.iter().all(|member| member.adapter.is_none())
    }

    /// Returns true if the norm or the product of the last weight is matched, and another weight
    /// may follow.
    pub(super) fn awaits_a_member(&self) -> bool {
        if self.members.is_empty() {
            return self.norm.is_some();
        }
        let reader = self.members.last().and_then(|member| member.reader.as_ref());
        matches!(reader, Some(Reader::Product(_))) && self.takes_a_member()
    }

    /// Returns true if the products alone read what the norm makes, nothing does so after them, and
    /// nothing else between has to do with the norm: the norm may then run with them.
    pub(super) fn keeps_norm(&self) -> bool {
        let Some(norm) = &self.norm else { return false };
        let Some(normalized) = norm.normalized() else { return false };
        let products = || {
            self.members.iter().filter_map(|member| match &member.reader {
                Some(Reader::Product(product)) => Some(&product.matmul.lhs),
                _ => None,
            })
        };
        let reshapes =
            || self.reshapes.iter().filter(|reshape| self.origin(reshape.output) == normalized);
        // Itself and its reshapes: each ends here.
        let is_kept = |tensor| {
            let reads = products().chain(reshapes().map(|reshape| &reshape.input));
            let mut reads = reads.filter(|read| read.id == tensor);
            reads.any(|read| read.status == TensorStatus::ReadWrite)
                || self.drops.iter().any(|drop| drop.tensor == tensor)
        };
        // Addends and reshapes are read before the norm's operands.
        let addends = self.members.iter().filter_map(|member| match &member.reader {
            Some(Reader::Product(product)) => Some(product.add.as_ref()?.operation.rhs.id),
            _ => None,
        });
        let apart = self.reshapes.iter().filter(|reshape| !self.is_of_norm(reshape.output));
        let mut others = addends.chain(apart.map(|reshape| reshape.input.id));
        let (inputs, outputs) = (&norm.operation.inputs, &norm.operation.outputs);
        let of_norm = |id| inputs.iter().chain(outputs).any(|tensor| tensor.id == id);
        !others.any(|id| of_norm(id) || self.is_of_norm(id))
            && products().all(|input| self.origin(input.id) == normalized)
            && is_kept(normalized)
            && reshapes().all(|reshape| is_kept(reshape.output))
    }

    /// Returns true if a tensor is what the norm makes, or a reshape of it.
    pub(super) fn is_of_norm(&self, tensor: TensorId) -> bool {
        self.norm.as_ref().and_then(Norm::normalized) == Some(self.origin(tensor))
    }

    fn accept_norm(&mut self, operation: &OperationIr) -> bool {
        let OperationIr::Custom(custom) = operation else { return false };
        let adds = custom.id == ADD_NORM;
        let halves =
            custom.inputs.iter().all(|input| matches!(input.dtype, DType::F16 | DType::BF16));
        if self.len > 0 || !self.takes_norms || !halves || !(adds || custom.id == NORM) {
            return false;
        }
        self.norm = Some(Norm { operation: custom.clone(), adds });
        true
    }

    /// Matches SwiGLU of two outputs that nothing else reads.
    fn accept_swiglu(&mut self, operation: &OperationIr) -> bool {
        let OperationIr::Custom(custom) = operation else { return false };
        let ([gate, up], [output]) = (&custom.inputs[..], &custom.outputs[..]) else {
            return false;
        };
        let outputs: Vec<&TensorIr> = self
            .members
            .iter()
            .filter_map(|member| match &member.reader {
                Some(Reader::Product(product)) => Some(product.output()),
                _ => None,
            })
            .collect();
        let [first, second] = outputs[..] else { return false };
        if custom.id != SWIGLU || !self.views.is_empty() {
            return false;
        }
        let reads = |of_gate, of_up| reads_last(gate, of_gate) && reads_last(up, of_up);
        let second_is_gate = reads(second, first);
        if !second_is_gate && !reads(first, second) {
            return false;
        }
        let gate = usize::from(second_is_gate);
        self.swiglu = Some(SwiGlu { at: self.len, gate, output: output.clone() });
        true
    }

    fn accept_dequantize(&mut self, operation: &OperationIr) -> bool {
        let OperationIr::Custom(custom) = operation else { return false };
        let [output] = &custom.outputs[..] else { return false };
        if custom.id != DEQUANTIZE {
            return false;
        }
        self.members.push(Member {
            dequantize: custom.clone(),
            at: self.len,
            weight: output.clone(),
            transposed: false,
            adapter: None,
            reader: None,
        });
        true
    }

    /// Matches a reshape of another tensor than the last weight, or a view of an output.
    fn accept_reshape(&mut self, operation: &OperationIr) -> bool {
        let (reshaped, swaps) = match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape))
            | OperationIr::BaseInt(BaseOperationIr::Reshape(reshape)) => {
                ((&reshape.input, &reshape.out), false)
            }
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(swap)) => {
                ((&swap.input, &swap.out), true)
            }
            _ => return false,
        };
        let (input, output) = (reshaped.0.id, reshaped.1.id);
        let of_output = self.is_output(input);
        let of_weight = self.members.last().is_some_and(|member| {
            let delta = member.adapter.as_ref().map(|adapter| adapter.delta.id);
            member.reader.is_none() && (member.weight.id == input || delta == Some(input))
        });
        if of_weight || (swaps && !of_output) {
            return false;
        }
        let to = if of_output { &mut self.views } else { &mut self.reshapes };
        to.push(Reshape { at: self.len, input: reshaped.0.clone(), output });
        true
    }

    /// Returns true if a member makes this tensor, or it is a view of its output.
    fn is_output(&self, tensor: TensorId) -> bool {
        let made = |member: &Member| match &member.reader {
            Some(Reader::Product(product)) => {
                let add = product.add.as_ref().map(|add| add.operation.out.id);
                product.matmul.out.id == tensor || add == Some(tensor)
            }
            _ => false,
        };
        self.members.iter().any(made) || self.views.iter().any(|view| view.output == tensor)
    }

    /// Returns the tensor that a reshape of the pattern has made this one from.
    fn origin(&self, tensor: TensorId) -> TensorId {
        let made = self.reshapes.iter().find(|reshape| reshape.output == tensor);
        made.map_or(tensor, |reshape| self.origin(reshape.input.id))
    }

    /// Matches operations after a product: a bias, views of outputs, another weight, or SwiGLU.
    fn accept_follower(&mut self, operation: &OperationIr) -> bool {
        let at = self.len;
        if self.swiglu.is_some() {
            return false;
        }
        if let OperationIr::NumericFloat(_, NumericOperationIr::Add(add)) = operation {
            // An output is not there before the family has run, and its views read it later.
            let waits = self.is_output(add.rhs.id)
                || self.views.iter().any(|view| view.input.id == add.lhs.id);
            let reader = self.members.last_mut().and_then(|member| member.reader.as_mut());
            let Some(Reader::Product(product)) = reader else { return false };
            let adds = !waits && product.add.is_none() && reads_last(&add.lhs, &product.matmul.out);
            if adds {
                product.add = Some(Addition { operation: add.clone(), at });
            }
            return adds;
        }
        let follows = self.accept_reshape(operation) || self.accept_swiglu(operation);
        follows || self.takes_a_member() && self.accept_dequantize(operation)
    }

    /// Matches operations from dequantization to the reader of the weight, which has to be the only
    /// one: the dense weight is never written.
    fn accept_reader(&mut self, operation: &OperationIr) -> bool {
        let at = self.len;
        let alone = self.members.len() == 1;
        let reads_input = match operation {
            OperationIr::Float(_, FloatOperationIr::Matmul(matmul)) => alone || self.joins(matmul),
            _ => alone,
        };
        let Some(member) = self.members.last_mut() else { return false };
        if member.adapter.as_ref().is_some_and(|adapter| !adapter.added) {
            return member.accept_adapter(operation);
        }
        let weight = &member.weight;
        let unchanged =
            member.dequantize.outputs.first().is_some_and(|output| output.id == weight.id);
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape))
                if reads_last(&reshape.input, weight) =>
            {
                member.weight = reshape.out.clone();
            }
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(swap))
                if unchanged
                    && reads_last(&swap.input, weight)
                    && swap.input.shape.num_dims() == 2
                    && swap.dim1 != swap.dim2 =>
            {
                member.weight = swap.out.clone();
                member.transposed = true;
            }
            OperationIr::BaseFloat(BaseOperationIr::Select(select))
                if alone && unchanged && reads_last(&select.tensor, weight) && select.dim == 0 =>
            {
                member.reader = Some(Reader::Lookup(Box::new(select.clone())));
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(matmul))
                if reads_input && reads_last(&matmul.rhs, weight) && matmul.lhs.id != weight.id =>
            {
                let product = Product { matmul: matmul.clone(), at, add: None };
                member.reader = Some(Reader::Product(Box::new(product)));
            }
            // The factors of an adapter follow the dequantization at once.
            OperationIr::Float(_, FloatOperationIr::Matmul(matmul))
                if alone
                    && at == member.at + 1
                    && ![matmul.lhs.id, matmul.rhs.id].contains(&weight.id)
                    && matmul.out.shape == weight.shape =>
            {
                let (matmul, delta) = (matmul.clone(), matmul.out.clone());
                member.adapter = Some(Adapter { matmul, scale: None, delta, added: false });
            }
            _ => return false,
        }
        true
    }

    /// Returns true if a product reads the input of the first one.
    fn joins(&self, matmul: &MatmulOpIr) -> bool {
        match self.members.first().and_then(|member| member.reader.as_ref()) {
            Some(Reader::Product(first)) => {
                self.origin(first.matmul.lhs.id) == self.origin(matmul.lhs.id)
                    && first.matmul.lhs.shape == matmul.lhs.shape
            }
            _ => false,
        }
    }
}

impl Member {
    /// Matches operations between the product of an adapter's factors and its addition.
    fn accept_adapter(&mut self, operation: &OperationIr) -> bool {
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
                    && reshape.out.shape == self.weight.shape =>
            {
                adapter.delta = reshape.out.clone();
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(add))
                if reads_last(&add.lhs, &self.weight) && reads_last(&add.rhs, &adapter.delta) =>
            {
                adapter.added = true;
                self.weight = add.out.clone();
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
