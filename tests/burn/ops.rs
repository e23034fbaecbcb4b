//! Operations on Burn tensors: any axis, any rank, any device, gradients, errors.

use std::sync::Arc;

use burn::backend::Flex;
use burn::backend::ops::FloatTensorOps;
use burn::module::Module;
use burn::nn::EmbeddingConfig;
use burn::tensor::quantization::{QuantMode, QuantScheme, QuantStore, QuantValue, ScaleDtype};
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor, TensorData, read_sync};
use burn_fp4::{Fp4Config, Fp4Embedding, Fp4Module};
use burn_fp4_ops::{
    Activations, BlockHessians, BlockOrder, DequantizeReason, Fp4Layout, Fp4Scheme, Fp4Tensor,
    Fp8Path, Fp8Weight, Gptq, Gram, GramSum, HessianFactor, Importance, MatmulPath, Method,
    NonFinite, OpsError, ScaleRule, TensorScaling, amax, block_hessians, embedding, fake_quantize,
    gram, is_host, linear, linear_with, matmul, matmul_path, modelopt, portable, quantize,
    quantize_by_importance, quantize_family, quantize_gptq, quantize_with_best_tensor_scale,
    quantize_with_hessian_factor, squared_sums,
};
use burn_fp4_search::formats::{FormatError, Fp4Format, Packed, TensorScale, bf16};
use burn_fp4_search::{SearchError, quantize as oracle};
use tests::compare::{assert_bits, assert_same};
use tests::engines::devices;
use tests::inputs::{Kind, normals};
use tests::modules::seeded;
use tests::tensors::{floats, sums};

fn values<const D: usize>(shape: [usize; D], device: &Device, dtype: DType) -> Tensor<D> {
    let data = Kind::Outliers.values(shape.iter().product(), 11);
    Tensor::<D>::from_data(TensorData::new(data, shape), (device, DType::F32))
        .cast(FloatDType::from(dtype))
}

/// Moves the axis last, in f32 on the host: rows for the oracle.
fn rows<const D: usize>(tensor: Tensor<D>, axis: usize) -> (Vec<f32>, usize, usize) {
    let cols = tensor.dims()[axis];
    let mut order: Vec<usize> = (0..D).filter(|&dim| dim != axis).collect();
    order.push(axis);
    let order: [isize; D] = core::array::from_fn(|at| order[at] as isize);
    let values = floats(tensor.permute(order));
    let rows = values.len() / cols;
    (values, rows, cols)
}

#[test]
fn tensors_of_any_rank_quantize_along_any_axis_on_any_device() {
    fn check<const D: usize>(shape: [usize; D], axis: usize) {
        for (name, device, dtypes) in devices() {
            for dtype in dtypes {
                for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4().with_block_size(16)] {
                    let tensor = values(shape, &device, dtype);
                    let packed = quantize(tensor.clone(), axis, &scheme).unwrap();
                    let (dense, m, k) = rows(tensor.clone(), axis);
                    let expected = oracle(&dense, m, k, &scheme).unwrap();
                    let what = format!("{name} {shape:?} axis {axis} {dtype:?}");
                    assert_same(&what, &packed.to_packed().unwrap(), &expected);
                    assert_eq!(packed.dims(), shape);
                    let restored = rows(packed.dequantize(), axis).0;
                    assert_bits(&what, &restored, &expected.dequantize());
                    // One rounding to the narrower type.
                    let dtype = FloatDType::from(dtype);
                    let narrow = packed.dequantize().cast(dtype);
                    let rounded = packed.dequantize_to(dtype);
                    assert_eq!(rounded.dtype(), narrow.dtype());
                    assert_bits(&what, &floats(rounded.clone()), &floats(narrow));
                    let fake = fake_quantize(tensor.clone(), axis, &scheme).unwrap();
                    assert_bits(&what, &floats(fake), &floats(rounded));

                    let sums = sums(packed.squared_error(tensor.clone()).unwrap());
                    let pairs = dense.iter().zip(&restored);
                    let error: f64 = pairs.map(|(a, b)| (*a as f64 - *b as f64).powi(2)).sum();
                    let energy: f64 = dense.iter().map(|a| (*a as f64).powi(2)).sum();
                    for (found, expected) in [(sums[0], error), (sums[1], energy)] {
                        assert!((found - expected).abs() <= 1e-6 * expected, "{what}");
                    }
                }
            }
        }
    }
    check([64], 0);
    check([48, 20], 0);
    check([20, 48], 1);
    check([3, 32, 5], 1);
    check([32, 3, 5], 0);
    check([3, 5, 32], 2);
    check([2, 3, 16, 4], 2);
}

#[test]
fn views_quantize_like_copies() {
    for (name, device, _) in devices() {
        views_quantize_like_copies_on(name, &device);
    }
}

fn views_quantize_like_copies_on(name: &str, device: &Device) {
    let tensor = values([32, 48], device, DType::F32);
    let packed = |tensor: Tensor<2>, axis| {
        quantize(tensor, axis, &Fp4Scheme::nvfp4()).unwrap().to_packed().unwrap()
    };
    let transposed = tensor.clone().transpose();
    assert_same(name, &packed(transposed.clone(), 0), &packed(tensor.clone(), 1));
    assert_same(name, &packed(transposed, 1), &packed(tensor.clone(), 0));
    let sliced = tensor.clone().slice([8..24, 16..48]);
    let copied = Tensor::from_data(sliced.clone().into_data(), (device, DType::F32));
    assert_same(name, &packed(sliced.clone(), 1), &packed(copied.clone(), 1));
    assert_same(name, &packed(sliced, 0), &packed(copied, 0));
}

#[test]
fn a_transpose_copies_nothing() {
    let device = Device::flex();
    let weight = values([32, 48], &device, DType::F32);
    let packed = quantize(weight, 1, &Fp4Scheme::nvfp4()).unwrap();
    let turned = packed.clone().transpose();
    assert_eq!((turned.dims(), turned.axis()), ([48, 32], 0));
    assert_bits(
        "transpose",
        &floats(turned.dequantize()),
        &floats(packed.dequantize().transpose()),
    );
}

/// Compares with sums in f64. The tolerance covers the rounding of f32 sums, of half-precision
/// weights and of the output; dense products on CUDA round f32 factors to 11 bits.
fn check_matmul<const D: usize>(
    what: &str,
    weight: &Fp4Tensor<2>,
    input: &Tensor<D>,
    found: Tensor<D>,
) {
    let [channels, outputs] = weight.dims();
    let rounding = match input.dtype() {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ if what.starts_with("cuda") => 2f64.powi(-10),
        _ => 0.0,
    };
    assert_eq!(found.dtype(), input.dtype(), "{what}");
    let mut shape = input.dims();
    shape[D - 1] = outputs;
    assert_eq!(found.dims(), shape, "{what}");
    let (dense, input, found) = (floats(weight.dequantize()), floats(input.clone()), floats(found));
    for (at, found) in found.into_iter().enumerate() {
        let (row, output) = (at / outputs, at % outputs);
        let terms = (0..channels).map(|k| {
            let [x, w] = [input[row * channels + k], dense[k * outputs + output]];
            f64::from(x) * f64::from(w)
        });
        let (sum, size) =
            terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()));
        let near = (f64::from(found) - sum).abs() <= (1e-5 + 2.0 * rounding) * size + 1e-7;
        assert!(near, "{what}, row {row}, output {output}: {found}, not {sum}");
    }
}

