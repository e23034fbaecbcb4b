//! The weight that a product of a captured graph prefetches: that of the product after it.
//!
//! A pass runs a few times before it is captured, always in the same order. So each run is noted,
//! and a product finds in the notes of the run before which product comes next. The last one finds
//! the first, since the same pass usually runs again. From the first product that differs from the
//! notes on, the rest of a run prefetches nothing.
//!
//! A wrong guess costs only time, since a prefetch changes no result. But the memory has to be
//! there in every replay. CubeCL keeps all memory that the launches of a graph were given for as
//! long as the graph lives, and a prefetched weight is given to a launch; until then the notes keep
//! it. They hold only weights with another owner, such as a model. Otherwise a run would find
//! memory taken that the run before had freed, and would take other memory, which a capture cannot.
//!
//! Everything here happens on the thread that runs the stream of operations, which the runs and the
//! capture have to themselves, so the notes are local to the thread. There are none while nothing
//! is being captured.

use core::cell::RefCell;

use burn_fp4_cubecl::{Matmul, PackedHandles, Prefetch};

thread_local! {
    static NOTES: RefCell<Option<Order<Weight>>> = const { RefCell::new(None) };
}

/// Notes the products of this thread for as long as it lives.
pub(super) struct Notes(());

impl Notes {
    pub(super) fn begin() -> Self {
        NOTES.set(Some(Order::default()));
        Self(())
    }

    /// Begins the next run of the pass.
    pub(super) fn next_run(&self) {
        NOTES.with_borrow_mut(|notes| notes.iter_mut().for_each(Order::next_run));
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        NOTES.set(None);
    }
}

/// Notes a product whose weight has another owner, and returns the weight of the product after it.
pub(super) fn next_weight(matmul: &Matmul, weight: &PackedHandles) -> Option<Prefetch> {
    NOTES.with_borrow_mut(|notes| {
        let notes = notes.as_mut().filter(|_| !weight.codes.can_mut())?;
        let own = Prefetch { matmul: *matmul, weight: weight.clone() };
        notes.after(Weight(own)).map(|next| next.0)
    })
}

#[derive(Clone)]
struct Weight(Prefetch);

impl PartialEq for Weight {
    /// Returns true for the same product with a weight in the same memory.
    fn eq(&self, other: &Self) -> bool {
        let place = |weight: &Self| {
            let codes = &weight.0.weight.codes;
            (codes.memory.descriptor().id.value, codes.offset_start)
        };
        place(self) == place(other) && self.0.matmul == other.0.matmul
    }
}

/// Order of the items of a run, compared with the run before.
struct Order<T> {
    before: Vec<T>,
    now: Vec<T>,
    /// Set while the two runs agree.
    same: bool,
}

impl<T> Default for Order<T> {
    fn default() -> Self {
        Self { before: Vec::new(), now: Vec::new(), same: true }
    }
}

impl<T: Clone + PartialEq> Order<T> {
    fn next_run(&mut self) {
        self.before = core::mem::take(&mut self.now);
        self.same = true;
    }

    /// Notes an item, and returns the one that came after it in the run before.
    fn after(&mut self, item: T) -> Option<T> {
        let at = self.now.len();
        self.same &= self.before.get(at) == Some(&item);
        self.now.push(item);
        self.same.then(|| self.before[(at + 1) % self.before.len()].clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(order: &mut Order<char>, items: &str) -> Vec<Option<char>> {
        order.next_run();
        items.chars().map(|item| order.after(item)).collect()
    }

    #[test]
    fn a_run_finds_what_came_next_in_the_one_before() {
        let mut order = Order::default();
        assert_eq!(run(&mut order, "abca"), [None; 4]);
        for _ in 0..3 {
            let found = [Some('b'), Some('c'), Some('a'), Some('a')];
            assert_eq!(run(&mut order, "abca"), found);
        }
        assert_eq!(run(&mut order, "a"), [Some('b')]);
        // Alone it comes after itself; what follows is new.
        assert_eq!(run(&mut order, "ab"), [Some('a'), None]);
        assert!(run(&mut order, "").is_empty());
        assert_eq!(run(&mut order, "a"), [None]);
    }

    #[cfg(feature = "cpu")]
    #[test]
    fn weights_that_others_own_are_noted() {
        use burn_fp4_cubecl::Dtype;
        use burn_fp4_cubecl::cubecl::Device;
        use burn_fp4_search::formats::Fp4Format;

        let client = Device::default().client();
        let weight = || {
            let [codes, scales, tensor_scale] = [(); 3].map(|()| client.empty(64));
            PackedHandles { codes, scales, tensor_scale, tensor_scales: 1 }
        };
        let (format, dtype) = (Fp4Format::NvFp4, Dtype::Bf16);
        let matmul = Matmul { m: 1, n: 1, k: 128, format, block_size: 16, dtype };
        let next = |weight: &PackedHandles| Some(Prefetch { matmul, weight: weight.clone() });
        let (first, second) = (weight(), weight());
        let run = || {
            let found = [next_weight(&matmul, &first.clone()), next_weight(&matmul, &weight())];
            let last = next_weight(&matmul, &second.clone());
            found.into_iter().chain([last]).map(|next| next.map(Weight)).collect::<Vec<_>>()
        };
        assert!(run().iter().all(Option::is_none), "nothing is captured");
        let notes = Notes::begin();
        notes.next_run();
        assert!(run().iter().all(Option::is_none), "the first run");
        notes.next_run();
        assert!(run() == [next(&second).map(Weight), None, next(&first).map(Weight)]);
        drop(notes);
        assert!(run().iter().all(Option::is_none), "the capture is over");
    }

    #[test]
    fn a_run_in_another_order_finds_nothing_from_there_on() {
        let mut order = Order::default();
        run(&mut order, "abcd");
        assert_eq!(run(&mut order, "abxd"), [Some('b'), Some('c'), None, None]);
        assert_eq!(run(&mut order, "abxd"), [Some('b'), Some('x'), Some('d'), Some('a')]);
    }
}
