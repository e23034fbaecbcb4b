//! A forward pass as a list of operations, and where it multiplies by weights.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Capture;
use burn::backend::capture::CapturedGraph;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fp4_ops::OpsError;
use burn_ir::{
    BaseOperationIr, FloatOperationIr, IrVisitorMut, ModuleOperationIr, OperationIr, TensorId,
    TensorIr,
};

use crate::Fp4Error;

/// A forward pass over one batch.
pub(crate) struct Recording {
    pub(crate) operations: Vec<OperationIr>,
    /// What the batch and the module hold, but for float parameters.
    pub(crate) values: BTreeMap<TensorId, TensorData>,
    /// Float parameters by path, as the operations know them.
    pub(crate) parameters: BTreeMap<String, TensorId>,
    /// In the order of operations.
    pub(crate) inputs: Vec<LayerInput>,
    /// By operation: the tensors that nothing reads after it.
    pub(crate) forgotten: Vec<Vec<TensorIr>>,
    /// Bytes that tensors other than parameters take, at most.
    pub(crate) peak_bytes: usize,
    /// The same where layers are about to read their inputs.
    pub(crate) waiting_bytes: usize,
}

/// A tensor that is multiplied by weights.
pub(crate) struct LayerInput {
    /// The operation that reads it first.
    pub(crate) at: usize,
    /// `[.., channels]`.
    pub(crate) tensor: TensorIr,
    /// The weights that it meets.
    pub(crate) weights: Vec<WeightUse>,
}

impl LayerInput {
    /// What went wrong with it, by the weight that it meets first.
    pub(crate) fn named(&self, source: OpsError) -> Fp4Error {
        Fp4Error::Parameter { path: self.weights[0].path.clone(), source }
    }
}

/// A weight in a product.
pub(crate) struct WeightUse {
    pub(crate) path: String,
    /// The axis of the parameter that is contracted.
    pub(crate) axis: usize,
    /// The operations that bring it into the shape of the product.
    pub(crate) views: Vec<usize>,
}

impl Recording {
    /// Records a forward pass. Nothing is computed, and no float parameter is read.
    ///
    /// # Errors
    /// [`Fp4Error::Capture`] if the pass reads values, or panics for another reason.
    pub(crate) fn of<M: Module, I: Module, O>(
        model: &M,
        batch: I,
        forward: &mut impl FnMut(&M, I) -> O,
    ) -> Result<Self, Fp4Error> {
        let capture = Device::capture();
        let mut stand_ins =
            StandIns { stack: Vec::new(), device: capture.clone(), parameters: BTreeMap::new() };
        let recorded = catch_unwind(AssertUnwindSafe(|| {
            capture.capture_scope(|scope| {
                // Clones share running statistics, so that these would be moved for all of them.
                let model = model.valid().map(&mut stand_ins).to_device(&capture);
                drop(forward(&model, batch.to_device(&capture)));
                scope.complete([], [])
            })
        }));
        let failed = |found: &str| {
            let problem = format!(
                "the forward pass cannot be recorded: {found}; it has to run the module on the batch it is given, \
                 without reading values (control flow that depends on data cannot be recorded)"
            );
            Fp4Error::Capture { problem }
        };
        match recorded {
            Ok(Ok(graph)) => Ok(Self::new(graph, stand_ins.parameters)),
            Ok(Err(error)) => Err(failed(&error.to_string())),
            Err(panic) => {
                let message = panic.downcast_ref::<String>().map(String::as_str);
                let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
                Err(failed(message.unwrap_or("it panicked")))
            }
        }
    }

    fn new(graph: CapturedGraph, parameters: BTreeMap<String, TensorId>) -> Self {
        let CapturedGraph { graph, values } = graph;
        let stand_ins: BTreeSet<_> = parameters.values().copied().collect();
        let mut operations = graph.operations;
        operations
            .retain(|operation| !operation.outputs().any(|output| stand_ins.contains(&output.id)));
        let (forgotten, bytes) = lifetimes(&operations, &values, &stand_ins);
        let inputs = layer_inputs(&operations, &parameters);
        let largest = |bytes: &mut dyn Iterator<Item = usize>| bytes.max().unwrap_or(0);
        let peak_bytes = largest(&mut bytes.iter().map(|[_, during]| *during));
        let waiting_bytes = largest(&mut inputs.iter().map(|input| bytes[input.at][0]));
        Self { operations, values, parameters, inputs, forgotten, peak_bytes, waiting_bytes }
    }
}

impl Hash for Recording {
    /// The same for recordings that compute the same of the same batch; tensors count by the order in which they appear.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut order = Order(BTreeMap::new());
        for (path, id) in &self.parameters {
            (path, order.of(*id)).hash(state);
        }
        for (id, data) in &self.values {
            (order.of(*id), data.shape(), data.as_bytes()).hash(state);
        }
        for operation in &self.operations {
            let mut operation = operation.clone();
            operation.visit_mut(&mut order);
            operation.hash(state);
        }
    }
}