#[test]
fn matmul_multiplies_by_the_dequantized_weight() {
    for (name, device, dtypes) in devices() {
        let row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
        for (inputs, channels, outputs, scheme) in [
            (1, 16, 1, Fp4Scheme::nvfp4()),
            (1, 160, 70, Fp4Scheme::mxfp4()),
            (2, 48, 33, row),
            (3, 32, 5, Fp4Scheme::nvfp4().with_block_size(32)),
            (4, 272, 40, Fp4Scheme::nvfp4()),
            (5, 80, 65, Fp4Scheme::mxfp4().with_block_size(16)),
            (9, 64, 3, row),
            (67, 96, 17, Fp4Scheme::nvfp4()),
        ] {
            for &dtype in &dtypes {
                let weight = values([channels, outputs], &device, DType::F32);
                let weight = quantize(weight, 0, &scheme).unwrap();
                let input = values([inputs, channels], &device, dtype);
                let what = format!("{name} {dtype:?} {inputs} x {channels} x {outputs} {scheme:?}");
                let found = matmul(input.clone(), &weight).unwrap();
                check_matmul(&what, &weight, &input, found);
                let batch = input.unsqueeze::<4>();
                let found = matmul(batch.clone(), &weight).unwrap();
                check_matmul(&what, &weight, &batch, found);
            }
        }
        // No rows, and not contiguous.
        let weight = quantize(values([32, 24], &device, DType::F32), 0, &Fp4Scheme::nvfp4());
        let weight = weight.unwrap();
        let empty = Tensor::<2>::zeros([0, 32], &device);
        assert_eq!(matmul(empty, &weight).unwrap().dims(), [0, 24]);
        let strided = values([32, 6], &device, DType::F32).transpose();
        let found = matmul(strided.clone(), &weight).unwrap();
        check_matmul(name, &weight, &strided, found);
    }
    let device = Device::flex();
    let input = Tensor::<2>::ones([2, 32], &device);
    let along_other =
        quantize(values([24, 32], &device, DType::F32), 1, &Fp4Scheme::nvfp4()).unwrap();
    assert!(matches!(matmul(input.clone(), &along_other), Err(OpsError::Contraction { .. })));
    let along = along_other.transpose();
    assert_eq!(matmul(input.clone(), &along).unwrap().dims(), [2, 24]);
    let wide = input.cast(DType::F64);
    assert!(matches!(matmul(wide, &along), Err(OpsError::DType { .. })));
}

#[test]
fn int8_activations_change_products_by_half_a_step_at_most() {
    for (name, device, _) in devices() {
        for (inputs, channels, outputs, scheme) in [
            (1, 576, 70, Fp4Scheme::nvfp4()),
            (3, 96, 33, Fp4Scheme::mxfp4()),
            (17, 272, 40, Fp4Scheme::nvfp4()),
        ] {
            let weight = values([channels, outputs], &device, DType::F32);
            let weight = quantize(weight, 0, &scheme).unwrap();
            let input = values([inputs, channels], &device, DType::F32);
            let bias = values([outputs], &device, DType::F32);
            let product = |activations| {
                let input = input.clone().unsqueeze::<3>();
                let product = linear_with(input, &weight, Some(bias.clone()), activations);
                let product = product.unwrap();
                assert_eq!(product.dims(), [1, inputs, outputs], "{name}");
                floats(product)
            };
            let (expected, found) = (product(Activations::F32), product(Activations::Int8));
            let (dense, input) = (floats(weight.dequantize()), floats(input.clone()));
            let mut differ = false;
            for (at, (found, expected)) in found.into_iter().zip(expected).enumerate() {
                let (row, output) = (at / outputs, at % outputs);
                let (mut half_steps, mut size) = (0.0, 0.0);
                for (block, x) in
                    input[row * channels..][..channels].chunks(scheme.block_size).enumerate()
                {
                    let amax = x.iter().fold(0f32, |amax, x| amax.max(x.abs()));
                    for (k, x) in x.iter().enumerate() {
                        let w = dense[(block * scheme.block_size + k) * outputs + output].abs();
                        half_steps += w * amax / 254.0;
                        size += w * x.abs();
                    }
                }
                let near = (found - expected).abs() <= half_steps + 1e-5 * (1.0 + size);
                assert!(near, "{name}, row {row}, output {output}: {found}, not {expected}");
                differ |= found != expected;
            }
            assert_eq!(differ, is_host(&device), "{name}");
        }
    }
}

/// Products in FP8 on devices that have them, emulated on hosts; others read the input as it is,
/// and say so.
#[test]
fn activations_in_fp8_are_read_as_the_device_says() {
    for (name, device, _) in devices() {
        // `ndarray` and WGSL have no bf16.
        let halves = !is_host(&device) && device.supports_dtype(DType::BF16);
        let dtype = if halves { FloatDType::BF16 } else { FloatDType::F32 };
        for (scheme, exact) in [(Fp4Scheme::mxfp4(), true), (Fp4Scheme::nvfp4(), false)] {
            let (rows, channels, outputs) = (130, 256, 24);
            let normal = |shape: [usize; 2]| {
                let data = TensorData::new(normals(7, shape[0] * shape[1]), shape);
                Tensor::<2>::from_data(data, (&device, DType::F32)).cast(dtype)
            };
            let weight = quantize(normal([channels, outputs]), 0, &scheme).unwrap();
            let facts = Fp8Weight::of(&weight).unwrap();
            let on_host = burn_fp4_search::fp8_rows(&weight.to_packed().unwrap());
            let inexact: f32 = on_host[outputs..].iter().sum();
            assert_eq!(facts.inexact_blocks(), inexact as usize, "{name}");
            assert_eq!(facts.inexact_blocks() == 0, exact, "{name}");
            let (input, bias) = (normal([rows, channels]), normal([1, outputs]).reshape([outputs]));
            let product = |activations, bias| {
                floats(linear_with(input.clone(), &weight, bias, activations).unwrap())
            };
            let in_fp8 = match facts.path(&weight, rows, dtype.into()) {
                Fp8Path::Fp8 | Fp8Path::Emulated => true,
                Fp8Path::Inexact { blocks } => {
                    assert_eq!(blocks, facts.inexact_blocks(), "{name}");
                    false
                }
                other => {
                    assert!(matches!(other, Fp8Path::Unplanned { .. }), "{name}: {other}");
                    false
                }
            };
            assert!(!in_fp8 || exact, "{name}");
            let rounded = facts.clone().with_rounding(true).path(&weight, rows, dtype.into());
            let expected = match facts.path(&weight, rows, dtype.into()) {
                Fp8Path::Inexact { .. } if is_host(&device) => Fp8Path::Emulated,
                Fp8Path::Inexact { blocks } => Fp8Path::Rounded { blocks },
                path => path,
            };
            assert_eq!(rounded, expected, "{name}");
            let is_multiplied = !matches!(rounded, Fp8Path::Unplanned { .. });
            let few = facts.path(&weight, 128, dtype.into());
            assert!(is_host(&device) || matches!(few, Fp8Path::Unplanned { .. }), "{name}: {few}");
            for bias in [None, Some(bias)] {
                let expected = product(Activations::F32, bias.clone());
                for (activations, in_fp8) in
                    [(Activations::Fp8, in_fp8), (Activations::Fp8Rounded, is_multiplied)]
                {
                    let found = product(activations, bias.clone());
                    let square = |values: &[f32]| values.iter().map(|x| x * x).sum::<f32>();
                    let differences: Vec<_> =
                        found.iter().zip(&expected).map(|(a, b)| a - b).collect();
                    let relative = (square(&differences) / square(&expected)).sqrt();
                    let range = if in_fp8 { 0.005..0.06 } else { 0.0..1e-9 };
                    assert!(range.contains(&relative), "{name}, {activations:?}: {relative}");
                }
            }
        }
    }
}

