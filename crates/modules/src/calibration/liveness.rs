//! When the tensors of recorded operations are read last, and the memory that they take until then.

use std::collections::{BTreeMap, BTreeSet};

use burn_ir::{BaseOperationIr, OperationIr, TensorId, TensorIr};

/// By tensor the last operation that reads or makes it, and what it is there.
pub(super) fn last_reads(operations: &[OperationIr]) -> BTreeMap<TensorId, (usize, TensorIr)> {
    let mut last = BTreeMap::new();
    for (at, operation) in operations.iter().enumerate() {
        for tensor in operation.nodes() {
            last.insert(tensor.id, (at, tensor.clone()));
        }
    }
    last
}

/// By operation the bytes of the tensors that live before and during it, of which some are there
/// from the beginning, and the `kept` ones stay to the end.
pub(super) fn living(
    operations: &[OperationIr],
    given: BTreeMap<TensorId, usize>,
    kept: &BTreeSet<TensorId>,
) -> Vec<[usize; 2]> {
    let owners = owners(operations);
    let owner = |id| owners.get(&id).copied().unwrap_or(id);
    // When memory is read last, by its owner.
    let mut freed: BTreeMap<TensorId, usize> = BTreeMap::new();
    for (id, (at, _)) in last_reads(operations) {
        let end = freed.entry(owner(id)).or_default();
        *end = (*end).max(if kept.contains(&id) { operations.len() } else { at });
    }
    let mut sizes = given;
    let mut living: usize = sizes.values().sum();
    let mut ending = vec![Vec::new(); operations.len() + 1];
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

/// Returns for each view the tensor whose memory it is in.
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
