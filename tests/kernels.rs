//! Compares the CubeCL kernels with the oracle, on CubeCL's CPU runtime (`--features cpu`) or on a
//! GPU (`--features cuda`).

#![cfg(any(feature = "cpu", feature = "cuda"))]

use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::*;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{
    Activations, Capability, Chain, Dtype as KernelDtype, FamilyOutputs, FamilyPlan, Hessians,
    Matmul, MatmulPlan, NormOperands, PackedHandles as Handles, Prefetch, Problem, Refusal, UNITS,
    WgmmaSupport, add_gram, amax, cubecl, dequantize, fake_quantize, fp8_rows, hadamard,
    hessian_factor, quantize, quantize_by_hessian, quantize_gptq, quantize_weighted, rms_norm,
    squared_error, swiglu,
};
use burn_fp4_formats::{Fp4Format, Packed, TensorScale, bf16, f16};
use burn_fp4_search::host::{self, DequantTarget, View};
use burn_fp4_search::squares::squared_sums;
use burn_fp4_search::{
    BlockHessians, BlockOrder, Blocks, Draw, E4m3Range, ErrorMetric, Fp4Scheme, Gptq, Gram,
    GramLayout, Hadamard, Importance, Method, NonFinite, Rounding, ScaleRule, SearchError, Sse,
    TensorScaling, fp8_rows as facts, fp8_values, quantize as oracle, round_to_fp8,
};
use tests::compare::{assert_bits, assert_same};
use tests::golden::Golden;
use tests::inputs::{Dense, Dtype, Kind, Random};
use tests::on_device::{
    assert_products, exact_products, floats, kernel_dtype, upload, upload_packed,
};

struct Device {
    client: Client,
    capability: Capability,
}

impl Device {
    fn new() -> Self {
        let client = cubecl::Device::default().client();
        Self { capability: Capability::of(&client), client }
    }

    /// Runs every kernel along an axis of a matrix, and compares the results with the oracle.
    fn check(&self, what: &str, dense: &Dense, axis: usize, scheme: Fp4Scheme) -> usize {
        self.check_view(what, dense, View::along(&[dense.rows, dense.cols], axis), scheme)
    }

    fn check_view(&self, what: &str, dense: &Dense, view: View, scheme: Fp4Scheme) -> usize {
        let dtype = kernel_dtype(dense.dtype());
        let what = format!("{what} {dtype:?} {view:?} {scheme:?}");
        let problem = Problem { view, dtype, scheme };
        let values = upload(&self.client, dense);
        let by_row = scheme.tensor_scales(view.packed_rows()) > 1;
        let largest = match scheme.tensor_scale {
            TensorScaling::Amax(amax) => self.client.create_from_slice(f32::as_bytes(&[amax])),
            _ => amax(&self.client, &self.capability, values.clone(), view, dtype, by_row)
                .expect("a plan"),
        };
        let packed =
            quantize(&self.client, &self.capability, values.clone(), largest.clone(), &problem)
                .expect("a plan");
        let restored =
            dequantize(&self.client, &self.capability, packed.clone(), &problem).expect("a plan");
        let fake = self.fake_quantize(values.clone(), largest, &problem, DequantTarget::Full);

        let rows = packed_rows(&dense.to_f32(), view);
        let expected = oracle(&rows, view.packed_rows(), view.axis, &scheme).expect("valid");
        let found = self.download(packed.clone(), &expected);
        assert_same(&what, &found, &expected);
        let exact = dense_order(&expected.dequantize(), view);
        let exact = Dense::new(dense.rows, dense.cols, &exact, dense.dtype()).to_f32();
        assert_bits(&what, &floats(&self.client, restored, dtype), &exact);
        assert_bits(&format!("fake {what}"), &floats(&self.client, fake, dtype), &exact);
        self.check_squared_error(&what, dense, values, packed, &problem, &expected);
        view.len()
    }

    fn fake_quantize(
        &self,
        values: Handle,
        amax: Handle,
        problem: &Problem,
        target: DequantTarget,
    ) -> Handle {
        fake_quantize(&self.client, &self.capability, values, amax, problem, target)
            .expect("a plan")
    }

    /// Compares fake quantization without the tensor scale with the oracle.
    fn check_block_scaled(&self, dense: &Dense, view: View, scheme: Fp4Scheme) {
        let dtype = KernelDtype::F32;
        let problem = Problem { view, dtype, scheme };
        let values = upload(&self.client, dense);
        let (client, device) = (&self.client, &self.capability);
        let largest = amax(client, device, values.clone(), view, dtype, false).expect("a plan");
        let found =
            self.fake_quantize(values, largest, &problem, DequantTarget::WithoutTensorScale);
        let rows = packed_rows(&dense.to_f32(), view);
        let packed = oracle(&rows, view.packed_rows(), view.axis, &scheme).expect("valid");
        let unscaled = Packed { tensor_scale: TensorScale::One(1.0), ..packed };
        let exact = dense_order(&unscaled.dequantize(), view);
        assert_bits(&format!("{problem:?}"), &floats(&self.client, found, dtype), &exact);
    }

    fn check_product(
        &self,
        m: usize,
        n: usize,
        k: usize,
        scheme: Fp4Scheme,
        dtype: Dtype,
        bias: bool,
    ) {
        self.check_plans([m, n, k], scheme, dtype, bias, every_plan);
    }

    fn check_plans(
        &self,
        [m, n, k]: [usize; 3],
        scheme: Fp4Scheme,
        dtype: Dtype,
        bias: bool,
        plans: fn(&Matmul, &Capability) -> Vec<MatmulPlan>,
    ) {
        let random = |rows, cols, seed| {
            Dense::new(rows, cols, &Kind::Outliers.values(rows * cols, seed), dtype)
        };
        let (weight, input) = (random(n, k, 1), random(m, k, 2));
        let added = random(1, n, 3);
        let kernel_dtype = kernel_dtype(dtype);
        let packed = oracle(&weight.to_f32(), n, k, &scheme).expect("valid");
        let handles = upload_packed(&self.client, &packed);
        let matmul = Matmul {
            m,
            n,
            k,
            format: scheme.format(),
            block_size: scheme.block_size,
            dtype: kernel_dtype,
        };
        let bias = bias.then(|| upload(&self.client, &added));
        let (client, device) = (&self.client, &self.capability);
        let values = upload(&self.client, &input);
        let run = |planned: MatmulPlan| {
            let output = planned.run(client, handles.clone(), values.clone(), bias.clone(), None);
            floats(&self.client, output.expect("memory of these lengths"), kernel_dtype)
        };
        let found: Vec<_> = plans(&matmul, device).into_iter().map(run).collect();
        let added = bias.is_some().then(|| added.to_f32());
        let exact = exact_products(&packed.dequantize(), &input.to_f32(), added.as_deref(), k);
        for (plan, found) in found.iter().enumerate() {
            assert_products(&format!("{matmul:?}, plan {plan}"), found, &exact, dtype);
        }
    }

    /// Compares a product in FP8 with the exact product of the rounded input and weight, and the
    /// facts about the weight with the host's.
    fn check_fp8(&self, [m, n, k]: [usize; 3], scheme: Fp4Scheme, dtype: Dtype, bias: bool) {
        let random = |rows, cols, seed| {
            Dense::new(rows, cols, &Kind::Outliers.values(rows * cols, seed), dtype)
        };
        let (weight, input, added) = (random(n, k, 1), random(m, k, 2), random(1, n, 3));
        let (format, block_size) = (scheme.format(), scheme.block_size);
        let packed = oracle(&weight.to_f32(), n, k, &scheme).expect("valid");
        let (client, device) = (&self.client, &self.capability);
        let matmul = Matmul { m, n, k, format, block_size, dtype: kernel_dtype(dtype) };
        let rows = fp8_rows(client, upload_packed(client, &packed), &matmul);
        let rows = rows.expect("memory of these lengths");
        assert_eq!(floats(client, rows.clone(), KernelDtype::F32), facts(&packed));
        let rounded: Vec<f32> = input.to_f32().chunks(k).flat_map(round_to_fp8).collect();
        let bias_values = bias.then(|| added.to_f32());
        let exact = exact_products(&fp8_values(&packed), &rounded, bias_values.as_deref(), k);
        // A small device gets larger tiles, which take long to emulate.
        let small = Capability { cubes: 4, ..*device };
        let devices: &[_] = match device.wgmma {
            WgmmaSupport::Ptx => &[*device, small],
            _ => &[*device],
        };
        for device in devices {
            let planned = matmul.fp8(device).expect("a plan");
            let (weight, input) = (upload_packed(client, &packed), upload(client, &input));
            let bias = bias.then(|| upload(client, &added));
            let output = planned.run(client, weight, rows.clone(), input, bias);
            let found = floats(client, output.expect("memory of these lengths"), matmul.dtype);
            let what = format!("{planned:?}");
            match device.wgmma {
                WgmmaSupport::Ptx => assert_fp8_products(&what, &found, &exact, k, dtype),
                _ => assert_products(&what, &found, &exact, dtype),
            }
        }
    }