#[test]
fn the_memory_of_a_dequantized_weight_is_reused() {
    let device = Device::flex();
    let weight = |seed: f32| {
        let values = values([1024, 1024], &device, DType::F32) * seed;
        quantize(values, 0, &Fp4Scheme::nvfp4()).unwrap()
    };
    let (first, second) = (weight(1.0), weight(-3.0));
    let (expected, others) = (floats(first.dequantize()), floats(second.dequantize()));
    let dense = first.dequantize();
    // While it is in use, another gets memory of its own.
    let other = second.dequantize();
    assert_bits("first", &floats(dense.clone()), &expected);
    assert_bits("second", &floats(other.clone()), &others);
    // Writing into a dense weight must not write into the memory that is reused.
    drop((dense.clone() * 2.0, dense + 1.0, other));
    let address = |data: &TensorData| data.as_bytes().as_ptr();
    let once = first.dequantize().into_data();
    let place = address(&once);
    drop(once);
    let again = second.dequantize().into_data();
    assert_eq!(address(&again), place);
    assert_bits("again", again.as_slice::<f32>().unwrap(), &others);
}

#[test]
fn gradients_of_the_input_flow_through_matmul() {
    for (name, device, _) in devices() {
        let device = device.autodiff();
        let dense = values([32, 24], &device, DType::F32);
        let weight = quantize(dense, 0, &Fp4Scheme::nvfp4()).unwrap();
        let input = values([5, 32], &device, DType::F32).require_grad();
        let factors = values([5, 24], &device, DType::F32);
        let output = matmul(input.clone(), &weight).unwrap();
        let found = input.grad(&(output * factors.clone()).sum().backward()).unwrap();
        let expected = factors.clone().without_autodiff().matmul(weight.dequantize().transpose());
        assert_bits(name, &floats(found), &floats(expected.clone()));
        for activations in [Activations::Int8, Activations::Fp8, Activations::Fp8Rounded] {
            let output = linear_with(input.clone(), &weight, None, activations).unwrap();
            let found = input.grad(&(output * factors.clone()).sum().backward()).unwrap();
            assert_bits(name, &floats(found), &floats(expected.clone()));
        }
    }
}

#[test]
fn gradients_pass_straight_through_fake_quantization() {
    for (name, device, _) in devices() {
        let device = device.autodiff();
        let input = values([16, 32], &device, DType::F32).require_grad();
        let weights = Tensor::<2>::random([16, 32], Distribution::Normal(0.0, 1.0), &device);
        let fake = fake_quantize(input.clone(), 1, &Fp4Scheme::nvfp4()).unwrap();
        let gradients = (fake * weights.clone()).sum().backward();
        let found = input.grad(&gradients).expect("the input is tracked");
        assert_bits(name, &floats(found), &floats(weights.without_autodiff()));
    }
}

#[test]
fn errors_name_the_problem_and_its_place() {
    let device = Device::flex();
    let nvfp4 = Fp4Scheme::nvfp4();
    let tensor = Tensor::<2>::ones([16, 24], &device);
    assert_eq!(
        quantize(tensor.clone(), 2, &nvfp4).unwrap_err(),
        OpsError::Axis { axis: 2, rank: 2 }
    );
    let indivisible = |axis| OpsError::Indivisible { axis, length: 24, block_size: 16 };
    assert_eq!(quantize(tensor.clone(), 1, &nvfp4).unwrap_err(), indivisible(1));
    let error = quantize(tensor.clone().transpose(), 0, &nvfp4).unwrap_err();
    assert_eq!(error, indivisible(0));
    let said = "axis 0: its 24 values are not a multiple of the block size 16";
    assert_eq!(error.to_string(), said);
    let doubles = Tensor::<1>::ones([16], (&device, DType::F64));
    assert_eq!(quantize(doubles, 0, &nvfp4).unwrap_err(), OpsError::DType { found: DType::F64 });
    for bad in [f32::NAN, f32::INFINITY] {
        let tensor = Tensor::<1>::full([16], bad, &device);
        for scheme in [
            nvfp4,
            Fp4Scheme::mxfp4().with_block_size(16),
            nvfp4.with_tensor_scale(TensorScaling::Amax(1.0)),
        ] {
            assert!(matches!(
                quantize(tensor.clone(), 0, &scheme),
                Err(OpsError::NonFinite { .. })
            ));
            assert!(matches!(
                fake_quantize(tensor.clone(), 0, &scheme),
                Err(OpsError::NonFinite { .. })
            ));
            let follow = scheme.with_non_finite(NonFinite::FollowReference);
            assert!(quantize(tensor.clone(), 0, &follow).is_ok());
        }
    }
    let inconsistent = nvfp4.with_rule(ScaleRule::Floor).with_tensor_scale(TensorScaling::Row);
    assert!(matches!(
        quantize(tensor.clone(), 0, &inconsistent),
        Err(OpsError::Search(SearchError::Scheme { .. }))
    ));
    let negative = nvfp4.with_tensor_scale(TensorScaling::Multiplier(-1.0));
    assert!(matches!(
        quantize(tensor, 0, &negative),
        Err(OpsError::Search(SearchError::TensorScale { .. }))
    ));
}

#[test]
fn parts_and_packed_matrices_are_checked() {
    let device = Device::flex();
    let packed = quantize(values([32, 8], &device, DType::F32), 0, &Fp4Scheme::nvfp4()).unwrap();
    let (codes, scales, bits) = (packed.codes(), packed.scales(), packed.tensor_scale_bits());
    let layout = packed.layout().clone();
    let again =
        Fp4Tensor::<2>::from_parts(codes.clone(), scales.clone(), bits.clone(), layout.clone())
            .unwrap();
    assert_bits("parts", &floats(again.dequantize()), &floats(packed.dequantize()));
    let short = Fp4Tensor::<2>::from_parts(
        codes.clone().slice([0..7, 0..16]),
        scales.clone(),
        bits.clone(),
        layout.clone(),
    );
    assert!(matches!(short, Err(OpsError::Shape { what: "codes", .. })));
    let odd = Fp4Layout { shape: vec![24, 8], ..layout };
    assert!(Fp4Tensor::<2>::from_parts(codes, scales, bits, odd).is_err());

    let host: Packed = packed.to_packed().unwrap();
    let back = Fp4Tensor::<2>::from_packed(host.clone(), [32, 8], 0, &device).unwrap();
    assert_same("round trip", &back.to_packed().unwrap(), &host);
    assert!(matches!(
        Fp4Tensor::<2>::from_packed(host.clone(), [8, 16], 1, &device),
        Err(OpsError::Shape { .. })
    ));
    let broken = Packed { tensor_scale: TensorScale::One(f32::NAN), ..host };
    assert!(matches!(
        Fp4Tensor::<2>::from_packed(broken, [32, 8], 0, &device),
        Err(OpsError::Format(_))
    ));
}

/// Returns a device other than this one.
fn another(name: &str) -> Device {
    let mut devices = devices().into_iter();
    devices.find(|(other, ..)| *other != name).expect("there are two in every build").1
}

/// Reads codes, block scales and the bits of the tensor scale.
type Parts = (Tensor<2, Int>, Tensor<2, Int>, Tensor<1, Int>);

fn parts_of(packed: &Fp4Tensor<2>) -> Parts {
    (packed.codes(), packed.scales(), packed.tensor_scale_bits())
}

fn from_parts((codes, scales, bits): Parts, layout: &Fp4Layout) -> Result<(), OpsError> {
    Fp4Tensor::<2>::from_parts(codes, scales, bits, layout.clone()).map(drop)
}

fn from_parts_unread((codes, scales, bits): Parts, layout: &Fp4Layout) -> Result<(), OpsError> {
    Fp4Tensor::<2>::from_parts_unread(codes, scales, bits, layout.clone()).map(drop)
}

#[test]
fn each_wrong_part_is_an_error_that_names_it() {
    for (name, device, _) in devices() {
        for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
            let packed = quantize(values([64, 6], &device, DType::F32), 0, &scheme).unwrap();
            let layout = packed.layout();
            assert_eq!(from_parts(parts_of(&packed), layout), Ok(()), "{name}");
            assert_eq!(from_parts_unread(parts_of(&packed), layout), Ok(()), "{name}");
            parts_of_a_wrong_kind_are_refused(name, &device, &packed);
            wrong_scales_are_refused_where_they_are_read(name, &device, &packed, &scheme);
        }
    }
}

