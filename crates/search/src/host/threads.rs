//! [`on_awake_threads`]: passes of many short operations, and the threads that share their tasks.

use core::any::Any;
use core::cell::Cell;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rayon::Yield;
use rayon::prelude::*;

/// Values per parallel task: large enough to amortize a task, small enough to balance two cores.
pub(super) const TASK: usize = 1 << 16;

/// Values per parallel task of a search: few, so that threads share a column of blocks in GPTQ.
pub(super) const SEARCH_TASK: usize = 1 << 12;

/// Work of a thread in a microsecond, by kind.
pub(super) mod per_microsecond {
    /// Multiplications by elements of a packed weight, which are decoded to f32.
    pub(in crate::host) const PACKED: usize = 1 << 14;
    /// The same with an input of 8-bit integers.
    pub(in crate::host) const PACKED_INT8: usize = 1 << 15;
    /// Multiplications by a matrix of signed bytes.
    pub(in crate::host) const SIGNED_BYTES: usize = 1 << 13;
    /// Multiplications by a dense weight, whose values come from memory.
    pub(in crate::host) const DENSE: usize = 1 << 12;
    /// Multiplications of attention.
    pub(in crate::host) const ATTENTION: usize = 1 << 13;
    /// Values that are read, changed and written.
    pub(in crate::host) const VALUES: usize = 1 << 10;
    /// Values that are written in another order.
    pub(in crate::host) const WRITTEN: usize = 1 << 12;
}

/// An amount of work, in microseconds of a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work(usize);

impl Work {
    pub(super) fn new(work: usize, per_microsecond: usize) -> Self {
        Self(work / per_microsecond)
    }

    /// Returns true if the work is worth the time until other threads take part, and until they
    /// are done. Inside a pass they look for work; a thread of rayon's pool shares its work with
    /// those that are awake; any other one sleeps until a thread of the pool has woken up and has
    /// done the work.
    pub(super) fn is_worth_threads(self) -> bool {
        let microseconds = match (Team::of_pass(), rayon::current_thread_index()) {
            (Some(_), _) => 2,
            (None, Some(_)) => 8,
            (None, None) => 80,
        };
        self.0 > microseconds && rayon::current_num_threads() > 1
    }
}

/// Runs a task for each chunk of `len` values, given its number. All threads share the tasks if the
/// work is worth it. A thread makes one state for its tasks.
pub(super) fn for_each_chunk<T: Send, S>(
    work: Work,
    values: &mut [T],
    len: usize,
    state: impl Fn() -> S + Sync + Send,
    task: impl Fn(&mut S, usize, &mut [T]) + Sync + Send,
) {
    debug_assert!(len > 0);
    if values.len() <= len || !work.is_worth_threads() {
        let mut state = state();
        return values
            .chunks_mut(len)
            .enumerate()
            .for_each(|(at, chunk)| task(&mut state, at, chunk));
    }
    let Some(team) = Team::of_pass() else {
        let chunks = values.par_chunks_mut(len).enumerate();
        return chunks.for_each_init(state, |state, (at, chunk)| task(state, at, chunk));
    };
    let (next, chunks) = (AtomicUsize::new(0), Chunks::new(values, len));
    team.run(&|| {
        let mut state = state();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            // SAFETY: no other thread has this number.
            let Some(chunk) = (unsafe { chunks.get(at) }) else { return };
            task(&mut state, at, chunk);
        }
    });
}

/// Number of tasks of a thread, so that one that is late does not keep the others waiting long.
const TASKS_OF_THREAD: usize = 2;
/// Number of bytes of a weight that a task reads, about, at most.
const STRETCH: usize = 1 << 20;

/// Returns the number of rows of a weight per task of a product that reads the weight once, a
/// multiple of `together`. Memory is read faster in long stretches.
pub(super) fn rows_of_stretch(rows: usize, row_bytes: usize, together: usize) -> usize {
    let tasks = TASKS_OF_THREAD * rayon::current_num_threads();
    let longest = (STRETCH / row_bytes.max(1)).max(1);
    rows.div_ceil(tasks).clamp(1, longest).next_multiple_of(together)
}

/// Chunks of values that threads borrow by number.
struct Chunks<T> {
    start: *mut T,
    values: usize,
    len: usize,
}