    /// Plans a family, if the device takes it.
    fn family(
        &self,
        m: usize,
        lengths: &[usize],
        k: usize,
        scheme: Fp4Scheme,
        dtype: Dtype,
    ) -> Option<(FamilyPlan, Vec<Matmul>)> {
        let (format, block_size) = (scheme.format(), scheme.block_size);
        let of = |&n: &usize| Matmul { m, n, k, format, block_size, dtype: kernel_dtype(dtype) };
        let matmuls: Vec<_> = lengths.iter().map(of).collect();
        Some((Matmul::family(&matmuls, &self.capability)?, matmuls))
    }

    /// Multiplies an input with all weights of a family at once, if the device takes it. Returns
    /// true if it does.
    fn check_family(
        &self,
        m: usize,
        lengths: &[usize],
        k: usize,
        scheme: Fp4Scheme,
        dtype: Dtype,
        bias: bool,
    ) -> bool {
        let random = |rows, cols, seed| {
            Dense::new(rows, cols, &Kind::Outliers.values(rows * cols, seed), dtype)
        };
        let planned = self.family(m, lengths, k, scheme, dtype);
        let Some((family, matmuls)) = planned else { return false };
        let input = random(m, k, 2);
        let (mut weights, mut exact) = (Vec::new(), Vec::new());
        for (seed, &n) in (3..).step_by(2).zip(lengths) {
            let (weight, added) = (random(n, k, seed), random(1, n, seed + 1));
            let packed = oracle(&weight.to_f32(), n, k, &scheme).expect("valid");
            weights.push((
                upload_packed(&self.client, &packed),
                bias.then(|| upload(&self.client, &added)),
            ));
            let added = bias.then(|| added.to_f32());
            let (weight, input) = (packed.dequantize(), input.to_f32());
            exact.push(exact_products(&weight, &input, added.as_deref(), k));
        }
        let found = family.run(&self.client, weights, upload(&self.client, &input), None, None);
        let outputs = found.expect("memory of these lengths").outputs;
        for (output, (exact, matmul)) in outputs.into_iter().zip(exact.iter().zip(&matmuls)) {
            let found = floats(&self.client, output, kernel_dtype(dtype));
            assert_products(&format!("{matmul:?} of {lengths:?}"), &found, exact, dtype);
        }
        true
    }

    /// Compares a family that computes the norm of its input, and SwiGLU if it has two weights of
    /// one length, with launches of their own, bit for bit. Returns true if the device takes it.
    fn check_joined(
        &self,
        m: usize,
        lengths: &[usize],
        k: usize,
        scheme: Fp4Scheme,
        dtype: Dtype,
        bias: bool,
    ) -> bool {
        let Self { client, capability } = self;
        let values = |rows, cols, seed| {
            let dense = Dense::new(rows, cols, &Kind::Outliers.values(rows * cols, seed), dtype);
            (upload(client, &dense), dense)
        };
        let planned = self.family(m, lengths, k, scheme, dtype);
        let Some((family, _)) = planned else { return false };
        let weights: Vec<_> = (3..)
            .step_by(2)
            .zip(lengths)
            .map(|(seed, &n)| {
                let packed = oracle(&values(n, k, seed).1.to_f32(), n, k, &scheme).expect("valid");
                (upload_packed(client, &packed), bias.then(|| values(1, n, seed + 1).0))
            })
            .collect();
        let bits = |handle| floats(client, handle, kernel_dtype(dtype));
        let [hidden, update] = [1, 2].map(|seed| values(m, k, seed).0);
        let weight = values(1, k, 12).0;
        for (adds, swiglu_joins) in
            [false, true].into_iter().flat_map(|adds| [(adds, false), (adds, true)])
        {
            let what = format!("{m} x {k} x {lengths:?} {dtype:?} adds {adds} {swiglu_joins}");
            let joined = if swiglu_joins { family.with_swiglu() } else { Some(family.clone()) };
            let Some(joined) = joined else { continue };
            let update = adds.then(|| update.clone());
            let normalized = rms_norm(
                client,
                capability,
                hidden.clone(),
                update.clone(),
                weight.clone(),
                [m, k],
                kernel_dtype(dtype),
                1e-5,
            )
            .expect("memory of the shape");
            let input = normalized.normalized;
            let apart = family.run(client, weights.clone(), input.clone(), None, None);
            let mut apart = apart.expect("memory of these lengths").outputs;
            if swiglu_joins {
                let (len, dtype) = (m * lengths[0], kernel_dtype(dtype));
                let [gate, up] = [0, 1].map(|at| apart[at].clone());
                apart = vec![swiglu(client, capability, gate, up, len, dtype).expect("a plan")];
            }
            let (joined, input, norm) = match joined.with_norm(adds) {
                Some(joined) => {
                    let weight = weight.clone();
                    let norm = NormOperands { update, weight, epsilon: 1e-5 };
                    (joined, hidden.clone(), Some(norm))
                }
                None => (joined, input, None),
            };
            let normalizes = norm.is_some();
            let planes = capability.plane == 32;
            assert_eq!(normalizes, planes && m == 1 && k <= 8192, "{what}");
            let found = joined.run(client, weights.clone(), input, norm, None);
            let found = found.expect("memory of these lengths");
            assert_eq!(found.sums.is_some(), adds && normalizes, "{what}");
            if let Some(sums) = found.sums {
                assert_bits(&what, &bits(sums), &bits(normalized.sums.expect("an update")));
            }
            assert_eq!(found.outputs.len(), apart.len(), "{what}");
            for (found, apart) in found.outputs.into_iter().zip(apart) {
                assert_bits(&what, &bits(found), &bits(apart));
            }
        }
        true
    }

    fn check_hadamard(&self, dense: &Dense, view: View, transform: Hadamard, inverse: bool) {
        let dtype = kernel_dtype(dense.dtype());
        let (client, device, values) =
            (&self.client, &self.capability, upload(&self.client, dense));
        let found = hadamard(client, device, values, view, dtype, transform, inverse);
        let found = floats(&self.client, found.expect("a plan"), dtype);
        let what = format!("{transform:?} {inverse} {dtype:?} {view:?}");
        assert_bits(&what, &found, &dense.hadamard(view, transform, inverse).to_f32());
    }

    fn check_importance(
        &self,
        dense: &Dense,
        view: View,
        scheme: Fp4Scheme,
        importance: Importance<'_>,
    ) {
        let dtype = kernel_dtype(dense.dtype());
        let problem = Problem { view, dtype, scheme };
        let values = upload(&self.client, dense);
        let by_row = scheme.tensor_scales(view.packed_rows()) > 1;
        let largest = amax(&self.client, &self.capability, values.clone(), view, dtype, by_row)
            .expect("a plan");
        let floats = |values: &[f32]| self.client.create_from_slice(f32::as_bytes(values));
        let (client, device) = (&self.client, &self.capability);
        let found = match importance {
            Importance::Blocks(blocks) => {
                let hessians =
                    Hessians { values: floats(blocks.values()), bounds: floats(blocks.bounds()) };
                quantize_by_hessian(client, device, values, largest, hessians, &problem)
            }
            Importance::Channels(weights) => {
                let weights = Some(floats(weights));
                quantize_weighted(client, device, values, largest, weights, &problem)
            }
            Importance::Uniform => quantize(client, device, values, largest, &problem),
        };
        let dense = dense.to_f32();
        let amax = host::amax(&dense, view, &scheme);
        let expected =
            host::quantize_packed(&dense, view, &scheme, &amax, importance).expect("valid");
        let found = self.download(found.expect("a plan"), &expected);
        assert_same(&format!("{problem:?}"), &found, &expected);
    }

