//! [`Recording`]: a forward pass over one batch as a list of operations.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;

use burn::backend::capture::CapturedGraph;
use burn_ir::{IrVisitorMut, OperationIr, TensorId, TensorIr};
use xxhash_rust::xxh3::Xxh3;

use super::layer_inputs::{LayerInput, RecordedParameter, layer_inputs};
use super::liveness::{last_reads, living};
use super::values::Values;

/// A forward pass over one batch.
pub(crate) struct Recording {
    pub(crate) operations: Vec<OperationIr>,
    /// Numbers of the tensors that it reads without computing them, but for float parameters.
    pub(crate) values: BTreeMap<TensorId, usize>,
    /// Float parameters by path.
    pub(crate) parameters: BTreeMap<String, RecordedParameter>,
    /// In the order of operations.
    pub(crate) inputs: Vec<LayerInput>,
    /// The outputs that are kept, in the order in which the forward pass gives them.
    pub(crate) outputs: Vec<TensorIr>,
    /// By operation: the tensors that nothing reads after it.
    pub(crate) forgotten: Vec<Vec<TensorIr>>,
}

/// Bytes that a recording takes on its device until the last input of a layer is known, where it
/// ends, but for parameters and values that are shared.
#[derive(Clone, Copy, Default)]
pub(crate) struct Memory {
    /// At most.
    pub(crate) peak: usize,
    /// At most where layers are about to read their inputs.
    pub(crate) waiting: usize,
}

impl Recording {
    /// Makes a recording of a captured forward pass, with the stand-ins of its parameters by path.
    /// Returns nothing if one of the outputs to be kept is not computed by the pass.
    pub(super) fn new(
        graph: CapturedGraph,
        mut parameters: BTreeMap<String, RecordedParameter>,
        kept: &[TensorId],
        values: &mut Values,
    ) -> Option<Self> {
        let CapturedGraph { graph, values: found } = graph;
        let stand_ins: BTreeSet<_> = parameters.values().map(|recorded| recorded.id).collect();
        let mut operations = graph.operations;
        operations
            .retain(|operation| !operation.outputs().any(|output| stand_ins.contains(&output.id)));
        let inputs = layer_inputs(&operations, &mut parameters);
        let computed: BTreeMap<TensorId, &TensorIr> =
            operations.iter().flat_map(OperationIr::outputs).map(|out| (out.id, out)).collect();
        let outputs = kept.iter().map(|id| computed.get(id).map(|&out| out.clone()));
        let outputs = outputs.collect::<Option<Vec<_>>>()?;
        let last = last_reads(&operations);
        let found = found.into_iter().filter(|(id, _)| last.contains_key(id));
        let values = found.map(|(id, data)| (id, values.add(data))).collect();
        let mut forgotten = vec![Vec::new(); operations.len()];
        for (id, (at, tensor)) in last {
            if !stand_ins.contains(&id) && !kept.contains(&id) {
                forgotten[at].push(tensor);
            }
        }
        Some(Self { operations, values, parameters, inputs, outputs, forgotten })
    }

    /// Leaves out the inputs of all weights but these, named by path and contracted axis.
    pub(crate) fn keep_inputs_of(&mut self, wanted: &BTreeSet<(String, usize)>) {
        for input in &mut self.inputs {
            input.weights.retain(|weight| wanted.contains(&(weight.path.clone(), weight.axis)));
        }
        self.inputs.retain(|input| !input.weights.is_empty());
    }

    /// Returns true if both execute the same layers in the same order.
    pub(crate) fn runs_like(&self, other: &Self) -> bool {
        let uses = |recording: &Self| -> Vec<_> {
            let inputs = recording.inputs.iter();
            inputs.map(|input| (input.slices, input.weights.clone())).collect()
        };
        uses(self) == uses(other)
    }

    /// The memory that it takes; `values` belong to all recordings.
    pub(crate) fn memory(&self, values: &Values) -> Memory {
        let own = self.values.iter().map(|(id, number)| {
            let value = values.get(*number);
            let bytes = if value.is_shared() { 0 } else { value.data.as_bytes().len() };
            (*id, bytes)
        });
        let kept = self.outputs.iter().map(|output| output.id).collect();
        let bytes = living(&self.operations, own.collect(), &kept);
        let largest = |bytes: &mut dyn Iterator<Item = usize>| bytes.max().unwrap_or(0);
        let end = self.inputs.last().map_or(0, |input| input.at);
        let waiting = largest(&mut self.inputs.iter().map(|input| bytes[input.at][0]));
        let running = largest(&mut bytes[..end].iter().map(|[_, during]| *during));
        Memory { peak: running.max(waiting), waiting }
    }

    /// Adds what it computes to a digest: the same for recordings that compute the same of the same
    /// values. Tensors count by the order in which they appear.
    pub(crate) fn digest(&self, values: &Values, hasher: &mut Xxh3) {
        let mut order = IdOrder(BTreeMap::new());
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
struct IdOrder(BTreeMap<TensorId, u64>);

impl IdOrder {
    fn of(&mut self, id: TensorId) -> u64 {
        let next = self.0.len() as u64;
        *self.0.entry(id).or_insert(next)
    }
}

impl IrVisitorMut for IdOrder {
    fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
        tensor.id = TensorId::new(self.of(tensor.id));
    }
}
