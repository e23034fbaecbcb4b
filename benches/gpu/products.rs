//! Speed of matmuls with a packed weight.

use std::cell::Cell;

use benches::{Row, weights};
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::CubeElement;
use burn_fp4_cubecl::{
    Capability, Dtype, Matmul, PackedHandles, Problem, amax, fp8_rows, quantize,
};
use burn_fp4_formats::bf16;
use burn_fp4_search::Fp4Scheme;
use burn_fp4_search::host::View;

use crate::figures::Figures;
use crate::{Arguments, median_seconds};

/// Bytes of all weights that take turns: more than a cache holds.
const TURN: usize = 200 << 20;

/// NVFP4 weights `n x k` that take turns, so that none is in the cache.
pub(crate) struct Turn<'a> {
    client: &'a Client,
    weights: Vec<PackedHandles>,
    next: Cell<usize>,
    n: usize,
    k: usize,
}

impl<'a> Turn<'a> {
    pub(crate) fn new(client: &'a Client, n: usize, k: usize) -> Self {
        let scheme = Fp4Scheme::nvfp4();
        let problem = Problem { view: View::rows(n, k), dtype: Dtype::Bf16, scheme };
        let weights = packed(client, &problem);
        Self { client, weights, next: Cell::new(0), n, k }
    }

    /// Measures the seconds of a matmul as it is planned.
    pub(crate) fn seconds(&self, arguments: &Arguments, m: usize) -> f64 {
        let Self { client, weights, next, n, k } = self;
        let scheme = Fp4Scheme::nvfp4();
        let matmul = Matmul {
            m,
            n: *n,
            k: *k,
            format: scheme.format(),
            block_size: scheme.block_size,
            dtype: Dtype::Bf16,
        };
        let planned = matmul.plan(&Capability::of(client)).expect("a plan");
        // There is no plan where a dense matmul is faster.
        let Some(planned) = planned else { return f64::NAN };
        let input = client.create_from_slice(bf16::as_bytes(&floats(m * k)));
        median_seconds(client, arguments, || {
            next.set((next.get() + 1) % weights.len());
            drop(planned.run(client, weights[next.get()].clone(), input.clone(), None, None));
        })
    }
}

fn floats(count: usize) -> Vec<bf16> {
    weights(count).into_iter().map(bf16::from_f32).collect()
}

/// Packs more weights than a cache holds.
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

/// Rows of inputs.
const ROWS: [usize; 11] = [1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];

/// Measures bf16 matmuls with weights that are not in the cache, as planned and with each kernel.
pub(crate) fn measure(client: &Client, arguments: &Arguments, figures: &mut Figures) {
    let device = Capability::of(client);
    let (dtype, most) = (Dtype::Bf16, 4096);
    for (n, k) in SHAPES {
        let input = client.create_from_slice(bf16::as_bytes(&floats(most * k)));
        for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
            let name = |m| format!("{} product, {n} x {k}, {m} rows", scheme.format());
            let is_measured =
                |name: &str| arguments.filter.as_ref().is_none_or(|part| name.contains(part));
            if !ROWS.iter().any(|&m| is_measured(&name(m))) {
                continue;
            }
            let problem = Problem { view: View::rows(n, k), dtype, scheme };
            let bytes = problem.code_bytes() + problem.scale_bytes();
            let turn = packed(client, &problem);
            let next = Cell::new(0);
            let of = Matmul {
                m: 0,
                n,
                k,
                format: scheme.format(),
                block_size: scheme.block_size,
                dtype,
            };
            let rows = fp8_rows(client, turn[0].clone(), &of).expect("memory of these lengths");
            for m in ROWS {
                let matmul = Matmul { m, ..of };
                let name = name(m);
                if !is_measured(&name) {
                    continue;
                }
                let turned = || {
                    next.set((next.get() + 1) % turn.len());
                    turn[next.get()].clone()
                };
                let mut row = |kernel: &str, launch: &dyn Fn()| {
                    let seconds = median_seconds(client, arguments, launch);
                    let bytes = bytes + 2 * m * (k + n);
                    // A copy moves as much at 4 TB/s.
                    let copy = bytes as f64 / 4.0e12;
                    let name = format!("{name}, {kernel}");
                    figures.push(Row::new(&name, n * k, bytes, seconds, copy));
                };
                let planned = [
                    ("planned", matmul.plan(&device).ok().flatten()),
                    ("gemv", matmul.gemv(&device).ok().filter(|_| m <= 8)),
                    ("small-m", matmul.small_m(&device).ok()),
                    ("mma", matmul.mma(&device).ok()),
                    ("wgmma", matmul.wgmma(&device).ok().filter(|_| m >= 16)),
                ];
                let is_asked =
                    |kernel: &str| arguments.products.as_ref().is_none_or(|asked| asked == kernel);
                for (kernel, planned) in planned {
                    let Some(planned) = planned.filter(|_| is_asked(kernel)) else { continue };
                    row(kernel, &|| drop(planned.run(client, turned(), input.clone(), None, None)));
                }
                // Block scales that E4M3 cannot multiply take as long as others.
                let planned = matmul.fp8(&device).ok().filter(|_| m > 128 && is_asked("fp8"));
                if let Some(planned) = planned {
                    let run = || planned.run(client, turned(), rows.clone(), input.clone(), None);
                    row("fp8, input rounded", &|| drop(run()));
                }
            }
        }
    }
}