    fn download(&self, packed: Handles, expected: &Packed) -> Packed {
        let tensor_scale = floats(&self.client, packed.tensor_scale, KernelDtype::F32);
        Packed {
            codes: self.client.read_one_unchecked(packed.codes).to_vec(),
            scales: self.client.read_one_unchecked(packed.scales).to_vec(),
            tensor_scale: match tensor_scale[..] {
                [scale] => TensorScale::One(scale),
                _ => TensorScale::PerRow(tensor_scale),
            },
            ..expected.clone()
        }
    }

    fn check_squared_error(
        &self,
        what: &str,
        dense: &Dense,
        values: Handle,
        packed: Handles,
        problem: &Problem,
        expected: &Packed,
    ) {
        let partial =
            squared_error(&self.client, &self.capability, values, packed, problem).expect("a plan");
        let sums = floats(&self.client, partial.sums, KernelDtype::F32);
        let total = |sums: &[f32]| sums.iter().map(|&sum| f64::from(sum)).sum::<f64>() as f32;
        let rows: Vec<f32> = sums.chunks(partial.count).map(total).collect();
        let found = squared_sums(&rows).expect("six rows");
        let exact = dense_order(&expected.dequantize(), problem.view);
        let squares = |terms: &mut dyn Iterator<Item = f64>| terms.map(|x| x * x).sum::<f64>();
        let values = dense.to_f32();
        // As the dtype holds it.
        let held = |y: f32| match problem.dtype {
            KernelDtype::F16 if f16::from_f32(y).is_infinite() => f64::INFINITY,
            KernelDtype::Bf16 if bf16::from_f32(y).is_infinite() => f64::INFINITY,
            _ => f64::from(y),
        };
        let error = squares(&mut values.iter().zip(&exact).map(|(&x, &y)| f64::from(x) - held(y)));
        let energy = squares(&mut values.iter().map(|&x| f64::from(x)));
        for (found, expected) in found.into_iter().zip([error, energy]) {
            let near = found == expected || (found - expected).abs() <= 1e-5 * expected;
            let unknown = expected.is_nan() && found.is_nan();
            assert!(near || unknown, "{what}: squared error {found}, not {expected}");
        }
    }
}

/// Compares outputs with exact products, within the errors of the instructions: a multiplication of
/// 32 values of k rounds each product and the sum, towards zero, to 13 bits below the largest. The
/// root mean square of all errors is far smaller.
fn assert_fp8_products(what: &str, found: &[f32], exact: &[(f64, f64)], k: usize, dtype: Dtype) {
    let once = if dtype == Dtype::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
    let steps = 2f64.powi(-8) * (k / 32 + 2) as f64;
    let (mut errors, mut sums) = (0.0, 0.0);
    for (at, (&found, &(sum, size))) in found.iter().zip(exact).enumerate() {
        let error = (f64::from(found) - sum).abs();
        let near = error <= steps * size + once * sum.abs() + 1e-7;
        assert!(near, "{what}, output {at}: {found}, not {sum}");
        errors += error * error;
        sums += sum * sum;
    }
    let relative = (errors / sums).sqrt();
    assert!(relative < 0.03, "{what}: outputs are {relative} off");
}

/// Plans every kernel that takes the matmul, also for a small device, which gets larger tiles.
fn every_plan(matmul: &Matmul, device: &Capability) -> Vec<MatmulPlan> {
    let mut plans = vec![matmul.gemv(device).expect("a plan")];
    for device in [*device, Capability { cubes: 4, ..*device }] {
        for planned in [matmul.mma(&device), matmul.small_m(&device), matmul.wgmma(&device)] {
            match planned {
                Ok(planned) => plans.push(planned),
                Err(Refusal::Instructions { .. }) => {}
                Err(refusal) => panic!("{matmul:?}: {refusal}"),
            }
        }
    }
    plans
}

/// Returns values in the order of the packed matrix.
fn packed_rows(values: &[f32], view: View) -> Vec<f32> {
    let mut rows = vec![0.0; view.len()];
    for (at, &value) in values.iter().enumerate() {
        rows[packed_index(at, view)] = value;
    }
    rows
}

/// Inverts [`packed_rows`].
fn dense_order(rows: &[f32], view: View) -> Vec<f32> {
    (0..view.len()).map(|at| rows[packed_index(at, view)]).collect()
}

fn packed_index(at: usize, view: View) -> usize {
    let (outer, k, column) =
        (at / view.inner / view.axis, at / view.inner % view.axis, at % view.inner);
    (outer * view.inner + column) * view.axis + k
}

const STOCHASTIC: Rounding = Rounding::Stochastic(Draw { seed: 7 << 40 | 3, step: 5 << 33 | 1 });

/// Everything a scheme can ask of a kernel.
fn schemes() -> Vec<Fp4Scheme> {
    let mut schemes = Vec::new();
    for rule in ScaleRule::ALL {
        for block_size in [16, 32] {
            schemes.push(Fp4Scheme::of(rule).with_block_size(block_size));
        }
    }
    for rule in [ScaleRule::Te, ScaleRule::TorchRecipe] {
        for scaling in
            [TensorScaling::Row, TensorScaling::Amax(3.0), TensorScaling::Multiplier(1e-3)]
        {
            schemes.push(Fp4Scheme::of(rule).with_tensor_scale(scaling));
        }
    }
    schemes.extend(searches().map(|search| Fp4Scheme::nvfp4().with_method(search)));
    let tile = |rule| Fp4Scheme::of(rule).with_block_size(16).with_blocks(Blocks::Tile16x16);
    schemes.extend([ScaleRule::Te, ScaleRule::Even].map(tile));
    schemes.extend(searches().map(|search| tile(ScaleRule::TeDivision).with_method(search)));
    let sse = |scheme: Fp4Scheme| scheme.with_method(Method::SSE);
    for rule in [ScaleRule::Te, ScaleRule::TorchRecipe, ScaleRule::Floor, ScaleRule::RoundUp] {
        schemes.push(sse(Fp4Scheme::of(rule)));
    }
    schemes.push(sse(Fp4Scheme::of(ScaleRule::NoTensorScale).with_block_size(32)));
    schemes.push(sse(Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Multiplier(1e-3))));
    schemes.extend([ScaleRule::Te, ScaleRule::Even].map(|rule| sse(tile(rule))));
    for rule in [ScaleRule::Te, ScaleRule::NoTensorScale, ScaleRule::Floor] {
        schemes.push(Fp4Scheme::of(rule).with_rounding(STOCHASTIC));
    }
    schemes.into_iter().map(follow).collect()
}

/// One scheme for every path that a dtype or a shape can take.
fn few_schemes() -> Vec<Fp4Scheme> {
    let search = Method::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse };
    let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let schemes = [
        Fp4Scheme::mxfp4(),
        by_row.with_method(search),
        by_row.with_method(Method::SSE),
        tiles,
        tiles.with_method(search),
        tiles.with_method(Method::SSE),
        by_row.with_rounding(STOCHASTIC),
        tiles.with_rounding(STOCHASTIC),
    ];
    schemes.into_iter().map(follow).collect()
}

fn searches() -> impl Iterator<Item = Method> {
    [E4m3Range::E448, E4m3Range::E256].into_iter().flat_map(|range| {
        [ErrorMetric::Mae, ErrorMetric::Mse].map(|error| Method::FourOverSix { range, error })
    })
}

/// Returns all on a GPU. The CPU runtime compiles slowly: there cases take turns, one each.
fn in_turn<T: Copy>(all: &[T], case: usize) -> Vec<T> {
    if cfg!(feature = "cpu") { vec![all[case % all.len()]] } else { all.to_vec() }
}