/// Dtypes, devices and shapes are checked without reading values back.
fn parts_of_a_wrong_kind_are_refused(name: &str, device: &Device, packed: &Fp4Tensor<2>) {
    let layout = packed.layout();
    let refused = |parts: Parts, error: OpsError| {
        assert_eq!(from_parts_unread(parts.clone(), layout), Err(error.clone()), "{name}");
        assert_eq!(from_parts(parts, layout), Err(error), "{name}");
    };
    let (codes, scales, bits) = parts_of(packed);
    let wide = |dims: [usize; 2]| Tensor::<2, Int>::zeros(dims, (device, DType::I32));
    let bytes = Tensor::<1, Int>::zeros([1], (device, DType::U8));
    let dtype = |what, expected, found| OpsError::PartDType { what, expected, found };
    refused(
        (wide(codes.dims()), scales.clone(), bits.clone()),
        dtype("codes", DType::U8, DType::I32),
    );
    refused(
        (codes.clone(), wide(scales.dims()), bits.clone()),
        dtype("block scales", DType::U8, DType::I32),
    );
    refused((codes.clone(), scales.clone(), bytes), dtype("tensor scale", DType::I32, DType::U8));

    let elsewhere = another(name);
    let moved = |what| {
        let (expected, found) = (device.clone().into(), elsewhere.clone().into());
        OpsError::PartDevice { what, expected, found }
    };
    let there = scales.clone().to_device(&elsewhere);
    refused((codes.clone(), there, bits.clone()), moved("block scales"));
    let there = bits.clone().to_device(&elsewhere);
    refused((codes.clone(), scales.clone(), there), moved("tensor scale"));

    let shape = |what, expected: &[usize], found: &[usize]| {
        let (expected, found) = (expected.to_vec(), found.to_vec());
        OpsError::Shape { what, expected, found }
    };
    let [rows, blocks] = scales.dims();
    refused(
        (codes.clone().slice([0..rows, 0..16]), scales.clone(), bits.clone()),
        shape("codes", &[rows, 32], &[rows, 16]),
    );
    refused(
        (codes.clone(), scales.clone().slice([0..rows - 1, 0..blocks]), bits.clone()),
        shape("block scales", &[rows, blocks], &[rows - 1, blocks]),
    );
    let three = Tensor::<1, Int>::zeros([3], (device, DType::I32));
    refused((codes.clone(), scales.clone(), three), shape("tensor scale", &[rows], &[3]));
    let off = Fp4Layout { axis: 2, ..layout.clone() };
    let axis = from_parts((codes.clone(), scales.clone(), bits.clone()), &off);
    let rank = Fp4Tensor::<3>::from_parts(codes, scales, bits, layout.clone()).map(drop);
    assert_eq!(rank, Err(shape("shape", &[3], &[2])), "{name}");
    assert_eq!(axis, Err(OpsError::Axis { axis: 2, rank: 2 }), "{name}");
}

/// Only the constructor that reads scales back checks their values.
fn wrong_scales_are_refused_where_they_are_read(
    name: &str,
    device: &Device,
    packed: &Fp4Tensor<2>,
    scheme: &Fp4Scheme,
) {
    let layout = packed.layout();
    let (codes, scales, bits) = parts_of(packed);
    let [_, blocks] = scales.dims();
    let host = packed.to_packed().unwrap();
    let scale = scheme.format().row().block_scale;
    let one = scale.encode(1.0);
    let negative = scale.signed.then_some((scale.sign_bit() | one, "negative"));
    for (code, problem) in [(scale.nan_code(), "NaN")].into_iter().chain(negative) {
        let mut bytes = host.scales.clone();
        bytes[blocks + 1] = code;
        let bytes = TensorData::new(bytes, scales.dims());
        let wrong = Tensor::<2, Int>::from_data(bytes, (device, DType::U8));
        let parts = (codes.clone(), wrong, bits.clone());
        let error = FormatError::BlockScale { row: 1, block: 1, code, problem };
        assert_eq!(from_parts(parts.clone(), layout), Err(error.into()), "{name}");
        assert_eq!(from_parts_unread(parts, layout), Ok(()), "{name}");
    }
    let with_scale = |scale: f32| {
        let data = TensorData::new(vec![scale.to_bits() as i32], [1]);
        let tensor_scale = Tensor::<1, Int>::from_data(data, (device, DType::I32));
        from_parts((codes.clone(), scales.clone(), tensor_scale), layout)
    };
    for scale in [f32::NAN, f32::INFINITY, -1.0] {
        let error = with_scale(scale).unwrap_err();
        let found = matches!(&error, OpsError::Format(FormatError::TensorScale { row: 0, .. }));
        assert!(found, "{name}: {error}");
    }
    let taken = with_scale(2.0).is_ok();
    assert_eq!(taken, scheme.format().row().tensor_scale, "{name}");
}

#[test]
fn tensor_operations_measure_errors_of_any_magnitude() {
    let (shape, scheme) = ([8, 64], Fp4Scheme::mxfp4());
    let layout = Fp4Layout::new(&shape.into(), 1, &scheme).unwrap();
    let relative = |exponent: i32| {
        let factor = 2f32.powi(exponent);
        let data = normals(5, 8 * 64).into_iter().map(|value| value * factor).collect::<Vec<_>>();
        let values = Flex::float_from_data(TensorData::new(data, shape), &Default::default());
        let amax = portable::amax::<Flex>(values.clone(), 1, false);
        let packed = portable::quantize::<Flex>(values.clone(), amax, 1, scheme);
        let found = portable::squared_error::<Flex>(values, packed, layout.clone());
        let found = read_sync(Flex::float_into_data(found)).unwrap();
        let [error, energy] = squared_sums(found.as_slice().unwrap()).unwrap();
        (error / energy).sqrt()
    };
    let expected = relative(0);
    assert!(expected > 0.08 && expected < 0.14, "{expected}");
    for exponent in [-110, -80, -66, -30, 30, 60, 110] {
        let found = relative(exponent);
        assert!((found - expected).abs() < 1e-6, "2^{exponent}: {found} {expected}");
    }
}

/// A format without a tensor scale may have a tensor scale of 1 for each row.
#[test]
fn every_device_takes_every_valid_packed_matrix() {
    let values = Kind::Outliers.values(6 * 64, 4);
    let mut packed = oracle(&values, 6, 64, &Fp4Scheme::mxfp4()).unwrap();
    packed.tensor_scale = TensorScale::PerRow(vec![1.0; 6]);
    for (name, device, _) in devices() {
        let tensor = Fp4Tensor::from_packed(packed.clone(), [6, 64], 1, &device).unwrap();
        assert_bits(name, &floats(tensor.dequantize()), &packed.dequantize());
        let dense = Tensor::from_data(TensorData::new(values.clone(), [6, 64]), &device);
        let sums = sums(tensor.squared_error(dense).unwrap());
        let energy: f64 = values.iter().map(|x| f64::from(x * x)).sum();
        assert!((sums[1] - energy).abs() <= 1e-5 * energy, "{name}: {sums:?}");
    }
}

#[test]
fn a_shape_that_overflows_is_an_error() {
    for shape in [[1 << 20, 1 << 20], [usize::MAX, 1 << 20]] {
        let layout = Fp4Layout {
            format: Fp4Format::NvFp4,
            block_size: 16,
            shape: shape.into(),
            axis: 1,
            hadamard: None,
        };
        assert!(matches!(layout.validate(), Err(OpsError::TooLarge { .. })), "{shape:?}");
    }
    // Empty, but with more packed rows than a `usize` can count.
    let shape = vec![1 << 40, 1 << 40, 0];
    let layout =
        Fp4Layout { format: Fp4Format::NvFp4, block_size: 16, shape, axis: 2, hadamard: None };
    assert!(matches!(layout.validate(), Err(OpsError::TooLarge { .. })));
}

