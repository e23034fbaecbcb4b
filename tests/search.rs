//! The searches against brute force in f64, and against the results of other projects.

use burn_fp4_formats::{E2M1, Fp4Format, Packed, ScaleGrid};
use burn_fp4_search::host::{self, View};
use burn_fp4_search::{
    Admm, BlockHessians, BlockOrder, Blocks, Fp4Scheme, Gptq, Gram, Importance, Method, ScaleRule,
    SearchError, TensorScaling, quantize_by_importance,
};
use tests::compare::assert_same;
use tests::golden::Golden;
use tests::inputs::Random;

/// Draws 32 values.
type Distribution = fn(&mut Random) -> Vec<f32>;

/// Distributions that are hard for a scale search.
const DISTRIBUTIONS: [(&str, Distribution); 8] = [
    ("normal", |r| (0..32).map(|_| r.normal()).collect()),
    ("heavy tails", |r| (0..32).map(|_| r.normal() / (r.uniform() + 1e-3)).collect()),
    ("outliers", |r| {
        (0..32).map(|_| if r.below(24) == 0 { r.normal() * 30.0 } else { r.normal() }).collect()
    }),
    ("constants", |r| {
        let value = r.normal();
        (0..32).map(|_| if r.below(4) == 0 { -value } else { value }).collect()
    }),
    ("near ties", |r| (0..32).map(|_| (r.below(65) as f32 - 32.0) / 8.0).collect()),
    ("subnormal scales", |r| (0..32).map(|_| r.normal() * 0.01).collect()),
    ("saturation", |r| (0..32).map(|_| r.normal() * 2000.0).collect()),
    ("few", |r| (0..32).map(|_| if r.below(10) == 0 { r.normal() } else { 0.0 }).collect()),
];

/// Draws `rows` blocks of 32 from each distribution, `[8 * rows, 32]`.
fn blocks(rows: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut values = Vec::new();
    for (_, distribution) in DISTRIBUTIONS {
        for _ in 0..rows {
            values.extend(distribution(&mut random));
        }
    }
    values
}

fn host_packed(
    values: &[f32],
    cols: usize,
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Packed {
    let view = View::rows(values.len() / cols, cols);
    let amax = host::amax(values, view, scheme);
    host::quantize_packed(values, view, scheme, &amax, importance).expect("a valid problem")
}

/// Returns the values of all scales of a format around an amax, times the tensor scale, in order.
fn all_scales(format: Fp4Format, amax: f64, tensor_scale: f64) -> Vec<f64> {
    match format.row().scale_grid() {
        ScaleGrid::Float(row) => {
            (1..=row.max_code()).map(|code| f64::from(row.decode(code)) * tensor_scale).collect()
        }
        ScaleGrid::PowersOfTwo(_) => {
            let exponent = amax.log2().floor() as i32;
            (exponent - 10..exponent + 6).map(|exponent| 2f64.powi(exponent)).collect()
        }
    }
}

/// Rounds to the nearest E2M1 value, in f64.
fn nearest(x: f64) -> f64 {
    let magnitude = x.abs().min(6.0);
    let step = if magnitude < 2.0 {
        0.5
    } else if magnitude < 4.0 {
        1.0
    } else {
        2.0
    };
    ((magnitude / step).round() * step).copysign(x)
}

fn schemes() -> Vec<Fp4Scheme> {
    let mut schemes = Vec::new();
    for rule in [ScaleRule::Te, ScaleRule::TorchRecipe, ScaleRule::NoTensorScale, ScaleRule::Floor]
    {
        for block_size in [16, 32] {
            schemes.push(Fp4Scheme::of(rule).with_block_size(block_size));
        }
    }
    // A given tensor scale: its own range, and one in which most blocks saturate.
    schemes.push(Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Multiplier(1e-3)));
    schemes.push(Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Amax(10.0)));
    schemes
}