fn follow(scheme: Fp4Scheme) -> Fp4Scheme {
    scheme.with_non_finite(NonFinite::FollowReference)
}

#[test]
fn kernels_give_the_bits_of_the_oracle() {
    let device = Device::new();
    let mut compared = 0;
    // A dtype changes only loads and stores: few schemes are enough for the others.
    for (dtype, schemes) in
        [(Dtype::F32, schemes()), (Dtype::F16, few_schemes()), (Dtype::Bf16, few_schemes())]
    {
        for (number, scheme) in schemes.into_iter().enumerate() {
            for (seed, kind) in Kind::ALL.into_iter().enumerate() {
                let dense = Dense::new(96, 160, &kind.values(96 * 160, seed as u64), dtype);
                for axis in in_turn(&[0, 1], number) {
                    compared += device.check(&format!("{kind:?}"), &dense, axis, scheme);
                }
            }
        }
    }
    println!("{compared} values compared");
}

#[test]
fn special_values_follow_the_reference() {
    let device = Device::new();
    let check_all = |what: &str, dense: &Dense| {
        for (number, scheme) in schemes().into_iter().enumerate() {
            for axis in in_turn(&[0, 1], number) {
                device.check(what, dense, axis, scheme);
            }
        }
    };
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-45, -f32::MAX] {
        let mut values = Kind::Weights.values(32 * 32, 5);
        values[70] = special;
        check_all(&format!("with {special}"), &Dense::new(32, 32, &values, Dtype::F32));
    }
    check_all("zeros", &Dense::new(32, 32, &[0.0; 1024], Dtype::F32));
}

/// Kernels are launched without bounds checks, so that short memory has to be refused.
#[test]
fn memory_that_is_too_short_is_refused() {
    let device = Device::new();
    let (client, capability) = (&device.client, &device.capability);
    let scheme = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let problem = Problem { view: View::rows(4, 64), dtype: KernelDtype::F32, scheme };
    let bytes = |count: usize| client.create_from_slice(&vec![0; count]);
    let (values, rows) = (|| bytes(4 * 4 * 64), || bytes(4 * 4));
    let memory = |what, expected, found| Refusal::Memory { what, expected, found };
    let refused = |result: Result<Handles, Refusal>| result.map(drop).unwrap_err();
    let found = quantize(client, capability, bytes(1020), rows(), &problem);
    assert_eq!(refused(found), memory("values", 1024, 1020));
    let found = quantize(client, capability, values(), bytes(12), &problem);
    assert_eq!(refused(found), memory("amax", 16, 12));
    let packed = |codes, scales, tensor_scales| Handles {
        codes: bytes(codes),
        scales: bytes(scales),
        tensor_scale: rows(),
        tensor_scales,
    };
    for (packed, expected) in [
        (packed(127, 16, 4), memory("codes", 128, 127)),
        (packed(128, 15, 4), memory("scales", 16, 15)),
        (packed(128, 16, 5), Refusal::TensorScales { expected: 4, found: 5 }),
    ] {
        let found = dequantize(client, capability, packed, &problem).map(drop);
        assert_eq!(found, Err(expected));
    }
    let (m, n, k) = (2, 4, 64);
    let (format, block_size, dtype) = (scheme.format(), 16, KernelDtype::F32);
    let matmul = Matmul { m, n, k, format, block_size, dtype };
    let matmul = matmul.gemv(capability).expect("a plan");
    let found = matmul.run(client, packed(128, 16, 4), bytes(511), None, None).map(drop);
    assert_eq!(found, Err(memory("input", 512, 511)));
    let found = matmul.run(client, packed(128, 16, 4), bytes(512), Some(bytes(12)), None).map(drop);
    assert_eq!(found, Err(memory("bias", 16, 12)));
}

#[test]
fn golden_files() {
    let device = Device::new();
    let mut cases = 0;
    for (file, rules) in [
        ("te_div6", vec![ScaleRule::TeDivision]),
        ("te_rcp6", vec![ScaleRule::Te]),
        ("gist", vec![ScaleRule::TorchRecipe]),
        (
            "mxfp4_torchao",
            vec![ScaleRule::Floor, ScaleRule::Even, ScaleRule::RoundUp, ScaleRule::Ceil],
        ),
    ] {
        let golden = Golden::read(file);
        for case in golden.cases("x") {
            let dense = golden.dense(&format!("{case}/x"));
            for &rule in &rules {
                let scheme = Fp4Scheme::of(rule).with_non_finite(NonFinite::FollowReference);
                // The oracle is held to the golden bytes by its own test.
                device.check(&format!("{file} {case}"), &dense, 1, scheme);
                cases += 1;
            }
        }
    }
    println!("{cases} golden cases");
    assert!(cases > 100);
}

#[test]
fn shapes_that_vectors_and_tiles_do_not_divide() {
    let device = Device::new();
    let views = [
        View { outer: 1, axis: 32, inner: 1 },
        View { outer: 1, axis: 96, inner: 1 },
        View { outer: 1, axis: 32, inner: 97 },
        View { outer: 1, axis: 64, inner: 72 },
        View { outer: 1, axis: 160, inner: 34 },
        View { outer: 3, axis: 32, inner: 8 },
        View { outer: 3, axis: 64, inner: 16 },
        View { outer: 23, axis: 96, inner: 1 },
        View { outer: 33, axis: 32, inner: 2 },
    ];
    for (number, view) in views.into_iter().enumerate() {
        for dtype in in_turn(&Dtype::ALL, number) {
            let values = Kind::Outliers.values(view.len(), view.len() as u64);
            let dense = Dense::new(1, view.len(), &values, dtype);
            // Neighbours in the list use different code paths of a shape.
            for scheme in in_turn(&few_schemes(), number) {
                device.check_view("shape", &dense, view, scheme);
            }
        }
    }
}

/// Compares matmuls with packed weights with f64 products of the dequantized weight.
#[test]
fn products_straight_from_the_codes() {
    let device = Device::new();
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let shapes = [
        (1, 64, 128, Fp4Scheme::nvfp4(), false),
        (1, 7, 16, Fp4Scheme::nvfp4(), true),
        (2, 33, 48, by_row, true),
        (3, 40, 1056, Fp4Scheme::mxfp4(), false),
        (5, 10, 32, Fp4Scheme::mxfp4(), true),
        (8, 129, 64, Fp4Scheme::mxfp4().with_block_size(16), false),
        (9, 65, 96, Fp4Scheme::nvfp4().with_block_size(32), true),
        (17, 20, 80, Fp4Scheme::nvfp4(), true),
        (65, 300, 64, Fp4Scheme::nvfp4(), false),
        (9, 70, 256, by_row, true),
        (33, 40, 384, Fp4Scheme::mxfp4(), true),
        (64, 129, 1152, Fp4Scheme::nvfp4(), false),
        (130, 16, 128, Fp4Scheme::nvfp4().with_block_size(32), true),
        (13, 100, 1280, Fp4Scheme::mxfp4(), true),
        (300, 150, 640, Fp4Scheme::nvfp4(), true),
        (1, 20, 2304, Fp4Scheme::nvfp4(), true),
        (4, 100, 512, Fp4Scheme::nvfp4().with_block_size(32), false),
        (16, 60, 2560, by_row, true),
        (11, 33, 768, Fp4Scheme::mxfp4().with_block_size(16), false),
        (70, 136, 640, by_row, true),
        (260, 24, 1152, Fp4Scheme::mxfp4(), false),
    ];
    for (number, (m, n, k, scheme, bias)) in shapes.into_iter().enumerate() {
        for dtype in in_turn(&Dtype::ALL, number) {
            device.check_product(m, n, k, scheme, dtype, bias);
        }
    }
}

