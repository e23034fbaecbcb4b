//! Compares the kernels for devices of CubeCL's wgpu runtime with the host: on such a device
//! (`--features wgpu`, Mesa's lavapipe will do), on CubeCL's CPU runtime (`cpu`) or CUDA (`cuda`).

#![cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]

use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::{
    Capability, Decoding, Dtype as KernelDtype, Matmul, MatmulPlan, PackedHandles, Portable,
    Problem, Refusal, cubecl, dequantize, gather_rows,
};
use burn_fp4_formats::{Fp4Format, Packed, TensorScale};
use burn_fp4_search::host::View;
use burn_fp4_search::{Fp4Scheme, ScaleRule, TensorScaling, quantize as oracle};
use tests::compare::assert_bits;
use tests::inputs::{Dense, Dtype, Kind, Random};
use tests::on_device::{floats, kernel_dtype, upload, upload_packed};

/// Least limits of WebGPU, with every dtype.
const LEAST: Portable = Portable {
    f16: true,
    bf16: true,
    cmma_f16: false,
    cmma_bf16: false,
    decoder: true,
    units: 256,
    shared_memory: 16 << 10,
};

struct Device {
    client: Client,
    capability: Capability,
}

impl Device {
    /// The device, with every conversion of codes that it may use. Other runtimes run the kernels
    /// as one of the wgpu runtime would.
    fn all() -> Vec<Self> {
        let client = cubecl::Device::default().client();
        let found = Capability::of(&client);
        let mut decodings = vec![Decoding::Integers];
        match Capability::tested(&client) {
            Ok(tested) if found.portable.is_some() => decodings.push(tested.decoding),
            tested => {
                tested.expect("other runtimes are trusted");
                decodings.push(Decoding::HalfSubnormals);
            }
        }
        decodings.dedup();
        let portable = found.portable.unwrap_or(LEAST);
        let with = |decoding, portable| {
            let capability = Capability { decoding, portable: Some(portable), ..found };
            Self { client: client.clone(), capability }
        };
        // Also without shared memory.
        let small = Portable { shared_memory: 0, ..portable };
        let mut limits = vec![portable, small];
        limits.dedup();
        let with_limits = |decoding| limits.iter().map(move |&portable| with(decoding, portable));
        decodings.into_iter().flat_map(with_limits).collect()
    }

    /// The dtypes of its buffers.
    fn dtypes(&self) -> Vec<Dtype> {
        let portable = self.capability.portable.expect("set in `all`");
        Dtype::ALL
            .into_iter()
            .filter(|dtype| match dtype {
                Dtype::F32 => true,
                Dtype::F16 => portable.f16,
                Dtype::Bf16 => portable.bf16,
            })
            .collect()
    }

    /// Dequantizes a packed matrix along either axis, and compares every bit.
    fn check_values(&self, packed: &Packed) {
        let scheme = Fp4Scheme::of(ScaleRule::of_format(packed.format));
        let scheme = scheme.with_block_size(packed.block_size);
        let expected = packed.dequantize();
        let strided = View { outer: 1, axis: packed.cols, inner: packed.rows };
        for view in [View::rows(packed.rows, packed.cols), strided] {
            let mut exact = vec![0.0; expected.len()];
            for (at, &value) in expected.iter().enumerate() {
                let (row, k) = (at / packed.cols, at % packed.cols);
                exact[if view.inner == 1 { at } else { k * packed.rows + row }] = value;
            }
            for dtype in self.dtypes() {
                let problem = Problem { view, dtype: kernel_dtype(dtype), scheme };
                let packed = upload_packed(&self.client, packed);
                let found = dequantize(&self.client, &self.capability, packed, &problem);
                let found = floats(&self.client, found.expect("a plan"), kernel_dtype(dtype));
                let exact = Dense::new(1, exact.len(), &exact, dtype).to_f32();
                assert_bits(&format!("{:?} {problem:?}", self.capability), &found, &exact);
            }
        }
    }

