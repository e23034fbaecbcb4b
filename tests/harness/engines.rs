//! All engines that quantize a matrix, with one signature.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Flex, NdArray};
use burn::tensor::{DType, Device, Tensor, TensorData, read_sync};
use burn_fp4_formats::{Packed, TensorScale};
use burn_fp4_ops::portable;
use burn_fp4_search::host::{self, HostElement, View};
use burn_fp4_search::{Fp4Scheme, Importance, TensorScaling, quantize};

use crate::inputs::{Dense, Values};

/// Axis of a matrix that the blocks run along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Down the columns: the packed matrix is the transpose.
    First = 0,
    /// Along the rows.
    Last = 1,
}

/// Quantizes a matrix along an axis; `None` if the engine does not take the dtype.
type Quantize = Box<dyn Fn(&Dense, Axis, &Fp4Scheme) -> Option<Packed>>;

/// A quantization engine.
pub struct Engine {
    /// Name in messages.
    pub name: &'static str,
    quantize: Quantize,
}

impl Engine {
    fn new(
        name: &'static str,
        quantize: impl Fn(&Dense, Axis, &Fp4Scheme) -> Option<Packed> + 'static,
    ) -> Self {
        Self { name, quantize: Box::new(quantize) }
    }

    /// Quantizes a matrix along an axis; `None` if the engine does not take its dtype.
    pub fn quantize(&self, dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> Option<Packed> {
        (self.quantize)(dense, axis, scheme)
    }
}

/// Returns every engine of this build, including the Burn [`devices`]. The oracle is the first.
pub fn engines() -> Vec<Engine> {
    let mut engines = vec![
        Engine::new("oracle", oracle),
        Engine::new("host", host),
        #[cfg(any(feature = "cpu", feature = "cuda"))]
        Engine::new("kernels", |dense, axis, scheme| {
            Some(crate::kernels::kernels(dense, axis, scheme))
        }),
        Engine::new("tensor operations on flex", portable_flex),
        Engine::new("tensor operations on ndarray", portable_ndarray),
    ];
    engines.extend(devices().into_iter().map(|(name, device, dtypes)| {
        Engine::new(name, move |dense, axis, scheme| {
            let data = tensor_data(dense);
            dtypes.contains(&data.dtype()).then(|| on_device(data, axis, scheme, &device))
        })
    }));
    engines
}

fn oracle(dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> Option<Packed> {
    let dense = match axis {
        Axis::Last => dense.clone(),
        Axis::First => dense.transposed(),
    };
    Some(quantize(&dense.to_f32(), dense.rows, dense.cols, scheme).expect("a valid problem"))
}

fn host(dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> Option<Packed> {
    let view = View::along(&[dense.rows, dense.cols], axis as usize);
    Some(match &dense.values {
        Values::F32(values) => host_packed(values, view, scheme),
        Values::F16(values) => host_packed(values, view, scheme),
        Values::Bf16(values) => host_packed(values, view, scheme),
    })
}

fn host_packed<T: HostElement>(values: &[T], view: View, scheme: &Fp4Scheme) -> Packed {
    let amax = host::amax(values, view, scheme);
    host::quantize_packed(values, view, scheme, &amax, Importance::Uniform)
        .expect("a valid problem")
}

/// Quantizes with the public function on a Burn device.
fn on_device(data: TensorData, axis: Axis, scheme: &Fp4Scheme, device: &Device) -> Packed {
    let dtype = data.dtype();
    let tensor = Tensor::<2>::from_data(data, (device, dtype));
    burn_fp4_ops::quantize(tensor, axis as usize, scheme)
        .and_then(|packed| packed.to_packed())
        .expect("a valid problem")
}

/// Converts a matrix to Burn's tensor data, in its own dtype.
pub fn tensor_data(dense: &Dense) -> TensorData {
    let shape = [dense.rows, dense.cols];
    match &dense.values {
        Values::F32(values) => TensorData::new(values.clone(), shape),
        Values::F16(values) => TensorData::new(values.clone(), shape),
        Values::Bf16(values) => TensorData::new(values.clone(), shape),
    }
}

fn portable_flex(dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> Option<Packed> {
    Some(by_tensor_operations::<Flex>(dense, axis, scheme))
}

fn portable_ndarray(dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> Option<Packed> {
    matches!(dense.values, Values::F32(_))
        .then(|| by_tensor_operations::<NdArray>(dense, axis, scheme))
}

/// Quantizes with tensor operations; the hosts override these with their own engine.
fn by_tensor_operations<B: Backend>(dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> Packed {
    let device = B::Device::default();
    let values = B::float_from_data(tensor_data(dense), &device);
    let axis = axis as usize;
    let amax = amax_for::<B>(&values, axis, scheme, &device);
    let packed = portable::quantize::<B>(values, amax, axis, *scheme);
    let tensor_scale: Vec<_> = ints::<B>(packed.tensor_scale)
        .iter::<i32>()
        .map(|bits| f32::from_bits(bits as u32))
        .collect();
    let (rows, cols) = match axis {
        0 => (dense.cols, dense.rows),
        _ => (dense.rows, dense.cols),
    };
    Packed {
        format: scheme.format(),
        block_size: scheme.block_size,
        rows,
        cols,
        codes: ints::<B>(packed.codes).iter::<u8>().collect(),
        scales: ints::<B>(packed.scales).iter::<u8>().collect(),
        tensor_scale: match tensor_scale[..] {
            [scale] => TensorScale::One(scale),
            _ => TensorScale::PerRow(tensor_scale),
        },
    }
}

fn amax_for<B: Backend>(
    values: &FloatTensor<B>,
    axis: usize,
    scheme: &Fp4Scheme,
    device: &B::Device,
) -> FloatTensor<B> {
    match scheme.tensor_scale {
        TensorScaling::Amax(amax) => B::float_from_data(TensorData::new(vec![amax], [1]), device),
        scaling => portable::amax::<B>(values.clone(), axis, scaling == TensorScaling::Row),
    }
}

fn ints<B: Backend>(tensor: IntTensor<B>) -> TensorData {
    read_sync(B::int_into_data(tensor)).expect("host memory")
}

/// Returns the Burn devices of this build and their dtypes.
pub fn devices() -> Vec<(&'static str, Device, Vec<DType>)> {
    vec![
        ("flex", Device::flex(), vec![DType::F32, DType::F16, DType::BF16]),
        ("ndarray", Device::ndarray(), vec![DType::F32]),
        #[cfg(feature = "cpu")]
        ("cpu", Device::cpu(), vec![DType::F32, DType::F16]),
        #[cfg(feature = "wgpu")]
        ("wgpu", Device::wgpu(burn::tensor::DeviceKind::DefaultDevice), vec![DType::F32]),
        #[cfg(feature = "cuda")]
        ("cuda", Device::cuda(0), vec![DType::F32, DType::F16, DType::BF16]),
    ]
}
