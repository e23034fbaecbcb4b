//! A forward pass as a list of operations, and where it multiplies by weights.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Capture;
use burn::backend::capture::CapturedGraph;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fp4_ops::OpsError;
use burn_ir::{
    BaseOperationIr, FloatOperationIr, IrVisitorMut, ModuleOperationIr, OperationIr, SliceOpIr,
    TensorId, TensorIr,
};
use xxhash_rust::xxh3::Xxh3;

use crate::Fp4Error;
use crate::pack::message;

/// Records forward passes, one after the other.
pub(crate) struct Recorder {
    /// One for all of them: Burn numbers capture devices by 16 bits and uses no number twice.
    device: Device,
    values: Values,
}

impl Recorder {
    /// # Errors
    /// [`Fp4Error::Capture`] if this process has no capture device left.
    pub(crate) fn new() -> Result<Self, Fp4Error> {
        let device = catch_unwind(Device::capture).map_err(|_| {
            let problem = "this process has used up Burn's 65536 capture devices, one for each \
                           calibration";
            Fp4Error::Capture { problem: problem.to_owned() }
        })?;
        Ok(Self { device, values: Values::default() })
    }

    /// Records a forward pass over a batch. Nothing is computed, and no float parameter is read.
    ///
    /// # Errors
    /// [`Fp4Error::Capture`] if the pass reads values, or panics for another reason.
    pub(crate) fn record<M: Module, I: Module, O>(
        &mut self,
        model: &M,
        batch: I,
        forward: &mut impl FnMut(&M, I) -> O,
    ) -> Result<Recording, Fp4Error> {
        let capture = &self.device;
        let mut stand_ins =
            StandIns { stack: Vec::new(), device: capture.clone(), found: BTreeMap::new() };
        let recorded = catch_unwind(AssertUnwindSafe(|| {
            capture.capture_scope(|scope| {
                // Clones share running statistics, so that these would be moved for all of them.
                let model = model.valid().map(&mut stand_ins).to_device(capture);
                drop(forward(&model, batch.to_device(capture)));
                scope.complete([], [])
            })
        }));
        let failed = |found: &str| {
            let problem = format!(
                "the forward pass cannot be recorded: {found}; it has to run the module on the \
                 batch it is given, without reading values (control flow that depends on data \
                 cannot be recorded)"
            );
            Fp4Error::Capture { problem }
        };
        match recorded {
            Ok(Ok(graph)) => Ok(Recording::new(graph, stand_ins.found, &mut self.values)),
            Ok(Err(error)) => Err(failed(&error.to_string())),
            Err(panic) => Err(failed(&message(&*panic))),
        }
    }

    /// The values of all recordings.
    pub(crate) fn into_values(self) -> Values {
        self.values
    }
}

/// Tensors that recordings read without computing them, each once however many read it.
#[derive(Default)]
pub(crate) struct Values {
    all: Vec<Value>,
    by_digest: HashMap<u128, Vec<usize>>,
}

/// One of them.
pub(crate) struct Value {
    pub(crate) data: TensorData,
    digest: u128,
    uses: usize,
}

impl Value {
    /// Whether it is read under several ids, of one recording or of several.
    pub(crate) fn is_shared(&self) -> bool {
        self.uses > 1
    }
}

impl Values {
    /// Counts a use of a tensor, and gives its number.
    fn add(&mut self, data: TensorData) -> usize {
        let mut hasher = Xxh3::new();
        data.dtype().hash(&mut hasher);
        data.shape().as_slice().hash(&mut hasher);
        hasher.update(data.as_bytes());
        let digest = hasher.digest128();
        let alike = self.by_digest.entry(digest).or_default();
        if let Some(&same) = alike.iter().find(|&&other| self.all[other].data == data) {
            self.all[same].uses += 1;
            return same;
        }
        alike.push(self.all.len());
        self.all.push(Value { data, digest, uses: 1 });
        self.all.len() - 1
    }

    pub(crate) fn get(&self, number: usize) -> &Value {
        &self.all[number]
    }

    /// Numbers of the tensors that are shared, and these.
    pub(crate) fn shared(&self) -> impl Iterator<Item = (usize, &TensorData)> {
        let all = self.all.iter().enumerate();
        all.filter(|(_, value)| value.is_shared()).map(|(number, value)| (number, &value.data))
    }

