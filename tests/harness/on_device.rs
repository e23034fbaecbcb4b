//! Tensors of kernels in tests: uploads, downloads, and exact products.

use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::*;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{Dtype as KernelDtype, PackedHandles};
use burn_fp4_formats::{Packed, bf16, f16};

use crate::inputs::{Dense, Dtype, Values};

/// Returns the dtype that kernels use for a dtype.
pub fn kernel_dtype(dtype: Dtype) -> KernelDtype {
    match dtype {
        Dtype::F32 => KernelDtype::F32,
        Dtype::F16 => KernelDtype::F16,
        Dtype::Bf16 => KernelDtype::Bf16,
    }
}

/// Uploads a matrix.
pub fn upload(client: &Client, dense: &Dense) -> Handle {
    match &dense.values {
        Values::F32(values) => client.create_from_slice(f32::as_bytes(values)),
        Values::F16(values) => client.create_from_slice(f16::as_bytes(values)),
        Values::Bf16(values) => client.create_from_slice(bf16::as_bytes(values)),
    }
}

/// Uploads values rounded to a dtype, and returns them with their handle.
pub fn upload_rounded(client: &Client, values: Vec<f32>, dtype: KernelDtype) -> (Vec<f32>, Handle) {
    let values: Vec<f32> = match dtype {
        KernelDtype::F32 => values,
        KernelDtype::F16 => values.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        KernelDtype::Bf16 => values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
    };
    let halves = |round: fn(f32) -> u16| values.iter().map(|&x| round(x)).collect::<Vec<_>>();
    let handle = match dtype {
        KernelDtype::F32 => client.create_from_slice(f32::as_bytes(&values)),
        KernelDtype::F16 => {
            let bits = halves(|x| f16::from_f32(x).to_bits());
            client.create_from_slice(u16::as_bytes(&bits))
        }
        KernelDtype::Bf16 => {
            let bits = halves(|x| bf16::from_f32(x).to_bits());
            client.create_from_slice(u16::as_bytes(&bits))
        }
    };
    (values, handle)
}

/// Uploads a packed matrix.
pub fn upload_packed(client: &Client, packed: &Packed) -> PackedHandles {
    let tensor_scale = packed.tensor_scale.as_slice();
    PackedHandles {
        codes: client.create_from_slice(&packed.codes),
        scales: client.create_from_slice(&packed.scales),
        tensor_scale: client.create_from_slice(f32::as_bytes(tensor_scale)),
        tensor_scales: tensor_scale.len(),
    }
}

/// Downloads values as f32.
pub fn floats(client: &Client, handle: Handle, dtype: KernelDtype) -> Vec<f32> {
    let bytes = client.read_one_unchecked(handle);
    match dtype {
        KernelDtype::F32 => f32::from_bytes(&bytes).to_vec(),
        KernelDtype::F16 => f16::from_bytes(&bytes).iter().map(|x| x.to_f32()).collect(),
        KernelDtype::Bf16 => bf16::from_bytes(&bytes).iter().map(|x| x.to_f32()).collect(),
    }
}

/// Computes products of rows of k values, plus a bias, and the sums of magnitudes.
pub fn exact_products(
    weight: &[f32],
    input: &[f32],
    bias: Option<&[f32]>,
    k: usize,
) -> Vec<(f64, f64)> {
    let rows = input.chunks(k).flat_map(|input| {
        weight.chunks(k).enumerate().map(move |(output, weight)| {
            let terms = input.iter().zip(weight).map(|(&x, &w)| f64::from(x) * f64::from(w));
            let bias = bias.map_or(0.0, |bias| f64::from(bias[output]));
            terms.fold((bias, bias.abs()), |(sum, size), term| (sum + term, size + term.abs()))
        })
    });
    rows.collect()
}

/// Compares outputs with exact products, within the errors of f32 sums and of one rounding to the
/// dtype.
pub fn assert_products(what: &str, found: &[f32], exact: &[(f64, f64)], dtype: Dtype) {
    let once = match dtype {
        Dtype::F32 => 0.0,
        Dtype::F16 => 2f64.powi(-11),
        Dtype::Bf16 => 2f64.powi(-8),
    };
    assert_eq!(found.len(), exact.len(), "{what}");
    for (at, (&found, &(sum, size))) in found.iter().zip(exact).enumerate() {
        let near = (f64::from(found) - sum).abs() <= 5e-6 * size + once * sum.abs() + 1e-7;
        assert!(near, "{what}, output {at}: {found}, not {sum}");
    }
}