    /// Multiplies with every kernel that takes the shape, and compares with sums in f64.
    fn check_product(
        &self,
        [m, n, k]: [usize; 3],
        scheme: Fp4Scheme,
        dtype: Dtype,
        bias: bool,
        gemm: bool,
    ) {
        let random = |rows, cols, seed| {
            Dense::new(rows, cols, &Kind::Outliers.values(rows * cols, seed), dtype)
        };
        let (weight, input, added) = (random(n, k, 1), random(m, k, 2), random(1, n, 3));
        let packed = oracle(&weight.to_f32(), n, k, &scheme).expect("valid");
        let (format, block_size) = (scheme.format(), scheme.block_size);
        let matmul = Matmul { m, n, k, format, block_size, dtype: kernel_dtype(dtype) };
        let run = |planned: Result<MatmulPlan, Refusal>| {
            let weight = upload_packed(&self.client, &packed);
            let (input, bias) =
                (upload(&self.client, &input), bias.then(|| upload(&self.client, &added)));
            let output = planned.expect("a plan").run(&self.client, weight, input, bias, None);
            floats(&self.client, output.expect("memory of these lengths"), kernel_dtype(dtype))
        };
        let mut found = vec![run(matmul.portable_gemv(&self.capability))];
        let shares = self.capability.portable.is_some_and(|portable| portable.shared_memory > 0);
        if gemm && shares {
            found.push(run(matmul.portable_gemm(&self.capability)));
            match matmul.portable_cmma(&self.capability) {
                Err(Refusal::Instructions { .. }) => {}
                planned => found.push(run(planned)),
            }
        }
        let (dense, input, added) = (packed.dequantize(), input.to_f32(), added.to_f32());
        for at in 0..m * n {
            let (row, output) = (at / n, at % n);
            let terms = (0..k).map(|index| {
                f64::from(input[row * k + index]) * f64::from(dense[output * k + index])
            });
            let (mut sum, mut size) =
                terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()));
            if bias {
                sum += f64::from(added[output]);
                size += f64::from(added[output]).abs();
            }
            // Errors of f32 sums, and of one rounding to the dtype.
            let once = match dtype {
                Dtype::F32 => 0.0,
                Dtype::F16 => 2f64.powi(-11),
                Dtype::Bf16 => 2f64.powi(-8),
            };
            for (kernel, found) in found.iter().enumerate() {
                let found = found[at];
                let near = (f64::from(found) - sum).abs() <= 5e-6 * size + once * sum.abs() + 1e-7;
                let what = format!("{matmul:?}, kernel {kernel}, row {row}, output {output}");
                assert!(near, "{:?} {what}: {found}, not {sum}", self.capability.decoding);
            }
        }
    }
}

/// Every code with every block scale, the NaN among them.
#[test]
fn every_code_and_scale_has_the_value_of_the_format() {
    for device in Device::all() {
        for (format, scales, tensor_scale) in [
            (Fp4Format::NvFp4, 0..=0x7F, 1.0),
            (Fp4Format::NvFp4, 0..=0x7F, 0.3),
            (Fp4Format::MxFp4, 0..=0xFF, 1.0),
        ] {
            let scales: Vec<u8> = scales.collect();
            for block_size in [16, 32] {
                let (rows, cols) = (scales.len() / 4, 4 * block_size);
                let codes = (0..rows * cols / 2).map(|byte| 0x10 + 0x22 * (byte % 8) as u8);
                let (codes, scales) = (codes.collect(), scales.clone());
                let tensor_scale = TensorScale::One(tensor_scale);
                let packed = Packed { format, block_size, rows, cols, codes, scales, tensor_scale };
                device.check_values(&packed);
            }
        }
    }
}

#[test]
fn products_of_few_and_many_rows() {
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    // Kernels with barriers are slow on CubeCL's CPU runtime.
    let many = !cfg!(feature = "cpu");
    for device in Device::all() {
        for (number, (shape, scheme, bias)) in [
            ([1, 64, 128], Fp4Scheme::nvfp4(), false),
            ([1, 7, 16], Fp4Scheme::nvfp4(), true),
            ([2, 33, 48], by_row, true),
            ([3, 40, 1056], Fp4Scheme::mxfp4(), false),
            ([5, 10, 32], Fp4Scheme::mxfp4(), true),
            ([8, 129, 64], Fp4Scheme::mxfp4().with_block_size(16), false),
            ([9, 65, 96], Fp4Scheme::nvfp4().with_block_size(32), true),
            ([17, 20, 80], Fp4Scheme::nvfp4(), true),
            ([70, 136, 640], by_row, true),
            ([130, 16, 128], Fp4Scheme::nvfp4().with_block_size(32), true),
            // More packed rows in a group.
            ([1, 16500, 32], Fp4Scheme::nvfp4(), true),
            ([4, 8200, 32], Fp4Scheme::mxfp4(), false),
            // Groups of 64 lanes in f32.
            ([1, 40, 4096], Fp4Scheme::nvfp4(), true),
            ([2, 33, 2080], Fp4Scheme::mxfp4(), false),
        ]
        .into_iter()
        .enumerate()
        {
            if !many && shape[0] * shape[1] > 1000 {
                continue;
            }
            let dtypes = device.dtypes();
            let taken = if many { dtypes.len() } else { 1 };
            for dtype in dtypes.iter().cycle().skip(number).take(taken) {
                device.check_product(shape, scheme, *dtype, bias, many);
            }
        }
    }
}