/// Finds the least squared error of a block over all scales, with nearest codes.
fn least_squared_error(block: &[f32], weights: &[f64], scales: &[f64]) -> f64 {
    let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    // The best scale is near this one. From there up, then down, most sums exceed the least error
    // after a few elements, and a sum that does is not finished.
    let begin = scales.partition_point(|scale| scale * 6.0 < f64::from(largest));
    let mut least = f64::INFINITY;
    for &scale in scales[begin..].iter().chain(scales[..begin].iter().rev()) {
        let mut sum = 0.0;
        for (&x, &weight) in block.iter().zip(weights) {
            let x = f64::from(x);
            let error = x - nearest(x / scale) * scale;
            sum += weight * error * error;
            if sum >= least {
                break;
            }
        }
        least = least.min(sum);
    }
    least
}

/// Computes the errors of a packed block, in f64.
fn errors_of(packed: &Packed, values: &[f32], row: usize, block: usize) -> Vec<f64> {
    let size = packed.block_size;
    let tensor_scale = f64::from(packed.tensor_scale.of_row(row));
    let scale =
        packed.format.row().block_scale.decode(packed.scales[row * packed.blocks() + block]);
    (0..size)
        .map(|k| {
            let at = row * packed.cols + block * size + k;
            let code = packed.codes[at / 2] >> (4 * (at % 2)) & 0xF;
            let value = f64::from(E2M1.decode(code)) * f64::from(scale) * tensor_scale;
            f64::from(values[at]) - value
        })
        .collect()
}

#[test]
fn sse_equals_brute_force_over_all_scales() {
    assert!(compare_sse_with_brute_force(600, Importance::Uniform, &[1.0; 32]) > 90_000);
}

#[test]
#[ignore = "slow"]
fn sse_of_half_a_million_blocks_equals_brute_force_over_all_scales() {
    assert!(compare_sse_with_brute_force(3300, Importance::Uniform, &[1.0; 32]) > 500_000);
}

#[test]
#[ignore = "slow"]
fn weighted_sse_of_half_a_million_blocks_equals_brute_force_over_all_scales() {
    assert!(compare_weighted_sse_with_brute_force(3300) > 500_000);
}

#[test]
fn weighted_sse_equals_brute_force_over_all_scales() {
    assert!(compare_weighted_sse_with_brute_force(600) > 90_000);
}

fn compare_weighted_sse_with_brute_force(rows: usize) -> usize {
    let weights: Vec<f32> = (0..32).map(|k| [0.1, 1.0, 3.0, 0.0][k % 4]).collect();
    let exact: Vec<_> = weights.iter().map(|&weight| f64::from(weight)).collect();
    compare_sse_with_brute_force(rows, Importance::Channels(&weights), &exact)
}

/// Compares the error of each block with the least over all scales, for inputs of several kinds
/// with so many rows each. Returns the number of blocks.
fn compare_sse_with_brute_force(rows: usize, importance: Importance<'_>, weights: &[f64]) -> usize {
    let mut searched = 0;
    let mut worst = 0.0f64;
    for (seed, scheme) in schemes().into_iter().enumerate() {
        let scheme = scheme.with_method(Method::SSE);
        let values = blocks(rows * scheme.block_size / 16, seed as u64);
        let packed = host_packed(&values, 32, &scheme, importance);
        let tensor_scale = f64::from(packed.tensor_scale.of_row(0));
        let mut scales = all_scales(scheme.format(), 1.0, tensor_scale);
        for (at, elements) in values.chunks_exact(scheme.block_size).enumerate() {
            let (row, block) = (at / packed.blocks(), at % packed.blocks());
            let weights = &weights[block * scheme.block_size..][..scheme.block_size];
            let amax = elements.iter().fold(0.0f32, |x, y| x.max(y.abs()));
            if amax == 0.0 {
                continue;
            }
            if scheme.format() == Fp4Format::MxFp4 {
                scales = all_scales(scheme.format(), amax.into(), tensor_scale);
            }
            let least = least_squared_error(elements, weights, &scales);
            let errors = errors_of(&packed, &values, row, block);
            let squares = errors.iter().zip(weights).map(|(error, weight)| weight * error * error);
            let found: f64 = squares.sum();
            let energy: f64 = elements.iter().map(|&x| f64::from(x).powi(2)).sum();
            // Sums of f32 tell scales apart down to their rounding.
            let excess = found - least - 1e-12 * energy;
            worst = worst.max(excess / least.max(1e-12 * energy));
            assert!(excess <= 1e-5 * least, "{scheme:?}: {found:e} > {least:e} for {elements:?}");
            searched += 1;
        }
    }
    println!("{searched} blocks, at most {worst:.1e} above the best in f64");
    searched
}