/// Only devices with matrix instructions of a plane take families.
#[test]
fn products_of_a_family_are_those_of_each_weight() {
    let device = Device::new();
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    for (m, lengths, k, scheme, bias) in [
        (1, &[64, 16, 16][..], 256, Fp4Scheme::nvfp4(), false),
        (1, &[4096, 1024, 1024], 512, Fp4Scheme::nvfp4(), true),
        (3, &[40, 7], 1280, Fp4Scheme::mxfp4(), true),
        (8, &[5, 33, 20], 768, by_row, true),
        (16, &[2000, 3000, 4000], 512, Fp4Scheme::nvfp4(), false),
        (16, &[6144, 2048], 256, Fp4Scheme::mxfp4(), false),
    ] {
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let taken = device.check_family(m, lengths, k, scheme, dtype, bias);
            // f16 has no room for the block scales of MXFP4.
            let takes = dtype == Dtype::Bf16 || scheme.format() == Fp4Format::NvFp4;
            assert_eq!(taken, device.capability.mma && takes, "{m} x {k} x {lengths:?} {dtype:?}");
        }
    }
}

/// Only devices with matrix instructions of a plane take families.
#[test]
fn norms_and_swiglu_in_a_family_are_those_of_their_own_launches() {
    let device = Device::new();
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    for (m, lengths, k, scheme, bias) in [
        (1, &[16][..], 256, Fp4Scheme::nvfp4(), false),
        (1, &[4096, 1024, 1024], 512, Fp4Scheme::nvfp4(), true),
        (1, &[7000, 2000], 4096, Fp4Scheme::nvfp4(), false),
        (1, &[40, 40], 1280, Fp4Scheme::mxfp4(), true),
        (1, &[5000, 5000], 2048, Fp4Scheme::nvfp4(), false),
        (1, &[3, 3], 768, by_row, true),
        (1, &[4096, 1024, 1024], 4096, Fp4Scheme::nvfp4(), false),
        (1, &[300], 8448, Fp4Scheme::nvfp4(), false),
        (3, &[500, 500], 512, Fp4Scheme::nvfp4(), true),
        (8, &[33, 33], 768, by_row, true),
        (16, &[2000, 2000], 512, Fp4Scheme::mxfp4(), false),
    ] {
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let taken = device.check_joined(m, lengths, k, scheme, dtype, bias);
            let takes = dtype == Dtype::Bf16 || scheme.format() == Fp4Format::NvFp4;
            assert_eq!(taken, device.capability.mma && takes, "{m} x {k} x {lengths:?} {dtype:?}");
        }
    }
}

/// A device without planes that emulates their matrix instruction, with one multiprocessor, so that
/// cubes have several n tiles.
fn emulating_mma() -> Option<Device> {
    let mut device = Device::new();
    (device.capability.mma, device.capability.cubes) = (true, 4);
    // Devices with planes test the instruction itself.
    (device.capability.plane == 1).then_some(device)
}

/// Plans `small_m.rs`, and `mma.rs` for one row.
fn mma_plans(matmul: &Matmul, device: &Capability) -> Vec<MatmulPlan> {
    let mut plans = vec![matmul.small_m(device).expect("few rows")];
    if matmul.m == 1 {
        plans.push(matmul.mma(device).expect("whole k tiles"));
    }
    plans
}

/// Tests the code around the instructions. Each emulated multiplication has two barriers, which are
/// slow on hosts: minutes for a shape. K tiles divide evenly among the planes, so that all of them
/// take part. The CPU runtime does not compile all of this for bf16.
#[test]
#[ignore = "slow: barriers of the emulated instructions"]
fn emulated_mma_gives_the_products() {
    let Some(device) = emulating_mma() else { return };
    let (nvfp4, dtype) = (Fp4Scheme::nvfp4(), Dtype::F16);
    let (by_row, wide) = (nvfp4.with_tensor_scale(TensorScaling::Row), nvfp4.with_block_size(32));
    for (shape, scheme, bias) in [
        ([1, 96, 6144], nvfp4, true),
        ([12, 70, 2048], by_row, false),
        ([1, 10, 14336], nvfp4, true),
        ([9, 50, 1024], wide, false),
        ([16, 400, 256], wide, true),
        ([8, 70, 1024], by_row, true),
        ([3, 40, 2048], nvfp4, false),
    ] {
        device.check_plans(shape, scheme, dtype, bias, mma_plans);
    }
    assert!(device.check_family(1, &[64, 16, 16], 2048, nvfp4, dtype, true));
    assert!(device.check_joined(1, &[20, 20], 2048, nvfp4, dtype, true));
    assert!(device.check_joined(16, &[40, 40], 1024, nvfp4, dtype, true));
}

/// Tests the code around the instructions. Each emulated multiplication has two barriers, which are
/// slow on hosts: few shapes.
#[test]
fn emulated_wgmma_gives_the_products() {
    let mut device = Device::new();
    device.capability.wgmma = WgmmaSupport::Emulated;
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let (format, dtype) = (Fp4Format::NvFp4, KernelDtype::Bf16);
    let matmul = Matmul { m: 20, n: 24, k: 256, format, block_size: 16, dtype };
    matmul.wgmma(&device.capability).expect("a plan");
    device.check_product(20, 24, 256, by_row, Dtype::Bf16, true);
    device.check_product(17, 72, 128, Fp4Scheme::mxfp4(), Dtype::F16, false);
}

/// Tests the code around the instructions; see [`emulated_wgmma_gives_the_products`].
#[test]
fn emulated_wgmma_gives_the_products_in_fp8() {
    let mut device = Device::new();
    device.capability.wgmma = WgmmaSupport::Emulated;
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    device.check_fp8([20, 24, 256], by_row, Dtype::Bf16, true);
    device.check_fp8([17, 24, 384], Fp4Scheme::mxfp4(), Dtype::F16, false);
    device.check_fp8([3, 8, 128], Fp4Scheme::mxfp4().with_block_size(16), Dtype::Bf16, true);
}

/// Random shapes, and the same bits every time, on GPUs with the instructions.
#[test]
fn products_in_fp8() {
    let device = Device::new();
    let (format, dtype) = (Fp4Format::MxFp4, KernelDtype::Bf16);
    let matmul = Matmul { m: 70, n: 136, k: 1152, format, block_size: 32, dtype };
    let planned = match matmul.fp8(&device.capability) {
        Ok(planned) => planned,
        Err(refusal) => {
            assert_eq!(device.capability.wgmma, WgmmaSupport::None, "{refusal}");
            return;
        }
    };
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let large = Fp4Scheme::nvfp4().with_block_size(32);
    let schemes = [Fp4Scheme::nvfp4(), by_row, large, Fp4Scheme::mxfp4()];
    let mut random = Random::new(12);
    for case in 0..200 {
        let m = 1 << random.below(10);
        let m = m + random.below(m);
        let (n, k) = (8 * (1 + random.below(64)), 128 * (1 + random.below(18)));
        let dtype = if case % 3 == 0 { Dtype::F16 } else { Dtype::Bf16 };
        device.check_fp8([m, n, k], schemes[random.below(4)], dtype, case % 2 == 0);
    }
    let Matmul { m, n, k, .. } = matmul;
    let packed = oracle(&Kind::Outliers.values(n * k, 1), n, k, &Fp4Scheme::mxfp4());
    let weight = upload_packed(&device.client, &packed.expect("valid"));
    let rows = fp8_rows(&device.client, weight.clone(), &matmul).expect("memory");
    let input = Kind::Outliers.values(m * k, 2);
    let input = upload(&device.client, &Dense::new(m, k, &input, Dtype::Bf16));
    let run = || {
        let (client, weight, rows) = (&device.client, weight.clone(), rows.clone());
        let found = planned.run(client, weight, rows, input.clone(), None);
        client.read_one_unchecked(found.expect("memory of these lengths"))
    };
    let first = run();
    (0..1000).for_each(|_| assert_eq!(run(), first));
}

#[test]
fn products_of_random_shapes() {
    let device = Device::new();
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let large = Fp4Scheme::nvfp4().with_block_size(32);
    let schemes = [Fp4Scheme::nvfp4(), by_row, large, Fp4Scheme::mxfp4()];
    let mut random = Random::new(11);
    for case in 0..if device.capability.mma { 200 } else { 4 } {
        let m = 1 << random.below(9);
        let m = m + random.below(m);
        let n = 8 * (1 + random.below(32));
        let k = 128 * (1 + random.below(9));
        let dtype = Dtype::ALL[random.below(3)];
        let scheme = schemes[random.below(schemes.len())];
        device.check_product(m, n, k, scheme, dtype, case % 2 == 0);
    }
}

