//! Weights that are quantized together, and how their values lie.

use std::ops::Range;

use burn_fp4_checkpoints::selection::Matrices;
use burn_fp4_checkpoints::{Dtype, Model, Value, Weight};
use burn_fp4_search::host::View;

/// The weights of a group, and how their values lie.
pub(super) struct Group<'g> {
    pub(super) members: Vec<&'g Weight<'g>>,
    /// The rows of each.
    pub(super) rows: Vec<Range<usize>>,
    /// The axes of the first.
    pub(super) first: Matrices,
    /// The layout of one of the stacked matrices.
    pub(super) view: View,
}

impl<'g> Group<'g> {
    pub(super) fn of(model: &'g Model<'g>, weights: &[usize]) -> Self {
        let members: Vec<_> = weights.iter().map(|&at| &model.weights[at]).collect();
        let first = Matrices::of(model, members[0]);
        // Members of a group are single matrices, one below the other.
        let below = |end: &mut usize, weight: &&Weight<'_>| {
            let begin = *end;
            *end += Matrices::of(model, weight).rows;
            Some(begin..*end)
        };
        let rows: Vec<_> = members.iter().scan(0, below).collect();
        let all = rows.last().map_or(0, |last| last.end);
        let view = match first.transposed {
            true => View { outer: 1, axis: first.cols, inner: all },
            false => View::rows(all, first.cols),
        };
        Self { members, rows, first, view }
    }

    /// Returns the layout of a member within one of the stacked matrices.
    pub(super) fn view_of(&self, member: usize) -> View {
        match self.members.len() {
            1 => self.view,
            _ => View::rows(self.rows[member].len(), self.first.cols),
        }
    }
}

/// Returns true if all weights have one float type that the search reads directly.
pub(super) fn native<'w, 'a: 'w>(weights: &(impl Iterator<Item = &'w Weight<'a>> + Clone)) -> bool {
    let dtype = |weight: &Weight<'_>| match &weight.value {
        Value::Plain(tensor) => tensor.plain(),
        Value::Fp8(_) | Value::Fp4(_) => None,
    };
    let mut dtypes = weights.clone().map(dtype);
    let first = dtypes.next().flatten();
    let known = [Dtype::F32, Dtype::F16, Dtype::BF16];
    first.is_some_and(|dtype| known.contains(&dtype)) && dtypes.all(|dtype| dtype == first)
}