#[test]
fn rows_are_looked_up_from_their_codes() {
    for (name, device, dtypes) in devices() {
        let row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
        for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4(), row] {
            let packed = quantize(values([50, 64], &device, DType::F32), 1, &scheme).unwrap();
            let indices = Tensor::<2, Int>::from_data([[0, 49, 7], [7, 7, 31]], &device);
            for &dtype in &dtypes {
                let dtype = FloatDType::from(dtype);
                let table = packed.dequantize_to(dtype);
                let expected = burn::tensor::module::embedding(table, indices.clone());
                let found = embedding(&packed, indices.clone(), dtype).unwrap();
                assert_eq!((found.dims(), found.dtype()), ([2, 3, 64], expected.dtype()), "{name}");
                assert_bits(&format!("{name} {scheme:?}"), &floats(found), &floats(expected));
            }
            let wanted = [49usize, 3, 3];
            let indices = Tensor::<1, Int>::from_data(wanted.map(|row| row as i32), &device);
            let rows = packed.select_rows(indices).unwrap();
            assert_eq!((rows.dims(), rows.axis()), ([3, 64], 1), "{name}");
            let (rows, all) = (rows.to_packed().unwrap(), packed.to_packed().unwrap());
            let picked = |bytes: &[u8], size: usize| {
                wanted.map(|row| bytes[row * size..][..size].to_vec()).concat()
            };
            assert_eq!(rows.codes, picked(&all.codes, 32), "{name}");
            assert_eq!(rows.scales, picked(&all.scales, all.blocks()), "{name}");
            for (at, row) in wanted.into_iter().enumerate() {
                assert_eq!(rows.tensor_scale.of_row(at), all.tensor_scale.of_row(row), "{name}");
            }
        }
        let down = quantize(values([48, 64], &device, DType::F32), 0, &Fp4Scheme::nvfp4()).unwrap();
        let first = || Tensor::<1, Int>::from_data([0], &device);
        let error = down.select_rows(first()).map(drop);
        assert_eq!(error, Err(OpsError::Rows { axis: 0, rank: 2 }), "{name}");
        let along = down.transpose();
        assert!(along.select_rows(first()).is_ok(), "{name}");
        let elsewhere = another(name);
        let error = along.select_rows(first().to_device(&elsewhere)).map(drop);
        let (expected, found) = (device.clone().into(), elsewhere.into());
        let what = "indices of rows";
        assert_eq!(error, Err(OpsError::PartDevice { what, expected, found }), "{name}");
    }
}

#[test]
fn an_index_out_of_range_panics_on_hosts_as_an_embedding_does() {
    for (name, device, _) in devices() {
        if !["flex", "ndarray"].contains(&name) {
            continue;
        }
        let packed =
            quantize(values([8, 64], &device, DType::F32), 1, &Fp4Scheme::nvfp4()).unwrap();
        let table = packed.dequantize();
        let indices = Tensor::<2, Int>::from_data([[0, 8]], &device);
        let panics = |run: &dyn Fn() -> Tensor<3>| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| floats(run()))).is_err()
        };
        let dense = || burn::tensor::module::embedding(table.clone(), indices.clone());
        let codes = || embedding(&packed, indices.clone(), FloatDType::F32).unwrap();
        assert!(panics(&dense) && panics(&codes), "{name}");
    }
}

#[test]
fn embedding_lookups_equal_the_dequantized_rows() {
    for (name, device, _) in devices() {
        let indices = || Tensor::<2, Int>::from_data([[0, 47, 7]], &device);
        let table = || Fp4Embedding::from(seeded(EmbeddingConfig::new(48, 64).init(&device), 3));
        let dense = floats(table().forward(indices()));
        for axis in [0, 1] {
            let mut table = table();
            let config = Fp4Config::nvfp4().container("Fp4Embedding", axis);
            table.quantize_fp4(&config).unwrap();
            let whole = table.clone().materialize();
            let found = floats(table.forward(indices()));
            assert_bits(name, &found, &floats(whole.forward(indices())));
            assert_ne!(found, dense, "{name}");

            // A head that is tied to it.
            let x = values([3, 64], &device, DType::F32);
            let logits =
                |table: &Fp4Embedding| floats(x.clone().matmul(table.weight.val().transpose()));
            for (found, expected) in logits(&table).iter().zip(logits(&whole)) {
                let near = (found - expected).abs() <= 2e-3 * (1.0 + expected.abs());
                assert!(near, "{name}: {found}, not {expected}");
            }

            // Its records load into Burn's layer.
            let mut other = EmbeddingConfig::new(48, 64).init(&device);
            other.load_fp4_record(table.into_record()).unwrap();
            assert_bits(name, &floats(other.forward(indices())), &found);
        }
    }
}

#[test]
fn the_path_of_a_product_is_reported_with_a_remedy() {
    for (name, device, _) in devices() {
        let layout = |shape: &[usize]| {
            let (format, block_size) = (Fp4Format::NvFp4, 16);
            Fp4Layout { format, block_size, shape: shape.to_vec(), axis: 0, hadamard: None }
        };
        let of = |layout: &Fp4Layout, dtype| match matmul_path(layout, dtype, &device) {
            MatmulPath::Dequantized(why) => why,
            other => panic!("{name}: {other}"),
        };
        let matrix = layout(&[64, 32]);
        // This process does not call `init`.
        let (why, remedy) = match name {
            "flex" | "ndarray" => (DequantizeReason::Host, "Fp4Linear"),
            "cpu" | "cuda" | "wgpu" => (DequantizeReason::NotInitialized, "burn_fp4::init()"),
            _ => (DequantizeReason::Device, "CUDA"),
        };
        assert_eq!(of(&matrix, DType::F32), why, "{name}");
        assert!(matmul_path(&matrix, DType::F32, &device).to_string().contains(remedy), "{name}");
        assert_eq!(
            of(&layout(&[64, 3, 32]), DType::F32),
            DequantizeReason::Rank { rank: 3 },
            "{name}"
        );
        assert_eq!(
            of(&matrix, DType::F64),
            DequantizeReason::DType { dtype: DType::F64 },
            "{name}"
        );
    }
}

#[test]
fn f64_and_empty_tensors_are_dequantized_or_refused() {
    for (name, device, _) in devices() {
        let weight = values([32, 8], &device, DType::F32);
        let packed = quantize(weight, 0, &Fp4Scheme::nvfp4()).unwrap();
        let doubles = packed.dequantize_to(FloatDType::F64);
        assert_eq!(doubles.dtype(), DType::F64, "{name}");
        assert_bits(name, &floats(doubles.clone()), &floats(packed.dequantize()));
        let error = packed.squared_error(doubles).unwrap_err();
        assert_eq!(error, OpsError::DType { found: DType::F64 });
        let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
        for scheme in [Fp4Scheme::nvfp4(), by_row] {
            let empty = Tensor::<2>::zeros([4, 0], &device);
            assert_eq!(quantize(empty, 1, &scheme).unwrap().dims(), [4, 0], "{name}");
        }
    }
}

#[test]
fn amax_is_the_largest_magnitude_or_nan() {
    for (name, device, dtypes) in devices() {
        for dtype in dtypes {
            let tensor = Tensor::<1>::from_data([1.0f32, -3.5, 2.0], (&device, DType::F32))
                .cast(FloatDType::from(dtype));
            assert_eq!(floats(amax(tensor).unwrap()), [3.5], "{name}");
        }
        let tensor = Tensor::<1>::from_data([1.0, f32::NAN, 2.0], (&device, DType::F32));
        assert!(floats(amax(tensor).unwrap())[0].is_nan(), "{name}");
    }
}

