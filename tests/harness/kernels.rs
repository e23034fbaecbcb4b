//! The CubeCL kernels as an engine, on the runtime of the build.

use burn_fp4_cubecl::cubecl::Device;
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::*;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{Capability, Dtype as KernelDtype, Problem, amax, quantize};
use burn_fp4_formats::{Packed, TensorScale, bf16, f16};
use burn_fp4_search::host::View;
use burn_fp4_search::{Fp4Scheme, TensorScaling};

use crate::engines::Axis;
use crate::inputs::{Dense, Dtype, Values};

/// Quantizes a matrix along an axis with the kernels.
pub(crate) fn kernels(dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> Packed {
    let client = Device::default().client();
    let device = Capability::of(&client);
    let view = View::along(&[dense.rows, dense.cols], axis as usize);
    let problem = Problem { view, dtype: kernel_dtype(dense.dtype()), scheme: *scheme };
    let values = upload(&client, dense);
    let by_row = scheme.tensor_scales(view.packed_rows()) > 1;
    let largest = match scheme.tensor_scale {
        TensorScaling::Amax(given) => client.create_from_slice(f32::as_bytes(&[given])),
        _ => amax(&client, &device, values.clone(), view, problem.dtype, by_row).expect("a plan"),
    };
    let packed = quantize(&client, &device, values, largest, &problem).expect("a plan");
    let tensor_scale = client.read_one_unchecked(packed.tensor_scale);
    Packed {
        format: scheme.format(),
        block_size: scheme.block_size,
        rows: view.packed_rows(),
        cols: view.axis,
        codes: client.read_one_unchecked(packed.codes).to_vec(),
        scales: client.read_one_unchecked(packed.scales).to_vec(),
        tensor_scale: match f32::from_bytes(&tensor_scale) {
            &[scale] => TensorScale::One(scale),
            scales => TensorScale::PerRow(scales.to_vec()),
        },
    }
}

fn kernel_dtype(dtype: Dtype) -> KernelDtype {
    match dtype {
        Dtype::F32 => KernelDtype::F32,
        Dtype::F16 => KernelDtype::F16,
        Dtype::Bf16 => KernelDtype::Bf16,
    }
}

fn upload(client: &Client, dense: &Dense) -> Handle {
    match &dense.values {
        Values::F32(values) => client.create_from_slice(f32::as_bytes(values)),
        Values::F16(values) => client.create_from_slice(f16::as_bytes(values)),
        Values::Bf16(values) => client.create_from_slice(bf16::as_bytes(values)),
    }
}