#[test]
fn sse_of_tiles_equals_the_reference() {
    let weights: Vec<f32> = (0..32).map(|k| (k % 5) as f32).collect();
    let values = blocks(40, 77);
    for rule in [ScaleRule::Te, ScaleRule::Floor, ScaleRule::RoundUp] {
        let scheme = Fp4Scheme::of(rule)
            .with_block_size(16)
            .with_blocks(Blocks::Tile16x16)
            .with_method(Method::SSE);
        for rows in [320, 37, 5] {
            let values = &values[..rows * 32];
            for importance in [Importance::Uniform, Importance::Channels(&weights)] {
                let found = host_packed(values, 32, &scheme, importance);
                let amax = host::amax(values, View::rows(rows, 32), &scheme);
                let expected =
                    quantize_by_importance(values, rows, 32, &scheme, &amax, importance).unwrap();
                assert_same(&format!("{scheme:?} {rows}"), &found, &expected);
            }
        }
    }
}

/// Draws activations `[rows, channels]` with correlated channels.
fn activations(rows: usize, channels: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    let mut values = Vec::new();
    for _ in 0..rows {
        let mut last = 0.0;
        for channel in 0..channels {
            last = 0.8 * last + random.normal() * if channel % 7 == 0 { 3.0 } else { 0.6 };
            values.push(last);
        }
    }
    values
}

fn quadratic_form(hessian: &[f32], errors: &[f64]) -> f64 {
    let n = errors.len();
    (0..n * n).map(|at| f64::from(hessian[at]) * errors[at / n] * errors[at % n]).sum()
}

/// Computes `r^T H r` of each block.
fn costs(packed: &Packed, values: &[f32], hessians: &BlockHessians) -> Vec<f64> {
    let square = packed.block_size * packed.block_size;
    let blocks = packed.blocks();
    (0..packed.rows * blocks)
        .map(|at| {
            let (row, block) = (at / blocks, at % blocks);
            let hessian = &hessians.values()[block * square..][..square];
            quadratic_form(hessian, &errors_of(packed, values, row, block))
        })
        .collect()
}

#[test]
#[ignore = "slow"]
fn searches_by_hessian_equal_or_beat_brute_force_over_scales() {
    let mut searched = 0;
    for (seed, scheme) in schemes().into_iter().enumerate() {
        let size = scheme.block_size;
        let values = blocks(40 * size / 16, seed as u64 + 100);
        let x = activations(192, 32, seed as u64);
        let hessians = BlockHessians::of(&x, 32, size).unwrap();
        let importance = Importance::Blocks(&hessians);
        let of = |search| {
            let packed = host_packed(&values, 32, &scheme.with_method(search), importance);
            (costs(&packed, &values, &hessians), packed)
        };
        let (hessian, packed) = of(Method::Hessian);
        let (descent, _) = of(Method::CoordinateDescent);
        let tensor_scale = f64::from(packed.tensor_scale.of_row(0));
        for (at, elements) in values.chunks_exact(size).enumerate() {
            let amax = elements.iter().fold(0.0f32, |x, y| x.max(y.abs()));
            if amax == 0.0 {
                continue;
            }
            let matrix = &hessians.values()[at % packed.blocks() * size * size..][..size * size];
            let least = all_scales(scheme.format(), amax.into(), tensor_scale)
                .into_iter()
                .map(|scale| {
                    let errors: Vec<_> = elements
                        .iter()
                        .map(|&x| f64::from(x) - nearest(f64::from(x) / scale) * scale)
                        .collect();
                    quadratic_form(matrix, &errors)
                })
                .fold(f64::INFINITY, f64::min);
            let energy: Vec<_> = elements.iter().map(|&x| f64::from(x)).collect();
            let slack = 1e-5 * least + 1e-9 * quadratic_form(matrix, &energy);
            // On ties the rule decides the code, and r^T H r depends on it.
            if !has_ties(elements) {
                assert!(hessian[at] <= least + slack, "{scheme:?}: {} > {least}", hessian[at]);
            }
            assert!(descent[at] <= hessian[at] + slack, "{scheme:?}: descent is worse");
            searched += 1;
        }
        let [descent, hessian] = [descent, hessian].map(|costs| costs.iter().sum::<f64>());
        println!("{} {size}: descent {:.3} of hessian", scheme.rule, descent / hessian);
        assert!(descent < hessian);
    }
    println!("{searched} blocks");
    assert!(searched > 5_000);
}

