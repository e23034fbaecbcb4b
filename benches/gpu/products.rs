//! Speed of matmuls with a packed weight.

use std::cell::Cell;

use benches::{Row, weights};
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::CubeElement;
use burn_fp4_cubecl::{Capability, Dtype, PackedHandles, Problem, Product, amax, quantize};
use burn_fp4_formats::bf16;
use burn_fp4_search::Fp4Scheme;
use burn_fp4_search::host::View;

use crate::figures::Figures;
use crate::{Arguments, median_seconds};

/// Total bytes of the weights, which are used in turn: more than the cache holds.
const TURN: usize = 200 << 20;

/// NVFP4 weights `n x k`, used in turn, and bf16 inputs of `m` rows.
pub(crate) struct Turn<'a> {
    client: &'a Client,
    weights: Vec<PackedHandles>,
    next: Cell<usize>,
    outputs: usize,
    channels: usize,
}

impl<'a> Turn<'a> {
    pub(crate) fn new(client: &'a Client, outputs: usize, channels: usize) -> Self {
        let scheme = Fp4Scheme::nvfp4();
        let problem = Problem { view: View::rows(outputs, channels), dtype: Dtype::Bf16, scheme };
        let weights = packed(client, &problem);
        Self { client, weights, next: Cell::new(0), outputs, channels }
    }

    /// Measures the seconds of the planned matmul over many launches.
    pub(crate) fn seconds(&self, arguments: &Arguments, inputs: usize) -> f64 {
        let Self { client, weights, next, outputs, channels } = self;
        let scheme = Fp4Scheme::nvfp4();
        let product = Product {
            inputs,
            outputs: *outputs,
            channels: *channels,
            format: scheme.format(),
            block_size: scheme.block_size,
            dtype: Dtype::Bf16,
        };
        let planned = product.plan(&Capability::of(client)).expect("a plan");
        // None if a dense matmul is faster.
        let Some(planned) = planned else { return f64::NAN };
        let input = client.create_from_slice(bf16::as_bytes(&floats(inputs * channels)));
        median_seconds(client, arguments, || {
            next.set((next.get() + 1) % weights.len());
            drop(planned.run(client, weights[next.get()].clone(), input.clone(), None));
        })
    }
}

fn floats(count: usize) -> Vec<bf16> {
    weights(count).into_iter().map(bf16::from_f32).collect()
}

/// Returns the number of weights that exceeds the cache.
fn packed(client: &Client, problem: &Problem) -> Vec<PackedHandles> {
    let device = Capability::of(client);
    let View { outer, axis, inner } = problem.view;
    let values = floats(outer * axis * inner);
    let dense = client.create_from_slice(bf16::as_bytes(&values));
    let bytes = problem.code_bytes() + problem.scale_bytes();
    let pack = |_| {
        let largest = amax(client, &device, dense.clone(), problem.view, problem.dtype, false);
        let largest = largest.expect("a plan");
        quantize(client, &device, dense.clone(), largest, problem).expect("a plan")
    };
    (0..TURN.div_ceil(bytes)).map(pack).collect()
}

/// Shapes of weights, `n x k`.
const SHAPES: [(usize, usize); 6] =
    [(8192, 8192), (4096, 4096), (6144, 4096), (11008, 4096), (28672, 4096), (4096, 14336)];

/// Measures matmuls of bf16 inputs with weights that are not in the cache: the planned kernel, and
/// every kernel.
pub(crate) fn measure(client: &Client, arguments: &Arguments, figures: &mut Figures) {
    let device = Capability::of(client);
    let (dtype, most) = (Dtype::Bf16, 2048);
    for (outputs, channels) in SHAPES {
        let input = client.create_from_slice(bf16::as_bytes(&floats(most * channels)));
        for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
            let problem = Problem { view: View::rows(outputs, channels), dtype, scheme };
            let bytes = problem.code_bytes() + problem.scale_bytes();
            let turn = packed(client, &problem);
            let next = Cell::new(0);
            for inputs in [1, 4, 16, 32, 64, 128, 256, 1024, 2048] {
                let format = scheme.format();
                let name = format!("{format} product, {outputs} x {channels}, {inputs} rows");
                if arguments.filter.as_ref().is_some_and(|part| !name.contains(part)) {
                    continue;
                }
                let product = Product {
                    inputs,
                    outputs,
                    channels,
                    format,
                    block_size: scheme.block_size,
                    dtype,
                };
                let turned = || {
                    next.set((next.get() + 1) % turn.len());
                    turn[next.get()].clone()
                };
                let mut row = |kernel: &str, launch: &dyn Fn()| {
                    let seconds = median_seconds(client, arguments, launch);
                    let bytes = bytes + 2 * inputs * (channels + outputs);
                    // Time of a copy of the same bytes at 4 TB/s.
                    let copy = bytes as f64 / 4.0e12;
                    let name = format!("{name}, {kernel}");
                    figures.push(Row::new(&name, outputs * channels, bytes, seconds, copy));
                };
                let planned = [
                    ("planned", product.plan(&device).ok().flatten()),
                    ("gemv", product.gemv(&device).ok().filter(|_| inputs <= 8)),
                    ("few", product.few(&device).ok()),
                    ("mma", product.mma(&device).ok()),
                    ("wgmma", product.wgmma(&device).ok().filter(|_| inputs >= 16)),
                ];
                for (kernel, planned) in planned {
                    let asked = arguments.products.as_ref().is_none_or(|asked| asked == kernel);
                    let Some(planned) = planned.filter(|_| asked) else { continue };
                    row(kernel, &|| drop(planned.run(client, turned(), input.clone(), None)));
                }
            }
        }
    }
}
