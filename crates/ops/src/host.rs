//! The host engine on slices of tensors, the same for every device whose memory is the host's.

use burn::tensor::TensorData;
use burn_fp4_search::formats::Packed;
use burn_fp4_search::host::{self, HostElement, PackedView, Restore, View};
use burn_fp4_search::{
    BlockHessians, Curvature as HostCurvature, Fp4Scheme, Hadamard, Importance, TensorScaling,
};

use crate::Fp4Layout;

/// Codes, block scales and bits of the tensor scale.
pub(crate) struct HostPacked {
    pub(crate) codes: TensorData,
    pub(crate) scales: TensorData,
    pub(crate) tensor_scale: TensorData,
}

impl From<Packed> for HostPacked {
    fn from(packed: Packed) -> Self {
        let tensor_scale = packed.tensor_scale.as_slice();
        let bits: Vec<_> = tensor_scale.iter().map(|scale| scale.to_bits() as i32).collect();
        let (count, blocks) = (bits.len(), packed.blocks());
        Self {
            codes: TensorData::new(packed.codes, [packed.rows, packed.cols / 2]),
            scales: TensorData::new(packed.scales, [packed.rows, blocks]),
            tensor_scale: TensorData::new(bits, [count]),
        }
    }
}

const CHECKED: &str = "callers check scheme, shape and dtype";

pub(crate) fn amax<T: HostElement>(values: &[T], view: View, by_row: bool) -> Vec<f32> {
    let scaling = if by_row { TensorScaling::Row } else { TensorScaling::Tensor };
    host::amax(values, view, &Fp4Scheme::nvfp4().with_tensor_scale(scaling))
}

pub(crate) fn quantize<T: HostElement>(
    values: &[T],
    view: View,
    amax: &[f32],
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> HostPacked {
    HostPacked::from(host::quantize_packed(values, view, scheme, amax, importance).expect(CHECKED))
}

pub(crate) fn quantize_gptq(
    values: &[f32],
    rows: usize,
    amax: &[f32],
    scheme: &Fp4Scheme,
    curvature: &HostCurvature,
) -> HostPacked {
    HostPacked::from(curvature.quantize(values, rows, scheme, amax).expect(CHECKED))
}

/// Calls `use_importance` with what the costs of an extension's operation mean.
pub(crate) fn with_importance<R>(
    costs: &[f32],
    scheme: &Fp4Scheme,
    use_importance: impl FnOnce(Importance<'_>) -> R,
) -> R {
    if scheme.search.needs_hessians() {
        let hessians = BlockHessians::new(costs.to_vec(), scheme.block_size).expect(CHECKED);
        use_importance(Importance::Blocks(&hessians))
    } else {
        use_importance(Importance::Channels(costs))
    }
}

pub(crate) fn fake_quantize<T: HostElement>(
    values: &[T],
    view: View,
    amax: &[f32],
    scheme: &Fp4Scheme,
    restore: Restore,
    output: &mut [T],
) {
    host::fake_quantize(values, view, scheme, amax, restore, output).expect(CHECKED);
}

pub(crate) fn hadamard<T: HostElement>(
    values: &[T],
    view: View,
    hadamard: Hadamard,
    inverse: bool,
    output: &mut [T],
) {
    host::hadamard(values, view, hadamard, inverse, output).expect(CHECKED);
}

/// Calls `use_packed` with the slices of a packed tensor.
pub(crate) fn with_packed<R>(
    codes: &[u8],
    scales: &[u8],
    tensor_scale: &[i32],
    layout: &Fp4Layout,
    use_packed: impl FnOnce(PackedView<'_>) -> R,
) -> R {
    let tensor_scale: Vec<_> =
        tensor_scale.iter().map(|bits| f32::from_bits(*bits as u32)).collect();
    use_packed(PackedView {
        format: layout.format,
        block_size: layout.block_size,
        codes,
        scales,
        tensor_scale: &tensor_scale,
    })
}

pub(crate) fn dequantize<T: HostElement>(
    packed: PackedView<'_>,
    layout: &Fp4Layout,
    output: &mut [T],
) {
    host::dequantize(packed, layout.view(), output).expect(CHECKED);
}

pub(crate) fn matmul<T: HostElement>(
    input: &[T],
    weight: PackedView<'_>,
    layout: &Fp4Layout,
    output: &mut [T],
) {
    let [channels, outputs] = layout.shape[..] else { unreachable!("callers check the rank") };
    host::matmul(input, weight, [outputs, channels], output).expect(CHECKED);
}

pub(crate) fn squared_error<T: HostElement>(
    values: &[T],
    packed: PackedView<'_>,
    layout: &Fp4Layout,
) -> TensorData {
    let sums = host::squared_error(values, packed, layout.view()).expect(CHECKED);
    TensorData::new(sums.map(|sum| sum as f32).to_vec(), [2])
}

/// f32 values as tensor data of shape `[len]`.
pub(crate) fn vector(values: Vec<f32>) -> TensorData {
    let len = values.len();
    TensorData::new(values, [len])
}
