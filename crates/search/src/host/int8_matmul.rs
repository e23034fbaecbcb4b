//! The product of an input rounded to 8-bit integers and a packed weight.

use core::array::from_fn;
use core::ops::Range;

use burn_fp4_formats::Fp4Format;

use super::decode::{prefetch, prefetch_distance};
use super::dense::HostElement;
use super::dequantize::PackedView;
use super::int8_input::{CHUNK, Chunk, Int8Input, LANES, block_lane};
use super::int8_instructions::Instructions;
use super::int8_lanes::{LaneWork, Lanes};
use super::panels::{self, PANEL};
use super::scale_grid::scale_values;
use super::threads::{Work, for_each_chunk, per_microsecond, rows_of_stretch};

const _: () = assert!(LANES == PANEL, "products of both kinds lie in the same order");

/// Number of panels per parallel task for an input of many rows. A panel has a packed row in each
/// lane.
const TASK_PANELS: usize = 2;
/// Number of rows of the input from which on every weight is decoded into panels.
const MANY: usize = 16;
/// Largest number of chunks that are decoded at a time: of a panel and of a few rows of the input
/// they stay in the first-level cache.
const STEP: usize = 8;

/// Computes [`matmul`](super::matmul()) with [`Activations::Int8`](crate::Activations::Int8).
pub(super) fn int8_matmul<T: HostElement>(
    instructions: Instructions,
    input: &[T],
    weight: PackedView<'_>,
    [outputs, channels]: [usize; 2],
    output: &mut [T],
) {
    let inputs = input.len() / channels;
    let input = Int8Input::new(input, [inputs, channels], weight.block_size);
    let products = multiply(instructions, &input, weight, [outputs, channels]);
    panels::write(&products, inputs, output);
}

/// Computes products `[panels, inputs, LANES]`, a panel for every 16 packed rows.
fn multiply(
    instructions: Instructions,
    input: &Int8Input,
    weight: PackedView<'_>,
    [outputs, channels]: [usize; 2],
) -> Vec<f32> {
    let panel_len = input.rows * LANES;
    let mut products = vec![0.0; outputs.div_ceil(LANES) * panel_len];
    let last_rows = LastRows::new(weight, [outputs, channels], input.len);
    let rows = PackedRows { weight, last_rows: &last_rows, outputs, channels, chunks: input.len };
    let task_panels = match input.rows {
        MANY.. => TASK_PANELS,
        _ => rows_of_stretch(outputs, channels / 2, LANES) / LANES,
    };
    let multiply = |panel: &mut Panel, task: usize, products: &mut [f32]| {
        let first = task * task_panels * LANES;
        // A block has two or four lanes: two or four rows of the weight share a vector.
        let done = match (weight.format, weight.block_size) {
            _ if input.rows >= MANY => None,
            (Fp4Format::NvFp4, 16) => {
                instructions.run(FewInputs::<2, 8> { input, rows, first, products })
            }
            (Fp4Format::MxFp4, 32) => {
                instructions.run(FewInputs::<4, 4> { input, rows, first, products })
            }
            _ => None,
        };
        let done = match weight.block_size {
            _ if done == Some(true) => Some(()),
            16 => instructions.run(ManyInputs::<2, 8> { input, rows, first, panel, products }),
            _ => instructions.run(ManyInputs::<4, 4> { input, rows, first, panel, products }),
        };
        done.expect("instructions that the processor has");
    };
    let work = Work::new(outputs * channels * input.rows, per_microsecond::PACKED_INT8);
    for_each_chunk(work, &mut products, task_panels * panel_len, Panel::default, multiply);
    products
}

/// Packed rows as whole chunks. Where the last chunk is not whole, it continues with the codes and
/// scales of the next row, for which the input has zeros.
#[derive(Clone, Copy)]
struct PackedRows<'a> {
    weight: PackedView<'a>,
    last_rows: &'a LastRows,
    outputs: usize,
    channels: usize,
    /// Number of chunks of a row.
    chunks: usize,
}

