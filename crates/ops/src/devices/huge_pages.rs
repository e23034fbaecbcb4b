//! Memory of weights: small ones share huge pages.
//!
//! A language model reads every weight once a token. In pages of 4 KiB looking up addresses takes
//! longer than reading values, on virtual machines above all. Allocators use huge pages for none
//! or for all memory, and never for weights that are smaller than one.

use core::mem::MaybeUninit;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use burn::tensor::TensorData;
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};

/// Length of a huge page on x86-64, and on AArch64 with small pages of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;
/// Largest length of an arena for several weights.
const SHARED: usize = 8 * HUGE_PAGE;
/// Arenas together are longer than a new one by this factor at least, so that little is free.
const GROWTH: usize = 16;
/// Largest number of arenas that are filled at a time.
const OPEN: usize = 4;
/// Data of fewer bytes stays where it is: one page.
const LEAST: usize = 4096;
/// A line of the cache.
const ALIGN: usize = 64;

/// Length of all arenas.
static LENGTH: AtomicUsize = AtomicUsize::new(0);
/// Arenas with free memory, while any part of them is in use.
static ARENAS: Mutex<Vec<Open>> = Mutex::new(Vec::new());

/// An arena that is filled.
struct Open {
    arena: Weak<Arena>,
    used: usize,
    len: usize,
}

impl Open {
    fn free(&self) -> usize {
        self.len - self.used
    }

    /// Returns the first of the next bytes, which are free.
    fn take(&mut self, len: usize) -> usize {
        let first = self.used;
        self.used = self.len.min((first + len).next_multiple_of(ALIGN));
        first
    }
}

/// Moves data to memory with huge pages, where the system has them.
pub(super) fn moved(data: TensorData) -> TensorData {
    if cfg!(target_os = "linux") { moved_to(&ARENAS, data) } else { data }
}

fn moved_to(arenas: &Mutex<Vec<Open>>, data: TensorData) -> TensorData {
    let bytes = data.as_bytes();
    if bytes.len() < LEAST {
        return data;
    }
    let part = Part::reserved(arenas, bytes.len());
    // SAFETY: the part is inside of its arena, and is no part of the bytes.
    unsafe { part.start().copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    let len = part.len;
    // SAFETY: a part has `len` initialized bytes.
    let bytes = unsafe { Bytes::from_controller(Box::new(part), len) };
    TensorData::from_bytes(bytes, data.shape().clone(), data.dtype())
}

/// A multiple of huge pages. Each byte belongs to one [`Part`] at most.
struct Arena {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an arena gives access to no memory; it is freed once, by the last part.
unsafe impl Send for Arena {}
// SAFETY: as for `Send`.
unsafe impl Sync for Arena {}

impl Arena {
    fn new(len: usize) -> Arc<Self> {
        let layout = layout(len);
        // SAFETY: the length is not 0.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        #[cfg(target_os = "linux")]
        // SAFETY: these pages belong to the allocation alone, and nothing was written to them. Both
        // calls are hints: memory that the allocator has used before gives its small pages back.
        unsafe {
            libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
            libc::madvise(start.as_ptr().cast(), len, libc::MADV_DONTNEED);
        }
        LENGTH.fetch_add(len, Ordering::Relaxed);
        Arc::new(Self { start, len })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        LENGTH.fetch_sub(self.len, Ordering::Relaxed);
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), layout(self.len)) };
    }
}

fn layout(len: usize) -> Layout {
    Layout::from_size_align(len, HUGE_PAGE).expect("lengths of slices are below the limit")
}

/// Bytes of an arena, which nothing else reads or writes.
struct Part {
    arena: Arc<Arena>,
    first: usize,
    len: usize,
}

impl Part {
    /// Reserves memory, which is not initialized: of an open arena, or of a new one.
    fn reserved(arenas: &Mutex<Vec<Open>>, len: usize) -> Self {
        let mut arenas = arenas.lock().unwrap_or_else(PoisonError::into_inner);
        arenas.retain(|open| open.arena.strong_count() > 0);
        for open in arenas.iter_mut().filter(|open| open.free() >= len) {
            if let Some(arena) = open.arena.upgrade() {
                return Self { arena, first: open.take(len), len };
            }
        }
        let shared = (LENGTH.load(Ordering::Relaxed) / GROWTH).min(SHARED);
        let arena = Arena::new(len.max(shared).next_multiple_of(HUGE_PAGE));
        let mut open = Open { arena: Arc::downgrade(&arena), used: 0, len: arena.len };
        let first = open.take(len);
        arenas.push(open);
        if arenas.len() > OPEN {
            let fullest = (0..arenas.len()).min_by_key(|&at| arenas[at].free());
            arenas.swap_remove(fullest.expect("one was added"));
        }
        Self { arena, first, len }
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: the part is inside of its arena.
        unsafe { self.arena.start.add(self.first) }
    }
}

impl AllocationController for Part {
    // The most with which `Bytes` are cloned.
    fn alloc_align(&self) -> usize {
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    // SAFETY: as the trait asks, callers write initialized bytes only.
    unsafe fn memory_mut(
        &mut self,
        _policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        // SAFETY: the bytes belong to this part, which is borrowed for as long.
        Ok(unsafe { slice::from_raw_parts_mut(self.start().cast().as_ptr(), self.len) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        // SAFETY: as for `memory_mut`.
        Ok(unsafe { slice::from_raw_parts(self.start().cast().as_ptr(), self.len) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_share_arenas_that_are_freed_with_the_last_of_them() {
        let arenas = Mutex::new(Vec::new());
        let data =
            |len: usize, value: u8| moved_to(&arenas, TensorData::new(vec![value; len], [len]));
        let start = |data: &TensorData| data.as_bytes().as_ptr() as usize;
        let small = data(LEAST - 1, 1);
        let large = data(SHARED + 5, 2);
        assert_eq!(start(&large) % HUGE_PAGE, 0);
        // The rest of the pages of a large one, then one that is larger than the rest.
        let [first, second] = [data(LEAST, 3), data(LEAST + 1, 4)];
        assert_eq!(start(&first) - start(&large), (SHARED + 5).next_multiple_of(ALIGN));
        assert_eq!(start(&second) - start(&first), LEAST);
        let whole = data(SHARED, 5);
        assert_eq!(start(&whole) % HUGE_PAGE, 0);
        let third = data(LEAST, 6);
        assert_eq!(start(&third) - start(&second), (LEAST + 1).next_multiple_of(ALIGN));
        let mut changed = first.clone();
        changed.as_mut_slice::<u8>().unwrap().fill(7);
        for (data, len, value) in [
            (&small, LEAST - 1, 1),
            (&large, SHARED + 5, 2),
            (&first, LEAST, 3),
            (&second, LEAST + 1, 4),
            (&whole, SHARED, 5),
            (&third, LEAST, 6),
            (&changed, LEAST, 7),
        ] {
            assert_eq!(data.as_slice::<u8>().unwrap(), vec![value; len]);
        }
        assert_eq!(second.clone().try_into_vec::<u8>().unwrap(), vec![4; LEAST + 1]);
        drop((large, first, second, third, whole));
        assert!(arenas.lock().unwrap().iter().all(|open| open.arena.upgrade().is_none()));
        let kept: Vec<_> = (0..=OPEN).map(|at| data(SHARED + 5, at as u8)).collect();
        let open = arenas.lock().unwrap();
        assert_eq!((kept.len(), open.len()), (OPEN + 1, OPEN));
    }
}