/// Returns true if elements are round numbers, which scales can put halfway between two codes.
fn has_ties(elements: &[f32]) -> bool {
    elements.iter().all(|x| (x * 8.0).fract() == 0.0)
}

#[test]
fn the_host_engine_searches_as_the_reference_does() {
    for (seed, scheme) in schemes().into_iter().enumerate() {
        let values = blocks(3, seed as u64 + 200);
        let rows = values.len() / 32;
        let x = activations(192, 32, seed as u64);
        let hessians = BlockHessians::of(&x, 32, scheme.block_size).unwrap();
        let importance = Importance::Blocks(&hessians);
        for search in [Method::Hessian, Method::CoordinateDescent] {
            let scheme = scheme.with_method(search);
            let found = host_packed(&values, 32, &scheme, importance);
            let amax = host::amax(&values, View::rows(rows, 32), &scheme);
            let expected =
                quantize_by_importance(&values, rows, 32, &scheme, &amax, importance).unwrap();
            assert_same(&format!("{scheme:?}"), &found, &expected);
        }
    }
}

#[test]
fn invalid_hessians_are_errors_that_name_the_value() {
    let x = activations(8, 32, 1);
    let mut bad = x.clone();
    bad[37] = f32::NAN;
    let error = BlockHessians::of(&bad, 32, 16).unwrap_err();
    assert!(matches!(error, SearchError::Activation { row: 1, channel: 5, .. }), "{error}");
    let mut values = BlockHessians::of(&x, 32, 16).unwrap().values().to_vec();
    values[17 * 16 + 3] += 1000.0;
    let error = BlockHessians::new(values, 16).unwrap_err();
    assert!(error.to_string().contains("differs from its mirror image"), "{error}");
    assert!(matches!(BlockHessians::of(&x, 24, 16), Err(SearchError::Format(_))));
    assert!(matches!(BlockHessians::of(&x[..40], 32, 16), Err(SearchError::Format(_))));
}