/// A block scale that is NaN makes the outputs of its packed row NaN, and no others.
#[test]
fn products_with_scales_that_are_nan() {
    let device = Device::new();
    let (m, n, k) = (20, 24, 256);
    for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::nvfp4().with_block_size(32), Fp4Scheme::mxfp4()] {
        for dtype in Dtype::ALL {
            let dense = Kind::Outliers.values(n * k, 1);
            let mut packed = oracle(&dense, n, k, &scheme).expect("valid");
            let nan = if scheme.format() == Fp4Format::NvFp4 { 0x7F } else { 0xFF };
            let blocks = k / scheme.block_size;
            for row in 0..8 {
                packed.scales[3 * row * blocks + row * blocks / 8] = nan;
            }
            let handles = upload_packed(&device.client, &packed);
            let input = Kind::Outliers.values(m * k, 2);
            let input = upload(&device.client, &Dense::new(m, k, &input, dtype));
            let (format, block_size) = (scheme.format(), scheme.block_size);
            let dtype = kernel_dtype(dtype);
            let matmul = Matmul { m, n, k, format, block_size, dtype };
            for planned in every_plan(&matmul, &device.capability) {
                let found = planned.run(&device.client, handles.clone(), input.clone(), None, None);
                let found = floats(&device.client, found.expect("memory of these lengths"), dtype);
                for (at, found) in found.into_iter().enumerate() {
                    let expected = at % n % 3 == 0;
                    assert_eq!(found.is_nan(), expected, "{planned:?}, {at}: {found}");
                }
            }
        }
    }
}

/// On GPUs with matrix instructions one row in bf16 is scaled before it is multiplied, by k tiles
/// of 256 values. Some here have values of 2^65 and more, or tiny ones.
#[test]
fn products_of_rows_of_any_magnitude() {
    let device = Device::new();
    if !device.capability.mma {
        return;
    }
    let (n, k, dtype) = (40, 2560, Dtype::Bf16);
    for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
        let packed = oracle(&Kind::Outliers.values(n * k, 1), n, k, &scheme).expect("valid");
        let handles = upload_packed(&device.client, &packed);
        let (format, block_size) = (scheme.format(), scheme.block_size);
        let matmul = Matmul { m: 1, n, k, format, block_size, dtype: kernel_dtype(dtype) };
        for [even, odd] in [[1e-20, 1e-20], [1e15, 1.0], [3e19, 1e19], [1e28, 1e17], [1e28, 1e28]] {
            let mut values = Kind::Outliers.values(k, 2);
            for (at, value) in values.iter_mut().enumerate() {
                *value *= if at / 256 % 2 == 0 { even } else { odd };
            }
            let input = Dense::new(1, k, &values, dtype);
            let planned = matmul.small_m(&device.capability).expect("one row");
            let uploaded = upload(&device.client, &input);
            let found = planned.run(&device.client, handles.clone(), uploaded, None, None);
            let found =
                floats(&device.client, found.expect("memory of these lengths"), matmul.dtype);
            let exact = exact_products(&packed.dequantize(), &input.to_f32(), None, k);
            assert_products(&format!("{scheme:?}, {even:e} and {odd:e}"), &found, &exact, dtype);
        }
    }
}

#[test]
fn products_are_the_same_every_time() {
    let device = Device::new();
    let (n, k, scheme) = (136, 1152, Fp4Scheme::nvfp4());
    let packed = oracle(&Kind::Outliers.values(n * k, 1), n, k, &scheme);
    let handles = upload_packed(&device.client, &packed.expect("valid"));
    for m in [5, 40, 150] {
        let input = Kind::Outliers.values(m * k, 2);
        let input = upload(&device.client, &Dense::new(m, k, &input, Dtype::Bf16));
        let (format, block_size) = (scheme.format(), scheme.block_size);
        let dtype = KernelDtype::Bf16;
        let matmul = Matmul { m, n, k, format, block_size, dtype };
        for planned in every_plan(&matmul, &device.capability) {
            let run = || {
                let found = planned.run(&device.client, handles.clone(), input.clone(), None, None);
                device.client.read_one_unchecked(found.expect("memory of these lengths"))
            };
            let first = run();
            for _ in 0..if device.capability.mma { 1000 } else { 2 } {
                assert_eq!(run(), first, "{planned:?}");
            }
        }
    }
}

/// The products of a layer of a decoder, each with the outputs of those before, in new memory and
/// with other inputs each time.
#[test]
fn chains_have_the_bits_of_launches_apart() {
    let Device { client, capability } = Device::new();
    let bytes = |count: usize| -> Vec<u8> { (0..count).map(|at| (at * 7 % 113) as u8).collect() };
    let weight = |n: usize, k: usize, block_size| Handles {
        codes: client.create_from_slice(&bytes(n * k / 2)),
        scales: client.create_from_slice(&bytes(n * k / block_size)),
        tensor_scale: client.create_from_slice(f32::as_bytes(&[1.0 / 65536.0])),
        tensor_scales: 1,
    };
    let mut chain = Chain::new(&client);
    for (hidden, inner, key, scheme, dtype) in [
        (256, 512, 64, Fp4Scheme::nvfp4(), Dtype::Bf16),
        (1280, 768, 10, Fp4Scheme::mxfp4(), Dtype::Bf16),
        (4096, 14336, 1024, Fp4Scheme::nvfp4(), Dtype::F16),
        (4096, 14336, 1024, Fp4Scheme::nvfp4(), Dtype::Bf16),
    ] {
        let (format, block_size) = (scheme.format(), scheme.block_size);
        let of = |lengths: &[usize], k| {
            let matmul = |&n| Matmul { m: 1, n, k, format, block_size, dtype: kernel_dtype(dtype) };
            let matmuls: Vec<_> = lengths.iter().map(matmul).collect();
            let weights: Vec<_> =
                lengths.iter().map(|&n| (weight(n, k, block_size), None)).collect();
            Some((Matmul::family(&matmuls, &capability)?, weights))
        };
        let Some((out, of_out)) = of(&[hidden], hidden) else { return };
        let (gate, of_gate) = of(&[inner; 2], hidden).expect("one row");
        let (down, of_down) = of(&[hidden], inner).expect("one row");
        let (query, of_query) = of(&[hidden, key, key], hidden).expect("one row");
        let gate = gate.with_swiglu().expect("two weights");
        let (Some(gate), Some(query)) = (gate.with_norm(true), query.with_norm(true)) else {
            return;
        };
        let row = |seed| {
            let values = Kind::Outliers.values(hidden, seed);
            upload(&client, &Dense::new(1, hidden, &values, dtype))
        };
        let norms = [1, 2].map(row);
        let mut run = |attended, stream, chained| {
            let mut link = |plan: &FamilyPlan, weights: &Vec<_>, input, norm: Option<_>| {
                let norm = norm.map(|(update, at): (_, usize)| {
                    let weight = norms[at].clone();
                    NormOperands { update: Some(update), weight, epsilon: 1e-5 }
                });
                let link = plan.prepare(&client, weights.clone(), input, norm, None);
                let link = link.expect("memory of these lengths");
                let found = link.outputs().clone();
                match chained {
                    true => chain.add(link),
                    false => link.run(&client),
                }
                found
            };
            let first = |found: &FamilyOutputs| found.outputs[0].clone();
            let out = link(&out, &of_out, attended, None);
            let gated = link(&gate, &of_gate, stream, Some((first(&out), 0)));
            let down = link(&down, &of_down, first(&gated), None);
            let stream = gated.sums.clone().expect("an update");
            let query = link(&query, &of_query, stream, Some((first(&down), 1)));
            chain.launch();
            let found = [out, gated, down, query].into_iter();
            found.flat_map(|found| found.outputs.into_iter().chain(found.sums)).collect()
        };
        let rounds = if capability.wgmma == WgmmaSupport::Ptx { 100 } else { 2 };
        for round in 0..rounds {
            let [attended, stream] = [3, 4].map(|seed| row(seed + 2 * round));
            // A chain first, so that its memory has other values before.
            let [chained, apart]: [Vec<Handle>; 2] =
                [true, false].map(|chained| run(attended.clone(), stream.clone(), chained));
            for (at, (chained, apart)) in chained.into_iter().zip(apart).enumerate() {
                let [chained, apart] =
                    [chained, apart].map(|handle| floats(&client, handle, kernel_dtype(dtype)));
                assert!(apart.iter().any(|&value| value.is_finite() && value != 0.0), "{at}");
                assert_bits(&format!("{hidden} {dtype:?} round {round}, {at}"), &chained, &apart);
            }
        }
    }
}