#[test]
fn modelopt_functions_take_tensors_of_any_shape() {
    let device = Device::flex();
    let tensor = values([4, 3, 32], &device, DType::BF16);
    let amax = tensor
        .clone()
        .abs()
        .reshape([4, 3, 2, 16])
        .max_dim(3)
        .reshape([4, 6])
        .cast(FloatDType::F32);
    let scales = modelopt::compute_fp4_scales(amax.clone(), None, true, 448.0).unwrap();
    assert_eq!(scales.dims(), [4, 6]);
    let fake = modelopt::static_blockwise_fp4_fake_quant(
        tensor.clone(),
        amax.clone(),
        None,
        true,
        448.0,
        None,
    )
    .unwrap();
    assert_eq!((fake.dims(), fake.dtype()), ([4, 3, 32], DType::BF16));
    let wide = modelopt::static_blockwise_fp4_fake_quant(
        tensor,
        amax,
        None,
        true,
        448.0,
        Some(FloatDType::F32),
    )
    .unwrap();
    assert_eq!(wide.dtype(), DType::F32);
    let odd = Tensor::<1>::ones([5], &device);
    let error = modelopt::static_blockwise_fp4_fake_quant(
        Tensor::<1>::ones([32], &device),
        odd,
        None,
        true,
        448.0,
        None,
    );
    assert!(matches!(error, Err(OpsError::Format(FormatError::Indivisible { .. }))));

    let packed = Tensor::<2, Int>::from_data(
        TensorData::new(vec![0x21u8, 0xF7, 0, 0, 0, 0, 0, 0], [1, 8]),
        (&device, DType::U8),
    );
    let scales = Tensor::<2>::from_data([[2.0f32]], &device);
    let values = modelopt::fp4_dequantize(packed, scales, 0.5, 16, FloatDType::F32).unwrap();
    assert_eq!(values.dims(), [1, 16]);
    assert_eq!(floats(values)[..4], [0.5, 1.0, 6.0, -6.0]);
}

/// Kernels run on the backend that `Fusion` wraps.
#[cfg(any(feature = "cpu", feature = "cuda"))]
#[test]
fn kernels_run_without_fusion_too() {
    use burn::backend::Backend;
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::read_sync;
    use burn_cubecl::CubeBackend;
    use burn_fp4_ops::search::host::DequantTarget;
    use burn_fp4_ops::{Fp4Backend, Saturated};

    let device = <CubeBackend as burn::backend::BackendTypes>::Device::default();
    let dense = Kind::Outliers.values(64 * 48, 11);
    let data = TensorData::new(dense.clone(), [64, 48]);
    let upload = || CubeBackend::float_from_data(data.clone(), &device);
    for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4().with_block_size(16)] {
        let amax = CubeBackend::fp4_amax(upload(), 1, false);
        let packed = CubeBackend::fp4_quantize(upload(), amax.clone(), 1, scheme);
        let layout = Fp4Layout::new(&[64, 48].into(), 1, &scheme).unwrap();
        let restored = CubeBackend::fp4_dequantize(packed, layout, FloatDType::F32);
        let (target, saturated) = (DequantTarget::Full, Saturated::PassThrough);
        let fake = CubeBackend::fp4_fake_quantize(upload(), amax, 1, scheme, target, saturated);
        let expected = oracle(&dense, 64, 48, &scheme).unwrap().dequantize();
        CubeBackend::sync(&device).unwrap();
        for found in [restored, fake] {
            let found = read_sync(CubeBackend::float_into_data(found)).unwrap();
            assert_bits("unfused", &found.iter::<f32>().collect::<Vec<_>>(), &expected);
        }
    }
}

/// Makes inputs `[rows, channels]` with correlated channels and values of bf16. A GPU multiplies
/// these exactly; it may round f32 first.
fn activations(rows: usize, channels: usize, device: &Device) -> Tensor<2> {
    let data = Kind::Weights.values(rows * channels, 21);
    let mut last = 0.0;
    let data: Vec<_> = data
        .into_iter()
        .map(|value| {
            last = 0.7 * last + value;
            bf16::from_f32(last).to_f32()
        })
        .collect();
    Tensor::from_data(TensorData::new(data, [rows, channels]), (device, DType::F32))
}

#[test]
fn activations_decide_about_codes_on_every_device() {
    for (name, device, dtypes) in devices() {
        let x = activations(300, 64, &device);
        let host_x = floats(x.clone());
        let found = gram(x.clone()).unwrap();
        let exact = Gram::of(&host_x, 64).unwrap();
        assert_eq!((found.rows(), found.channels()), (300, 64));
        let near = |found: f64, exact: f64, scale: f64| (found - exact).abs() <= 1e-5 * scale;
        for (&found, &sum) in found.values().iter().zip(exact.values()) {
            assert!(near(found, sum, exact.values()[0]), "{name}: {found} {sum}");
        }
        // Products of devices differ in their last bits; with the same Hessians codes do not.
        let by_device = block_hessians(x, 16).unwrap();
        let hessians = BlockHessians::of(&host_x, 64, 16).unwrap();
        for (&found, &sum) in by_device.values().iter().zip(hessians.values()) {
            assert!(near(found.into(), sum.into(), exact.values()[0]), "{name}: {found} {sum}");
        }
        let weights: Vec<f32> = (0..64).map(|channel| (channel % 3) as f32).collect();
        for dtype in dtypes {
            let tensor = values([64, 24], &device, dtype);
            let (dense, m, k) = rows(tensor.clone(), 0);
            let searches = [
                (Method::SSE, Importance::Uniform),
                (Method::SSE, Importance::Channels(&weights)),
                (Method::Hessian, Importance::Blocks(&hessians)),
                (Method::CoordinateDescent, Importance::Blocks(&hessians)),
                (Method::ADMM, Importance::Blocks(&hessians)),
            ];
            for (search, importance) in searches {
                let scheme = Fp4Scheme::nvfp4().with_method(search);
                let packed = quantize_by_importance(tensor.clone(), 0, &scheme, importance);
                let amax = burn_fp4_search::amax(&dense, k, &scheme);
                let expected = burn_fp4_search::quantize_by_importance(
                    &dense, m, k, &scheme, &amax, importance,
                );
                let what = format!("{name} {dtype:?} {search:?}");
                assert_same(&what, &packed.unwrap().to_packed().unwrap(), &expected.unwrap());
            }
            let scheme = Fp4Scheme::nvfp4();
            let scheme = scheme.with_method(Method::SSE);
            let best = quantize_with_best_tensor_scale(tensor.clone(), 0, &scheme).unwrap();
            let plain = quantize(tensor.clone(), 0, &scheme).unwrap();
            let error =
                |packed: Fp4Tensor<2>| sums(packed.squared_error(tensor.clone()).unwrap())[0];
            assert!(error(best) <= error(plain), "{name} {dtype:?}");
        }
    }
}