    /// Bytes of the tensors that are shared.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.shared().map(|(_, data)| data.as_bytes().len()).sum()
    }
}

/// A forward pass over one batch.
pub(crate) struct Recording {
    pub(crate) operations: Vec<OperationIr>,
    /// Numbers of the tensors that it reads without computing them, but for float parameters.
    pub(crate) values: BTreeMap<TensorId, usize>,
    /// Float parameters by path.
    pub(crate) parameters: BTreeMap<String, Recorded>,
    /// In the order of operations.
    pub(crate) inputs: Vec<LayerInput>,
    /// By operation: the tensors that nothing reads after it.
    pub(crate) forgotten: Vec<Vec<TensorIr>>,
}

/// A float parameter in a recording.
pub(crate) struct Recorded {
    pub(crate) id: TensorId,
    shape: Vec<usize>,
    /// Operations that bring it into another form, in order, each with the last one that reads the
    /// outcome.
    pub(crate) views: Vec<(usize, usize)>,
    /// Other operations that read it in any form, in order.
    readers: Vec<usize>,
}

impl Recorded {
    /// How many operations have to run so that all before one that read the parameter have run.
    pub(crate) fn read_before(&self, operation: usize) -> usize {
        let before = self.readers.partition_point(|reader| *reader < operation);
        self.readers[..before].last().map_or(0, |last| last + 1)
    }
}

/// A tensor that is multiplied by weights.
pub(crate) struct LayerInput {
    /// The operation that reads it first.
    pub(crate) at: usize,
    /// `[.., channels]`.
    pub(crate) tensor: TensorIr,
    /// Parts that its rows are divided into, each with statistics of its own: as many as each
    /// weight has slices, if every slice is multiplied by other rows, otherwise 1.
    pub(crate) slices: usize,
    /// Rows of one part that follow each other; after them come those of the next.
    run: usize,
    /// The weights that it is multiplied by.
    pub(crate) weights: Vec<WeightUse>,
}

impl LayerInput {
    /// What is wrong with it, by the first of the weights that it is multiplied by.
    pub(crate) fn named(&self, problem: OpsError) -> Fp4Error {
        Fp4Error::at(&self.weights[0].path, problem)
    }

    pub(crate) fn channels(&self) -> usize {
        self.tensor.shape.last().copied().unwrap_or(1)
    }

    /// Rows of each part.
    pub(crate) fn rows(&self) -> usize {
        rows(&self.tensor) / self.slices
    }

    /// The parts `[rows, channels]` of all rows `[slices * rows, channels]`.
    pub(crate) fn cut(&self, all: Tensor<2>) -> Vec<Tensor<2>> {
        let [rows, channels] = all.dims();
        if self.slices == 1 || rows == 0 {
            return vec![all; self.slices];
        }
        let turns = rows / (self.slices * self.run);
        let all = all.reshape([turns, self.slices, self.run * channels]);
        let part = |slice: usize| all.clone().slice_dim(1, slice..slice + 1);
        let parts = (0..self.slices).map(part);
        parts.map(|part| part.reshape([turns * self.run, channels])).collect()
    }

    /// What is multiplied by one of its parts: paths of weights, the axis of them that is
    /// contracted, and the slice.
    pub(crate) fn uses(&self, part: usize) -> impl Iterator<Item = (&str, usize, usize)> {
        self.weights.iter().flat_map(move |weight| {
            let slices = match self.slices {
                1 => weight.slices.clone(),
                _ => weight.slices.start + part..weight.slices.start + part + 1,
            };
            slices.map(move |slice| (weight.path.as_str(), weight.axis, slice))
        })
    }
}

/// A weight in a product.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct WeightUse {
    pub(crate) path: String,
    /// The axis of the parameter that is contracted.
    pub(crate) axis: usize,
    /// Its matrices that take part, numbered over its leading axes: `0..1` of a parameter of rank
    /// 2.
    pub(crate) slices: Range<usize>,
}

/// Bytes that a recording takes on its device, but for parameters and values that are shared.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    /// At most.
    pub(crate) peak: usize,
    /// At most where layers are about to read their inputs.
    pub(crate) waiting: usize,
}

