//! [`on_awake_threads`]: a pass of many short parallel operations.

use core::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rayon::Yield;

/// Time without a task after which a thread goes to sleep all the same.
const IDLE: Duration = Duration::from_micros(200);

/// Runs a pass on a thread of rayon's pool, while its other threads look for tasks and stay awake.
///
/// A decoder's products take tens of microseconds each, about as long as it takes to wake up a
/// thread, which rayon puts to sleep between two of them. The other threads sleep again when the
/// pass ends, or earlier if it has no task for 200 us.
///
/// ```
/// use burn_fp4_ops::on_awake_threads;
///
/// assert_eq!(on_awake_threads(|| rayon::join(|| 1, || 2)), (1, 2));
/// ```
pub fn on_awake_threads<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
    let done = AtomicBool::new(false);
    rayon::scope(|scope| {
        let own = rayon::current_thread_index();
        let done = &done;
        scope.spawn_broadcast(move |_, thread| {
            // This thread gets here where the pass waits for a task: the pass must go on.
            if Some(thread.index()) != own {
                look_for_tasks(done);
            }
        });
        // Also if the pass panics.
        let _done = SetOnDrop(done);
        pass()
    })
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
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
