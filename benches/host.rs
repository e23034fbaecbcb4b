//! Speed of the host engine, relative to a copy of the same input: `cargo bench --bench host`.

mod language_model;

use benches::{Row, median_seconds, print, weights};
use burn_fp4_formats::{bf16, f16};
use burn_fp4_search::host::{self, DequantTarget, HostElement, PackedView, View};
use burn_fp4_search::{
    Activations, Admm, BlockHessians, Blocks, Fp4Scheme, Importance, Method, ScaleRule,
};
use clap::Parser;

/// Measures the host engine, relative to a copy of the same input.
#[derive(Parser)]
struct Arguments {
    /// Measure only operations whose name contains this.
    filter: Option<String>,
    /// Match the whole name instead.
    #[arg(long)]
    exact: bool,
    /// Rows of the matrix.
    #[arg(long, default_value_t = 4096)]
    rows: usize,
    /// Columns of the matrix.
    #[arg(long, default_value_t = 4096)]
    cols: usize,
    /// Timed runs per operation; the median counts.
    #[arg(long, default_value_t = 15)]
    runs: usize,
    /// Measure products with packed weights instead, with one thread and with all.
    #[arg(long)]
    products: bool,
    /// Measure made-up language models instead: dense, NVFP4 and MXFP4.
    #[arg(long)]
    language_model: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Option that `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() {
    let arguments = Arguments::parse();
    if arguments.products {
        print(&products(&arguments), arguments.json);
        return;
    }
    if arguments.language_model {
        return language_model::measure(arguments.runs, arguments.json);
    }
    let values = weights(arguments.rows * arguments.cols);
    let mut rows = Vec::new();
    measure::<f32>("f32", &arguments, &values, &mut rows);
    let halves: Vec<_> = values.iter().map(|&value| bf16::from_f32(value)).collect();
    measure("bf16", &arguments, &halves, &mut rows);
    let halves: Vec<_> = values.iter().map(|&value| f16::from_f32(value)).collect();
    measure("f16", &arguments, &halves, &mut rows);
    print(&rows, arguments.json);
}

fn measure<T: HostElement>(dtype: &str, arguments: &Arguments, values: &[T], rows: &mut Vec<Row>) {
    let dense_bytes = size_of_val(values);
    let mut output = vec![T::default(); values.len()];
    let copy = median_seconds(arguments.runs, || output.copy_from_slice(values));
    let mut bench = Bench { dtype, arguments, values, copy, rows };
    bench.time(format!("copy {dtype}"), 2 * dense_bytes, || output.copy_from_slice(values));

    let plain = Fp4Scheme::nvfp4();
    let view = View::rows(arguments.rows, arguments.cols);
    bench.time(format!("amax {dtype}"), dense_bytes, || {
        std::hint::black_box(host::amax(values, view, &plain));
    });
    bench.searches_by_hessian();
    let four_over_six =
        Method::FourOverSix { range: Default::default(), error: Default::default() };
    for (name, axis, scheme) in [
        ("nvfp4", 1, plain),
        ("nvfp4 along axis 0", 0, plain),
        ("nvfp4 in 16x16 tiles", 1, plain.with_blocks(Blocks::Tile16x16)),
        ("nvfp4 four over six", 1, plain.with_method(four_over_six)),
        ("nvfp4 by sse", 1, plain.with_method(Method::SSE)),
        ("nvfp4 by sse along axis 0", 0, plain.with_method(Method::SSE)),
        ("mxfp4 by sse", 1, Fp4Scheme::mxfp4().with_method(Method::SSE)),
        ("nvfp4 without tensor scale", 1, Fp4Scheme::of(ScaleRule::NoTensorScale)),
        ("mxfp4", 1, Fp4Scheme::mxfp4()),
        ("mxfp4 along axis 0", 0, Fp4Scheme::mxfp4()),
    ] {
        let view = View::along(&[arguments.rows, arguments.cols], axis);
        bench.scheme(name, view, &scheme, &mut output);
    }
}

/// Values of one dtype, and the results for them.
struct Bench<'a, T> {
    dtype: &'a str,
    arguments: &'a Arguments,
    values: &'a [T],
    /// Seconds of a copy of the values.
    copy: f64,
    rows: &'a mut Vec<Row>,
}

impl<T: HostElement> Bench<'_, T> {
    /// Measures an operation if the filter matches it.
    fn time(&mut self, name: String, bytes: usize, run: impl FnMut()) {
        let wanted = self.arguments.filter.as_ref().is_none_or(|filter| {
            if self.arguments.exact { name == *filter } else { name.contains(filter) }
        });
        if wanted {
            let seconds = median_seconds(self.arguments.runs, run);
            self.rows.push(Row::new(&name, self.values.len(), bytes, seconds, self.copy));
        }
    }

    /// Allocates codes and block scales.
    fn packed(&self, scheme: &Fp4Scheme) -> (Vec<u8>, Vec<u8>) {
        let count = self.values.len();
        (vec![0; count / 2], vec![0; count / scheme.block_size])
    }

    /// Measures the searches that need activations, including the Hessians of the blocks.
    fn searches_by_hessian(&mut self) {
        let (values, cols) = (self.values, self.arguments.cols);
        let view = View::rows(self.arguments.rows, cols);
        let x: Vec<_> = weights(512 * cols).iter().map(|x| x * 50.0).collect();
        for search in [
            Method::Hessian,
            Method::CoordinateDescent,
            Method::Admm(Admm::Published),
            Method::ADMM,
        ] {
            for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
                let scheme = scheme.with_method(search);
                let (mut codes, mut scales) = self.packed(&scheme);
                let (dtype, format) = (self.dtype, scheme.format());
                let name = format!("quantize {dtype} to {format} by {search:?}, T = 512");
                self.time(name, size_of_val(values), || {
                    let hessians = BlockHessians::of(&x, cols, scheme.block_size).expect("finite");
                    let importance = Importance::Blocks(&hessians);
                    let amax = host::amax(values, view, &scheme);
                    host::quantize_by_importance(
                        values,
                        view,
                        &scheme,
                        &amax,
                        importance,
                        &mut codes,
                        &mut scales,
                    )
                    .expect("a valid problem");
                });
            }
        }
    }

    /// Measures a scheme that needs no activations, and dequantization where there is no search.
    fn scheme(&mut self, name: &str, view: View, scheme: &Fp4Scheme, output: &mut [T]) {
        let (dtype, values) = (self.dtype, self.values);
        let dense_bytes = size_of_val(values);
        let (mut codes, mut scales) = self.packed(scheme);
        let packed_bytes = codes.len() + scales.len();
        // MXFP4 and rules without a tensor scale need no pass for the amax.
        let reads = if scheme.rule.row().tensor_scale { 2 } else { 1 };
        let mut quantize = || {
            let amax = if reads == 2 { host::amax(values, view, scheme) } else { vec![1.0] };
            host::quantize(values, view, scheme, &amax, &mut codes, &mut scales)
                .expect("a valid problem")
        };
        let tensor_scale = quantize();
        let name_of = format!("quantize {dtype} to {name}");
        self.time(name_of, reads * dense_bytes + packed_bytes, || drop(quantize()));
        if scheme.blocks != Blocks::Row || scheme.method != Method::Amax {
            return;
        }

        let packed = PackedView {
            format: scheme.format(),
            block_size: scheme.block_size,
            codes: &codes,
            scales: &scales,
            tensor_scale: tensor_scale.as_slice(),
        };
        self.time(format!("dequantize {name} to {dtype}"), dense_bytes + packed_bytes, || {
            host::dequantize(packed, view, output).expect("a valid problem");
        });
        self.time(format!("fake-quantize {dtype} by {name}"), 2 * dense_bytes, || {
            host::fake_quantize(values, view, scheme, &[0.1], DequantTarget::Full, output)
                .expect("a valid problem");
        });
    }
}

/// Shapes of weights in products: of SmolLM2 135M and of Llama 3 8B.
const SHAPES: [[usize; 2]; 8] = [
    [192, 576],
    [576, 576],
    [1536, 576],
    [576, 1536],
    [2048, 2048],
    [4096, 4096],
    [14336, 4096],
    [49152, 576],
];

/// Measures products, relative to a copy of the codes and scales of the weight.
///
/// Each run has another part of memory as its weight, so that no weight stays in the caches of a
/// core.
fn products(arguments: &Arguments) -> Vec<Row> {
    const MEMORY: usize = 1 << 27;
    let mut state = 1u64;
    let codes: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (state >> 56) as u8
    })
    .take(MEMORY)
    .collect();
    let scales: Vec<_> = codes[..MEMORY / 8].iter().map(|code| 0x70 + code % 8).collect();
    let mut rows = Vec::new();
    for (threads, name) in [(1, "1 thread"), (0, "all threads")] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads").install(|| {
            for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
                for activations in [Activations::F32, Activations::Int8] {
                    for [n, k] in SHAPES {
                        for m in [1, 2, 4, 8, 128, 512] {
                            let what = format!(
                                "{} {activations:?} {n} x {k}, {m}, {name}",
                                scheme.format()
                            );
                            let bench = Product { codes: &codes, scales: &scales, scheme, what };
                            bench.time(arguments, [m, n, k], activations, &mut rows);
                        }
                    }
                }
            }
        });
    }
    rows
}

/// A product of some shape.
struct Product<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    scheme: Fp4Scheme,
    what: String,
}

impl Product<'_> {
    fn time(
        self,
        arguments: &Arguments,
        [m, n, k]: [usize; 3],
        activations: Activations,
        rows: &mut Vec<Row>,
    ) {
        let Self { codes, scales, scheme, what } = self;
        let wanted = arguments.filter.as_ref().is_none_or(|filter| {
            if arguments.exact { what == *filter } else { what.contains(filter) }
        });
        // Products of the largest weights and inputs take seconds.
        if !wanted || m * n * k > 1 << 33 {
            return;
        }
        let input: Vec<_> = weights(m * k).iter().map(|x| x * 50.0).collect();
        let mut output = vec![0.0; m * n];
        let block_size = scheme.block_size;
        let (code_bytes, scale_bytes) = (n * k / 2, n * k / block_size);
        let count = codes.len() / code_bytes;
        let mut at = 0;
        let mut next = || {
            at = (at + 1) % count;
            (&codes[at * code_bytes..][..code_bytes], &scales[at * scale_bytes..][..scale_bytes])
        };
        let mut target = vec![0; code_bytes + scale_bytes];
        let copy = median_seconds(arguments.runs, || {
            let (codes, scales) = next();
            target[..code_bytes].copy_from_slice(codes);
            target[code_bytes..].copy_from_slice(scales);
        });
        let seconds = median_seconds(arguments.runs, || {
            let (codes, scales) = next();
            let weight = PackedView {
                format: scheme.format(),
                block_size,
                codes,
                scales,
                tensor_scale: &[1.0],
            };
            host::matmul(&input, weight, [n, k], activations, &mut output)
                .expect("a valid product");
        });
        rows.push(Row::new(&what, m * n * k, code_bytes + scale_bytes, seconds, copy));
    }
}