/// Another order of summation may change a code: kernels are compared by their remaining error,
/// `tr(E H E^T)`.
#[test]
fn gptq_has_a_small_error_on_every_device() {
    let damped = Gptq { damping: 0.02, ..Gptq::default() };
    let steps = [
        Gptq { sweeps: 0, refits: 0, ..damped },
        Gptq { sweeps: 1, refits: 0, ..damped },
        Gptq { order: BlockOrder::Natural, sweeps: 0, refits: 1, ..damped },
        damped,
    ];
    let schemes = [
        Fp4Scheme::nvfp4(),
        Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row),
        Fp4Scheme::nvfp4().with_block_size(32),
        Fp4Scheme::mxfp4(),
    ];
    for (name, device, dtypes) in devices() {
        // GPTQ compiles for a quarter of a minute per scheme and dtype on CubeCL's CPU runtime.
        let step = if name == "cpu" { 3 } else { 1 };
        // More than a group of channels, and rows that no vector divides.
        for (channels, outputs) in [(160, 21), (64, 24)] {
            let gram = gram(activations(400, channels, &Device::flex())).unwrap();
            for dtype in dtypes.iter().step_by(step) {
                let tensor = values([channels, outputs], &device, *dtype);
                let (dense, m, k) = rows(tensor.clone(), 0);
                for scheme in schemes.into_iter().step_by(step) {
                    for options in steps {
                        let what = format!("{name} {channels} {dtype:?} {scheme:?} {options:?}");
                        let amax = burn_fp4_search::amax(&dense, k, &scheme);
                        let expected =
                            options.quantize(&dense, m, k, &scheme, &amax, &gram).unwrap();
                        let packed =
                            quantize_gptq(tensor.clone(), 0, &scheme, &options, &gram).unwrap();
                        let found = packed.to_packed().unwrap();
                        if !["cpu", "cuda"].contains(&name) {
                            assert_same(&what, &found, &expected);
                            continue;
                        }
                        assert_eq!(found.tensor_scale, expected.tensor_scale, "{what}");
                        let codes = found.codes.iter().zip(&expected.codes);
                        let same = codes.filter(|(found, expected)| found == expected).count();
                        assert!(20 * same >= 19 * found.codes.len(), "{what}: {same} same codes");
                        let error = |packed: &Packed| cost(packed, &dense, &gram);
                        let (found, expected) = (error(&found), error(&expected));
                        assert!(found <= 1.01 * expected, "{what}: {found} {expected}");
                    }
                }
                // The other axis, of a tensor with more.
                let scheme = Fp4Scheme::nvfp4();
                let of = |tensor: Tensor<3>, axis| {
                    quantize_gptq(tensor, axis, &scheme, &damped, &gram).unwrap().to_packed()
                };
                let last = tensor.clone().swap_dims(0, 1).reshape([outputs, 1, channels]);
                let first = tensor.reshape([channels, 1, outputs]);
                assert_same(name, &of(last, 2).unwrap(), &of(first, 0).unwrap());
            }
        }
    }
}

/// Compares outputs with those of dense inputs.
#[test]
fn gptq_makes_up_for_a_drift_on_every_device() {
    let host = Device::flex();
    let quantized = activations(400, 64, &host);
    let shifted = quantized.clone().slice_dim(1, 1..64);
    let shifted = Tensor::cat(vec![shifted, quantized.clone().slice_dim(1, 0..1)], 1);
    let dense = quantized.clone() * 1.1 + shifted * 0.2;
    let mut sum = GramSum::new(64);
    sum.add_with_drift(quantized.clone(), dense.clone()).unwrap();
    let gram = sum.finish().unwrap();
    for (name, device, dtypes) in devices() {
        for dtype in dtypes {
            let weight = values([64, 24], &device, dtype);
            let on_host = weight.clone().to_device(&host).cast(DType::F32);
            let expected = dense.clone().matmul(on_host);
            let error = |correction| {
                let options =
                    Gptq { damping: 0.01, correction, sweeps: 1, refits: 0, ..Gptq::DEFAULT };
                let scheme = Fp4Scheme::nvfp4();
                let packed = quantize_gptq(weight.clone(), 0, &scheme, &options, &gram).unwrap();
                let found = packed.dequantize().to_device(&host).cast(DType::F32);
                let far = quantized.clone().matmul(found) - expected.clone();
                far.square().sum().into_scalar::<f32>()
            };
            let [without, half, all] = [0.0, 0.5, 1.0].map(error);
            assert!(half < 0.5 * without, "{name} {dtype:?}: {half} {without}");
            assert!(all < 0.2 * without, "{name} {dtype:?}: {all} {without}");
        }
    }
}

/// Computes `tr(E H E^T)` of the errors of a packed matrix.
fn cost(packed: &Packed, values: &[f32], gram: &Gram) -> f64 {
    let errors: Vec<f64> = packed
        .dequantize()
        .iter()
        .zip(values)
        .map(|(found, value)| f64::from(*found) - f64::from(*value))
        .collect();
    let of_row = |row: &[f64]| -> f64 {
        let of_channel = |channel: usize| -> f64 {
            let sums = (0..row.len()).map(|other| gram.get(channel, other).expect("whole"));
            sums.zip(row).map(|(h, e)| h * e).sum()
        };
        row.iter().enumerate().map(|(channel, e)| e * of_channel(channel)).sum()
    };
    errors.chunks_exact(packed.cols).map(of_row).sum()
}

#[test]
fn a_curvature_of_a_device_is_for_weights_on_that_device() {
    let flex = Device::flex();
    let gram = gram(activations(100, 64, &flex)).unwrap();
    let (scheme, options) = (Fp4Scheme::nvfp4(), Gptq::default());
    for (name, device, _) in devices() {
        let hessian_factor =
            HessianFactor::new(&gram, &options, scheme.block_size, &device).unwrap();
        assert_eq!((hessian_factor.channels(), hessian_factor.block_size()), (64, 16));
        let hessian_factor = Arc::new(hessian_factor);
        let of = |device| {
            let values = values([64, 24], device, DType::F32);
            quantize_with_hessian_factor(values, 0, &scheme, &hessian_factor).map(drop)
        };
        assert_eq!(of(&device), Ok(()), "{name}");
        if ["cpu", "cuda"].contains(&name) {
            let error = of(&flex).unwrap_err();
            let (expected, found) = (flex.clone().into(), device.into());
            assert_eq!(error, OpsError::PartDevice { what: "Hessian factor", expected, found });
        } else {
            assert_eq!(of(&flex), Ok(()), "{name}");
        }
    }
    let undamped = Gptq { damping: 0.0, ..options };
    let few = burn_fp4_ops::gram(activations(20, 64, &flex)).unwrap();
    for (name, device, _) in devices() {
        let singular = HessianFactor::new(&few, &undamped, 16, &device).map(drop);
        assert_eq!(singular, Err(SearchError::Singular.into()), "{name}");
    }
}

/// Rows that tiles and vectors do not divide, with tensor scales of every kind.
#[test]
fn weights_quantized_as_a_family_have_the_bits_they_get_alone() {
    let options = Gptq::default();
    // More than a group of channels.
    let gram = gram(activations(400, 160, &Device::flex())).unwrap();
    let of_nvfp4 = [
        TensorScaling::Tensor,
        TensorScaling::Row,
        TensorScaling::Amax(3.0),
        TensorScaling::Multiplier(0.01),
        TensorScaling::Multiplier(0.02),
        TensorScaling::Tensor,
    ];
    for (name, device, dtypes) in devices() {
        // GPTQ compiles for a quarter of a minute per scheme and dtype on CubeCL's CPU runtime.
        let count = if name == "cpu" { 1 } else { 2 };
        for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()].into_iter().take(count) {
            let hessian_factor =
                HessianFactor::new(&gram, &options, scheme.block_size, &device).unwrap();
            let hessian_factor = Arc::new(hessian_factor);
            let scaled = scheme.rule.row().tensor_scale;
            for (axis, dtype) in [(0, dtypes[0]), (1, dtypes[dtypes.len() - 1])] {
                let member = |(at, outputs): (usize, usize)| {
                    let tensor_scale = if scaled { of_nvfp4[at] } else { TensorScaling::Tensor };
                    let shape = if axis == 0 { [160, outputs] } else { [outputs, 160] };
                    // With an amax of its own.
                    let values = values(shape, &device, dtype) * (at + 1) as f32;
                    (values, scheme.with_tensor_scale(tensor_scale))
                };
                let family: Vec<_> =
                    [40, 7, 21, 5, 4, 12].into_iter().enumerate().map(member).collect();
                let found = quantize_family(family.clone(), axis, &hessian_factor).unwrap();
                assert_eq!(found.len(), family.len());
                for (found, (values, scheme)) in found.iter().zip(family) {
                    let alone =
                        quantize_with_hessian_factor(values, axis, &scheme, &hessian_factor)
                            .unwrap();
                    let what = format!("{name} {dtype:?} {:?} {scheme:?}", alone.dims());
                    assert_eq!(found.layout(), alone.layout(), "{what}");
                    let [found, alone] = [found, &alone].map(|one| one.to_packed().unwrap());
                    assert_same(&what, &found, &alone);
                }
            }
        }
    }
}