#[test]
fn no_block_is_worse_than_qwantizes() {
    println!(
        "file, block, method: theirs, ours, blocks left out for a scale outside the format, \
         blocks with ties"
    );
    for file in ["qwantize_std0.02", "qwantize_std1.0"] {
        let golden = Golden::read(file);
        let (w, x) = (golden.dense("W"), golden.dense("X").to_f32());
        let values = w.to_f32();
        for size in [16, 32] {
            let hessians = BlockHessians::of(&x, w.cols, size).unwrap();
            for (name, rule, search) in [
                ("nvfp4_naive", ScaleRule::NoTensorScale, Method::Amax),
                ("nvfp4_optimal", ScaleRule::NoTensorScale, Method::SSE),
                ("nvfp4_optimal_hessian", ScaleRule::NoTensorScale, Method::Hessian),
                ("nvfp4_admm", ScaleRule::NoTensorScale, Method::ADMM),
                ("mxfp4_naive", ScaleRule::Floor, Method::Amax),
                ("mxfp4_optimal", ScaleRule::Floor, Method::SSE),
                ("mxfp4_optimal_hessian", ScaleRule::Floor, Method::Hessian),
            ] {
                let case = format!("b{size}/{name}");
                let scheme = Fp4Scheme::of(rule).with_block_size(size).with_method(search);
                let by_hessian = search.needs_hessians();
                let importance =
                    if by_hessian { Importance::Blocks(&hessians) } else { Importance::Uniform };
                let packed = host_packed(&values, w.cols, &scheme, importance);
                let scales = golden.floats(&format!("{case}/scales"));
                let quants = golden.floats(&format!("{case}/quants"));
                let square = size * size;
                let cost = |errors: &[f64], block: usize| {
                    if by_hessian {
                        quadratic_form(&hessians.values()[block * square..][..square], errors)
                    } else {
                        errors.iter().map(|error| error * error).sum()
                    }
                };
                let (mut theirs, mut ours, mut left_out, mut ties) = (0.0, 0.0, 0, 0);
                for (at, &scale) in scales.iter().enumerate() {
                    let (row, block) = (at / packed.blocks(), at % packed.blocks());
                    if scale == 0.0 {
                        left_out += 1;
                        continue;
                    }
                    let range = at * size..(at + 1) * size;
                    let elements = &values[range.clone()];
                    let their_cost = |quants: &[f32]| {
                        let pairs = elements.iter().zip(quants);
                        let error =
                            |(&x, &q): (&f32, &f32)| f64::from(x) - f64::from(q) * f64::from(scale);
                        cost(&pairs.map(error).collect::<Vec<_>>(), block)
                    };
                    let mut their = their_cost(&quants[range]);
                    let our = cost(&errors_of(&packed, &values, row, block), block);
                    let tied = elements.iter().any(|x| {
                        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0].contains(&(x / scale).abs())
                    });
                    // Where two codes are equally near, they take the smaller one and we the even
                    // one, and r^T H r depends on it: there their scale has even codes too.
                    if by_hessian && tied && our > their {
                        ties += 1;
                        let even = |x: &f32| E2M1.decode(E2M1.encode(x / scale));
                        their = their_cost(&elements.iter().map(even).collect::<Vec<_>>());
                    }
                    assert!(our <= their * (1.0 + 1e-6), "{file} {case} {at}: {our} > {their}");
                    theirs += their;
                    ours += our;
                }
                println!("{file} {case}: {theirs:.6} {ours:.6} {left_out} {ties}");
            }
        }
    }
}

/// Methods. Those after the second are not worse than the second, in `r^T H r`.
const ORDER: [Method; 3] = [Method::Hessian, Method::CoordinateDescent, Method::ADMM];

#[test]
fn each_search_is_no_worse_than_its_starting_point() {
    let values = blocks(4, 5);
    let x = activations(64, 32, 5);
    let hessians = BlockHessians::of(&x, 32, 16).unwrap();
    for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4().with_block_size(16)] {
        let costs = ORDER.map(|search| {
            let scheme = scheme.with_method(search);
            let importance = Importance::Blocks(&hessians);
            let packed = host_packed(&values, 32, &scheme, importance);
            let rows = packed.rows;
            let amax = host::amax(&values, View::rows(rows, 32), &scheme);
            let reference =
                quantize_by_importance(&values, rows, 32, &scheme, &amax, importance).unwrap();
            assert_same(&format!("{scheme:?}"), &packed, &reference);
            costs(&packed, &values, &hessians)
        });
        let begin = &costs[1];
        for (search, costs) in ORDER.into_iter().zip(&costs) {
            println!("{search:?}: {:.4}", costs.iter().sum::<f64>());
        }
        for better in &costs[2..] {
            for (better, begin) in better.iter().zip(begin) {
                assert!(*better <= begin * (1.0 + 1e-5) + 1e-12, "{better} > {begin}");
            }
        }
    }
}

