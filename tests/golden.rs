//! Every engine gives the codes and scales of other projects, byte for byte.

use burn_fp4_formats::{E2M1, Packed, unpack_nibbles};
use burn_fp4_search::{
    Blocks, E4m3Range, ErrorMetric, Fp4Scheme, Method, NonFinite, ScaleRule, TensorScaling,
    modelopt,
};
use tests::compare::Tally;
use tests::engines::{Axis, engines};
use tests::golden::Golden;
use tests::inputs::Dense;

/// Compares every engine with the golden codes and scales of one case.
fn check(
    tally: &mut Tally,
    golden: &Golden,
    case: &str,
    input: &Dense,
    axis: Axis,
    scheme: Fp4Scheme,
) {
    let scheme = scheme.with_non_finite(NonFinite::FollowReference);
    let (codes, scales) = (format!("{case}/codes"), format!("{case}/scales"));
    for engine in engines() {
        if let Some(packed) = engine.quantize(input, axis, &scheme) {
            let what = format!("{} {case}", engine.name);
            tally.check(&what, &packed, golden.bytes(&codes), golden.bytes(&scales));
        }
    }
}

fn transformer_engine(file: &str, rule: ScaleRule) {
    let golden = Golden::read(file);
    let mut tally = Tally::default();
    for case in golden.cases("x") {
        let input = golden.dense(&format!("{case}/x"));
        for (variant, blocks) in [("1d", Blocks::Row), ("2d", Blocks::Tile16x16)] {
            let scheme = Fp4Scheme::of(rule).with_blocks(blocks);
            check(&mut tally, &golden, &format!("{case}/{variant}"), &input, Axis::Last, scheme);
        }
    }
    tally.finish(file);
}

#[test]
fn transformer_engine_up_to_2_13_has_the_same_bits() {
    transformer_engine("te_div6", ScaleRule::TeDivision);
}

#[test]
fn transformer_engine_since_2_14_has_the_same_bits() {
    transformer_engine("te_rcp6", ScaleRule::Te);
}

#[test]
fn variants_of_transformer_engine_have_the_same_bits() {
    let golden = Golden::read("te_variants");
    let mut tally = Tally::default();
    for case in golden.cases("x") {
        let input = golden.dense(&format!("{case}/x"));
        let plain = Fp4Scheme::nvfp4();
        let by_row = plain.with_tensor_scale(TensorScaling::Row);
        check(&mut tally, &golden, &format!("{case}/row_scaled"), &input, Axis::Last, by_row);
        check(&mut tally, &golden, &format!("{case}/col"), &input, Axis::First, plain);
        for (blocks_name, blocks) in [("1d", Blocks::Row), ("2d", Blocks::Tile16x16)] {
            for (range_name, range) in [("448", E4m3Range::E448), ("256", E4m3Range::E256)] {
                for (error_name, error) in [("mae", ErrorMetric::Mae), ("mse", ErrorMetric::Mse)] {
                    let variant = format!("{case}/4over6_{blocks_name}_{range_name}_{error_name}");
                    let search = Method::FourOverSix { range, error };
                    let scheme = plain.with_blocks(blocks).with_method(search);
                    check(&mut tally, &golden, &variant, &input, Axis::Last, scheme);
                }
            }
        }
    }
    tally.finish("te_variants");
}

#[test]
fn torch_recipe() {
    let golden = Golden::read("gist");
    let mut tally = Tally::default();
    for case in golden.cases("x") {
        let input = golden.dense(&format!("{case}/x"));
        check(
            &mut tally,
            &golden,
            &case,
            &input,
            Axis::Last,
            Fp4Scheme::of(ScaleRule::TorchRecipe),
        );
    }
    tally.finish("gist");
}

#[test]
fn torchao_has_the_same_bits() {
    let golden = Golden::read("mxfp4_torchao");
    let modes = [
        ("floor", ScaleRule::Floor),
        ("even", ScaleRule::Even),
        ("rceil", ScaleRule::RoundUp),
        ("ceil", ScaleRule::Ceil),
    ];
    let mut tally = Tally::default();
    for case in golden.cases("x") {
        let input = golden.dense(&format!("{case}/x"));
        for (mode, rule) in modes {
            let case = format!("{case}/{mode}");
            check(&mut tally, &golden, &case, &input, Axis::Last, Fp4Scheme::of(rule));
        }
    }
    tally.finish("mxfp4_torchao");
}

