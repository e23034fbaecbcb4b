//! Checks the bits of the kernels against the reference quantizer, which runs on all cores.

use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::CubeElement;
use burn_fp4_cubecl::{
    Capability, Dtype, Hessians, Matmul, Problem, amax, dequantize, fake_quantize, fp8_rows,
    quantize, quantize_by_hessian,
};
use burn_fp4_formats::{Packed, bf16, f16};
use burn_fp4_search::host::{self, DequantTarget, HostElement, View};
use burn_fp4_search::{
    BlockHessians, Blocks, Draw, Fp4Scheme, Importance, Method, NonFinite, Rounding, ScaleRule,
    quantize_with_amax, round_to_fp8,
};
use rayon::prelude::*;

/// Length of the blocked axis.
const AXIS: usize = 4096;

/// Checks every rule, search and tile in every dtype along either axis.
pub(crate) fn every_rule(client: &Client, values: usize) {
    let rows = (values / 2 / AXIS).next_multiple_of(16);
    let mut schemes: Vec<_> = ScaleRule::ALL.into_iter().map(Fp4Scheme::of).collect();
    let search = Method::FourOverSix { range: Default::default(), error: Default::default() };
    let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
    schemes.extend([tiles, tiles.with_method(search), Fp4Scheme::nvfp4().with_method(search)]);
    for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4(), tiles] {
        schemes.push(scheme.with_method(Method::SSE));
    }
    let drawn = Rounding::Stochastic(Draw { seed: 7 << 40 | 3, step: 5 << 33 | 1 });
    for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4(), tiles] {
        schemes.push(scheme.with_rounding(drawn));
    }
    for scheme in schemes {
        let scheme = scheme.with_non_finite(NonFinite::FollowReference);
        let seed = scheme.rule as u64;
        every_axis::<f32>(client, Dtype::F32, random(rows, seed), scheme);
        every_axis::<f16>(client, Dtype::F16, random(rows, seed + 100), scheme);
        every_axis::<bf16>(client, Dtype::Bf16, random(rows, seed + 200), scheme);
    }
}

