//! Scratch memory: the memory of a dense weight is kept for the next one.
//!
//! A host that dequantizes a weight for every product would otherwise get fresh pages from the
//! system each time. Touching these costs more than writing the values.

use core::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

use burn_fp4_search::host::HostElement;
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;

/// Free memory: that of one tensor, the largest so far.
static FREE: Mutex<Vec<f32>> = Mutex::new(Vec::new());

/// Makes bytes for `len` values. `fill` overwrites the memory, which holds old values.
pub(crate) fn filled<T: HostElement + Pod>(len: usize, fill: impl FnOnce(&mut [T])) -> Bytes {
    let words = (len * size_of::<T>()).div_ceil(size_of::<f32>());
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    // A small tensor leaves it for a larger one, which gains more.
    let fits = (words..=4 * words).contains(&free.len());
    let mut memory = if fits { core::mem::take(&mut *free) } else { vec![0.0; words] };
    drop(free);
    fill(&mut bytemuck::cast_slice_mut(&mut memory)[..len]);
    // SAFETY: the memory is initialized, and holds at least `len` values.
    unsafe { Bytes::from_controller(Box::new(Scratch { words: memory }), len * size_of::<T>()) }
}

struct Scratch {
    words: Vec<f32>,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        if self.words.len() > free.len() {
            *free = core::mem::take(&mut self.words);
        }
    }
}

impl AllocationController for Scratch {
    fn alloc_align(&self) -> usize {
        align_of::<f32>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    // SAFETY: as the trait asks, callers write initialized bytes only.
    unsafe fn memory_mut(
        &mut self,
        _policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
        // SAFETY: the layout is the same, and callers write initialized bytes only.
        Ok(unsafe { &mut *(core::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.words);
        // SAFETY: the layout is the same, and what is initialized may be read as if it were not.
        Ok(unsafe { &*(core::ptr::from_ref(bytes) as *const [MaybeUninit<u8>]) })
    }
}
