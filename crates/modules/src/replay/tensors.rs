//! [`ReplayTensors`]: what goes into a replay and comes out of it, taken apart and put together.

use std::collections::VecDeque;
use std::fmt;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_fp4_ops::{KvCache, KvFormat, PackedHeads};

/// Inputs, outputs or state of a [`Replay`](crate::Replay): tensors of any kind and KV caches,
/// alone or in tuples, arrays, vectors and options.
///
/// A type of one's own takes itself apart and puts itself together field by field:
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_fp4_modules::{ReplayParts, ReplayTensors};
///
/// struct Cache {
///     keys: Vec<Tensor<4>>,
///     values: Vec<Tensor<4>>,
/// }
///
/// impl ReplayTensors for Cache {
///     fn take_apart(self, parts: &mut ReplayParts) {
///         (self.keys, self.values).take_apart(parts);
///     }
///
///     fn put_together(parts: &mut ReplayParts) -> Self {
///         let (keys, values) = ReplayTensors::put_together(parts);
///         Self { keys, values }
///     }
/// }
/// ```
pub trait ReplayTensors: Sized {
    /// Appends its tensors, and the lengths of what may have others.
    fn take_apart(self, parts: &mut ReplayParts);

    /// Takes from the front what [`take_apart`](Self::take_apart) appended.
    fn put_together(parts: &mut ReplayParts) -> Self;
}

/// Tensors, and the lengths of the vectors and options that they were in.
#[derive(Default)]
pub struct ReplayParts {
    tensors: VecDeque<DispatchTensor>,
    lengths: VecDeque<usize>,
}

impl fmt::Debug for ReplayParts {
    /// Devices, shapes and dtypes of the tensors, not their values.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Signature { tensors, lengths } = self.signature();
        f.debug_struct("ReplayParts").field("tensors", &tensors).field("lengths", &lengths).finish()
    }
}

/// Shapes and dtypes that tell captures of a pass apart.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Signature {
    tensors: Vec<(Device, Shape, DType)>,
    lengths: Vec<usize>,
}

impl ReplayParts {
    pub(crate) fn of(tensors: impl ReplayTensors) -> Self {
        let mut parts = Self::default();
        tensors.take_apart(&mut parts);
        parts
    }

    /// Tensors with the lengths of others.
    pub(crate) fn new(tensors: Vec<DispatchTensor>, lengths: &[usize]) -> Self {
        Self { tensors: tensors.into(), lengths: lengths.iter().copied().collect() }
    }

    pub(crate) fn into<T: ReplayTensors>(mut self) -> T {
        T::put_together(&mut self)
    }

    pub(crate) fn into_tensors(self) -> Vec<DispatchTensor> {
        self.tensors.into()
    }

    pub(crate) fn lengths(&self) -> Vec<usize> {
        self.lengths.iter().copied().collect()
    }

    /// Where the first tensor is.
    pub(crate) fn device(&self) -> Option<Device> {
        self.tensors.front().map(|tensor| Device::from(tensor.device()))
    }

    pub(crate) fn signature(&self) -> Signature {
        let spec = |tensor: &DispatchTensor| {
            (Device::from(tensor.device()), tensor.shape(), tensor.dtype())
        };
        Signature { tensors: self.tensors.iter().map(spec).collect(), lengths: self.lengths() }
    }
}

const SAME: &str = "what was taken apart is put together in the same order";

impl<const D: usize, K: Basic> ReplayTensors for Tensor<D, K> {
    fn take_apart(self, parts: &mut ReplayParts) {
        parts.tensors.push_back(self.into_dispatch());
    }

    fn put_together(parts: &mut ReplayParts) -> Self {
        Self::from_dispatch(parts.tensors.pop_front().expect(SAME))
    }
}

impl ReplayTensors for () {
    fn take_apart(self, _parts: &mut ReplayParts) {}

    fn put_together(_parts: &mut ReplayParts) -> Self {}
}

impl ReplayTensors for KvCache {
    fn take_apart(self, parts: &mut ReplayParts) {
        match self {
            Self::Dense { keys, values } => {
                parts.lengths.push_back(KvFormat::ALL.len());
                [keys, values].take_apart(parts);
            }
            Self::Packed { format, keys, values } => {
                let place = KvFormat::ALL.iter().position(|known| *known == format);
                parts.lengths.push_back(place.expect("one of all formats"));
                [keys.codes, keys.scales, values.codes, values.scales].take_apart(parts);
            }
        }
    }

    fn put_together(parts: &mut ReplayParts) -> Self {
        let place = parts.lengths.pop_front().expect(SAME);
        let Some(&format) = KvFormat::ALL.get(place) else {
            let [keys, values] = ReplayTensors::put_together(parts);
            return Self::Dense { keys, values };
        };
        let mut heads = || {
            let [codes, scales] = ReplayTensors::put_together(parts);
            PackedHeads { codes, scales }
        };
        Self::Packed { format, keys: heads(), values: heads() }
    }
}

impl<T: ReplayTensors> ReplayTensors for Vec<T> {
    fn take_apart(self, parts: &mut ReplayParts) {
        parts.lengths.push_back(self.len());
        self.into_iter().for_each(|item| item.take_apart(parts));
    }

    fn put_together(parts: &mut ReplayParts) -> Self {
        let length = parts.lengths.pop_front().expect(SAME);
        (0..length).map(|_| T::put_together(parts)).collect()
    }
}

impl<T: ReplayTensors> ReplayTensors for Option<T> {
    fn take_apart(self, parts: &mut ReplayParts) {
        parts.lengths.push_back(usize::from(self.is_some()));
        self.into_iter().for_each(|item| item.take_apart(parts));
    }

    fn put_together(parts: &mut ReplayParts) -> Self {
        (parts.lengths.pop_front().expect(SAME) == 1).then(|| T::put_together(parts))
    }
}

impl<T: ReplayTensors, const N: usize> ReplayTensors for [T; N] {
    fn take_apart(self, parts: &mut ReplayParts) {
        self.into_iter().for_each(|item| item.take_apart(parts));
    }

    fn put_together(parts: &mut ReplayParts) -> Self {
        core::array::from_fn(|_| T::put_together(parts))
    }
}

macro_rules! tuples {
    ($(($($item:ident),+))+) => {$(
        impl<$($item: ReplayTensors),+> ReplayTensors for ($($item,)+) {
            #[allow(non_snake_case)]
            fn take_apart(self, parts: &mut ReplayParts) {
                let ($($item,)+) = self;
                $($item.take_apart(parts);)+
            }

            fn put_together(parts: &mut ReplayParts) -> Self {
                ($($item::put_together(parts),)+)
            }
        }
    )+};
}

tuples! { (A) (A, B) (A, B, C) (A, B, C, D) (A, B, C, D, E) (A, B, C, D, E, F) }