#[test]
fn products_of_random_shapes() {
    let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let large = Fp4Scheme::nvfp4().with_block_size(32);
    let schemes = [Fp4Scheme::nvfp4(), by_row, large, Fp4Scheme::mxfp4()];
    let mut random = Random::new(17);
    for device in Device::all() {
        let dtypes = device.dtypes();
        for case in 0..if cfg!(feature = "cpu") { 2 } else { 60 } {
            let m = 1 + random.below(if case % 2 == 0 { 8 } else { 80 });
            let n = 1 + random.below(150);
            let k = 32 * (1 + random.below(12));
            let dtype = dtypes[random.below(dtypes.len())];
            let scheme = schemes[random.below(schemes.len())];
            device.check_product([m, n, k], scheme, dtype, case % 3 == 0, case % 2 == 1);
        }
    }
}

/// Limits that a driver may have are refusals, not panics.
#[test]
fn devices_that_lack_what_kernels_need_are_refused() {
    let [device, ..] = &Device::all()[..] else { panic!("a device") };
    let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, KernelDtype::F16);
    let matmul = Matmul { m: 1, n: 8, k: 32, format, block_size, dtype };
    for (portable, expected) in [
        (Portable { f16: false, ..LEAST }, "has no buffers of the dtype"),
        (Portable { units: 128, ..LEAST }, "has cubes of fewer than 256 units"),
    ] {
        let small = Capability { portable: Some(portable), ..device.capability };
        let refused = |result: Result<(), Refusal>| {
            assert_eq!(result, Err(Refusal::Device { lacks: expected }));
        };
        refused(matmul.plan(&small).map(drop));
        refused(matmul.portable_gemv(&small).map(drop));
        let view = View::rows(1, 32);
        let problem = Problem { view, dtype, scheme: Fp4Scheme::nvfp4() };
        let bytes = |count: usize| device.client.create_from_slice(&vec![0; count]);
        let (codes, scales, tensor_scale) = (bytes(16), bytes(2), bytes(4));
        let packed = PackedHandles { codes, scales, tensor_scale, tensor_scales: 1 };
        refused(dequantize(&device.client, &small, packed, &problem).map(drop));
    }
    // Without shared memory there is a slower kernel.
    let portable = Some(Portable { shared_memory: 8 << 10, ..LEAST });
    let small = Capability { portable, ..device.capability };
    let many = Matmul { m: 100, ..matmul };
    assert!(matches!(many.portable_gemm(&small), Err(Refusal::Device { .. })));
    assert!(many.plan(&small).expect("a plan").is_some());
    let other = Capability { portable: None, ..device.capability };
    assert!(matches!(matmul.portable_gemv(&other), Err(Refusal::Device { .. })));
}

#[test]
fn rows_of_any_length_are_gathered() {
    use cubecl::prelude::CubeElement;

    let client = cubecl::Device::default().client();
    let device = Capability::of(&client);
    let small_cubes = device.portable.map(|portable| Portable { units: 64, ..portable });
    let small = Capability { portable: small_cubes, ..device };
    let mut random = Random::new(31);
    for (rows, row_bytes) in [(1, 1), (3, 2), (7, 3), (5, 4), (300, 6), (40, 36), (2, 1024)] {
        let bytes: Vec<_> = (0..rows * row_bytes).map(|_| random.below(256) as u8).collect();
        for count in [0, 1, 2, 333] {
            // One index beyond the end: the last row.
            let indices: Vec<_> = (0..count).map(|_| random.below(rows + 1) as i32).collect();
            let expected: Vec<_> = indices
                .iter()
                .flat_map(|&index| {
                    let row = (index as usize).min(rows - 1);
                    bytes[row * row_bytes..(row + 1) * row_bytes].to_vec()
                })
                .collect();
            let mut padded = bytes.clone();
            padded.resize(bytes.len().next_multiple_of(4), 0xAB);
            let [from, at] = [&padded[..], i32::as_bytes(&indices)].map(|bytes| {
                // Memory has at least a word.
                client.create_from_slice(if bytes.is_empty() { &[0; 4] } else { bytes })
            });
            for device in [&device, &small] {
                let (from, at) = (from.clone(), at.clone());
                let found = gather_rows(&client, device, from, [rows, row_bytes], at, count);
                let found = client.read_one_unchecked(found.expect("memory of these lengths"));
                assert_eq!(found[..expected.len()], expected, "{rows} x {row_bytes}, {count}");
            }
        }
    }
    let (bytes, at) = (client.empty(4), client.empty(4));
    let short = gather_rows(&client, &device, bytes.clone(), [2, 4], at.clone(), 1);
    assert!(matches!(short, Err(Refusal::Memory { what: "bytes", .. })));
    let short = gather_rows(&client, &device, bytes.clone(), [1, 4], at.clone(), 2);
    assert!(matches!(short, Err(Refusal::Memory { what: "indices", .. })));
    assert!(gather_rows(&client, &device, bytes, [0, 4], at, 1).is_err());
}
