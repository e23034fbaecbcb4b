//! Counts and errors of the blocks of a weight, measured where its values are at hand.

use burn_fp4_search::formats::{E2M1, Fp4Format};
use burn_fp4_search::host::{HostElement, PackedView, View, tensor_amax};
use burn_fp4_search::{Fp4Scheme, Method, Statistics};

use crate::accuracy::Blocks;

/// Blocks whose errors are measured, at most. More would take time, and tell the same.
pub(crate) const SAMPLE: usize = 4096;

/// Finds the value of a place in a packed row.
fn value<T: HostElement>(values: &[T], view: View, row: usize, col: usize) -> f32 {
    let (outer, inner) = (row / view.inner, row % view.inner);
    values[(outer * view.axis + col) * view.inner + inner].to_f32()
}

/// The steps between the blocks whose errors are measured.
fn step(blocks: usize) -> usize {
    blocks.div_ceil(SAMPLE).max(1)
}

/// The sums of squares of a block: of its change, and of its values.
fn squares(values: impl Iterator<Item = f32>, codes: &[u8], scale: f64) -> [f64; 2] {
    let codes = codes.iter().flat_map(|byte| [byte & 0xF, byte >> 4]);
    let decoded = codes.map(|code| f64::from(E2M1.decode(code)) * scale);
    values.map(f64::from).zip(decoded).fold([0.0; 2], |[change, energy], (before, after)| {
        [change + (after - before).powi(2), energy + before * before]
    })
}

/// Adds the relative error of a block that is not all zero, and counts it.
fn add(sums: &mut [f64; 2], [change, energy]: [f64; 2]) {
    if energy > 0.0 {
        sums[0] += (change / energy).sqrt();
        sums[1] += 1.0;
    }
}

/// Counts the blocks of a weight. One large value raises the tensor scale until the scales of other
/// blocks are imprecise or round to zero, which an error of the whole weight does not show.
pub(crate) fn blocks<T: HostElement>(values: &[T], packed: PackedView<'_>, view: View) -> Blocks {
    let PackedView { block_size, codes, scales, tensor_scale, .. } = packed;
    let row = packed.format.row();
    let grid = row.block_scale;
    let per_row = view.axis / block_size;
    let block_values = |block: usize| {
        let (row, first) = (block / per_row, block % per_row * block_size);
        (first..first + block_size).map(move |col| value(values, view, row, col))
    };
    let block_codes = |block: usize| &codes[block * block_size / 2..][..block_size / 2];
    let mut blocks = Blocks { peak: f64::from(tensor_amax(values)), ..Blocks::default() };
    for block in (0..scales.len()).step_by(step(scales.len())) {
        let multiplier = tensor_scale[(block / per_row).min(tensor_scale.len() - 1)];
        let scale = f64::from(grid.decode(scales[block])) * f64::from(multiplier);
        add(&mut blocks.errors, squares(block_values(block), block_codes(block), scale));
    }
    if !row.tensor_scale {
        return blocks;
    }
    blocks.all = scales.len() as u64;
    let subnormal = 1..1_u8 << grid.mantissa_bits;
    for (block, &scale) in scales.iter().enumerate() {
        let zero = |codes: &[u8]| codes.iter().all(|&byte| byte & 0x77 == 0);
        if zero(block_codes(block)) || grid.decode(scale) == 0.0 {
            blocks.zeroed += u64::from(block_values(block).any(|value| value != 0.0));
        } else {
            blocks.small += u64::from(subnormal.contains(&scale));
        }
    }
    blocks
}

/// Sums the relative errors that the measured blocks of a weight in NVFP4 have in MXFP4, and counts
/// them. 0 of them: the weight has another format, or columns that MXFP4 does not divide.
pub(crate) fn in_mxfp4<T: HostElement>(
    values: &[T],
    packed: PackedView<'_>,
    view: View,
    method: Method,
) -> [f64; 2] {
    let PackedView { format, block_size, scales, .. } = packed;
    let other = Fp4Format::MxFp4;
    let wide = other.row().block_size;
    if format != Fp4Format::NvFp4 || !view.axis.is_multiple_of(wide) || scales.is_empty() {
        return [0.0; 2];
    }
    let row = method.row();
    // The scheme of the same command with the other format.
    let open = method == Fp4Scheme::recommended(format).method;
    let scheme = match open || row.calibrated || !row.formats.contains(&other) {
        true => Fp4Scheme::recommended(other),
        false => method.scheme(other, wide),
    };
    let per_row = view.axis / block_size;
    let places = (0..scales.len()).step_by(step(scales.len())).map(|block| {
        let (row, col) = (block / per_row, block % per_row * block_size);
        (row, col, col / wide * wide)
    });
    let around = |(row, _, first): (usize, usize, usize)| {
        (first..first + wide).map(move |col| value(values, view, row, col))
    };
    let sample: Vec<f32> = places.clone().flat_map(around).collect();
    let of_sample = View::rows(sample.len() / wide, wide);
    let Ok(cast) = scheme.method.quantize_view(&sample, of_sample, &scheme, Statistics::None)
    else {
        return [0.0; 2];
    };
    let mut sums = [0.0; 2];
    for (at, (_, col, first)) in places.enumerate() {
        let begin = at * wide + col - first;
        let codes = &cast.codes[begin / 2..][..block_size.min(wide) / 2];
        let values = sample[begin..][..block_size.min(wide)].iter().copied();
        let scale = f64::from(other.row().block_scale.decode(cast.scales[at]));
        add(&mut sums, squares(values, codes, scale));
    }
    sums
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::quantize;

    use super::*;

    #[test]
    fn mxfp4_is_measured_by_the_scheme_that_its_format_has_without_other_options() {
        let (rows, cols) = (8, 64);
        // Rows of other magnitudes, whose powers of two the schemes choose differently.
        let value = |at: usize| (at as f32 * 0.7).sin().powi(3) * (1.0 + (at / cols) as f32 * 0.13);
        let values: Vec<f32> = (0..rows * cols).map(value).collect();
        let of = |scheme: Fp4Scheme| quantize(&values, rows, cols, &scheme).expect("quantized");
        let sums = |scheme: Fp4Scheme| {
            let mut sums = [0.0; 2];
            for (before, after) in values.chunks(16).zip(of(scheme).dequantize().chunks(16)) {
                let pairs = before.iter().zip(after).map(|(&a, &b)| (f64::from(a), f64::from(b)));
                let squares = pairs.fold([0.0; 2], |[change, energy], (before, after)| {
                    [change + (after - before).powi(2), energy + before * before]
                });
                add(&mut sums, squares);
            }
            sums
        };
        let usual = Fp4Scheme::recommended(Fp4Format::NvFp4);
        let packed = of(usual);
        let measured = |method| in_mxfp4(&values, (&packed).into(), View::rows(rows, cols), method);
        let even = Fp4Scheme::recommended(Fp4Format::MxFp4);
        for (method, expected) in [
            (usual.method, even),
            (Method::GPTQ, even),
            (Method::Amax, Method::Amax.scheme(Fp4Format::MxFp4, 32)),
        ] {
            let ([found, count], [error, blocks]) = (measured(method), sums(expected));
            assert_eq!(count, blocks);
            assert!((found - error).abs() < 1e-9, "{method}: {found}, not {error}");
        }
        let by_sse = sums(Method::SSE.scheme(Fp4Format::MxFp4, 32))[0];
        assert!((sums(even)[0] - by_sse).abs() > 1e-6, "{by_sse}: the schemes have other errors");
    }
}
