//! Which weight a product reads ahead in a recording: that of the product after it.
//!
//! A pass is run a few times before it is recorded, and always in the same order. So the products
//! of every run are noted, and each one of the next run finds in the notes what is multiplied after
//! it; the last one finds the first, for the same pass is usually run again. From the first product
//! on that is another than the noted one, the rest of a run reads nothing ahead.
//!
//! A wrong guess costs time alone: what is read ahead changes no result. But its memory has to be
//! there in every run of the recording. CubeCL keeps all memory that it gave to the launches of a
//! recording for as long as the recording lives, and to be read ahead is to be given to a launch.
//! Until then the notes keep it. They are only of weights that others own too, as a model does: a
//! run that found memory taken which the run before had freed would take other memory, and in a
//! recording it cannot.
//!
//! All of it happens on the thread that runs the stream of operations, which the runs before the
//! recording and the recording itself have to themselves; so the notes are its own. There are none
//! while nothing is being recorded.

use core::cell::RefCell;

use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{Matmul, MatmulPlan, PackedHandles, Prefetch, Refusal};

thread_local! {
    static NOTES: RefCell<Option<Order<Weight>>> = const { RefCell::new(None) };
}

/// Products of this thread are noted for as long as it lives.
pub(super) struct Notes(());

impl Notes {
    pub(super) fn begin() -> Self {
        NOTES.set(Some(Order::default()));
        Self(())
    }

    /// What follows is another run of the pass.
    pub(super) fn next_run(&self) {
        NOTES.with_borrow_mut(|notes| notes.iter_mut().for_each(Order::next_run));
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        NOTES.set(None);
    }
}

/// Runs a product, which reads the next one's weight ahead if the notes tell.
pub(crate) fn run(
    plan: &MatmulPlan,
    client: &Client,
    weight: PackedHandles,
    input: Handle,
    bias: Option<Handle>,
) -> Result<Handle, Refusal> {
    let next = note(plan.matmul(), &weight);
    plan.run(client, weight, input, bias, next)
}

/// Notes a product with a weight that others own too, and finds the weight of the one after it.
fn note(matmul: &Matmul, weight: &PackedHandles) -> Option<Prefetch> {
    NOTES.with_borrow_mut(|notes| {
        let notes = notes.as_mut().filter(|_| !weight.codes.can_mut())?;
        let own = Prefetch { matmul: *matmul, weight: weight.clone() };
        notes.after(Weight(own)).map(|next| next.0)
    })
}

#[derive(Clone)]
struct Weight(Prefetch);

impl PartialEq for Weight {
    /// Whether it is the same product with the same memory.
    fn eq(&self, other: &Self) -> bool {
        let place = |weight: &Self| {
            let codes = &weight.0.weight.codes;
            (codes.memory.descriptor().id.value, codes.offset_start)
        };
        place(self) == place(other) && self.0.matmul == other.0.matmul
    }
}

/// What came one after the other in a run, and in the run before.
struct Order<T> {
    before: Vec<T>,
    now: Vec<T>,
    /// Whether they are the same so far.
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

    /// Notes an item, and finds the one that came after it in the run before.
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
            let found = [note(&matmul, &first.clone()), note(&matmul, &weight())];
            let last = note(&matmul, &second.clone());
            found.into_iter().chain([last]).map(|next| next.map(Weight)).collect::<Vec<_>>()
        };
        assert!(run().iter().all(Option::is_none), "nothing is recorded");
        let notes = Notes::begin();
        notes.next_run();
        assert!(run().iter().all(Option::is_none), "the first run");
        notes.next_run();
        assert!(run() == [next(&second).map(Weight), None, next(&first).map(Weight)]);
        drop(notes);
        assert!(run().iter().all(Option::is_none), "the recording is over");
    }

    #[test]
    fn a_run_in_another_order_finds_nothing_from_there_on() {
        let mut order = Order::default();
        run(&mut order, "abcd");
        assert_eq!(run(&mut order, "abxd"), [Some('b'), Some('c'), None, None]);
        assert_eq!(run(&mut order, "abxd"), [Some('b'), Some('x'), Some('d'), Some('a')]);
    }
}
