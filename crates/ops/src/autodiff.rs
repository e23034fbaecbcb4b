//! Gradients: they pass straight through fake quantization; nothing else here has one.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend};
use burn::tensor::FloatDType;
use burn_fp4_search::Fp4Scheme;

use crate::{Fp4Backend, Fp4Layout, Fp4Primitive};

/// The same integers, seen by the inner backend.
fn inner<B: Fp4Backend, C: CheckpointStrategy>(
    packed: Fp4Primitive<Autodiff<B, C>>,
) -> Fp4Primitive<B> {
    Fp4Primitive { codes: packed.codes, scales: packed.scales, tensor_scale: packed.tensor_scale }
}

impl<B: Fp4Backend, C: CheckpointStrategy> Fp4Backend for Autodiff<B, C> {
    fn fp4_amax(values: FloatTensor<Self>, axis: usize, by_row: bool) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_amax(values.into_primitive(), axis, by_row))
    }

    fn fp4_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        let packed = B::fp4_quantize(values.into_primitive(), amax.into_primitive(), axis, scheme);
        Fp4Primitive {
            codes: packed.codes,
            scales: packed.scales,
            tensor_scale: packed.tensor_scale,
        }
    }

    fn fp4_dequantize(
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_dequantize(inner(packed), layout, dtype))
    }

    fn fp4_fake_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct StraightThrough;

        impl<B: Fp4Backend> Backward<B, 1> for StraightThrough {
            type State = ();

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                grads: &mut Gradients,
                _checkpointer: &mut Checkpointer,
            ) {
                unary::<B, _>(ops.parents, ops.node, grads, |grad| grad);
            }
        }

        let amax = amax.into_primitive();
        let (values, node) = values.into_parts();
        let output = B::fp4_fake_quantize(values, amax, axis, scheme);
        match StraightThrough.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((), output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    }

    fn fp4_squared_error(
        values: FloatTensor<Self>,
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_squared_error(values.into_primitive(), inner(packed), layout))
    }
}