/// Makes random magnitudes around 2^-10 .. 2^10 with outliers. Each row has a power of two of its
/// own.
fn random<T: HostElement>(rows: usize, seed: u64) -> Vec<T> {
    let mut values = vec![T::default(); rows * AXIS];
    values.par_chunks_mut(AXIS).enumerate().for_each(|(row, values)| {
        let mut state = (row as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (seed << 32);
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let size = (uniform() * 20.0).exp2();
        let row: Vec<_> = (0..AXIS)
            .map(|_| {
                let spread = if uniform() > 0.48 { 20.0 } else { 1.0 };
                (uniform() + uniform()) * size * spread
            })
            .collect();
        T::write(&row, values);
    });
    values
}

fn every_axis<T: HostElement + CubeElement>(
    client: &Client,
    dtype: Dtype,
    values: Vec<T>,
    scheme: Fp4Scheme,
) {
    let device = Capability::of(client);
    let rows = values.len() / AXIS;
    let device_values = client.create_from_slice(T::as_bytes(&values));
    for view in [View::rows(rows, AXIS), View { outer: 1, axis: AXIS, inner: rows }] {
        let problem = Problem { view, dtype, scheme };
        let name = format!("{dtype:?} {view:?} {scheme:?}");
        let largest =
            amax(client, &device, device_values.clone(), view, dtype, false).expect("a plan");
        let packed = quantize(client, &device, device_values.clone(), largest.clone(), &problem)
            .expect("a plan");
        let amax = largest.clone();
        let fake = fake_quantize(
            client,
            &device,
            device_values.clone(),
            amax,
            &problem,
            DequantTarget::Full,
        )
        .expect("a plan");
        let restored = dequantize(client, &device, packed.clone(), &problem).expect("a plan");

        let amax = values.par_iter().map(|x| x.to_f32().abs()).reduce(|| 0.0, f32::max);
        let [codes, scales, restored, fake, found] =
            [packed.codes, packed.scales, restored, fake, largest]
                .map(|handle| client.read_one_unchecked(handle));
        assert_eq!(f32::from_bytes(&found), [amax], "{name}: amax");
        let [restored, fake] = [&restored, &fake].map(|bytes| T::from_bytes(bytes));
        if scheme.rounding != Rounding::Nearest {
            // Stochastic rounding depends on the index of an element in the whole tensor.
            let whole = host::quantize_packed(&values, view, &scheme, &[amax], Importance::Uniform);
            let whole = whole.expect("a valid problem");
            assert!(
                whole.codes == codes[..] && whole.scales == scales[..],
                "{name}: stochastic rounding"
            );
            let same = |(a, b): (&T, &T)| a.to_f32().to_bits() == b.to_f32().to_bits();
            assert!(restored.iter().zip(fake).all(same), "{name}: fake-quantized");
            eprintln!("{} values equal: {name}", values.len());
            continue;
        }
        // Sixteen rows at a time, so that tiles stay whole.
        let tile = 16 * view.axis;
        let differing: usize = (0..view.packed_rows() / 16)
            .into_par_iter()
            .map(|first| {
                let place = |at: usize| {
                    let (row, k) = (first * 16 + at / view.axis, at % view.axis);
                    (row / view.inner * view.axis + k) * view.inner + row % view.inner
                };
                let dense: Vec<_> = (0..tile).map(|at| values[place(at)].to_f32()).collect();
                let expected = expected(&dense, view.axis, &scheme, amax);
                let bytes = |found: &[u8], expected: &[u8]| {
                    let found = &found[first * expected.len()..][..expected.len()];
                    found.iter().zip(expected).filter(|(found, expected)| found != expected).count()
                };
                let mut exact = vec![T::default(); tile];
                T::write(&expected.dequantize(), &mut exact);
                let values = (0..tile).filter(|&at| {
                    let exact = exact[at].to_f32().to_bits();
                    [restored, fake]
                        .iter()
                        .any(|found| found[place(at)].to_f32().to_bits() != exact)
                });
                bytes(&codes, &expected.codes) + bytes(&scales, &expected.scales) + values.count()
            })
            .sum();
        assert_eq!(differing, 0, "{name}: codes, scales and values that differ");
        eprintln!("{} values equal: {name}", values.len());
    }
}

/// Quantizes sixteen rows with the reference quantizer. Where that tries every scale, uses the host
/// engine, which tests compare with it bit for bit.
fn expected(dense: &[f32], cols: usize, scheme: &Fp4Scheme, amax: f32) -> Packed {
    if scheme.method == Method::SSE {
        by_host(dense, cols, scheme, amax, Importance::Uniform)
    } else {
        quantize_with_amax(dense, 16, cols, scheme, &[amax]).expect("a valid problem")
    }
}

fn by_host(
    dense: &[f32],
    cols: usize,
    scheme: &Fp4Scheme,
    amax: f32,
    importance: Importance<'_>,
) -> Packed {
    let view = View::rows(dense.len() / cols, cols);
    host::quantize_packed(dense, view, scheme, &[amax], importance).expect("a valid problem")
}

/// Checks the searches with Hessians against the host engine.
pub(crate) fn by_hessian(client: &Client, values: usize) {
    let device = Capability::of(client);
    let rows = (values / AXIS).next_multiple_of(16);
    let values: Vec<bf16> = random(rows, 7);
    let dense: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
    let activations: Vec<f32> = random(512, 8);
    let device_values = client.create_from_slice(bf16::as_bytes(&values));
    let amax = dense.par_iter().map(|x| x.abs()).reduce(|| 0.0, f32::max);
    let largest = client.create_from_slice(f32::as_bytes(&[amax]));
    for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
        let blocks = BlockHessians::of(&activations, AXIS, scheme.block_size).expect("finite");
        for search in [Method::Hessian, Method::CoordinateDescent] {
            let scheme = scheme.with_method(search);
            let view = View::rows(rows, AXIS);
            let problem = Problem { view, dtype: Dtype::Bf16, scheme };
            let hessians = upload(client, &blocks);
            let (values, largest) = (device_values.clone(), largest.clone());
            let packed = quantize_by_hessian(client, &device, values, largest, hessians, &problem)
                .expect("a plan");
            let expected = by_host(&dense, AXIS, &scheme, amax, Importance::Blocks(&blocks));
            let [codes, scales] =
                [packed.codes, packed.scales].map(|handle| client.read_one_unchecked(handle));
            assert!(codes[..] == expected.codes && scales[..] == expected.scales, "{problem:?}");
            eprintln!("{} values equal: {problem:?}", dense.len());
        }
    }
}