/// Numbers for ids, which are others in every recording.
struct Order(BTreeMap<TensorId, u64>);

impl Order {
    fn of(&mut self, id: TensorId) -> u64 {
        let next = self.0.len() as u64;
        *self.0.entry(id).or_insert(next)
    }
}

impl IrVisitorMut for Order {
    fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
        tensor.id = TensorId::new(self.of(tensor.id));
    }
}

/// Puts tensors of the capture device in the place of float parameters.
struct StandIns {
    stack: Vec<String>,
    device: Device,
    parameters: BTreeMap<String, TensorId>,
}

impl ModuleMapper for StandIns {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.stack.push(name.to_owned());
    }
    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.stack.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let device = &self.device;
        let param = param.map(|tensor| Tensor::zeros(tensor.shape(), (device, tensor.dtype())));
        let stand_in = param.val().try_into_primitive::<Capture>().expect("just made there");
        self.parameters.insert(self.stack.join("."), stand_in.id());
        param
    }
}

/// By operation the tensors that nothing reads after it, and the bytes of those that live before and during it.
fn lifetimes(
    operations: &[OperationIr],
    values: &BTreeMap<TensorId, TensorData>,
    parameters: &BTreeSet<TensorId>,
) -> (Vec<Vec<TensorIr>>, Vec<[usize; 2]>) {
    let mut last = BTreeMap::new();
    for (at, operation) in operations.iter().enumerate() {
        for tensor in operation.nodes() {
            last.insert(tensor.id, (at, tensor.clone()));
        }
    }
    let owners = owners(operations);
    let owner = |id| owners.get(&id).copied().unwrap_or(id);
    // When memory is read last, by its owner.
    let mut freed: BTreeMap<TensorId, usize> = BTreeMap::new();
    for (id, (at, _)) in &last {
        let end = freed.entry(owner(*id)).or_default();
        *end = (*end).max(*at);
    }
    let mut forgotten = vec![Vec::new(); operations.len()];
    for (id, (at, tensor)) in last {
        if !parameters.contains(&id) {
            forgotten[at].push(tensor);
        }
    }
    let mut sizes: BTreeMap<TensorId, usize> =
        values.iter().map(|(id, data)| (*id, data.bytes().len())).collect();
    let mut living: usize = sizes.values().sum();
    let mut ending = vec![Vec::new(); operations.len()];
    for (id, at) in freed {
        ending[at].push(id);
    }
    let during = operations.iter().zip(&ending).map(|(operation, ending)| {
        let before = living;
        for output in operation.outputs().filter(|output| owner(output.id) == output.id) {
            // Values are there from the beginning.
            sizes.entry(output.id).or_insert_with(|| {
                let bytes = output.shape.num_elements() * output.dtype.size();
                living += bytes;
                bytes
            });
        }
        let during = living;
        living -= ending.iter().filter_map(|id| sizes.remove(id)).sum::<usize>();
        [before, during]
    });
    let during = during.collect();
    (forgotten, during)
}

/// Of tensors that are views, the one whose memory they are in.
fn owners(operations: &[OperationIr]) -> BTreeMap<TensorId, TensorId> {
    let mut owners = BTreeMap::new();
    // Those whose elements are in another order in memory: reshaping copies them.
    let mut strided = BTreeSet::new();
    for operation in operations {
        let OperationIr::BaseFloat(operation) = operation else { continue };
        let (input, out) = match operation {
            BaseOperationIr::Reshape(op) if strided.contains(&op.input.id) => continue,
            BaseOperationIr::Reshape(op) => (op.input.id, op.out.id),
            BaseOperationIr::SwapDims(op) => (op.input.id, op.out.id),
            BaseOperationIr::Permute(op) => (op.input.id, op.out.id),
            BaseOperationIr::Expand(op) => (op.input.id, op.out.id),
            _ => continue,
        };
        if !matches!(operation, BaseOperationIr::Reshape(_)) {
            strided.insert(out);
        }
        owners.insert(out, owners.get(&input).copied().unwrap_or(input));
    }
    owners
}

