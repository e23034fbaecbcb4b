//! Checks the bits of the kernels against the reference quantizer, which runs on all cores.

use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::CubeElement;
use burn_fp4_cubecl::{
    Capability, Dtype, Hessians, Problem, amax, dequantize, fake_quantize, quantize,
    quantize_by_hessian,
};
use burn_fp4_formats::{Packed, bf16, f16};
use burn_fp4_search::host::{self, DequantTarget, HostElement, View};
use burn_fp4_search::{
    BlockHessians, Blocks, Draw, Fp4Scheme, Importance, Method, NonFinite, Rounding, ScaleRule,
    quantize_with_amax,
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

/// Hessians in device memory.
pub(crate) fn upload(client: &Client, blocks: &BlockHessians) -> Hessians {
    Hessians {
        values: client.create_from_slice(f32::as_bytes(blocks.values())),
        bounds: client.create_from_slice(f32::as_bytes(blocks.bounds())),
    }
}