#[test]
fn zero_and_singular_hessians_are_searched() {
    let values = blocks(2, 9);
    let rows = values.len() / 32;
    let searches =
        [Method::Hessian, Method::CoordinateDescent, Method::ADMM, Method::Admm(Admm::Published)];
    for base in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4().with_block_size(16)] {
        let amax = host_packed(&values, 32, &base, Importance::Uniform);
        for search in searches {
            let scheme = base.with_method(search);
            // No activations at all: nothing is better than the rule's own choice.
            let zero = BlockHessians::new(vec![0.0; 2 * 256], 16).unwrap();
            let packed = host_packed(&values, 32, &scheme, Importance::Blocks(&zero));
            packed.validate().unwrap();
            if search != Method::Admm(Admm::Published) {
                assert_eq!(packed.scales, amax.scales, "{scheme:?}");
            }
            // Fewer activations than channels, and a channel that is never active.
            let mut x = activations(3, 32, 4);
            x.iter_mut().step_by(32).for_each(|value| *value = 0.0);
            let singular = BlockHessians::of(&x, 32, 16).unwrap();
            assert!(singular.bounds().iter().all(|&bound| bound == 0.0));
            let packed = host_packed(&values, 32, &scheme, Importance::Blocks(&singular));
            packed.validate().unwrap();
            let importance = Importance::Uniform;
            let amax = host::amax(&values, View::rows(rows, 32), &scheme);
            let error = quantize_by_importance(&values, rows, 32, &scheme, &amax, importance);
            assert!(matches!(error, Err(SearchError::Importance { .. })));
        }
    }
}

#[test]
fn gptq_handles_degenerate_activations() {
    let values = blocks(2, 10);
    let rows = values.len() / 32;
    for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
        let amax = host::amax(&values, View::rows(rows, 32), &scheme);
        let quantize =
            |options: Gptq, gram: &Gram| options.quantize(&values, rows, 32, &scheme, &amax, gram);
        // None, fewer than channels, a dead channel.
        let mut few = activations(3, 32, 4);
        few.iter_mut().step_by(32).for_each(|value| *value = 0.0);
        for x in [vec![0.0; 64], few.clone()] {
            let packed = quantize(Gptq::default(), &Gram::of(&x, 32).unwrap()).unwrap();
            packed.validate().unwrap();
        }
        let gram = Gram::of(&few, 32).unwrap();
        let undamped = Gptq { damping: 0.0, ..Gptq::default() };
        assert_eq!(quantize(undamped, &gram), Err(SearchError::Singular));
        let negative = Gptq { damping: -1.0, ..Gptq::default() };
        assert_eq!(quantize(negative, &gram), Err(SearchError::Damping { found: -1.0 }));
        assert!(matches!(quantize(Gptq::default(), &Gram::new(16)), Err(SearchError::Format(_))));
    }
}

/// Computes `|X (Wq - W)^T|^2`, in f64.
fn output_error(packed: &Packed, values: &[f32], x: &[f32]) -> f64 {
    let quantized = packed.dequantize();
    let cols = packed.cols;
    let mut sum = 0.0;
    for x in x.chunks_exact(cols) {
        for (q, w) in quantized.chunks_exact(cols).zip(values.chunks_exact(cols)) {
            let terms = x.iter().zip(q.iter().zip(w));
            let output: f64 =
                terms.map(|(&x, (&q, &w))| f64::from(x) * (f64::from(q) - f64::from(w))).sum();
            sum += output * output;
        }
    }
    sum
}

