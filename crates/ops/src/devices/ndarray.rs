//! Burn's `ndarray` device, which has f32 only. Burn 0.22 deprecates it in favour of `flex`.

#![allow(deprecated)]

use burn::backend::NdArray;
use burn_ndarray::NdArrayTensor;

use super::host::{HostDevice, Values};

/// Copies a tensor into row-major order, unless it is in it.
macro_rules! contiguous {
    ($tensor:expr, $variant:ident) => {
        match $tensor {
            NdArrayTensor::$variant(storage) if !storage.view().is_standard_layout() => {
                storage.view().as_standard_layout().into_owned().into_shared().into()
            }
            contiguous => contiguous,
        }
    };
}

/// Borrows the elements of a contiguous tensor.
macro_rules! elements {
    ($tensor:expr, $variant:ident) => {
        match $tensor {
            NdArrayTensor::$variant(storage) => storage.view().to_slice().expect("contiguous"),
            other => unreachable!("callers check the dtype: {other:?}"),
        }
    };
}

impl HostDevice for NdArray {
    fn contiguous(values: NdArrayTensor) -> NdArrayTensor {
        contiguous!(values, F32)
    }

    fn contiguous_ints(ints: NdArrayTensor) -> NdArrayTensor {
        match ints {
            ints @ NdArrayTensor::I32(_) => contiguous!(ints, I32),
            bytes => contiguous!(bytes, U8),
        }
    }

    fn values(contiguous: &NdArrayTensor) -> Values<'_> {
        Values::F32(elements!(contiguous, F32))
    }

    fn bytes(contiguous: &NdArrayTensor) -> &[u8] {
        elements!(contiguous, U8)
    }

    fn ints(contiguous: &NdArrayTensor) -> &[i32] {
        elements!(contiguous, I32)
    }
}