impl Recording {
    fn new(
        graph: CapturedGraph,
        mut parameters: BTreeMap<String, Recorded>,
        values: &mut Values,
    ) -> Self {
        let CapturedGraph { graph, values: found } = graph;
        let stand_ins: BTreeSet<_> = parameters.values().map(|recorded| recorded.id).collect();
        let mut operations = graph.operations;
        operations
            .retain(|operation| !operation.outputs().any(|output| stand_ins.contains(&output.id)));
        let inputs = layer_inputs(&operations, &mut parameters);
        let last = last_reads(&operations);
        let found = found.into_iter().filter(|(id, _)| last.contains_key(id));
        let values = found.map(|(id, data)| (id, values.add(data))).collect();
        let mut forgotten = vec![Vec::new(); operations.len()];
        for (id, (at, tensor)) in last {
            if !stand_ins.contains(&id) {
                forgotten[at].push(tensor);
            }
        }
        Self { operations, values, parameters, inputs, forgotten }
    }

    /// The memory that it takes; `values` are those of all recordings.
    pub(crate) fn memory(&self, values: &Values) -> Memory {
        let own = self.values.iter().map(|(id, number)| {
            let value = values.get(*number);
            let bytes = if value.is_shared() { 0 } else { value.data.as_bytes().len() };
            (*id, bytes)
        });
        let bytes = living(&self.operations, own.collect());
        let largest = |bytes: &mut dyn Iterator<Item = usize>| bytes.max().unwrap_or(0);
        Memory {
            peak: largest(&mut bytes.iter().map(|[_, during]| *during)),
            waiting: largest(&mut self.inputs.iter().map(|input| bytes[input.at][0])),
        }
    }

