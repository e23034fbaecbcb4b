//! Burn's Cube devices: kernels on CUDA and on CubeCL's CPU runtime. On wgpu kernels dequantize,
//! multiply and run a decoder, and tensor operations do the rest.
//!
//! | file               | what it holds                                                          |
//! |--------------------|------------------------------------------------------------------------|
//! | `mod.rs`           | [`Fp4Backend`] of Cube devices                                         |
//! | `decoder.rs`       | norms and attention of a decoder, and the draw of tokens               |
//! | `matmul.rs`        | products straight from the codes; prefetches in a captured pass        |
//! | `deterministic.rs` | products and sums with fixed, not autotuned, kernels                   |
//! | `queues.rs`        | the worker threads of a device                                         |
//! | `graph/`           | captured passes: one launch on CUDA, launches encoded again on wgpu    |
//! | `device.rs`        | devices with kernels; tensors in the form that kernels take            |

mod decoder;
mod deterministic;
pub(crate) mod device;
pub(crate) mod graph;
pub(crate) mod matmul;
pub(crate) mod queues;

use core::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, IntDType, Shape, TensorData};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{
    Activations, Capability, Dtype, Hessians, Matmul, PackedHandles, Problem, Refusal, gather_rows,
    quantize as quantize_kernel, quantize_by_hessian, quantize_gptq, quantize_weighted,
};
use burn_fp4_search::host::{DequantTarget, View};
use burn_fp4_search::squares::SUMS;
use burn_fp4_search::{Fp4Scheme, GramLayout, Hadamard, Method};

use self::device::{
    capability, computes_with_bytes, contiguous, has_kernels, kernel_dtype, output_tensor, words,
    writable,
};
use self::matmul::{DENSE, FUSED, GROUPS, handles, launch_chain, scheme_of};
use super::extension::Fp4Backend;
use super::portable;
use super::portable::bias::add_bias;
use crate::factorization::Factorization;
use crate::layout::{Fp4Layout, Fp4Primitive, amax_shape};
use crate::saturated::Saturated;

const CHECKED: &str = "callers check scheme and layout";

/// Quantizes with a kernel.
fn quantize(
    values: CubeTensor,
    amax: CubeTensor,
    axis: usize,
    scheme: Fp4Scheme,
    launch: impl FnOnce(
        &Client,
        &Capability,
        Handle,
        Handle,
        &Problem,
    ) -> Result<PackedHandles, Refusal>,
) -> Fp4Primitive<CubeBackend> {
    let shape = values.meta.shape().clone();
    let (values, view) = contiguous(values, axis);
    let problem = Problem { view, dtype: kernel_dtype(values.dtype), scheme };
    quantize_on(&values, amax, axis, &shape, scheme, |client, device, amax| {
        launch(client, device, values.handle.clone(), amax, &problem)
    })
}

/// Quantizes a tensor of a shape with a kernel, on the client and device of another tensor.
fn quantize_on(
    like: &CubeTensor,
    amax: CubeTensor,
    axis: usize,
    shape: &Shape,
    scheme: Fp4Scheme,
    launch: impl FnOnce(&Client, &Capability, Handle) -> Result<PackedHandles, Refusal>,
) -> Fp4Primitive<CubeBackend> {
    let layout = Fp4Layout::new(shape, axis, &scheme).expect(CHECKED);
    let amax = into_contiguous(amax);
    let tensor_scales = amax.meta.shape().clone();
    let device = Capability::of(&like.client);
    let packed = launch(&like.client, &device, amax.handle).expect(CHECKED);
    Fp4Primitive {
        codes: output_tensor(like, packed.codes, layout.codes_shape().into(), DType::U8),
        scales: output_tensor(like, packed.scales, layout.scales_shape().into(), DType::U8),
        tensor_scale: output_tensor(like, packed.tensor_scale, tensor_scales, DType::I32),
    }
}