// SAFETY: a chunk is borrowed by one thread at a time, and its values may be sent to it.
unsafe impl<T: Send> Sync for Chunks<T> {}

impl<T> Chunks<T> {
    fn new(values: &mut [T], len: usize) -> Self {
        Self { start: values.as_mut_ptr(), values: values.len(), len }
    }

    /// Borrows a chunk; None after the last.
    ///
    /// # Safety
    /// The values are borrowed for as long, and nothing else borrows this chunk.
    #[allow(clippy::mut_from_ref)]
    unsafe fn get(&self, at: usize) -> Option<&mut [T]> {
        let first = at * self.len;
        let len = self.values.checked_sub(first).filter(|&left| left > 0)?.min(self.len);
        // SAFETY: inside of the values.
        Some(unsafe { core::slice::from_raw_parts_mut(self.start.add(first), len) })
    }
}

/// Number of looks at the work of a team between two looks at rayon's tasks.
const LOOKS: usize = 16;
/// Number of looks at rayon's tasks, one after the other without any task, after which a thread
/// goes to sleep all the same: some hundreds of microseconds. A clock would count the time in which
/// others have the processor.
const IDLE: usize = 512;
/// Number of times that a pass looks for the end of a task before others may have its processor:
/// some tens of microseconds.
const WAITS: usize = 1 << 10;

thread_local! {
    /// True while the thread runs a pass, or looks for the tasks of one.
    static BUSY: Cell<bool> = const { Cell::new(false) };
    /// The team of the pass that the thread runs; null outside of one, and inside of a task.
    static TEAM: Cell<*const Team> = const { Cell::new(ptr::null()) };
}

/// Runs a pass on a thread of rayon's pool, while its other threads stay awake and look for tasks.
///
/// A decoder's products take tens of microseconds each, about as long as it takes to wake up a
/// thread, which rayon puts to sleep between two of them. The other threads sleep again when the
/// pass ends, or earlier if it has no task for some hundreds of microseconds. The pass does not
/// wait for them: they may have other tasks. A pass inside of a pass calls them back.
///
/// ```
/// use burn_fp4_search::host::on_awake_threads;
///
/// assert_eq!(on_awake_threads(|| rayon::join(|| 1, || 2)), (1, 2));
/// ```
pub fn on_awake_threads<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| {
        let outer = TEAM.get();
        if !outer.is_null() {
            // SAFETY: it is the pointer of an `Arc`, which the outer pass holds.
            let team = unsafe {
                Arc::increment_strong_count(outer);
                Arc::from_raw(outer)
            };
            team.call_threads();
            return pass();
        }
        let team = Arc::new(Team::default());
        // Also if the pass panics.
        let _done = SetOnDrop(&team.done);
        let _busy = Replaced::new(&BUSY, true);
        team.call_threads();
        let _team = Replaced::new(&TEAM, Arc::as_ptr(&team));
        pass()
    })
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Replaces a value of a thread until it is dropped.
struct Replaced<T: Copy + 'static> {
    cell: &'static thread::LocalKey<Cell<T>>,
    before: T,
}

impl<T: Copy + 'static> Replaced<T> {
    fn new(cell: &'static thread::LocalKey<Cell<T>>, value: T) -> Self {
        Self { cell, before: cell.replace(value) }
    }
}

impl<T: Copy + 'static> Drop for Replaced<T> {
    fn drop(&mut self) {
        self.cell.set(self.before);
    }
}

/// Shared work: a function that takes tasks until none is left. A thread may call it twice.
type Shared<'a> = &'a (dyn Fn() + Sync);

/// The threads of a pass, which take part in its work as soon as it is posted.
#[derive(Default)]
struct Team {
    /// Number of works so far.
    posted: AtomicUsize,
    /// The work that threads may take part in, or null.
    work: AtomicPtr<Shared<'static>>,
    /// Number of threads that look at `work`, or take part in it.
    inside: AtomicUsize,
    /// Number of threads that look for tasks.
    looking: AtomicUsize,
    /// The panic of a thread that took part.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    done: AtomicBool,
}

