//! Speed of the host engine, next to a copy of the same input: `cargo bench --bench host`.

use benches::{Row, median_seconds, print, weights};
use burn_fp4_formats::{bf16, f16};
use burn_fp4_search::host::{self, HostElement, PackedView, Restore, View};
use burn_fp4_search::{BlockHessians, Blocks, Fp4Scheme, Importance, ScaleRule, ScaleSearch};
use clap::Parser;

/// Speed of the host engine, next to a copy of the same input.
#[derive(Parser)]
struct Arguments {
    /// Measure only operations whose name contains this.
    filter: Option<String>,
    /// The filter is the whole name.
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
    /// Print an array of objects instead of a table.
    #[arg(long)]
    json: bool,
    /// What `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() {
    let arguments = Arguments::parse();
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
    let Arguments { rows: m, cols: k, runs, .. } = *arguments;
    let shape = [m, k];
    let dense_bytes = size_of_val(values);
    let mut output = vec![T::default(); values.len()];
    let copy = median_seconds(runs, || output.copy_from_slice(values));
    let mut time = |name: String, bytes, run: &mut dyn FnMut()| {
        let wanted = arguments.filter.as_ref().is_none_or(|filter| {
            if arguments.exact { name == *filter } else { name.contains(filter) }
        });
        if wanted {
            let seconds = median_seconds(runs, run);
            rows.push(Row::new(&name, values.len(), bytes, seconds, copy));
        }
    };
    time(format!("copy {dtype}"), 2 * dense_bytes, &mut || output.copy_from_slice(values));

    let plain = Fp4Scheme::nvfp4();
    time(format!("amax {dtype}"), dense_bytes, &mut || {
        std::hint::black_box(host::amax(values, View::rows(m, k), &plain));
    });
    let four_over_six =
        ScaleSearch::FourOverSix { range: Default::default(), error: Default::default() };
    let x: Vec<_> = weights(512 * k).iter().map(|x| x * 50.0).collect();
    for search in [
        ScaleSearch::Hessian,
        ScaleSearch::CoordinateDescent,
        ScaleSearch::AdmmPublished,
        ScaleSearch::Admm,
    ] {
        for scheme in [plain, Fp4Scheme::mxfp4()] {
            let scheme = scheme.with_search(search);
            let mut codes = vec![0; values.len() / 2];
            let mut scales = vec![0; values.len() / scheme.block_size];
            let view = View::rows(m, k);
            let name = format!("quantize {dtype} to {} by {search:?}, T = 512", scheme.format());
            time(name, dense_bytes, &mut || {
                let hessians = BlockHessians::of(&x, k, scheme.block_size).expect("finite");
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
    for (name, axis, scheme) in [
        ("nvfp4", 1, plain),
        ("nvfp4 along axis 0", 0, plain),
        ("nvfp4 in 16x16 tiles", 1, plain.with_blocks(Blocks::Tile16x16)),
        ("nvfp4 four over six", 1, plain.with_search(four_over_six)),
        ("nvfp4 by sse", 1, plain.with_search(ScaleSearch::Sse)),
        ("nvfp4 by sse along axis 0", 0, plain.with_search(ScaleSearch::Sse)),
        ("mxfp4 by sse", 1, Fp4Scheme::mxfp4().with_search(ScaleSearch::Sse)),
        ("nvfp4 without tensor scale", 1, Fp4Scheme::of(ScaleRule::NoTensorScale)),
        ("mxfp4", 1, Fp4Scheme::mxfp4()),
        ("mxfp4 along axis 0", 0, Fp4Scheme::mxfp4()),
    ] {
        let view = View::along(&shape, axis);
        let mut codes = vec![0; values.len() / 2];
        let mut scales = vec![0; values.len() / scheme.block_size];
        let packed_bytes = codes.len() + scales.len();
        // MXFP4 and rules without a tensor scale need no pass over the data for it.
        let reads = if scheme.rule.row().tensor_scale { 2 } else { 1 };
        let mut quantize = || {
            let amax = if reads == 2 { host::amax(values, view, &scheme) } else { vec![1.0] };
            host::quantize(values, view, &scheme, &amax, &mut codes, &mut scales)
                .expect("a valid problem")
        };
        let tensor_scale = quantize();
        let name_of = format!("quantize {dtype} to {name}");
        time(name_of, reads * dense_bytes + packed_bytes, &mut || drop(quantize()));

        let packed = PackedView {
            format: scheme.format(),
            block_size: scheme.block_size,
            codes: &codes,
            scales: &scales,
            tensor_scale: tensor_scale.as_slice(),
        };
        if scheme.blocks == Blocks::Row && scheme.search == ScaleSearch::Amax {
            let name_of = format!("dequantize {name} to {dtype}");
            time(name_of, dense_bytes + packed_bytes, &mut || {
                host::dequantize(packed, view, &mut output).expect("a valid problem");
            });
            time(format!("fake-quantize {dtype} by {name}"), 2 * dense_bytes, &mut || {
                host::fake_quantize(values, view, &scheme, &[0.1], Restore::Values, &mut output)
                    .expect("a valid problem");
            });
        }
    }
}