/// Copies of the last rows, whose last chunk would end beyond the weight, with zeros after them.
struct LastRows {
    /// The first of these rows.
    first: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl LastRows {
    fn new(weight: PackedView<'_>, [outputs, channels]: [usize; 2], chunks: usize) -> Self {
        let missing = chunks * CHUNK - channels;
        let first = outputs.saturating_sub(missing.div_ceil(channels));
        let padded = |values: &[u8], row_len: usize, missing: usize| {
            let mut values = values[first * row_len..].to_vec();
            if first < outputs {
                values.resize(values.len() + missing, 0);
            }
            values
        };
        let block = weight.block_size;
        Self {
            first,
            codes: padded(weight.codes, channels / 2, missing / 2),
            scales: padded(weight.scales, channels / block, missing / block),
        }
    }
}

impl<'a> PackedRows<'a> {
    /// Returns the codes and scales of a row, and of what follows it. The rows after the last one
    /// repeat it.
    #[inline(always)]
    fn row<const W: usize>(&self, row: usize) -> CodeRow<'a, W> {
        let Self { weight, last_rows, outputs, channels, chunks } = *self;
        let row = row.min(outputs - 1);
        let (codes, scales, at) = match row.checked_sub(last_rows.first) {
            None => (weight.codes, weight.scales, row),
            Some(at) => (&last_rows.codes[..], &last_rows.scales[..], at),
        };
        let codes = &codes[at * channels / 2..];
        let scales = &scales[at * (channels / (CHUNK / W))..];
        CodeRow {
            codes: &codes.as_chunks().0[..chunks],
            scales: &scales.as_chunks().0[..chunks],
            tensor_scale: tensor_scale(weight, row),
        }
    }
}

/// A packed row in whole chunks of `W` blocks.
#[derive(Clone, Copy)]
struct CodeRow<'a, const W: usize> {
    codes: &'a [[u8; CHUNK / 2]],
    /// Block scales.
    scales: &'a [[u8; W]],
    tensor_scale: f32,
}

/// Decoded packed rows, one in each lane.
#[derive(Default)]
struct Panel {
    /// Of every 8 channels the even ones, then the odd ones.
    elements: Vec<Bytes>,
    /// Scales of a block, then of the next.
    scales: Vec<[f32; LANES]>,
    /// Sums of each row of the input between steps, for each block of a chunk.
    sums: Vec<[f32; LANES]>,
}

/// Four bytes of each lane.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bytes([i8; 4 * LANES]);

/// Computes the products of packed rows from `first` on with an input of few rows: codes are
/// decoded into registers, `R` packed rows with `W` block scales a chunk at a time.
///
/// The output is false if a block scale is NaN or negative, and products are wrong. A scale that is
/// read after the rows counts too.
struct FewInputs<'a, const R: usize, const W: usize> {
    input: &'a Int8Input,
    rows: PackedRows<'a>,
    first: usize,
    products: &'a mut [f32],
}

impl<const R: usize, const W: usize> LaneWork for FewInputs<'_, R, W> {
    type Output = bool;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> bool {
        let Self { input, rows, first, products } = self;
        let mut largest = [0; LANES];
        let distance = prefetch_distance(R * rows.channels / 2);
        let end = rows.outputs.min(first + products.len() / input.rows);
        let (vectors, _) = products.as_chunks_mut::<LANES>();
        for row in (first..end).step_by(R) {
            let mut weights = [rows.row::<W>(row); R];
            for at in 1..R {
                weights[at] = rows.row::<W>(row + at);
            }
            let (panel, lane) = ((row - first) / LANES * input.rows, row % LANES);
            for from in (0..input.rows).step_by(4) {
                let vectors = &mut vectors[panel + from..];
                match input.rows - from {
                    1 => {
                        let inputs = [input.row(from)];
                        let sums =
                            row_sums::<L, R, W, 1>(lanes, &weights, inputs, distance, &mut largest);
                        vectors[0][lane..][..R].copy_from_slice(&sums[0]);
                    }
                    left => {
                        let mut inputs = [input.row(from); 4];
                        for at in 1..4 {
                            // Rows beyond the last repeat it.
                            inputs[at] = input.row((from + at).min(input.rows - 1));
                        }
                        let sums =
                            row_sums::<L, R, W, 4>(lanes, &weights, inputs, distance, &mut largest);
                        for (vector, sums) in vectors.iter_mut().zip(&sums).take(left) {
                            vector[lane..][..R].copy_from_slice(sums);
                        }
                    }
                }
            }
        }
        let valid = if rows.weight.format == Fp4Format::NvFp4 { 0x7E } else { 0xFE };
        largest.iter().all(|&code| code <= valid)
    }
}

/// Computes the products of packed rows from `first` on with an input of many rows: codes are
/// decoded into panels.
struct ManyInputs<'a, const R: usize, const W: usize> {
    input: &'a Int8Input,
    rows: PackedRows<'a>,
    first: usize,
    panel: &'a mut Panel,
    products: &'a mut [f32],
}

