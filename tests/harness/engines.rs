//! Every engine that quantizes a matrix, behind one signature.

use burn_fp4_formats::Packed;
use burn_fp4_search::host::{self, HostElement, View};
use burn_fp4_search::{Fp4Scheme, quantize};

use crate::inputs::{Dense, Values};

/// Which axis of a matrix the blocks run along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Down the columns: the packed matrix is the transpose.
    First,
    /// Along the rows.
    Last,
}

/// An engine; `None` where it does not take the dtype.
pub struct Engine {
    /// Name in messages.
    pub name: &'static str,
    /// Quantizes a matrix along an axis.
    pub quantize: fn(&Dense, Axis, &Fp4Scheme) -> Option<Packed>,
}

/// All engines.
pub const ENGINES: &[Engine] = &[
    Engine { name: "oracle", quantize: oracle },
    Engine { name: "host", quantize: host },
];

fn oracle(dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> Option<Packed> {
    let dense = match axis {
        Axis::Last => dense.clone(),
        Axis::First => dense.transposed(),
    };
    Some(quantize(&dense.to_f32(), dense.rows, dense.cols, scheme).expect("a valid problem"))
}

fn host(dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> Option<Packed> {
    let view = View::along(&[dense.rows, dense.cols], if axis == Axis::First { 0 } else { 1 });
    Some(match &dense.values {
        Values::F32(values) => host_packed(values, view, scheme),
        Values::F16(values) => host_packed(values, view, scheme),
        Values::Bf16(values) => host_packed(values, view, scheme),
    })
}

fn host_packed<T: HostElement>(values: &[T], view: View, scheme: &Fp4Scheme) -> Packed {
    let mut codes = vec![0; view.len() / 2];
    let mut scales = vec![0; view.len() / scheme.block_size];
    let amax = host::amax(values, view, scheme);
    let tensor_scale = host::quantize(values, view, scheme, &amax, &mut codes, &mut scales)
        .expect("a valid problem");
    Packed {
        format: scheme.format(),
        block_size: scheme.block_size,
        rows: view.packed_rows(),
        cols: view.axis,
        codes,
        scales,
        tensor_scale,
    }
}