/// qwantize's naive quantizers. On a tie, qwantize takes the smaller magnitude and we the even
/// code; all other codes are equal.
#[test]
fn qwantize_has_the_same_bits() {
    let (mut tally, mut ties) = (Tally::default(), 0);
    for file in ["qwantize_std0.02", "qwantize_std1.0"] {
        let golden = Golden::read(file);
        let input = golden.dense("W");
        let values = input.to_f32();
        for (method, rule) in
            [("nvfp4_naive", ScaleRule::NoTensorScale), ("mxfp4_naive", ScaleRule::Floor)]
        {
            for block_size in [16, 32] {
                let case = format!("b{block_size}/{method}");
                let scales = golden.floats(&format!("{case}/scales"));
                let quants = golden.floats(&format!("{case}/quants"));
                let scheme = Fp4Scheme::of(rule).with_block_size(block_size);
                for engine in engines() {
                    let Some(packed) = engine.quantize(&input, Axis::Last, &scheme) else {
                        continue;
                    };
                    let what = format!("{} {file} {case}", engine.name);
                    ties += compare_with_qwantize(&what, &packed, &values, &scales, &quants);
                    tally.cases += 1;
                    tally.codes += quants.len();
                    tally.scales += scales.len();
                }
            }
        }
    }
    println!("qwantize: {ties} elements exactly between two codes");
    tally.finish("qwantize");
}

fn compare_with_qwantize(
    what: &str,
    packed: &Packed,
    values: &[f32],
    scales: &[f32],
    quants: &[f32],
) -> usize {
    let row = packed.format.row().block_scale;
    for (index, (&code, &expected)) in packed.scales.iter().zip(scales).enumerate() {
        assert_eq!(row.decode(code), expected, "{what}: scale {index}");
    }
    let mut codes = vec![0; values.len()];
    unpack_nibbles(&packed.codes, &mut codes);
    let mut ties = 0;
    for (index, (&code, &expected)) in codes.iter().zip(quants).enumerate() {
        let found = E2M1.decode(code);
        if found == expected {
            continue;
        }
        let normalized = values[index].abs() / scales[index / packed.block_size];
        let midpoint = (found.abs() + expected.abs()) / 2.0;
        assert!(
            normalized == midpoint && expected.abs() < found.abs() && code % 2 == 0,
            "{what}: element {index} is {found}, expected {expected} for {normalized}"
        );
        ties += 1;
    }
    ties
}

/// Allowed difference, in ulps, of scales that ModelOpt computed on a GPU. Triton's division is an
/// approximation: most scales are equal, some 1 ulp away, and about one in thousands is 2 away.
const MODELOPT_SCALE_ULPS: u32 = 2;

/// ModelOpt ran on a GPU: scales within [`MODELOPT_SCALE_ULPS`], at most 1 in a thousand
/// fake-quantized values apart.
#[test]
fn modelopt_functions() {
    let golden = Golden::read("modelopt");
    let cases = golden.cases("x");
    assert!(!cases.is_empty());
    let (mut compared_scales, mut compared_values, mut apart) = (0, 0, 0);
    for case in &cases {
        let amax = golden.floats(&format!("{case}/amax"));
        let global = golden.floats(&format!("{case}/global_amax"))[0];
        let input = golden.dense(&format!("{case}/x"));
        for (name, global, quantized, largest) in [
            ("raw", Some(global), false, 448.0),
            ("448", Some(global), true, 448.0),
            ("256", Some(global), true, 256.0),
            ("own_global", None, true, 448.0),
        ] {
            let scales = modelopt::compute_fp4_scales(&amax, global, quantized, largest);
            let expected = golden.floats(&format!("{case}/scales_{name}"));
            for (found, expected) in scales.iter().zip(&expected) {
                let apart = found.to_bits().abs_diff(expected.to_bits());
                assert!(
                    apart <= MODELOPT_SCALE_ULPS,
                    "{case}/scales_{name}: {found:e}, expected {expected:e}"
                );
            }
            compared_scales += expected.len();

            for variant in [format!("static_{name}"), format!("static_{name}_to_f32")] {
                let variant = format!("{case}/{variant}");
                if !golden.has(&variant) {
                    continue;
                }
                let values = modelopt::static_blockwise_fp4_fake_quant(
                    &input.to_f32(),
                    &amax,
                    global,
                    quantized,
                    largest,
                )
                .expect("a whole number of values per amax");
                let expected = golden.dense(&variant);
                let found = Dense::new(input.rows, input.cols, &values, expected.dtype());
                compared_values += values.len();
                let pairs = found.to_f32().into_iter().zip(expected.to_f32());
                apart += pairs.filter(|(a, b)| !within_two_ulps(*a, *b, &found)).count();
            }
        }
    }
    println!("modelopt: {compared_scales} scales, {compared_values} values, {apart} apart");
    assert!(compared_values > 0 && apart * 1000 <= compared_values);
}

/// Returns true if values differ as much as most scales do: 1 ulp of a scale is up to 2 ulps of its
/// multiple.
fn within_two_ulps(a: f32, b: f32, dense: &Dense) -> bool {
    let shift = match dense.dtype() {
        tests::inputs::Dtype::F32 => 0,
        tests::inputs::Dtype::F16 => 13,
        tests::inputs::Dtype::Bf16 => 16,
    };
    a == b || (a.to_bits() >> shift).abs_diff(b.to_bits() >> shift) <= 2
}