#[test]
fn gptq_lowers_the_error_of_outputs_with_every_sweep() {
    let mut random = Random::new(8);
    let values: Vec<f32> = (0..24 * 160).map(|_| random.normal() * 0.05).collect();
    let x = activations(400, 160, 6);
    let gram = Gram::of(&x, 160).unwrap();
    for base in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
        for scaling in [TensorScaling::Tensor, TensorScaling::Row] {
            if base.format() == Fp4Format::MxFp4 && scaling == TensorScaling::Row {
                continue;
            }
            let scheme = base.with_tensor_scale(scaling);
            let amax = host::amax(&values, View::rows(24, 160), &scheme);
            let of = |options: Gptq| {
                let packed = options.quantize(&values, 24, 160, &scheme, &amax, &gram).unwrap();
                output_error(&packed, &values, &x)
            };
            let sse =
                host_packed(&values, 160, &scheme.with_method(Method::SSE), Importance::Uniform);
            let sse = output_error(&sse, &values, &x);
            let light = Gptq { damping: 0.01, ..Gptq::default() };
            let rounded = of(Gptq { sweeps: 0, refits: 0, ..light });
            let swept = of(Gptq { refits: 0, ..light });
            let refitted = of(light);
            println!("{scheme:?}: sse {sse:.4} rounded {rounded:.4} {swept:.4} {refitted:.4}");
            assert!(rounded < 0.5 * sse && swept < rounded && refitted < swept);
            let natural = of(Gptq { order: BlockOrder::Natural, ..light });
            assert!(natural < 0.5 * sse);
        }
    }
}

/// ModelOpt's sweep over the 126 scales, on a GPU. Its results are stored as amaxes of blocks.
#[test]
fn no_block_is_worse_than_modelopts_sweep() {
    let golden = Golden::read("modelopt");
    let mut blocks = 0;
    for case in golden.cases("sweep_amax") {
        let dense = golden.dense(&format!("{case}/x"));
        let values = dense.to_f32();
        let global = golden.floats(&format!("{case}/global_amax"))[0];
        let hessians =
            BlockHessians::new(golden.floats(&format!("{case}/hessian")), 16).expect("Hessians");
        for (name, search) in
            [("sweep_amax", Method::SSE), ("sweep_hessian_amax", Method::CoordinateDescent)]
        {
            let by_hessian = search.needs_hessians();
            let importance =
                if by_hessian { Importance::Blocks(&hessians) } else { Importance::Uniform };
            let scheme = Fp4Scheme::nvfp4()
                .with_tensor_scale(TensorScaling::Amax(global))
                .with_method(search);
            let packed = host_packed(&values, dense.cols, &scheme, importance);
            let (mut theirs, mut ours) = (0.0, 0.0);
            for (at, amax) in golden.floats(&format!("{case}/{name}")).into_iter().enumerate() {
                let (row, block) = (at / packed.blocks(), at % packed.blocks());
                let scale = f64::from(amax) / 6.0;
                let their: Vec<f64> = values[at * 16..][..16]
                    .iter()
                    .map(|&x| f64::from(x) - nearest(f64::from(x) / scale) * scale)
                    .collect();
                let our = errors_of(&packed, &values, row, block);
                let cost = |errors: &[f64]| {
                    if by_hessian {
                        quadratic_form(&hessians.values()[block * 256..][..256], errors)
                    } else {
                        errors.iter().map(|error| error * error).sum()
                    }
                };
                let (their, our) = (cost(&their), cost(&our));
                theirs += their;
                ours += our;
                // How ties are rounded makes no difference to squares, but to r^T H r.
                assert!(by_hessian || our <= their * 1.001, "{case} {name} {at}: {our} > {their}");
                blocks += 1;
            }
            println!("{case} {name}: {theirs:.6} {ours:.6}");
            assert!(ours <= theirs * (1.0 + 1e-5));
        }
    }
    assert!(blocks >= 2048);
}

#[test]
fn every_rule_is_known_by_its_name() {
    for rule in ScaleRule::ALL {
        assert_eq!(rule.row().name.parse(), Ok(rule));
        let json = serde_json::to_string(&rule).expect("a unit variant");
        assert_eq!(json.trim_matches('"'), rule.row().name);
    }
    assert!("nearest".parse::<ScaleRule>().is_err());
}