/// Also with a weight so large that the kernel prefetches late. Only matmuls with few rows on
/// Hopper prefetch; others ignore the argument.
#[test]
fn prefetching_a_weight_changes_no_output() {
    let device = Device::new();
    let bytes = |count: usize| -> Vec<u8> { (0..count).map(|at| (at * 7 % 113) as u8).collect() };
    let weight = |n: usize, k: usize| Handles {
        codes: device.client.create_from_slice(&bytes(n * k / 2)),
        scales: device.client.create_from_slice(&bytes(n * k / 16)),
        tensor_scale: device.client.create_from_slice(f32::as_bytes(&[1.0 / 1024.0])),
        tensor_scales: 1,
    };
    let (format, dtype) = (Fp4Format::NvFp4, KernelDtype::Bf16);
    let matmul = |m, n, k| Matmul { m, n, k, format, block_size: 16, dtype };
    let large = if device.capability.wgmma == WgmmaSupport::Ptx { 11_000 } else { 100 };
    for (n, k) in [(136, 1280), (large, 4096)] {
        let own = weight(n, k);
        for (next, m) in [(matmul(1, 200, 512), 1), (matmul(1, 9000, 256), 5)] {
            let input = Kind::Outliers.values(m * k, 2);
            let input = upload(&device.client, &Dense::new(m, k, &input, Dtype::Bf16));
            let next = Prefetch { matmul: next, weight: weight(next.n, next.k) };
            for planned in every_plan(&matmul(m, n, k), &device.capability) {
                let run = |next| {
                    let (client, own, input) = (&device.client, own.clone(), input.clone());
                    let found = planned.run(client, own, input, None, next);
                    device.client.read_one_unchecked(found.expect("memory of these lengths"))
                };
                assert_eq!(run(Some(next.clone())), run(None), "{planned:?}");
            }
        }
    }
}

#[test]
fn fake_quantization_may_leave_the_tensor_scale_out() {
    let device = Device::new();
    let dense = Dense::new(64, 96, &Kind::Outliers.values(64 * 96, 6), Dtype::F32);
    let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
    for scheme in [tiles, Fp4Scheme::mxfp4(), Fp4Scheme::nvfp4().with_rounding(STOCHASTIC)] {
        for axis in [0, 1] {
            device.check_block_scaled(&dense, View::along(&[64, 96], axis), scheme);
        }
    }
}

/// Compares the transform along either axis, and its inverse, with the host engine.
#[test]
fn hadamard_transforms() {
    let device = Device::new();
    let views = [
        View { outer: 1, axis: 32, inner: 1 },
        View { outer: 5, axis: 96, inner: 1 },
        View { outer: 1, axis: 48, inner: 72 },
        View { outer: 3, axis: 16, inner: 7 },
        View { outer: 3, axis: 128, inner: 1 },
        View { outer: 2, axis: 256, inner: 35 },
    ];
    for view in views {
        for dtype in Dtype::ALL {
            for kind in [Kind::Outliers, Kind::Subnormal, Kind::WideRange] {
                let dense = Dense::new(1, view.len(), &kind.values(view.len(), 1), dtype);
                for (signs, inverse) in [(0xD7E8, false), (0x1234, true)] {
                    device.check_hadamard(&dense, view, Hadamard::with_signs(signs), inverse);
                }
                for size in [32, 64, 128] {
                    let transform = Hadamard::of_size(size).expect("a size");
                    if view.axis.is_multiple_of(size) {
                        device.check_hadamard(&dense, view, transform, false);
                    }
                }
            }
        }
    }
}

/// Compares searches by channel weights and by Hessians of blocks with the host engine.
///
/// One case for every path: the CPU runtime compiles such long kernels slowly.
#[test]
fn searches_by_importance_give_the_bits_of_the_host() {
    use Method::{CoordinateDescent, Hessian};
    const WEIGHTED: Method = Method::Sse(Sse::Weighted);
    let device = Device::new();
    let mut random = Random::new(11);
    let contiguous = View::rows(5, 96);
    let strided = View { outer: 1, axis: 64, inner: 72 };
    let slabs = View { outer: 3, axis: 32, inner: 10 };
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
    let none = Fp4Scheme::of(ScaleRule::NoTensorScale).with_block_size(32);
    let cases = [
        (contiguous, Kind::Outliers, Dtype::Bf16, by_row, WEIGHTED),
        (contiguous, Kind::Weights, Dtype::F32, by_row, Hessian),
        // Scales far above the first candidates, and divisions.
        (contiguous, Kind::Outliers, Dtype::Bf16, Fp4Scheme::nvfp4(), Hessian),
        (strided, Kind::Outliers, Dtype::F32, none, Hessian),
        (contiguous, Kind::Outliers, Dtype::Bf16, by_row, CoordinateDescent),
        (strided, Kind::Weights, Dtype::Bf16, tiles, WEIGHTED),
        (strided, Kind::Ties, Dtype::F16, Fp4Scheme::mxfp4(), Hessian),
        (slabs, Kind::Ties, Dtype::F16, none, WEIGHTED),
        (slabs, Kind::Weights, Dtype::F16, Fp4Scheme::nvfp4(), CoordinateDescent),
    ];
    for (view, kind, dtype, scheme, search) in cases {
        let dense = Dense::new(1, view.len(), &kind.values(view.len(), 3), dtype);
        let scheme = scheme.with_method(search);
        let weights: Vec<f32> = (0..view.axis).map(|k| (k % 5) as f32 * random.uniform()).collect();
        let x: Vec<f32> = (0..40 * view.axis).map(|_| random.normal()).collect();
        let hessians = BlockHessians::of(&x, view.axis, scheme.block_size).unwrap();
        let importance = match search {
            WEIGHTED => Importance::Channels(&weights),
            _ => Importance::Blocks(&hessians),
        };
        device.check_importance(&dense, view, scheme, importance);
    }
}

/// Forces the detour through shared memory that only GPUs take by default.
#[test]
fn shared_memory_transposes_keep_every_block() {
    let mut device = Device::new();
    device.capability.fast_shared_memory = true;
    // The fewest cubes that transpose.
    for (dtype, scheme, inner) in
        [(Dtype::F32, Fp4Scheme::mxfp4(), 128), (Dtype::Bf16, Fp4Scheme::nvfp4(), 32)]
    {
        let view = View { outer: 1, axis: 256, inner };
        let values = Kind::Outliers.values(view.len(), 3);
        let dense = Dense::new(1, view.len(), &values, dtype);
        device.check_view("staged", &dense, view, scheme);
    }
}

/// Forces the Hessians of blocks of 32 into shared memory. The inputs of one channel are all zeros:
/// nothing stops the search early there, and its element has no best value.
#[test]
fn hessians_in_shared_memory_give_the_bits_of_the_host() {
    let mut device = Device::new();
    device.capability.fast_shared_memory = true;
    let mut random = Random::new(12);
    let view = View::rows(70, 64);
    let scheme = Fp4Scheme::mxfp4().with_method(Method::CoordinateDescent);
    let dense = Dense::new(1, view.len(), &Kind::Ties.values(view.len(), 3), Dtype::Bf16);
    let x: Vec<f32> = (0..100 * view.axis)
        .map(|at| if at % view.axis == 3 { 0.0 } else { random.normal() })
        .collect();
    let hessians = BlockHessians::of(&x, view.axis, scheme.block_size).unwrap();
    device.check_importance(&dense, view, scheme, Importance::Blocks(&hessians));
}