#[test]
fn importance_that_does_not_fit_is_an_error() {
    let device = Device::flex();
    let tensor = values([64, 24], &device, DType::F32);
    let hessians = BlockHessians::of(&vec![1.0; 32 * 4], 32, 16).unwrap();
    let scheme = Fp4Scheme::nvfp4().with_method(Method::Hessian);
    let blocks = Importance::Blocks(&hessians);
    let error = quantize_by_importance(tensor.clone(), 0, &scheme, blocks).unwrap_err();
    assert!(error.to_string().contains("block Hessians: expected 4 values, found 2"), "{error}");
    for result in [quantize(tensor.clone(), 0, &scheme).map(drop), {
        fake_quantize(tensor.clone(), 0, &scheme).map(drop)
    }] {
        let error = result.unwrap_err();
        assert!(matches!(error, OpsError::Search(SearchError::Importance { .. })), "{error}");
    }
    let negative = Importance::Channels(&[-1.0; 64]);
    let sse = Fp4Scheme::nvfp4().with_method(Method::SSE);
    let error = quantize_by_importance(tensor.clone(), 0, &sse, negative).unwrap_err();
    assert!(
        matches!(error, OpsError::Search(SearchError::ChannelWeight { channel: 0, .. })),
        "{error}"
    );
    let narrow = Gram::of(&[1.0; 32], 32).unwrap();
    let gptq = quantize_gptq(tensor.clone(), 0, &scheme, &Gptq::default(), &narrow);
    assert!(matches!(gptq, Err(OpsError::Format(_))));
    let mut x = vec![0.5; 64];
    x[33] = f32::INFINITY;
    let x = Tensor::<2>::from_data(TensorData::new(x, [2, 32]), &device);
    assert!(matches!(gram(x.clone()), Err(OpsError::Search(SearchError::Activation { .. }))));
    assert!(matches!(block_hessians(x.clone(), 16), Err(OpsError::Search(_))));
    assert!(matches!(block_hessians(x, 48), Err(OpsError::Search(SearchError::Format(_)))));
    let mxfp4 = quantize_with_best_tensor_scale(tensor, 0, &Fp4Scheme::mxfp4());
    assert!(matches!(mxfp4, Err(OpsError::Search(SearchError::Scheme { .. }))));
}

#[test]
fn a_bias_of_another_dtype_is_cast_to_that_of_the_input() {
    let device = Device::flex();
    let weight = quantize(values([32, 4], &device, DType::F32), 0, &Fp4Scheme::mxfp4()).unwrap();
    let bias = values([4], &device, DType::F16);
    for rows in [0, 3] {
        let input = values([rows, 32], &device, DType::F32);
        let output = linear(input.clone(), &weight, Some(bias.clone())).unwrap();
        let expected = linear(input, &weight, Some(bias.clone().cast(FloatDType::F32))).unwrap();
        assert_eq!(output.into_data(), expected.into_data(), "{rows} rows");
    }
}

/// Burn 0.22 holds E2M1 on Cube devices alone, eight codes in a word.
#[test]
fn quantized_tensors_of_burn_have_the_same_codes_and_scales() {
    let schemes = [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()];
    // Burn multiplies the scales first, and rounds their product.
    let check = |what: &str, found: Vec<f32>, expected: Vec<f32>| {
        for (found, expected) in found.iter().zip(expected) {
            let error = (found - expected).abs();
            assert!(error <= 2e-7 * expected.abs(), "{what}: {found}, {expected}");
        }
    };
    for (name, device, _) in devices() {
        for (scheme, axis) in schemes.into_iter().flat_map(|scheme| [(scheme, 0), (scheme, 1)]) {
            let what = format!("{name} {:?} axis {axis}", scheme.format());
            let dense = values([64, 96], &device, DType::F32);
            let packed = quantize(dense.clone(), axis, &scheme).unwrap();
            let data = packed.to_burn_data().unwrap();
            let again = Fp4Tensor::<2>::from_burn_data(&data, &device).unwrap();
            assert_eq!(again.to_packed().unwrap(), packed.to_packed().unwrap(), "{what}");
            assert_eq!(again.layout(), packed.layout(), "{what}");
            if !["cpu", "cuda"].contains(&name) {
                continue;
            }
            let tensor = Tensor::<2>::from_data(data.clone(), &device);
            assert_eq!(tensor.clone().into_data().as_bytes(), data.as_bytes(), "{what}");
            check(&what, floats(tensor.dequantize()), floats(packed.dequantize()));
            // One that Burn has quantized, which it does along the last axis alone.
            if axis == 0 {
                continue;
            }
            let DType::QFloat(of_burn) = data.dtype() else { panic!("{what}: {:?}", data.dtype()) };
            let tensor = dense.quantize_dynamic(&of_burn);
            let taken = Fp4Tensor::<2>::from_burn_data(&tensor.clone().into_data(), &device);
            let taken = taken.unwrap();
            check(&what, floats(tensor.dequantize()), floats(taken.dequantize()));
        }
    }
}

#[test]
fn data_that_are_no_fp4_tensor_of_burn_are_refused_by_what_they_are() {
    let device = Device::flex();
    let refused = |data: &TensorData| match Fp4Tensor::<2>::from_burn_data(data, &device) {
        Err(OpsError::BurnData { found }) => found,
        other => panic!("{other:?}"),
    };
    let scheme = QuantScheme::default()
        .with_value(QuantValue::E2M1)
        .with_store(QuantStore::PackedU32(0))
        .per_block([32], ScaleDtype::UE8M0);
    let of = |scheme: QuantScheme, shape: &[usize]| {
        TensorData::from_bytes_vec(vec![0; 17], shape.to_vec(), DType::QFloat(scheme))
    };
    assert!(Fp4Tensor::<2>::from_burn_data(&of(scheme, &[1, 32]), &device).is_ok());
    for (data, expected) in [
        (TensorData::from([[1.0f32]]), "F32"),
        (of(scheme.with_value(QuantValue::Q8F), &[1, 32]), "values Q8F"),
        (of(scheme.with_mode(QuantMode::Lookup), &[1, 32]), "mode Lookup"),
        (of(scheme.per_block([2, 32], ScaleDtype::UE8M0), &[1, 32]), "blocks [2, 32]"),
        (of(scheme.with_store(QuantStore::PackedU32(1)), &[1, 32]), "PackedU32(1)"),
        (of(scheme.per_block([32], ScaleDtype::F32), &[1, 32]), "block scales Some(F32)"),
        (of(scheme, &[2, 32]), "17 bytes for shape [2, 32]"),
        (of(scheme, &[32]), "shape [32] for a tensor of rank 2"),
    ] {
        let found = refused(&data);
        assert!(found.contains(expected), "{found}, not {expected}");
    }
    let rows = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
    let packed = quantize(values([4, 32], &device, DType::F32), 1, &rows).unwrap();
    let error = packed.to_burn_data().expect_err("Burn has one tensor scale");
    assert!(error.to_string().ends_with("found a tensor scale for each row"), "{error}");
    let stack = quantize(values([2, 32, 4], &device, DType::F32), 1, &Fp4Scheme::mxfp4()).unwrap();
    let error = stack.to_burn_data().expect_err("another order of bytes");
    assert!(error.to_string().ends_with("blocks along axis 1 of a tensor of rank 3"), "{error}");
}

/// Burn's maximum of 2048 x 256 values is wrong on Mesa's lavapipe.
#[test]
fn many_values_have_the_amax_of_the_host_on_every_device() {
    for (name, device, _) in devices() {
        for rows in [512, 2048] {
            let data = TensorData::new(normals(rows as u64, rows * 256), [rows, 256]);
            let largest =
                |values: &[f32]| values.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
            let expected = largest(data.as_slice().unwrap());
            let values = Tensor::<2>::from_data(data, &device);
            assert_eq!(floats(amax(values).unwrap()), [expected], "{name}");
        }
    }
}
