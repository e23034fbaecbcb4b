//! [`on_awake_threads`]: a pass of many short parallel operations.

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::Yield;

/// Time without a task after which a thread goes to sleep all the same.
const IDLE: Duration = Duration::from_micros(200);

thread_local! {
    /// True while the thread runs a pass, or looks for the tasks of one.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Runs a pass on a thread of rayon's pool, while its other threads look for tasks and stay awake.
///
/// A decoder's products take tens of microseconds each, about as long as it takes to wake up a
/// thread, which rayon puts to sleep between two of them. The other threads sleep again when the
/// pass ends, or earlier if it has no task for 200 us. The pass does not wait for them: they may
/// have other tasks.
///
/// ```
/// use burn_fp4_ops::on_awake_threads;
///
/// assert_eq!(on_awake_threads(|| rayon::join(|| 1, || 2)), (1, 2));
/// ```
pub fn on_awake_threads<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| {
        let done = Arc::new(AtomicBool::new(false));
        // Also if the pass panics.
        let _done = SetOnDrop(Arc::clone(&done));
        let _busy = Busy::enter();
        rayon::spawn_broadcast(move |_| {
            // A busy thread gets here where its pass waits for a task: the pass must go on.
            if !BUSY.get() {
                let _busy = Busy::enter();
                look_for_tasks(&done);
            }
        });
        pass()
    })
}

struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Makes a thread busy until it is dropped.
struct Busy {
    before: bool,
}

impl Busy {
    fn enter() -> Self {
        Self { before: BUSY.replace(true) }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        BUSY.set(self.before);
    }
}

fn look_for_tasks(done: &AtomicBool) {
    let mut idle_since = Instant::now();
    while !done.load(Ordering::Relaxed) {
        if let Some(Yield::Executed) = rayon::yield_now() {
            idle_since = Instant::now();
        } else if idle_since.elapsed() < IDLE {
            core::hint::spin_loop();
        } else {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_does_not_wait_for_a_thread_that_waits_for_it() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let (after_pass, wait) = std::sync::mpsc::channel::<()>();
        pool.spawn(move || wait.recv().unwrap());
        assert_eq!(pool.install(|| on_awake_threads(|| 1)), 1);
        after_pass.send(()).unwrap();
    }

    #[test]
    fn passes_that_run_at_once_or_inside_each_other_or_panic_end() {
        let sum = |count: u64| {
            on_awake_threads(move || {
                use rayon::prelude::*;
                let sums = (0..50).map(|_| (0..count).into_par_iter().sum::<u64>());
                let inner = on_awake_threads(|| (0..count).into_par_iter().max());
                sums.max().zip(inner)
            })
        };
        let expected = Some((4999 * 5000 / 2, 4999));
        std::thread::scope(|scope| {
            let threads = [(); 3].map(|()| scope.spawn(|| (0..20).map(|_| sum(5000)).max()));
            for thread in threads {
                assert_eq!(thread.join().unwrap(), Some(expected));
            }
        });
        let panics = || on_awake_threads(|| panic!("a pass"));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(sum(5000), expected);
    }
}