/// Multiplies straight from the codes if there is a plan, otherwise by the dense weight.
fn multiply(
    input: CubeTensor,
    weight: Fp4Primitive<CubeBackend>,
    bias: Option<CubeTensor>,
    layout: Fp4Layout,
) -> CubeTensor {
    let [m, n] = [input.meta.shape()[0], layout.shape[1]];
    let planner = matmul::Planner::new(&input.device, &input.client);
    let plan = planner.ok().and_then(|mut planner| planner.plan(m, &layout, input.dtype));
    if let Some(plan) = plan {
        FUSED.fetch_add(1, Ordering::Relaxed);
        GROUPS.fetch_add(1, Ordering::Relaxed);
        let input = portable::transformed_input::<CubeBackend>(input, &layout);
        return matmul::run(&plan, input, weight, bias, Shape::new([m, n]));
    }
    DENSE.fetch_add(1, Ordering::Relaxed);
    let product = portable::matmul::<CubeBackend>(input, weight, layout);
    match bias {
        Some(bias) => add_bias::<CubeBackend>(product, bias),
        None => product,
    }
}

/// Multiplies in FP8 if there is a plan, otherwise as [`multiply`] does.
fn multiply_in_fp8(
    input: CubeTensor,
    weight: Fp4Primitive<CubeBackend>,
    rows: CubeTensor,
    bias: Option<CubeTensor>,
    layout: Fp4Layout,
) -> CubeTensor {
    let [m, n] = [input.meta.shape()[0], layout.shape[1]];
    let planner = matmul::Planner::new(&input.device, &input.client);
    match planner.and_then(|planner| planner.plan_fp8(m, &layout, input.dtype)) {
        Ok(plan) => {
            FUSED.fetch_add(1, Ordering::Relaxed);
            GROUPS.fetch_add(1, Ordering::Relaxed);
            let input = portable::transformed_input::<CubeBackend>(input, &layout);
            matmul::run_in_fp8(&plan, input, weight, rows, bias, Shape::new([m, n]))
        }
        Err(_) => multiply(input, weight, bias, layout),
    }
}

/// Returns true if tensor operations of a device round quotients as IEEE 754 asks, which the
/// reference's bits need. Vulkan allows errors of 2.5 units in the last place, and drivers of
/// NVIDIA make them. The first call for a device divides some thousand pairs.
fn divides_exactly(device: &CubeDevice) -> bool {
    static TESTED: Mutex<Vec<(CubeDevice, bool)>> = Mutex::new(Vec::new());
    const PAIRS: usize = 4096;
    let mut tested = TESTED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, exact)) = tested.iter().find(|(known, _)| known == device) {
        return *exact;
    }
    // Steps of a multiplicative generator: significands without a pattern, between 1 and 2.
    let value = |at: usize| {
        f32::from_bits(0x3F80_0000 | ((at as u32 + 1).wrapping_mul(2_654_435_769) >> 9))
    };
    let tensor = |first: usize| {
        let values: Vec<_> = (first..first + PAIRS).map(value).collect();
        CubeBackend::float_from_data(TensorData::new(values, [PAIRS]), device)
    };
    let quotients =
        portable::on_host::read::<CubeBackend>(CubeBackend::float_div(tensor(0), tensor(PAIRS)));
    let exact = (0..PAIRS).all(|at| quotients[at] == value(at) / value(PAIRS + at));
    tested.push((device.clone(), exact));
    exact
}

/// Returns signed bytes as i32, using words.
fn signed_bytes(bytes: &CubeTensor) -> CubeTensor {
    let words = words(bytes, DType::I32);
    let count = words.meta.num_elements();
    let byte = |place: i64| {
        let first = CubeBackend::bitwise_left_shift_scalar(words.clone(), (24 - 8 * place).into());
        let byte = CubeBackend::bitwise_right_shift_scalar(first, 24i64.into());
        CubeBackend::int_reshape(byte, Shape::new([count, 1]))
    };
    let bytes_of_words = CubeBackend::int_cat((0..4).map(byte).collect(), 1);
    CubeBackend::int_reshape(bytes_of_words, bytes.meta.shape().clone())
}