impl Team {
    /// Calls the threads that do not look for tasks yet.
    fn call_threads(self: &Arc<Self>) {
        if self.looking.load(Ordering::Relaxed) + 1 >= rayon::current_num_threads() {
            return;
        }
        let team = Arc::clone(self);
        rayon::spawn_broadcast(move |_| {
            // A busy thread gets here where its pass waits for a task: the pass must go on.
            if !BUSY.get() {
                let _busy = Replaced::new(&BUSY, true);
                team.look_for_tasks(IDLE);
            }
        });
    }

    /// Returns the team of the pass that this thread runs, if any other thread looks for tasks.
    fn of_pass() -> Option<&'static Self> {
        // SAFETY: `on_awake_threads` holds the team until the pass ends, and the caller is inside
        // of the pass.
        let team = unsafe { TEAM.get().as_ref() }?;
        (team.looking.load(Ordering::Relaxed) > 0).then_some(team)
    }

    /// Runs work on this thread and on all that look for it. Returns when all of them are done.
    fn run(&self, work: Shared<'_>) {
        // SAFETY: nobody uses it after this function: `Posted` waits for those inside.
        let mut work: Shared<'static> = unsafe { core::mem::transmute(work) };
        // Work inside of this work has no team.
        let _team = Replaced::new(&TEAM, ptr::null());
        self.work.store(&raw mut work, Ordering::SeqCst);
        let posted = Posted(self);
        self.posted.fetch_add(1, Ordering::Release);
        work();
        drop(posted);
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Takes part in the work that is posted, if it is not over.
    fn take_part(&self) {
        // In one order with `Posted`: it sees this thread inside, or this thread sees null.
        self.inside.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the work is not over while this thread is inside.
        if let Some(work) = unsafe { self.work.load(Ordering::SeqCst).as_ref() }
            && let Err(panic) = catch_unwind(AssertUnwindSafe(work))
        {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    /// Takes part in works until the pass is done, or no task was found for `idle_rounds` rounds.
    fn look_for_tasks(&self, idle_rounds: usize) {
        self.looking.fetch_add(1, Ordering::Relaxed);
        let (mut idle, mut seen) = (0, 0);
        while idle < idle_rounds && !self.done.load(Ordering::Relaxed) {
            let mut found = false;
            for _ in 0..LOOKS {
                let posted = self.posted.load(Ordering::Acquire);
                if posted != seen {
                    seen = posted;
                    self.take_part();
                    found = true;
                } else {
                    core::hint::spin_loop();
                }
            }
            found |= matches!(rayon::yield_now(), Some(Yield::Executed));
            idle = if found { 0 } else { idle + 1 };
        }
        self.looking.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Posted work, which is over when this is dropped.
struct Posted<'a>(&'a Team);

impl Drop for Posted<'_> {
    fn drop(&mut self) {
        self.0.work.store(ptr::null_mut(), Ordering::SeqCst);
        let mut waits = 0;
        while self.0.inside.load(Ordering::SeqCst) > 0 {
            waits += 1;
            if waits < WAITS {
                core::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
        if thread::panicking() {
            // Of the same work: no later one must end with it.
            *self.0.panic.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_threads() -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap()
    }

    #[test]
    fn a_pass_does_not_wait_for_a_thread_that_waits_for_it() {
        let pool = two_threads();
        let (after_pass, wait) = std::sync::mpsc::channel::<()>();
        pool.spawn(move || wait.recv().unwrap());
        assert_eq!(pool.install(|| on_awake_threads(|| 1)), 1);
        after_pass.send(()).unwrap();
    }

    #[test]
    fn passes_that_run_at_once_or_inside_each_other_or_panic_end() {
        let sum = |count: u64| {
            on_awake_threads(move || {
                let sums = (0..50).map(|_| (0..count).into_par_iter().sum::<u64>());
                let inner = on_awake_threads(|| (0..count).into_par_iter().max());
                sums.max().zip(inner)
            })
        };
        let expected = Some((4999 * 5000 / 2, 4999));
        thread::scope(|scope| {
            let threads = [(); 3].map(|()| scope.spawn(|| (0..20).map(|_| sum(5000)).max()));
            for thread in threads {
                assert_eq!(thread.join().unwrap(), Some(expected));
            }
        });
        let panics = || on_awake_threads(|| panic!("a pass"));
        assert!(catch_unwind(panics).is_err());
        assert_eq!(sum(5000), expected);
    }

    /// Work that is worth threads everywhere.
    const LARGE: Work = Work(1000);

    /// Runs a pass with a team of one other thread, which does not leave it.
    fn run_with_team<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
        two_threads().install(|| {
            let team = Arc::new(Team::default());
            thread::scope(|scope| {
                let _done = SetOnDrop(&team.done);
                scope.spawn(|| team.look_for_tasks(usize::MAX));
                while team.looking.load(Ordering::Relaxed) == 0 {
                    thread::yield_now();
                }
                let _team = Replaced::new(&TEAM, Arc::as_ptr(&team));
                pass()
            })
        })
    }

    #[test]
    fn stretches_are_whole_rows_and_at_most_a_part_of_the_memory() {
        two_threads().install(|| {
            assert_eq!(rows_of_stretch(0, 8, 16), 16);
            assert_eq!(rows_of_stretch(576, 288, 16), 144);
            assert_eq!(rows_of_stretch(600, 288, 16), 160);
            assert_eq!(rows_of_stretch(49_152, 576, 16), 1824);
            assert_eq!(rows_of_stretch(64, 2 * STRETCH, 16), 16);
            assert_eq!(rows_of_stretch(64, 0, 1), 16);
        });
    }

    #[test]
    fn tasks_of_a_pass_run_once_each_on_all_threads() {
        run_with_team(|| {
            for _ in 0..1000 {
                let (calls, states) = (AtomicUsize::new(0), AtomicUsize::new(0));
                let mut values = vec![0; 10_001];
                let state = || states.fetch_add(1, Ordering::Relaxed);
                for_each_chunk(LARGE, &mut values, 7, state, |_, at, chunk| {
                    // The last task waits for the other thread.
                    while at == 1428 && states.load(Ordering::Relaxed) < 2 {
                        thread::yield_now();
                    }
                    calls.fetch_add(1, Ordering::Relaxed);
                    chunk.iter_mut().for_each(|value| *value += at + 1);
                });
                assert_eq!(calls.into_inner(), 1429);
                assert!(values.iter().enumerate().all(|(at, value)| *value == at / 7 + 1));
            }
        });
    }

    /// The other thread leaves the outer pass, which has no tasks, and comes back.
    #[test]
    fn a_pass_inside_of_a_pass_has_the_threads_of_the_outer_one() {
        let wait_for_team = || {
            while !on_awake_threads(|| Team::of_pass().is_some()) {
                thread::yield_now();
            }
        };
        two_threads().install(|| {
            on_awake_threads(|| {
                let outer = TEAM.get();
                wait_for_team();
                let address = outer.addr();
                assert_eq!(on_awake_threads(|| TEAM.get().addr()), address);
                // SAFETY: the team of this pass.
                let looking = || unsafe { &*outer }.looking.load(Ordering::Relaxed);
                while looking() > 0 {
                    thread::yield_now();
                }
                wait_for_team();
            });
        });
    }

    #[test]
    fn a_panic_of_two_threads_does_not_end_a_later_work() {
        run_with_team(|| {
            let states = AtomicUsize::new(0);
            let state = || states.fetch_add(1, Ordering::Relaxed);
            let task = |_: &mut usize, _: usize, _: &mut [i32]| {
                // Each of both threads has a task.
                while states.load(Ordering::Relaxed) < 2 {
                    thread::yield_now();
                }
                panic!("a task");
            };
            let panics = || for_each_chunk(LARGE, &mut [0; 2], 1, state, task);
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
            for_each_chunk(LARGE, &mut [0; 2], 1, || (), |(), _, _| ());
        });
    }

    #[test]
    fn a_task_that_panics_ends_its_pass_and_no_other() {
        for first in [0, 99] {
            let panics = || {
                run_with_team(|| {
                    for_each_chunk(
                        LARGE,
                        &mut [0; 100],
                        1,
                        || (),
                        |(), at, _| {
                            assert_ne!(at, first, "a task");
                        },
                    );
                });
            };
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        }
        let sum = run_with_team(|| {
            let mut values = [1; 100];
            for_each_chunk(
                LARGE,
                &mut values,
                3,
                || (),
                |(), _, chunk| {
                    // A task inside of a task has this thread, or rayon's.
                    for_each_chunk(LARGE, chunk, 1, || (), |(), _, values| values[0] += 1);
                },
            );
            values.iter().sum::<i32>()
        });
        assert_eq!(sum, 200);
    }
}