impl<const R: usize, const W: usize> LaneWork for ManyInputs<'_, R, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { input, rows, first, panel, products } = self;
        let blocks = rows.channels / rows.weight.block_size;
        let values = scale_values(rows.weight.format);
        for (at, products) in products.chunks_mut(input.rows * LANES).enumerate() {
            let rows: [_; LANES] = from_fn(|lane| rows.row::<W>(first + at * LANES + lane));
            let scales = rows.map(|row| row.tensor_scale);
            let steps = input.len.div_ceil(STEP);
            let step = input.len.div_ceil(steps);
            panel.sums.resize(if steps > 1 { input.rows * W } else { 0 }, [0.0; LANES]);
            for begin in (0..input.len).step_by(step) {
                let chunks = begin..input.len.min(begin + step);
                panel.decode::<L, W>(lanes, values, &rows, chunks.clone(), blocks);
                let mut from = 0;
                while from < input.rows {
                    let left = input.rows - from;
                    let place = PanelTile { from, chunks: chunks.clone(), scales: &scales };
                    from += match left {
                        4.. => panel.tile::<L, R, 4>(lanes, input, place, products),
                        _ => panel.tile::<L, R, 1>(lanes, input, place, products),
                    };
                }
            }
        }
    }
}

/// Some rows of the input, in some chunks.
struct PanelTile<'a> {
    from: usize,
    chunks: Range<usize>,
    /// Tensor scales of the panel.
    scales: &'a [f32; LANES],
}

/// Returns the tensor scale of a row.
#[inline(always)]
fn tensor_scale(packed: PackedView<'_>, row: usize) -> f32 {
    packed.tensor_scale[if packed.tensor_scale.len() > 1 { row } else { 0 }]
}

/// Returns scale codes as a word, the first in its lowest byte.
#[inline(always)]
fn word<const W: usize>(scales: &[u8; W]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..W].copy_from_slice(scales);
    u64::from_le_bytes(bytes)
}