impl Fp4Backend for CubeBackend {
    fn fp4_amax(values: FloatTensor<Self>, axis: usize, by_row: bool) -> FloatTensor<Self> {
        let mut device = Capability::of(&values.client);
        let mut read = values.clone();
        if device.portable.is_some() {
            // Burn's maximum of many values is wrong on some drivers, such as Mesa's lavapipe.
            read = Self::float_cast(read, FloatDType::F32);
            device.plane = 1;
        } else if !has_kernels(&values.device) {
            return portable::amax::<Self>(values, axis, by_row);
        }
        let shape = amax_shape(values.meta.shape(), axis, by_row);
        let (like, view) = contiguous(read, axis);
        let (memory, dtype) = (like.handle.clone(), kernel_dtype(like.dtype));
        match burn_fp4_cubecl::amax(&like.client, &device, memory, view, dtype, by_row) {
            Ok(amax) => output_tensor(&like, amax, shape, DType::F32),
            // A wgpu device with small cubes.
            Err(Refusal::Device { .. }) => portable::amax::<Self>(values, axis, by_row),
            Err(refusal) => panic!("{CHECKED}: {refusal}"),
        }
    }

    fn fp4_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        if !has_kernels(&values.device) {
            return match computes_with_bytes(&values.client) && divides_exactly(&values.device) {
                true => portable::quantize::<Self>(values, amax, axis, scheme),
                false => portable::quantize_on_host::<Self>(values, amax, axis, scheme),
            };
        }
        quantize(values, amax, axis, scheme, quantize_kernel)
    }

    fn fp4_quantize_by_importance(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        costs: FloatTensor<Self>,
        bounds: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        let costs = into_contiguous(costs);
        let bounds = into_contiguous(bounds);
        match scheme.method {
            Method::Sse(_) if has_kernels(&values.device) => {
                let weights = Some(costs.handle);
                quantize(values, amax, axis, scheme, |client, device, values, amax, problem| {
                    quantize_weighted(client, device, values, amax, weights, problem)
                })
            }
            Method::Hessian | Method::CoordinateDescent if has_kernels(&values.device) => {
                let hessians = Hessians { values: costs.handle, bounds: bounds.handle };
                quantize(values, amax, axis, scheme, |client, device, values, amax, problem| {
                    quantize_by_hessian(client, device, values, amax, hessians, problem)
                })
            }
            _ => {
                portable::quantize_by_importance::<Self>(values, amax, costs, bounds, axis, scheme)
            }
        }
    }

    fn fp4_quantize_gptq(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        factorization: Arc<Factorization>,
    ) -> Fp4Primitive<Self> {
        let Some(on_device) = factorization.on_cube() else {
            return portable::quantize_gptq::<Self>(values, amax, axis, scheme, factorization);
        };
        let channels = factorization.channels();
        let problem =
            Problem { view: View::along(values.meta.shape(), axis), dtype: Dtype::F32, scheme };
        // Channels first, in the order of the Hessian factor.
        let shape = values.meta.shape().clone();
        let rank = shape.num_dims();
        let axes: Vec<_> = [axis].into_iter().chain((0..rank).filter(|&dim| dim != axis)).collect();
        let values = Self::float_permute(Self::float_cast(values, FloatDType::F32), &axes);
        let values = Self::float_reshape(
            values,
            Shape::new([channels, shape.num_elements() / channels.max(1)]),
        );
        let order = factorization.order().iter().map(|&channel| channel as i32).collect();
        let order = Self::int_from_data(TensorData::new(order, [channels]), &values.device);
        let values = into_contiguous(Self::float_select(values, 0, order));
        quantize_on(&values, amax, axis, &shape, scheme, |client, device, amax| {
            let values = values.handle.clone();
            let options = factorization.damped().options();
            quantize_gptq(client, device, values, amax, on_device, options, &problem)
        })
    }

    fn fp4_solve(
        columns: FloatTensor<Self>,
        factorization: Arc<Factorization>,
    ) -> FloatTensor<Self> {
        let factor = match factorization.on_cube() {
            Some(on_device) => {
                let shape = Shape::new([factorization.channels(); 2]);
                output_tensor(&columns, on_device.factor().clone(), shape, DType::F32)
            }
            None => portable::on_host::factor::<Self>(&factorization, &columns.device),
        };
        portable::gram::solve::<Self>(factor, columns, Self::fp4_deterministic_matmul)
    }

    fn fp4_dequantize(
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        launch_chain();
        if let Some(hadamard) = layout.hadamard {
            return portable::dequantize_transformed::<Self>(packed, layout, hadamard, dtype);
        }
        let like = packed.codes.clone();
        let device = match capability(&like.device, &like.client) {
            Ok(device) => device,
            Err(_) if computes_with_bytes(&like.client) => {
                return portable::dequantize::<Self>(packed, layout, dtype);
            }
            // The host cannot read the codes back.
            Err(refusal) if cfg!(target_family = "wasm") => panic!("{refusal}"),
            Err(_) => return portable::on_host::dequantize::<Self>(packed, layout, dtype),
        };
        let dtype = DType::from(dtype);
        let problem =
            Problem { view: layout.view(), dtype: kernel_dtype(dtype), scheme: scheme_of(&layout) };
        let handles = handles(packed.clone());
        match burn_fp4_cubecl::dequantize(&like.client, &device, handles, &problem) {
            Ok(values) => output_tensor(&like, values, layout.shape.into(), dtype),
            // A wgpu device without buffers of the dtype.
            Err(Refusal::Device { .. }) => {
                let values = Self::fp4_dequantize(packed, layout, FloatDType::F32);
                Self::float_cast(values, FloatDType::from(dtype))
            }
            Err(refusal) => panic!("{CHECKED}: {refusal}"),
        }
    }

    fn fp4_largest(packed: Fp4Primitive<Self>, layout: Fp4Layout) -> FloatTensor<Self> {
        // As words, which WGSL has too.
        let (shape, device) = (packed.codes.meta.shape().clone(), packed.codes.device.clone());
        let sixes = i64::from(i32::from_ne_bytes([portable::dequantize::SIXES; 4]));
        let words = Shape::new([shape.num_elements().div_ceil(4)]);
        let words = Self::int_full(words, sixes.into(), &device, IntDType::I32);
        let codes = output_tensor(&words, words.handle.clone(), shape, DType::U8);
        Self::fp4_dequantize(Fp4Primitive { codes, ..packed }, layout, FloatDType::F32)
    }

    fn fp4_dequantize_int8(codes: IntTensor<Self>, scales: FloatTensor<Self>) -> FloatTensor<Self> {
        let codes = match computes_with_bytes(&codes.client) {
            true => codes,
            false => signed_bytes(&into_contiguous(codes)),
        };
        portable::dequantize::dequantize_int8::<Self>(codes, scales)
    }

    fn fp4_select_rows(packed: Fp4Primitive<Self>, rows: IntTensor<Self>) -> Fp4Primitive<Self> {
        if computes_with_bytes(&packed.codes.client) {
            return portable::select_rows::<Self>(packed, rows);
        }
        let indices = into_contiguous(Self::int_cast(rows.clone(), IntDType::I32));
        let [count] = indices.meta.shape()[..] else { unreachable!("{CHECKED}") };
        let gather = |part: CubeTensor| {
            let part = into_contiguous(part);
            let [rows, cols] = part.meta.shape()[..] else { unreachable!("{CHECKED}") };
            let (device, indices) = (Capability::of(&part.client), indices.handle.clone());
            let bytes = part.handle.clone();
            let gathered = gather_rows(&part.client, &device, bytes, [rows, cols], indices, count);
            output_tensor(&part, gathered.expect(CHECKED), Shape::new([count, cols]), part.dtype)
        };
        let by_row = packed.tensor_scale.meta.num_elements() > 1;
        Fp4Primitive {
            codes: gather(packed.codes),
            scales: gather(packed.scales),
            tensor_scale: match by_row {
                true => Self::int_select(packed.tensor_scale, 0, rows),
                false => packed.tensor_scale,
            },
        }
    }

    fn fp4_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        multiply(input, weight, None, layout)
    }

    fn fp4_linear(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        bias: FloatTensor<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        multiply(input, weight, Some(bias), layout)
    }

    fn fp4_fp8_rows(weight: Fp4Primitive<Self>, layout: Fp4Layout) -> FloatTensor<Self> {
        if !has_kernels(&weight.codes.device) {
            return portable::on_host::fp8_rows::<Self>(weight, &layout);
        }
        let like = weight.codes.clone();
        let [k, n] = layout.shape[..] else { unreachable!("{CHECKED}") };
        let Fp4Layout { format, block_size, .. } = layout;
        let matmul = Matmul { m: 0, n, k, format, block_size, dtype: Dtype::Bf16 };
        let rows = burn_fp4_cubecl::fp8_rows(&like.client, handles(weight), &matmul);
        output_tensor(&like, rows.expect(CHECKED), Shape::new([2, n]), DType::F32)
    }

    fn fp4_fp8_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        rows: FloatTensor<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        multiply_in_fp8(input, weight, rows, None, layout)
    }

    fn fp4_fp8_linear(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        rows: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        multiply_in_fp8(input, weight, rows, Some(bias), layout)
    }

    fn fp4_fake_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        target: DequantTarget,
        _for_gradients: Saturated,
    ) -> FloatTensor<Self> {
        if !has_kernels(&values.device) {
            let dequantize = Self::fp4_dequantize;
            return portable::fake_quantize::<Self>(values, amax, axis, scheme, target, dequantize);
        }
        let values = into_contiguous(values);
        let shape = values.meta.shape().clone();
        let problem =
            Problem { view: View::along(&shape, axis), dtype: kernel_dtype(values.dtype), scheme };
        let amax = into_contiguous(amax).handle;
        let device = Capability::of(&values.client);
        let output = burn_fp4_cubecl::fake_quantize(
            &values.client,
            &device,
            values.handle.clone(),
            amax,
            &problem,
            target,
        )
        .expect(CHECKED);
        output_tensor(&values, output, shape, values.dtype)
    }

    fn fp4_hadamard(
        values: FloatTensor<Self>,
        axis: usize,
        hadamard: Hadamard,
        inverse: bool,
    ) -> FloatTensor<Self> {
        let Ok(device) = capability(&values.device, &values.client) else {
            return portable::hadamard::<Self>(values, axis, hadamard, inverse);
        };
        let values = into_contiguous(values);
        let shape = values.meta.shape().clone();
        let output = burn_fp4_cubecl::hadamard(
            &values.client,
            &device,
            values.handle.clone(),
            View::along(&shape, axis),
            kernel_dtype(values.dtype),
            hadamard,
            inverse,
        );
        match output {
            Ok(output) => output_tensor(&values, output, shape, values.dtype),
            // A wgpu device: sixteen neighbours, or no buffers of the dtype.
            Err(Refusal::Device { .. }) => {
                portable::hadamard::<Self>(values, axis, hadamard, inverse)
            }
            Err(refusal) => panic!("{CHECKED}: {refusal}"),
        }
    }

    fn fp4_add_gram(
        sums: FloatTensor<Self>,
        activations: FloatTensor<Self>,
        layout: GramLayout,
        first: usize,
    ) -> FloatTensor<Self> {
        if !has_kernels(&sums.device) || sums.dtype != DType::F64 {
            return portable::add_gram::<Self>(sums, activations, layout, first);
        }
        let sums = writable(sums);
        let x = into_contiguous(activations);
        let [rows, tiles] = [x.meta.shape()[0], sums.meta.shape()[0]];
        burn_fp4_cubecl::add_gram(
            &x.client,
            &Capability::of(&x.client),
            &Activations { values: x.handle.clone(), dtype: kernel_dtype(x.dtype), rows },
            sums.handle.clone(),
            layout,
            first..first + tiles,
        )
        .expect(CHECKED);
        sums
    }

    fn fp4_deterministic_matmul(
        left: FloatTensor<Self>,
        right: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        deterministic::matmul(left, right)
    }

    fn fp4_deterministic_sum(
        values: FloatTensor<Self>,
        axis: usize,
        mean: bool,
    ) -> FloatTensor<Self> {
        deterministic::sum(values, axis, mean)
    }

    fn fp4_squared_error(
        values: FloatTensor<Self>,
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        if !has_kernels(&values.device) {
            return portable::squared_error::<Self>(values, packed, layout);
        }
        let values = into_contiguous(values);
        let problem = Problem {
            view: layout.view(),
            dtype: kernel_dtype(values.dtype),
            scheme: scheme_of(&layout),
        };
        let device = Capability::of(&values.client);
        let partial = burn_fp4_cubecl::squared_error(
            &values.client,
            &device,
            values.handle.clone(),
            handles(packed),
            &problem,
        )
        .expect(CHECKED);
        let sums =
            output_tensor(&values, partial.sums, Shape::new([SUMS, partial.count]), DType::F32);
        Self::float_reshape(Self::float_sum_dim(sums, 1), Shape::new([SUMS]))
    }
}
