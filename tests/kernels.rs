//! The CubeCL kernels against the oracle, on whatever runtime the build has: with `--features cpu`
//! CubeCL's CPU runtime, with `--features cuda` a GPU.

#![cfg(any(feature = "cpu", feature = "cuda"))]

use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::CubeElement;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{Dtype as KernelDtype, Problem, Refusal, amax, cubecl, dequantize, quantize};
use burn_fp4_formats::{Packed, TensorScale, bf16, f16};
use burn_fp4_search::host::View;
use burn_fp4_search::{Blocks, Fp4Scheme, NonFinite, ScaleRule, TensorScaling, quantize as oracle};
use tests::compare::{assert_bits, assert_same};
use tests::golden::Golden;
use tests::inputs::{Dense, Dtype, Kind, Values};

struct Device {
    client: Client,
}

impl Device {
    fn new() -> Self {
        Self { client: cubecl::Device::default().client() }
    }

    fn upload(&self, dense: &Dense) -> Handle {
        match &dense.values {
            Values::F32(values) => self.client.create_from_slice(f32::as_bytes(values)),
            Values::F16(values) => self.client.create_from_slice(f16::as_bytes(values)),
            Values::Bf16(values) => self.client.create_from_slice(bf16::as_bytes(values)),
        }
    }

    fn floats(&self, handle: Handle, dtype: KernelDtype) -> Vec<f32> {
        let bytes = self.client.read_one_unchecked(handle);
        match dtype {
            KernelDtype::F32 => f32::from_bytes(&bytes).to_vec(),
            KernelDtype::F16 => f16::from_bytes(&bytes).iter().map(|x| x.to_f32()).collect(),
            KernelDtype::Bf16 => bf16::from_bytes(&bytes).iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// Quantizes and dequantizes on the device, and compares both with the oracle.
    fn check(&self, what: &str, dense: &Dense, axis: usize, scheme: Fp4Scheme) -> usize {
        let view = View::along(&[dense.rows, dense.cols], axis);
        let dtype = match dense.dtype() {
            Dtype::F32 => KernelDtype::F32,
            Dtype::F16 => KernelDtype::F16,
            Dtype::Bf16 => KernelDtype::Bf16,
        };
        let problem = Problem { view, dtype, scheme };
        let values = self.upload(dense);
        let by_row = scheme.tensor_scales(view.packed_rows()) > 1;
        let largest = match scheme.tensor_scale {
            TensorScaling::Amax(amax) => self.client.create_from_slice(f32::as_bytes(&[amax])),
            _ => amax(&self.client, values.clone(), &problem, by_row).expect("a plan"),
        };
        let packed = quantize(&self.client, values, largest, &problem).expect("a plan");
        let restored = dequantize(&self.client, packed.clone(), &problem).expect("a plan");

        let rows = if axis == 0 { dense.transposed() } else { dense.clone() };
        let expected = oracle(&rows.to_f32(), rows.rows, rows.cols, &scheme).expect("valid");
        let tensor_scale = self.floats(packed.tensor_scale, KernelDtype::F32);
        let found = Packed {
            codes: self.client.read_one_unchecked(packed.codes).to_vec(),
            scales: self.client.read_one_unchecked(packed.scales).to_vec(),
            tensor_scale: match tensor_scale[..] {
                [scale] => TensorScale::One(scale),
                _ => TensorScale::PerRow(tensor_scale),
            },
            ..expected.clone()
        };
        let what = format!("{what} {dtype:?} axis {axis} {scheme:?}");
        assert_same(&what, &found, &expected);
        let exact = Dense::new(rows.rows, rows.cols, &expected.dequantize(), dense.dtype());
        let exact = if axis == 0 { exact.transposed() } else { exact };
        assert_bits(&what, &self.floats(restored, dtype), &exact.to_f32());
        dense.rows * dense.cols
    }
}

fn schemes() -> Vec<Fp4Scheme> {
    let mut schemes = Vec::new();
    for rule in ScaleRule::ALL {
        for block_size in [16, 32] {
            schemes.push(Fp4Scheme::of(rule).with_block_size(block_size));
        }
    }
    for rule in [ScaleRule::Te, ScaleRule::TeDivision, ScaleRule::Gist] {
        for scaling in
            [TensorScaling::Row, TensorScaling::Amax(3.0), TensorScaling::Multiplier(1e-3)]
        {
            schemes.push(Fp4Scheme::of(rule).with_tensor_scale(scaling));
        }
    }
    let follow = |scheme: Fp4Scheme| scheme.with_non_finite(NonFinite::FollowReference);
    schemes.into_iter().map(follow).collect()
}

#[test]
fn kernels_give_the_bits_of_the_oracle() {
    let device = Device::new();
    let mut compared = 0;
    for scheme in schemes() {
        for (seed, kind) in Kind::ALL.into_iter().enumerate() {
            for dtype in Dtype::ALL {
                let dense = Dense::new(96, 160, &kind.values(96 * 160, seed as u64), dtype);
                for axis in [0, 1] {
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
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-45, -f32::MAX] {
        let mut values = Kind::Weights.values(32 * 32, 5);
        values[70] = special;
        let dense = Dense::new(32, 32, &values, Dtype::F32);
        for scheme in schemes() {
            device.check(&format!("with {special}"), &dense, 1, scheme);
        }
    }
    let zeros = Dense::new(32, 32, &[0.0; 1024], Dtype::F32);
    schemes().into_iter().for_each(|scheme| {
        device.check("zeros", &zeros, 0, scheme);
    });
}

#[test]
fn golden_files() {
    let device = Device::new();
    let mut cases = 0;
    for (file, rules) in [
        ("te_div6", vec![ScaleRule::TeDivision]),
        ("te_rcp6", vec![ScaleRule::Te]),
        ("gist", vec![ScaleRule::Gist]),
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
fn what_has_no_kernel_is_refused() {
    let device = Device::new();
    let scheme = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
    let problem = Problem { view: View::rows(16, 16), dtype: KernelDtype::F32, scheme };
    let values = device.client.create_from_slice(f32::as_bytes(&[0.0; 256]));
    let largest = amax(&device.client, values.clone(), &problem, false).expect("a plan");
    let refused = quantize(&device.client, values, largest, &problem).expect_err("no kernel");
    assert_eq!(refused, Refusal::NoKernel("Blocks::Tile16x16"));
}