/// Checks products in FP8 against exact sums of the rounded input, for MXFP4 and random shapes.
/// Does nothing on devices without them.
pub(crate) fn in_fp8(client: &Client) {
    let (device, dtype, scheme) = (Capability::of(client), Dtype::Bf16, Fp4Scheme::mxfp4());
    let (format, block_size) = (scheme.format(), scheme.block_size);
    for (m, n, tiles) in [
        (65, 8, 1),
        (70, 136, 3),
        (96, 520, 9),
        (129, 1032, 32),
        (200, 256, 8),
        (300, 1536, 5),
        (513, 4096, 2),
        (700, 128, 32),
    ] {
        let k = 128 * tiles;
        let matmul = Matmul { m, n, k, format, block_size, dtype };
        let Ok(planned) = matmul.fp8(&device) else { return };
        let [weight, input]: [Vec<bf16>; 2] = [n, m].map(|rows| {
            let values: Vec<f32> = random(rows, 9);
            values
                .chunks(AXIS)
                .flat_map(|row| row[..k].iter().copied().map(bf16::from_f32))
                .collect()
        });
        let upload = |values: &[bf16]| client.create_from_slice(bf16::as_bytes(values));
        let view = View::rows(n, k);
        let problem = Problem { view, dtype, scheme };
        let values = upload(&weight);
        let largest = amax(client, &device, values.clone(), view, dtype, false).expect("a plan");
        let packed = quantize(client, &device, values, largest, &problem).expect("a plan");
        let dense = dequantize(client, &device, packed.clone(), &problem).expect("a plan");
        let dense = client.read_one_unchecked(dense);
        let dense: Vec<f32> = bf16::from_bytes(&dense).iter().map(|value| value.to_f32()).collect();
        let rows = fp8_rows(client, packed.clone(), &matmul).expect("memory of these lengths");
        let facts = client.read_one_unchecked(rows.clone());
        assert!(f32::from_bytes(&facts)[n..].iter().all(|&blocks| blocks == 0.0), "{matmul:?}");
        let output = planned.run(client, packed, rows, upload(&input), None);
        let output = client.read_one_unchecked(output.expect("memory of these lengths"));
        let wrong: usize = bf16::from_bytes(&output)
            .par_chunks(n)
            .zip(input.par_chunks(k))
            .map(|(found, input)| {
                let input: Vec<_> = input.iter().map(|value| value.to_f32()).collect();
                let input = round_to_fp8(&input);
                let is_near = |(found, weight): (&bf16, &[f32])| {
                    let terms = weight.iter().zip(&input);
                    let terms = terms.map(|(&w, &x)| f64::from(w) * f64::from(x));
                    let (sum, size) =
                        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                    // The instructions keep about 13 bits of a sum of 32 products.
                    let bound = size * (k / 32 + 2) as f64 / 2048.0 + sum.abs() / 256.0;
                    (f64::from(found.to_f32()) - sum).abs() <= bound
                };
                found.iter().zip(dense.chunks(k)).filter(|&pair| !is_near(pair)).count()
            })
            .sum();
        assert_eq!(wrong, 0, "{matmul:?}: outputs that are too far off");
        eprintln!("{} outputs in FP8 near: {m} x {k} x {n}", m * n);
    }
}

/// Hessians in device memory.
pub(crate) fn upload(client: &Client, blocks: &BlockHessians) -> Hessians {
    Hessians {
        values: client.create_from_slice(f32::as_bytes(blocks.values())),
        bounds: client.create_from_slice(f32::as_bytes(blocks.bounds())),
    }
}