/// More rows than the device has planes.
#[test]
fn every_row_has_its_amax() {
    let Device { client, capability } = Device::new();
    let view = View::rows(3 * (capability.cubes * UNITS) as usize / 2 + 1, 16);
    let values = Kind::Weights.values(view.len(), 9);
    let handle = client.create_from_slice(f32::as_bytes(&values));
    let found = amax(&client, &capability, handle, view, KernelDtype::F32, true).expect("a plan");
    let found = client.read_one_unchecked(found);
    let expected: Vec<_> =
        values.chunks(16).map(|row| row.iter().fold(0.0, |x: f32, y| x.max(y.abs()))).collect();
    assert_bits("amax of rows", f32::from_bytes(&found), &expected);
}

/// Compares X^T X with sums in f64, for some of the tiles, and for activations added later.
#[test]
fn products_of_activations_are_added_up_in_tiles() {
    const SIDE: usize = GramLayout::SIDE;
    let device = Device::new();
    let shapes = [
        (1, 8, 8),
        (33, 128, 128),
        (1060, 136, 136),
        (40, 264, 264),
        (70, 300, 300),
        (50, 256, 16),
    ];
    // Matrix instructions truncate to f32.
    let bound = if device.capability.mma { 1e-5 } else { 1e-14 };
    for dtype in Dtype::ALL {
        for (rows, channels, block_size) in shapes {
            let batches = [3, 4].map(|seed| {
                let values = Kind::Weights.values(rows * channels, seed + channels as u64);
                Dense::new(rows, channels, &values, dtype)
            });
            let layout = GramLayout::of_device(channels, block_size);
            let mut tiles = Vec::new();
            for part in [0..1, 1..layout.count()] {
                let sums = vec![0.0f64; part.len() * SIDE * SIDE];
                let sums = device.client.create_from_slice(f64::as_bytes(&sums));
                for batch in &batches {
                    add_gram(
                        &device.client,
                        &device.capability,
                        &Activations {
                            values: upload(&device.client, batch),
                            dtype: kernel_dtype(dtype),
                            rows,
                        },
                        sums.clone(),
                        layout,
                        part.clone(),
                    )
                    .expect("a plan");
                }
                let found = device.client.read_one_unchecked(sums);
                tiles.extend(f64::from_bytes(&found)[..part.len() * SIDE * SIDE].to_vec());
            }
            let tiles: Vec<_> = tiles.chunks_exact(SIDE * SIDE).collect();
            let found = Gram::from_tiles(&tiles, layout, block_size, 2 * rows, 1.0).unwrap();
            let mut expected = vec![0.0f64; channels * channels];
            for values in batches.iter().map(Dense::to_f32) {
                for x in values.chunks_exact(channels) {
                    for (sums, &x_row) in expected.chunks_exact_mut(channels).zip(x) {
                        let products = x.iter().map(|&x_col| f64::from(x_row) * f64::from(x_col));
                        sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
                    }
                }
            }
            let size = |channel: usize| expected[channel * (channels + 1)].sqrt();
            let all = (0..channels).flat_map(|row| (0..channels).map(move |col| (row, col)));
            for (row, col) in all {
                let Some(found) = found.get(row, col) else {
                    assert!(row / block_size != col / block_size);
                    continue;
                };
                assert!(row / block_size == col / block_size);
                let expected = expected[row * channels + col];
                let far = (found - expected).abs();
                assert!(
                    far <= bound * size(row) * size(col),
                    "{dtype:?} {rows} x {channels} at {row}, {col}: {found} {expected}"
                );
            }
        }
    }
}

/// Compares H, its factor and the channel weights with the host. Panels of 64 channels divide only
/// one of these sizes.
#[test]
fn a_gram_matrix_is_factorized_as_on_the_host() {
    let Device { client, capability } = Device::new();
    let mut random = Random::new(8);
    let floats = |handle| f32::from_bytes(&client.read_one_unchecked(handle)).to_vec();
    for (channels, options) in [
        (16, Gptq::default()),
        (64, Gptq { order: BlockOrder::Natural, ..Gptq::default() }),
        (176, Gptq { damping: 0.01, ..Gptq::default() }),
    ] {
        // Channels that resemble their neighbours, some more active than others.
        let mut x: Vec<f32> = (0..3 * channels * channels).map(|_| random.normal()).collect();
        for at in 1..x.len() {
            x[at] = (x[at] + 0.7 * x[at - 1]) * if at % 7 == 0 { 1.5 } else { 0.8 };
        }
        // Rounded to f32, as in the upload.
        let exact = Gram::of(&x, channels).unwrap();
        let rounded = |row, col| exact.get(row, col).map(|sum| f64::from(sum as f32)).unwrap();
        let sums: Vec<_> =
            (0..channels * channels).map(|at| rounded(at / channels, at % channels)).collect();
        let (rows, amax) = (exact.rows(), exact.amax());
        let gram = Gram::from_values(&sums, channels, channels, rows, amax).unwrap();
        let expected = options.hessian_factor(&gram, 16).unwrap();
        let found = hessian_factor(&client, &capability, &gram, expected.damped()).expect("a plan");
        assert_eq!(client.read_one_unchecked(found.definite().clone())[0], 1);
        assert_bits("H", &floats(found.hessian().clone()), expected.hessian());
        let factor = floats(found.factor().clone());
        let largest = factor.iter().fold(0.0, |x: f32, y| x.max(y.abs()));
        for (at, (found, expected)) in factor.iter().zip(expected.factor()).enumerate() {
            let far = (found - expected).abs();
            assert!(far <= 1e-6 * largest, "{channels} {at}: {found} {expected}");
        }
        let weights = floats(found.channel_weights().clone());
        for (channel, weight) in weights.iter().enumerate() {
            let expected = expected.factor()[channel * (channels + 1)].powi(-2);
            assert!((weight - expected).abs() <= 1e-5 * expected, "{weight} {expected}");
        }
    }
    // Fewer activations than channels, but enough for every block.
    let x: Vec<f32> = (0..20 * 64).map(|_| random.normal()).collect();
    let gram = Gram::of(&x, 64).unwrap();
    let undamped = Gptq { damping: 0.0, ..Gptq::default() };
    assert_eq!(undamped.hessian_factor(&gram, 16), Err(SearchError::Singular));
    let damped = undamped.damped_hessian(&gram, 16).unwrap();
    let found = hessian_factor(&client, &capability, &gram, &damped).expect("a plan");
    assert_eq!(client.read_one_unchecked(found.definite().clone())[0], 0);
}

/// Compares both sizes of tiles, with a number of rows that neither divides.
#[test]
fn tiles_of_gptq_make_no_difference_to_its_codes() {
    let Device { client, capability } = Device::new();
    let mut random = Random::new(13);
    let (rows, channels) = (140, 272);
    let options = Gptq { sweeps: 1, refits: 0, ..Gptq::default() };
    let x: Vec<f32> = (0..2 * channels * channels).map(|_| random.normal()).collect();
    let gram = Gram::of(&x, channels).unwrap();
    let damped = options.damped_hessian(&gram, 16).unwrap();
    let scheme = damped.scheme(&Fp4Scheme::nvfp4()).unwrap();
    let problem = Problem { view: View::rows(rows, channels), dtype: KernelDtype::F32, scheme };
    let weights = Kind::Weights.values(rows * channels, 3);
    let largest = weights.iter().fold(0.0, |x: f32, y| x.max(y.abs()));
    let hessian_factor = hessian_factor(&client, &capability, &gram, &damped).expect("a plan");
    // A device that one cube keeps busy gets the larger tiles.
    let [larger, smaller] = [1, 1 << 20].map(|cubes| {
        let device = Capability { cubes, ..capability };
        let values = client.create_from_slice(f32::as_bytes(&weights));
        let amax = client.create_from_slice(f32::as_bytes(&[largest]));
        let packed =
            quantize_gptq(&client, &device, values, amax, &hessian_factor, &options, &problem)
                .expect("a plan");
        client.read_one_unchecked(packed.codes).to_vec()
    });
    assert!(larger == smaller);
}