/// Computes the products of `R` packed rows and `M` rows of the input, and updates the largest
/// codes of block scales.
#[inline(always)]
fn row_sums<L: Lanes, const R: usize, const W: usize, const M: usize>(
    lanes: L,
    rows: &[CodeRow<'_, W>; R],
    inputs: [&[Chunk]; M],
    distance: usize,
    largest: &mut [u8; LANES],
) -> [[f32; R]; M] {
    const { assert!((R == 2 || R == 4) && R * W == LANES) };
    let len = inputs[0].len();
    // Known lengths avoid bounds checks in the loop.
    let mut codes = [&rows[0].codes[..len]; R];
    let mut scales = [&rows[0].scales[..len]; R];
    for row in 1..R {
        codes[row] = &rows[row].codes[..len];
        scales[row] = &rows[row].scales[..len];
    }
    let mut sums = [lanes.repeat_float(0.0); M];
    for chunk in 0..len {
        let (mut chunk_codes, mut words) = ([&codes[0][chunk]; R], [0; R]);
        for row in 0..R {
            prefetch(&codes[row][chunk], distance);
            chunk_codes[row] = &codes[row][chunk];
            words[row] = word::<W>(&scales[row][chunk]);
        }
        let mut input_chunks = [&inputs[0][chunk]; M];
        for to in 1..M {
            input_chunks[to] = &inputs[to][chunk];
        }
        let scales = lanes.interleave(words);
        for (largest, code) in largest.iter_mut().zip(scales) {
            *largest = code.max(*largest);
        }
        add_chunk::<L, R, M>(lanes, chunk_codes, scales, input_chunks, &mut sums);
    }
    let mut products = [[0.0; R]; M];
    for (products, sums) in products.iter_mut().zip(sums) {
        let sums = lanes.store(sums);
        let halves: [_; 8] = from_fn(|lane| sums[lane] + sums[lane + 8]);
        let quarters: [_; 4] = from_fn(|lane| halves[lane] + halves[lane + 4]);
        let pairs = [quarters[0] + quarters[1], quarters[2] + quarters[3]];
        for row in 0..R {
            let sum = if R == 2 { pairs[row % 2] } else { quarters[row] };
            products[row] = sum * rows[row].tensor_scale;
        }
    }
    products
}

/// Adds the products of a chunk, in the order of [`Lanes::block_dots`].
#[inline(always)]
fn add_chunk<L: Lanes, const R: usize, const M: usize>(
    lanes: L,
    codes: [&[u8; CHUNK / 2]; R],
    scales: [u8; LANES],
    inputs: [&Chunk; M],
    sums: &mut [L::Floats; M],
) {
    let scales = match R {
        2 => lanes.e4m3(scales),
        _ => lanes.e8m0(scales),
    };
    let mut elements = [lanes.elements(codes[0]); R];
    for row in 1..R {
        elements[row] = lanes.elements(codes[row]);
    }
    for to in 0..M {
        let input = inputs[to];
        let integers = [lanes.bytes(&input.even), lanes.bytes(&input.odd)];
        let dots = lanes.block_dots(elements, integers);
        let dots = lanes.to_floats(lanes.add_ints(dots, lanes.ints(&input.offsets)));
        let factors = lanes.mul(scales, lanes.floats(&input.half_scales));
        sums[to] = lanes.mul_add(dots, factors, sums[to]);
    }
}

impl Panel {
    /// Decodes some chunks of 16 packed rows. `blocks` is the number of blocks of a row.
    #[inline(always)]
    fn decode<L: Lanes, const W: usize>(
        &mut self,
        lanes: L,
        values: &[f32; 256],
        rows: &[CodeRow<'_, W>; LANES],
        chunks: Range<usize>,
        blocks: usize,
    ) {
        self.elements.clear();
        self.scales.clear();
        for chunk in chunks {
            let mut codes = [[0; LANES]; LANES];
            // The scale of what follows a row may be NaN: there it stays 0.
            let mut scales = [[0.0; LANES]; W];
            for (lane, row) in rows.iter().enumerate() {
                for (codes, &bytes) in codes.iter_mut().zip(row.codes[chunk].as_chunks().0) {
                    codes[lane] = u32::from_ne_bytes(bytes);
                }
                let codes = row.scales[chunk].iter().take(blocks - chunk * W);
                for (scales, &code) in scales.iter_mut().zip(codes) {
                    scales[lane] = values[usize::from(code)];
                }
            }
            for codes in codes {
                let elements = lanes.elements(&pulp::cast(codes));
                for elements in elements {
                    self.elements.push(Bytes(lanes.store_bytes(elements)));
                }
            }
            self.scales.extend(scales);
        }
    }

    /// Multiplies by `M` rows of the input. Returns `M`.
    #[inline(always)]
    fn tile<L: Lanes, const R: usize, const M: usize>(
        &mut self,
        lanes: L,
        input: &Int8Input,
        place: PanelTile<'_>,
        products: &mut [f32],
    ) -> usize {
        let PanelTile { from, chunks, scales: tensor_scales } = place;
        let inputs: [_; M] = from_fn(|to| &input.row(from + to)[chunks.clone()]);
        let blocks = LANES / R;
        // Of the blocks of a chunk.
        let mut sums = [[lanes.repeat_float(0.0); M]; 8];
        let kept = |block: usize, to: usize| (from + to) * blocks + block;
        if chunks.start > 0 {
            for block in 0..blocks {
                for to in 0..M {
                    sums[block][to] = lanes.floats(&self.sums[kept(block, to)]);
                }
            }
        }
        let elements = self.elements.chunks_exact(2 * LANES);
        let scales = self.scales.chunks_exact(blocks);
        for (chunk, (elements, scales)) in elements.zip(scales).enumerate() {
            let mut chunks = [&inputs[0][chunk]; M];
            for to in 1..M {
                chunks[to] = &inputs[to][chunk];
            }
            for block in 0..blocks {
                let elements = &elements[2 * R * block..][..2 * R];
                let scales = lanes.floats(&scales[block]);
                for to in 0..M {
                    let input = chunks[to];
                    let (even, odd) = (input.even.as_chunks().0, input.odd.as_chunks().0);
                    let mut dots = lanes.repeat_int(input.offsets[block_lane::<R>(block)]);
                    for pair in 0..R / 2 {
                        let quad = [
                            lanes.bytes(&elements[4 * pair].0),
                            lanes.bytes(&elements[4 * pair + 1].0),
                            lanes.bytes(&elements[4 * pair + 2].0),
                            lanes.bytes(&elements[4 * pair + 3].0),
                        ];
                        let at = R * block + 2 * pair;
                        let integers = [
                            lanes.repeat(&even[at]),
                            lanes.repeat(&odd[at]),
                            lanes.repeat(&even[at + 1]),
                            lanes.repeat(&odd[at + 1]),
                        ];
                        dots = lanes.dot(dots, quad, integers);
                    }
                    let factor = lanes.repeat_float(input.half_scales[block_lane::<R>(block)]);
                    let factors = lanes.mul(scales, factor);
                    let sum = &mut sums[block][to];
                    *sum = lanes.mul_add(lanes.to_floats(dots), factors, *sum);
                }
            }
        }
        if chunks.end < input.len {
            for block in 0..blocks {
                for to in 0..M {
                    self.sums[kept(block, to)] = lanes.store(sums[block][to]);
                }
            }
            return M;
        }
        let tensor_scales = lanes.floats(tensor_scales);
        for to in 0..M {
            let mut half = blocks / 2;
            while half > 0 {
                for block in 0..half {
                    sums[block][to] = lanes.add(sums[block][to], sums[block + half][to]);
                }
                half /= 2;
            }
            let scaled = lanes.store(lanes.mul(sums[0][to], tensor_scales));
            products[(from + to) * LANES..][..LANES].copy_from_slice(&scaled);
        }
        M
    }
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::{Packed, TensorScale};

    use super::*;
    use crate::reference::int8_matmul::int8_matmul as reference;

    /// Makes a weight with scales of each kind, and some that are not.
    fn weight(
        format: Fp4Format,
        block_size: usize,
        [rows, cols]: [usize; 2],
        invalid: Option<u8>,
        by_row: bool,
    ) -> Packed {
        let scale = |at: usize| match (format, at % 61) {
            // Subnormal, and the largest.
            (Fp4Format::NvFp4, 7) => 3,
            (Fp4Format::NvFp4, 8) => 0x7E,
            (Fp4Format::NvFp4, _) => 0x28 + (at * 7 % 32) as u8,
            (_, 7) => 0,
            _ => 120 + (at * 5 % 9) as u8,
        };
        let blocks = cols / block_size;
        let mut scales: Vec<u8> = (0..rows * blocks).map(scale).collect();
        if let Some(code) = invalid {
            // Also in the first row of the second panel, which rows of the first read, and which
            // may begin a task.
            for row in [rows / 2, LANES.min(rows - 1), (TASK_PANELS * LANES).min(rows - 1)] {
                scales[row * blocks] = code;
            }
        }
        let of_row = (0..rows).map(|row| 1.0 / (row + 3) as f32).collect();
        Packed {
            format,
            block_size,
            rows,
            cols,
            codes: (0..rows * cols / 2).map(|at| (at * 37 % 251) as u8).collect(),
            scales,
            tensor_scale: if by_row { TensorScale::PerRow(of_row) } else { TensorScale::One(0.7) },
        }
    }

    fn available() -> impl Iterator<Item = Instructions> {
        Instructions::ALL.iter().copied().filter(|instructions| instructions.is_available())
    }

    /// Includes chunks of several rows, last chunks, panels and groups of rows that are not whole,
    /// several steps, and more work than one thread does.
    #[test]
    fn products_have_the_bits_of_the_reference_with_every_instruction_set() {
        for format in Fp4Format::ALL {
            for (at, (block_size, channels, outputs)) in [
                (16, 16, 1),
                (16, 16, 40),
                (16, 48, 37),
                (16, 112, 34),
                (16, 128, 17),
                (16, 144, 34),
                (16, 592, 37),
                (16, 1168, 17),
                (32, 32, 3),
                (32, 32, 41),
                (32, 1184, 50),
                (16, 2064, 83),
            ]
            .into_iter()
            .enumerate()
            {
                for invalid in [None, Some(0x7F), Some(0xC0), Some(0xFF)] {
                    let packed =
                        weight(format, block_size, [outputs, channels], invalid, at % 2 == 0);
                    let view = PackedView::from(&packed);
                    for inputs in [1, 2, 3, 5, 8, 21] {
                        let input: Vec<_> = (0..inputs * channels)
                            .map(|at| ((at * 13 % 101) as f32 - 50.0) / (1 + at % 7) as f32)
                            .collect();
                        let expected = reference(&input, &packed);
                        for instructions in available() {
                            let mut found = vec![0.0; expected.len()];
                            let shape = [outputs, channels];
                            // Inside the pool other threads are worth their while earlier.
                            rayon::scope(|_| {
                                int8_matmul(instructions, &input, view, shape, &mut found);
                            });
                            for (found, expected) in found.iter().zip(&expected) {
                                let same = found.to_bits() == expected.to_bits()
                                    || found.is_nan() && expected.is_nan();
                                assert!(
                                    same,
                                    "{instructions:?}: {found}, not {expected}; {format}, \
                                     {block_size}, {inputs} x {channels} x {outputs}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}
