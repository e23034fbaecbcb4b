//! Forward passes as lists of operations, with the values that they read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use burn::backend::Capture;
use burn::backend::capture::CapturedGraph;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_ir::{BaseOperationIr, IrVisitorMut, OperationIr, TensorId, TensorIr};
use xxhash_rust::xxh3::Xxh3;

use crate::Fp4Error;
use crate::layer_inputs::{LayerInput, Recorded, layer_inputs};
use crate::pack::message;

/// Records forward passes, one after the other.
pub(crate) struct Recorder {
    device: Device,
    values: Values,
    /// Whether a pass has failed on the device: what it left there is not known.
    failed: bool,
}

/// Capture devices that no calibration uses now.
///
/// Burn numbers them by 16 bits, uses no number twice and keeps the settings of each for as long
/// as the process runs, so a new one for every calibration would run out of numbers.
static FREE: Mutex<Vec<Device>> = Mutex::new(Vec::new());

impl Recorder {
    /// # Errors
    /// [`Fp4Error::Capture`] if this process has no capture device left.
    pub(crate) fn new() -> Result<Self, Fp4Error> {
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let device = free.map_or_else(|| catch_unwind(Device::capture), Ok).map_err(|_| {
            let problem = "this process has used up Burn's 65536 capture devices, one for each \
                           calibration that failed and one for each that ran beside others";
            Fp4Error::Capture { problem: problem.to_owned() }
        })?;
        Ok(Self { device, values: Values::default(), failed: false })
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
            Ok(Err(error)) => {
                self.failed = true;
                Err(failed(&error.to_string()))
            }
            Err(panic) => {
                self.failed = true;
                Err(failed(&message(&*panic)))
            }
        }
    }

    /// The values of all recordings.
    pub(crate) fn into_values(mut self) -> Values {
        std::mem::take(&mut self.values)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.failed {
            FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.device.clone());
        }
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
        self.found.insert(self.stack.join("."), Recorded::new(id, shape));
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

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::tensor::Distribution;

    use std::ops::Range;

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
    fn calibrations_one_after_the_other_do_not_run_out_of_capture_devices() {
        for number in 0..=u32::from(u16::MAX) + 1 {
            let recorder = Recorder::new();
            assert!(recorder.is_ok(), "number {number}");
        }
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
            let of = |expert: usize| w.clone().slice([expert..expert + 1, 0..4]).reshape([4, 5]);
            x.clone().matmul(of(1)) + (x + 1.0).matmul(of(2))
        };
        assert_eq!(experts([2, 4], one), [(1, 2, 1..2, 1), (1, 2, 2..3, 1)]);
        let some = |w: Tensor<3>, x: Tensor<3>| x.matmul(w.slice([1..3, 0..4]));
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