    /// Adds what it computes to a digest: the same for recordings that compute the same of the same
    /// values. Tensors count by the order in which they appear.
    pub(crate) fn digest(&self, values: &Values, hasher: &mut Xxh3) {
        let mut order = Order(BTreeMap::new());
        for (path, recorded) in &self.parameters {
            (path, order.of(recorded.id)).hash(hasher);
        }
        for (id, number) in &self.values {
            (order.of(*id), values.get(*number).digest).hash(hasher);
        }
        for operation in &self.operations {
            let mut operation = operation.clone();
            operation.visit_mut(&mut order);
            operation.hash(hasher);
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
    found: BTreeMap<String, Recorded>,
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
        let (id, shape) = (stand_in.id(), param.shape().to_vec());
        let recorded = Recorded { id, shape, views: Vec::new(), readers: Vec::new() };
        self.found.insert(self.stack.join("."), recorded);
        param
    }
}

/// By tensor the last operation that reads or makes it, and what it is there.
fn last_reads(operations: &[OperationIr]) -> BTreeMap<TensorId, (usize, TensorIr)> {
    let mut last = BTreeMap::new();
    for (at, operation) in operations.iter().enumerate() {
        for tensor in operation.nodes() {
            last.insert(tensor.id, (at, tensor.clone()));
        }
    }
    last
}

/// By operation the bytes of the tensors that live before and during it, of which some are there
/// from the beginning.
fn living(operations: &[OperationIr], given: BTreeMap<TensorId, usize>) -> Vec<[usize; 2]> {
    let owners = owners(operations);
    let owner = |id| owners.get(&id).copied().unwrap_or(id);
    // When memory is read last, by its owner.
    let mut freed: BTreeMap<TensorId, usize> = BTreeMap::new();
    for (id, (at, _)) in last_reads(operations) {
        let end = freed.entry(owner(id)).or_default();
        *end = (*end).max(at);
    }
    let mut sizes = given;
    let mut living: usize = sizes.values().sum();
    let mut ending = vec![Vec::new(); operations.len()];
    for (id, at) in freed {
        ending[at].push(id);
    }
    let during = operations.iter().zip(&ending).map(|(operation, ending)| {
        let before = living;
        for output in operation.outputs().filter(|output| owner(output.id) == output.id) {
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
    during.collect()
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

/// What is multiplied by parameters of rank 2 or more. Notes as well which operations read these.
fn layer_inputs(
    operations: &[OperationIr],
    parameters: &mut BTreeMap<String, Recorded>,
) -> Vec<LayerInput> {
    // Weights in the forms that operations bring them into.
    let mut weights: BTreeMap<TensorId, View> = BTreeMap::new();
    for (path, recorded) in parameters.iter().filter(|(_, recorded)| recorded.shape.len() >= 2) {
        weights.insert(recorded.id, View::of(path, &recorded.shape));
    }
    // By operation that brings a weight into another form: the last one that reads the outcome.
    let mut until: BTreeMap<usize, usize> = BTreeMap::new();
    // The same rows in other shapes.
    let mut roots: BTreeMap<TensorId, TensorId> = BTreeMap::new();
    let mut known: BTreeMap<(TensorId, usize, usize), usize> = BTreeMap::new();
    let mut found: Vec<LayerInput> = Vec::new();
    for (at, operation) in operations.iter().enumerate() {
        if let Some((input, out)) = same_rows(operation) {
            roots.insert(out.id, roots.get(&input.id).copied().unwrap_or(input.id));
        }
        let mut made = Vec::new();
        for tensor in operation.inputs() {
            let Some(view) = weights.get(&tensor.id) else { continue };
            until.extend(view.operations.iter().map(|operation| (*operation, at)));
            let recorded = parameters.get_mut(&view.path).expect("views are of parameters");
            match view.after(operation, at) {
                Some(after) => {
                    recorded.views.push((at, at));
                    made.push(after);
                }
                None => recorded.readers.push(at),
            }
        }
        weights.extend(made);
        let product = match operation {
            OperationIr::Float(_, FloatOperationIr::Matmul(op)) => Some((&op.lhs, &op.rhs)),
            OperationIr::Module(ModuleOperationIr::Linear(op)) => Some((&op.x, &op.weight)),
            _ => None,
        };
        let Some((input, weight)) = product else { continue };
        let Some(view) = weights.get(&weight.id) else { continue };
        let division = Division::of(leading(input), leading(weight), &view.slices);
        let Some(Division { slices, parts, run }) = division else { continue };
        let run = match parts {
            1 => rows(input),
            _ => run * input.shape[input.shape.num_dims() - 2],
        };
        // Of the last two axes.
        let axis = parameters[&view.path].shape.len() + usize::from(view.turned) - 2;
        let weight = WeightUse { path: view.path.clone(), axis, slices };
        let root = roots.get(&input.id).copied().unwrap_or(input.id);
        match known.get(&(root, parts, run)) {
            Some(&same) => found[same].weights.push(weight),
            None => {
                known.insert((root, parts, run), found.len());
                let (tensor, weights) = (input.clone(), vec![weight]);
                found.push(LayerInput { at, tensor, slices: parts, run, weights });
            }
        }
    }
    for (view, last) in parameters.values_mut().flat_map(|recorded| &mut recorded.views) {
        *last = until.get(&*view).copied().unwrap_or(*last);
    }
    found
}

/// The rows that an operation brings into another shape or dtype, and the outcome.
fn same_rows(operation: &OperationIr) -> Option<(&TensorIr, &TensorIr)> {
    let OperationIr::BaseFloat(operation) = operation else { return None };
    let (input, out) = match operation {
        BaseOperationIr::Reshape(op) | BaseOperationIr::Expand(op) => (&op.input, &op.out),
        BaseOperationIr::Cast(op) => (&op.input, &op.out),
        _ => return None,
    };
    let same = input.shape.last() == out.shape.last()
        && input.shape.num_elements() == out.shape.num_elements();
    same.then_some((input, out))
}

/// A parameter as an operation reads it.
#[derive(Clone)]
struct View {
    path: String,
    /// Whether its last two axes are exchanged.
    turned: bool,
    /// By index over the leading axes the slice of the parameter that is there.
    slices: Vec<usize>,
    /// What brought it into this form.
    operations: Vec<usize>,
}

impl View {
    /// A parameter as it is.
    fn of(path: &str, shape: &[usize]) -> Self {
        let slices = (0..shape[..shape.len() - 2].iter().product::<usize>()).collect();
        Self { path: path.to_owned(), turned: false, slices, operations: Vec::new() }
    }

    /// What an operation makes of it, if its matrices stay as they are or are transposed.
    fn after(&self, operation: &OperationIr, at: usize) -> Option<(TensorId, Self)> {
        let OperationIr::BaseFloat(operation) = operation else { return None };
        let (input, out, slices) = match operation {
            BaseOperationIr::Reshape(op) => (&op.input, &op.out, self.slices.clone()),
            BaseOperationIr::Cast(op) => (&op.input, &op.out, self.slices.clone()),
            BaseOperationIr::Expand(op) => {
                let (from, to) = (leading(&op.input), leading(&op.out));
                let index =
                    (0..to.iter().product::<usize>()).map(|index| broadcast(index, to, from));
                (&op.input, &op.out, index.map(|index| self.slices[index]).collect())
            }
            BaseOperationIr::Slice(op) => (&op.tensor, &op.out, self.sliced(op)?),
            BaseOperationIr::SwapDims(op) => {
                let rank = op.input.shape.num_dims();
                let last = [op.dim1.min(op.dim2) + 2, op.dim1.max(op.dim2) + 1] == [rank; 2];
                return last.then(|| self.made(at, &op.out, true, self.slices.clone()));
            }
            BaseOperationIr::Permute(op) => {
                let rank = op.axes.len();
                let mut exchanged: Vec<_> = (0..rank).collect();
                exchanged.swap(rank.checked_sub(2)?, rank - 1);
                let last = op.axes == exchanged;
                return last.then(|| self.made(at, &op.out, true, self.slices.clone()));
            }
            _ => return None,
        };
        (matrix(input) == matrix(out)).then(|| self.made(at, out, false, slices))
    }

    fn made(&self, at: usize, out: &TensorIr, turns: bool, slices: Vec<usize>) -> (TensorId, Self) {
        let operations = self.operations.iter().copied().chain([at]).collect();
        let turned = self.turned ^ turns;
        (out.id, Self { path: self.path.clone(), turned, slices, operations })
    }

    /// The slices that a part of a tensor has, if it is in their order.
    fn sliced(&self, op: &SliceOpIr) -> Option<Vec<usize>> {
        let sizes = op.tensor.shape.as_slice().iter().enumerate();
        let ranges = sizes.map(|(axis, &size)| match op.ranges.get(axis) {
            Some(slice) => (slice.step() == 1).then(|| slice.to_range(size)),
            None => Some(0..size),
        });
        let ranges = ranges.collect::<Option<Vec<_>>>()?;
        let leading = leading(&op.tensor);
        let inside = |index: usize| {
            let mut rest = index;
            leading.iter().zip(&ranges[..leading.len()]).rev().all(|(size, range)| {
                let at = rest % size;
                rest /= size;
                range.contains(&at)
            })
        };
        let kept = self.slices.iter().enumerate().filter(|(index, _)| inside(*index));
        Some(kept.map(|(_, slice)| *slice).collect())
    }
}

/// How a product divides the rows of its input among the slices of its weight.
struct Division {
    slices: Range<usize>,
    /// 1 if every slice is multiplied by all rows, otherwise as many as there are slices.
    parts: usize,
    /// Leading indices of one part that follow each other.
    run: usize,
}

impl Division {
    /// By the leading axes of both, and the slices of the weight there; `None` if it is another one
    /// than described.
    fn of(input: &[usize], weight: &[usize], slices: &[usize]) -> Option<Self> {
        let range = *slices.iter().min()?..*slices.iter().max()? + 1;
        let (count, inputs) = (range.len(), input.iter().product::<usize>());
        if count == 1 {
            return Some(Self { slices: range, parts: 1, run: 1 });
        }
        let rank = input.len().max(weight.len());
        let size = |shape: &[usize], axis: usize| {
            (axis + shape.len()).checked_sub(rank).map_or(1, |axis| shape[axis])
        };
        let to: Vec<_> = (0..rank)
            .map(|axis| match (size(input, axis), size(weight, axis)) {
                (1, size) | (size, _) => size,
            })
            .collect();
        // Which rows are multiplied by which slices.
        let pairs = (0..to.iter().product::<usize>()).map(|index| {
            let slice = slices[broadcast(index, &to, weight)];
            (broadcast(index, &to, input), slice - range.start)
        });
        let pairs: BTreeSet<(usize, usize)> = pairs.collect();
        if pairs.len() == inputs * count {
            return Some(Self { slices: range, parts: 1, run: 1 });
        }
        let first = pairs.first()?.1;
        let run = pairs.iter().take_while(|(_, slice)| *slice == first).count();
        let even = pairs.iter().enumerate().all(|(at, pair)| *pair == (at, at / run % count));
        let divided = even && pairs.len() == inputs && inputs.is_multiple_of(run * count);
        divided.then_some(Self { slices: range, parts: count, run })
    }
}

/// Of an index into a shape, that into another one that is broadcast to it.
fn broadcast(index: usize, to: &[usize], from: &[usize]) -> usize {
    let (mut rest, mut stride, mut found) = (index, 1, 0);
    for (axis, size) in to.iter().enumerate().rev() {
        let at = rest % size;
        rest /= size;
        let Some(axis) = (axis + from.len()).checked_sub(to.len()) else { break };
        if from[axis] > 1 {
            found += at * stride;
        }
        stride *= from[axis];
    }
    found
}

/// All axes but the last two.
fn leading(tensor: &TensorIr) -> &[usize] {
    let shape = tensor.shape.as_slice();
    &shape[..shape.len().saturating_sub(2)]
}

/// The last two axes.
fn matrix(tensor: &TensorIr) -> &[usize] {
    &tensor.shape.as_slice()[leading(tensor).len()..]
}

/// All of `[.., channels]`.
fn rows(tensor: &TensorIr) -> usize {
    let channels = tensor.shape.last().copied().unwrap_or(1);
    tensor.shape.num_elements().checked_div(channels).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::tensor::Distribution;

    use super::*;

    fn record<M: Module, I: Module, O>(
        model: &M,
        batches: impl IntoIterator<Item = I>,
        mut forward: impl FnMut(&M, I) -> O,
    ) -> (Vec<Recording>, Values) {
        let mut recorder = Recorder::new().unwrap();
        let record = |batch| recorder.record(model, batch, &mut forward).unwrap();
        let recordings = batches.into_iter().map(record).collect();
        (recordings, recorder.into_values())
    }

    #[test]
    fn views_take_no_memory_of_their_own() {
        let device = Device::flex();
        let mlp = [LinearConfig::new(4, 8), LinearConfig::new(8, 4)];
        let mlp = mlp.map(|config| config.with_bias(false).init(&device)).to_vec();
        let batch = Tensor::<3>::ones([2, 3, 4], &device);
        // Every tensor of four channels has 96 bytes.
        let (recordings, values) = record(&mlp, [batch], |mlp: &Vec<_>, x: Tensor<3>| {
            let [up, down]: &[burn::nn::Linear; 2] = mlp[..].try_into().expect("two layers");
            let hidden = up.forward(x.clone());
            // Reshaping what was transposed copies it.
            let turned = x.clone().swap_dims(1, 2).reshape([2, 3, 4]);
            down.forward(hidden) + turned + x
        });
        let recording = &recordings[0];
        let inputs: Vec<_> = recording.inputs.iter().map(|input| &input.weights[0].path).collect();
        assert_eq!(inputs, ["0.weight", "1.weight"]);
        // The batch, twice as much of what is hidden, and the copy; the product on top.
        let memory = recording.memory(&values);
        assert_eq!((memory.waiting, memory.peak), (4 * 96, 5 * 96));
    }

    #[test]
    fn values_that_recordings_have_in_common_are_kept_once() {
        let device = Device::flex();
        let random = |rows| Tensor::<2>::random([rows, 8], Distribution::Default, &device);
        let table = vec![random(16), random(16)];
        let batches = [random(1), random(1), random(1)];
        let (recordings, values) =
            record(&table, batches, |table: &Vec<Tensor<2>>, x: Tensor<2>| {
                table.iter().fold(x, |x, table| x + table.clone())
            });
        assert_eq!(recordings.iter().map(|recording| recording.values.len()).sum::<usize>(), 9);
        let sizes: Vec<_> = values.shared().map(|(_, data)| data.num_elements()).collect();
        assert_eq!((sizes, values.all.len()), (vec![128; 2], 5));
        assert_eq!(values.shared_bytes(), 2 * 128 * 4);
        // Both sums.
        let peaks = recordings.iter().map(|recording| recording.memory(&values).peak);
        assert_eq!(peaks.collect::<Vec<_>>(), [2 * 512; 3]);
    }

    /// By input: how many parts it has, their rows, and the slices of the weight.
    fn experts<const D: usize>(
        input: [usize; D],
        forward: impl Fn(Tensor<3>, Tensor<D>) -> Tensor<D>,
    ) -> Vec<(usize, usize, Range<usize>, usize)> {
        let device = Device::flex();
        let weights = vec![Param::from_tensor(Tensor::<3>::ones([3, 4, 5], &device))];
        let batch = Tensor::<D>::ones(input, &device);
        let run = |weights: &Vec<Param<Tensor<3>>>, x| forward(weights[0].val(), x);
        let (recordings, _) = record(&weights, [batch], run);
        let inputs = recordings[0].inputs.iter();
        let found = inputs.map(|input| {
            let [weight] = &input.weights[..] else { panic!("one weight") };
            (input.slices, input.rows(), weight.slices.clone(), weight.axis)
        });
        found.collect()
    }

    #[test]
    fn every_expert_has_inputs_of_its_own() {
        assert_eq!(experts([3, 2, 4], |w, x| x.matmul(w)), [(3, 2, 0..3, 1)]);
        let transposed = |w: Tensor<3>, x: Tensor<3>| x.matmul(w.swap_dims(1, 2));
        assert_eq!(experts([3, 2, 5], transposed), [(3, 2, 0..3, 2)]);
        // All of them the same.
        assert_eq!(experts([1, 2, 4], |w, x| x.matmul(w)), [(1, 2, 0..3, 1)]);
        let batched = |w: Tensor<3>, x: Tensor<4>| x.matmul(w.unsqueeze());
        assert_eq!(experts([7, 3, 2, 4], batched), [(3, 14, 0..3, 1)]);
        assert_eq!(experts([7, 1, 2, 4], batched), [(1, 14, 0..3, 1)]);
        // One by one.
        let one = |w: Tensor<3>, x: Tensor<2>| {
            let of = |expert: usize| w.clone().slice([expert..expert + 1]).reshape([4, 5]);
            x.clone().matmul(of(1)) + (x + 1.0).matmul(of(2))
        };
        assert_eq!(experts([2, 4], one), [(1, 2, 1..2, 1), (1, 2, 2..3, 1)]);
        let some = |w: Tensor<3>, x: Tensor<3>| x.matmul(w.slice([1..3]));
        assert_eq!(experts([2, 2, 4], some), [(2, 2, 1..3, 1)]);
        // A part of its columns is another weight.
        let columns = |w: Tensor<3>, x: Tensor<3>| x.matmul(w.slice([0..3, 0..4, 1..4]));
        assert!(experts([3, 2, 4], columns).is_empty());
    }

    #[test]
    fn inputs_are_cut_into_those_of_experts() {
        let device = Device::flex();
        let weights = vec![Param::from_tensor(Tensor::<3>::ones([3, 4, 5], &device))];
        let batch = Tensor::<4>::ones([2, 3, 2, 4], &device);
        let (recordings, _) = record(&weights, [batch], |weights: &Vec<Param<Tensor<3>>>, x| {
            let weight: Tensor<4> = weights[0].val().unsqueeze();
            Tensor::<4>::matmul(x, weight)
        });
        let input = &recordings[0].inputs[0];
        let rows: Vec<f32> = (0..12).flat_map(|row| [row as f32; 4]).collect();
        let rows = Tensor::<2>::from_data(TensorData::new(rows, [12, 4]), &device);
        let first = |part: Tensor<2>| part.slice([0..4, 0..1]).into_data().iter::<f32>().collect();
        let parts: Vec<Vec<f32>> = input.cut(rows).into_iter().map(first).collect();
        assert_eq!(parts, [[0.0, 1.0, 6.0, 7.0], [2.0, 3.0, 8.0, 9.0], [4.0, 5.0, 10.0, 11.0]]);
        assert_eq!(input.uses(2).collect::<Vec<_>>(), [("0", 1, 2)]);
    }
}