/// What is multiplied by parameters.
fn layer_inputs(
    operations: &[OperationIr],
    parameters: &BTreeMap<String, TensorId>,
) -> Vec<LayerInput> {
    // Weights in other shapes, and the operations that made these.
    let mut weights: BTreeMap<TensorId, View<'_>> = parameters
        .iter()
        .map(|(path, id)| (*id, View { path, turned: false, operations: Vec::new() }))
        .collect();
    let ranks: BTreeMap<_, _> = operations
        .iter()
        .flat_map(OperationIr::nodes)
        .map(|tensor| (tensor.id, tensor.shape.num_dims()))
        .collect();
    // The same rows in other shapes.
    let mut rows: BTreeMap<TensorId, TensorId> = BTreeMap::new();
    let mut found: Vec<(TensorId, LayerInput)> = Vec::new();
    for (at, operation) in operations.iter().enumerate() {
        if let Some((input, out, turns)) = viewed(operation) {
            if let Some(view) = weights.get(&input.id)
                && (turns || matrix(input) == matrix(out))
            {
                let mut view = view.clone();
                view.operations.push(at);
                view.turned ^= turns;
                weights.insert(out.id, view);
            }
            if !turns
                && input.shape.last() == out.shape.last()
                && input.shape.num_elements() == out.shape.num_elements()
            {
                let root = rows.get(&input.id).copied().unwrap_or(input.id);
                rows.insert(out.id, root);
            }
        }
        let product = match operation {
            OperationIr::Float(_, FloatOperationIr::Matmul(op)) => Some((&op.lhs, &op.rhs)),
            OperationIr::Module(ModuleOperationIr::Linear(op)) => Some((&op.x, &op.weight)),
            _ => None,
        };
        let Some((input, weight)) = product else { continue };
        let Some(View { path, turned, operations }) = weights.get(&weight.id) else { continue };
        // Of the last two axes.
        let axis = (ranks[&parameters[*path]] + usize::from(*turned)).saturating_sub(2);
        let weight = WeightUse { path: (*path).to_owned(), axis, views: operations.clone() };
        let root = rows.get(&input.id).copied().unwrap_or(input.id);
        match found.iter_mut().find(|(known, _)| *known == root) {
            Some((_, same)) => same.weights.push(weight),
            None => {
                let tensor = input.clone();
                found.push((root, LayerInput { at, tensor, weights: vec![weight] }));
            }
        }
    }
    found.into_iter().map(|(_, input)| input).collect()
}

/// What an operation brings into another shape, and the outcome; whether that exchanges the last two axes.
fn viewed(operation: &OperationIr) -> Option<(&TensorIr, &TensorIr, bool)> {
    let OperationIr::BaseFloat(operation) = operation else { return None };
    match operation {
        BaseOperationIr::Reshape(op) | BaseOperationIr::Expand(op) => {
            Some((&op.input, &op.out, false))
        }
        BaseOperationIr::Cast(op) => Some((&op.input, &op.out, false)),
        BaseOperationIr::SwapDims(op) => {
            let rank = op.input.shape.num_dims();
            let last = [op.dim1.min(op.dim2) + 2, op.dim1.max(op.dim2) + 1];
            (last == [rank; 2]).then_some((&op.input, &op.out, true))
        }
        BaseOperationIr::Permute(op) => {
            let rank = op.axes.len();
            let mut exchanged: Vec<_> = (0..rank).collect();
            exchanged.swap(rank.checked_sub(2)?, rank - 1);
            (op.axes == exchanged).then_some((&op.input, &op.out, true))
        }
        _ => None,
    }
}

/// The last two axes.
fn matrix(tensor: &TensorIr) -> Vec<usize> {
    let rank = tensor.shape.num_dims();
    tensor.shape[rank.saturating_sub(2)..].to_vec()
}

/// A parameter as an operation reads it.
#[derive(Clone)]
struct View<'a> {
    path: &'a str,
    /// Whether its last two axes are exchanged.
    turned: bool,
    /// What brought it into this shape.
    operations: Vec<usize>,
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;

    use super::*;

    #[test]
    fn views_take_no_memory_of_their_own() {
        let device = Device::flex();
        let mlp = [LinearConfig::new(4, 8), LinearConfig::new(8, 4)];
        let mlp = mlp.map(|config| config.with_bias(false).init(&device)).to_vec();
        let batch = Tensor::<3>::ones([2, 3, 4], &device);
        // Every tensor of four channels has 96 bytes.
        let recording = Recording::of(&mlp, batch, &mut |mlp: &Vec<_>, x: Tensor<3>| {
            let [up, down]: &[burn::nn::Linear; 2] = mlp[..].try_into().expect("two layers");
            let hidden = up.forward(x.clone());
            // Reshaping what was transposed copies it.
            let turned = x.clone().swap_dims(1, 2).reshape([2, 3, 4]);
            down.forward(hidden) + turned + x
        });
        let recording = recording.unwrap();
        let inputs: Vec<_> = recording.inputs.iter().map(|input| &input.weights[0].path).collect();
        assert_eq!(inputs, ["0.weight", "1.weight"]);
        // The batch, twice as much of what is hidden, and the copy; the product on top.
        assert_eq!(recording.waiting_bytes, 4 * 96);
        assert_eq!(recording.peak_bytes, 5 * 96);
    }
}
