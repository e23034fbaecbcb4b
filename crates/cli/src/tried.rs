//! Losses of weights that are not quantized yet, measured on some of their blocks: the warnings of
//! `fp4 quantize` before it runs.

use std::collections::BTreeMap;

use burn_fp4_checkpoints::selection::{Matrices, Selection};
use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight};
use burn_fp4_policy::Decision;
use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::host::{PackedView, View, squared_error};
use burn_fp4_search::{Fp4Scheme, Statistics, TensorScaling};

use crate::accuracy::{Blocks, Tally, TallyAt};
use crate::blocks::{SAMPLE, blocks, in_mxfp4};

/// Dtypes of values that are looked at.
const FLOATS: [Dtype; 4] = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::BF16];

/// Some values of a weight, and sums over all of them.
pub(crate) struct Tried {
    /// Runs of values, each as long as a block of MXFP4, or of NVFP4 if those do not fit the
    /// columns.
    values: Vec<f32>,
    run: usize,
    /// The runs between two that are kept, and those that were looked at.
    step: usize,
    seen: usize,
    /// The largest magnitude, and the sum of squares.
    largest: f64,
    energy: f64,
}

impl Tried {
    /// Begins to look at a weight. None: it is not a matrix of floats.
    pub(crate) fn of(weight: &Weight<'_>) -> Option<Self> {
        let Value::Plain(tensor) = &weight.value else { return None };
        let &[rows, cols] = &*tensor.shape else { return None };
        let (short, long) = (Fp4Format::NvFp4.row().block_size, Fp4Format::MxFp4.row().block_size);
        let run = if cols.is_multiple_of(long) { long } else { short };
        let step = (rows * cols).div_ceil(SAMPLE * short).max(1);
        (tensor.is(&FLOATS) && cols.is_multiple_of(run)).then(|| Self {
            values: Vec::new(),
            run,
            step,
            seen: 0,
            largest: 0.0,
            energy: 0.0,
        })
    }

    /// Looks at the bytes of its tensor that follow: whole runs. None: a value is beyond f32.
    pub(crate) fn look(&mut self, tensor: &Tensor<'_>, bytes: &[u8]) -> Option<()> {
        let dtype = tensor.plain()?;
        let shape = vec![8 * bytes.len() / dtype.bitsize()];
        let piece = Tensor::new(tensor.name.clone(), dtype, shape, bytes).ok()?.to_f32().ok()?;
        for run in piece.chunks(self.run) {
            if self.seen.is_multiple_of(self.step) {
                self.values.extend(run);
            }
            self.seen += 1;
        }
        for value in piece.into_iter().map(f64::from) {
            self.largest = self.largest.max(value.abs());
            self.energy += value * value;
        }
        Some(())
    }

    /// Quantizes the values that are kept, next to a largest value of the group. The error of all
    /// is estimated by theirs.
    fn tally(&self, scheme: Fp4Scheme, largest: f64) -> Option<Tally> {
        let rows = self.values.len() / self.run;
        let view = View::rows(rows, self.run);
        let scheme = match scheme.tensor_scale {
            TensorScaling::Tensor => scheme.with_tensor_scale(TensorScaling::Amax(largest as f32)),
            _ => scheme,
        };
        let (values, method) = (&self.values[..], scheme.method);
        let packed = method.quantize_view(values, view, &scheme, Statistics::None).ok()?;
        let packed = PackedView::from(&packed);
        let [change, _] = squared_error(values, packed, view).ok()?;
        let blocks = blocks(values, packed, view);
        let change = change * self.seen as f64 / rows.max(1) as f64;
        let blocks = Blocks { peak: self.largest, ..blocks };
        let tally = Tally { blocks, ..Tally::of_values([change, self.energy]) };
        Some(tally.with_other(|| in_mxfp4(values, packed, view, method)))
    }
}

/// Weights that are tried, group by group.
pub(crate) struct Trial<'s> {
    selection: &'s Selection,
    open: BTreeMap<usize, Tried>,
    pub(crate) tallies: Vec<TallyAt>,
}

impl<'s> Trial<'s> {
    pub(crate) fn new(selection: &'s Selection) -> Self {
        Self { selection, open: BTreeMap::new(), tallies: Vec::new() }
    }

    /// Begins to look at a weight, by its place in the model. None: it stays, or is not a matrix of
    /// floats whose blocks lie in memory one behind the other.
    pub(crate) fn begin(&self, model: &Model<'_>, at: usize) -> Option<Tried> {
        let weight = &model.weights[at];
        match self.selection.decisions[at] {
            Decision::Quantize { .. } if !Matrices::of(model, weight).transposed => {
                Tried::of(weight)
            }
            Decision::Quantize { .. } | Decision::Keep(_) => None,
        }
    }

    /// Adds a weight that all was seen of, and quantizes its group if that is complete.
    pub(crate) fn end(&mut self, at: usize, tried: Tried) {
        self.open.insert(at, tried);
        let Decision::Quantize { scheme, group } = &self.selection.decisions[at] else { return };
        let members = &self.selection.groups[*group];
        if !members.iter().all(|member| self.open.contains_key(member)) {
            return;
        }
        let members: Vec<(usize, Tried)> =
            members.iter().filter_map(|&at| Some((at, self.open.remove(&at)?))).collect();
        let largest = members.iter().map(|(_, tried)| tried.largest).fold(0.0, f64::max);
        let tally = |(at, tried): &(usize, Tried)| Some((*at, tried.tally(*scheme, largest)?));
        self.tallies.extend(members.iter().filter_map(tally));
    }
}
