//! Where a list of operations multiplies activations by weights.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use burn::tensor::Tensor;
use burn_fp4_ops::OpsError;
use burn_ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, OperationIr, SliceOpIr, TensorId,
    TensorIr,
};

use crate::error::Fp4Error;

/// A float parameter in a recording.
pub(crate) struct RecordedParameter {
    pub(crate) id: TensorId,
    shape: Vec<usize>,
    /// Operations that bring it into another form, in order, each with the last one that reads the
    /// outcome.
    pub(crate) views: Vec<(usize, usize)>,
    /// Other operations that read it in any form, in order.
    readers: Vec<usize>,
}

impl RecordedParameter {
    /// Makes a parameter that nothing has read yet.
    pub(crate) fn new(id: TensorId, shape: Vec<usize>) -> Self {
        Self { id, shape, views: Vec::new(), readers: Vec::new() }
    }

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
    /// Consecutive rows of one part; the rows of the next part follow.
    run: usize,
    /// The weights that it is multiplied by.
    pub(crate) weights: Vec<WeightUse>,
}

impl LayerInput {
    /// Returns an error that names the first weight that it is multiplied by.
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

    /// Returns the weights that one of its parts is multiplied by: path, contracted axis and slice.
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

/// Finds the inputs of products with parameters of rank 2 or more, and the operations that read
/// these.
pub(crate) fn layer_inputs(
    operations: &[OperationIr],
    parameters: &mut BTreeMap<String, RecordedParameter>,
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
    /// Set if its last two axes are exchanged.
    turned: bool,
    /// By index over the leading axes the slice of the parameter that is there.
    slices: Vec<usize>,
    /// The operations that brought it into this form.
    operations: Vec<usize>,
}

impl View {
    /// A parameter itself.
    fn of(path: &str, shape: &[usize]) -> Self {
        let slices = (0..shape[..shape.len() - 2].iter().product::<usize>()).collect();
        Self { path: path.to_owned(), turned: false, slices, operations: Vec::new() }
    }

    /// Returns the view that an operation makes of it, if that keeps or transposes its matrices.
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
                return last.then(|| self.seen_as(at, &op.out, true, self.slices.clone()));
            }
            BaseOperationIr::Permute(op) => {
                let rank = op.axes.len();
                let mut exchanged: Vec<_> = (0..rank).collect();
                exchanged.swap(rank.checked_sub(2)?, rank - 1);
                let last = op.axes == exchanged;
                return last.then(|| self.seen_as(at, &op.out, true, self.slices.clone()));
            }
            _ => return None,
        };
        (matrix(input) == matrix(out)).then(|| self.seen_as(at, out, false, slices))
    }

    fn seen_as(
        &self,
        at: usize,
        out: &TensorIr,
        turns: bool,
        slices: Vec<usize>,
    ) -> (TensorId, Self) {
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

/// Returns the index into a shape that is broadcast to another one, for an index into that.
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
