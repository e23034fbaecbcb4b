//! Signals that end a run: what is said before it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::ProgressBar;

/// A run that says how far it is if a signal ends it, until this is dropped.
pub(crate) struct Announced(Arc<AtomicBool>);

impl Announced {
    /// Waits for SIGINT (Ctrl-C) and SIGTERM, in a thread. The process still ends by the signal,
    /// so that shells see what they expect: 130 and 143. Elsewhere than on Unix nothing is said.
    pub(crate) fn new(bar: &ProgressBar, advice: &'static str) -> Self {
        let running = Arc::new(AtomicBool::new(true));
        #[cfg(unix)]
        unix::announce(bar, Arc::clone(&running), advice);
        #[cfg(not(unix))]
        let _ = (bar, advice);
        Self(running)
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[cfg(unix)]
mod unix {
    use std::thread;

    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;
    use signal_hook::low_level::emulate_default_handler;

    use super::*;
    use crate::print::say;
    use crate::size::Size;

    /// The signals that this process ignores, a bit for each from the first on: as Linux says it.
    fn ignored() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    }

    pub(super) fn announce(bar: &ProgressBar, running: Arc<AtomicBool>, advice: &'static str) {
        // A shell starts what runs in the background with SIGINT ignored.
        let ignored = ignored();
        let handled =
            [SIGINT, SIGTERM].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
        // Without the thread a signal ends the run all the same, without a word.
        let Ok(mut signals) = Signals::new(handled) else { return };
        let bar = bar.downgrade();
        thread::spawn(move || {
            for signal in signals.forever() {
                if running.load(Ordering::Relaxed)
                    && let Some(bar) = bar.upgrade()
                {
                    let [done, of] = [bar.position(), bar.length().unwrap_or(0)].map(Size);
                    bar.finish_and_clear();
                    say(format!("stopped at {done} of {of}; {advice}"));
                }
                let _ = emulate_default_handler(signal);
            }
        });
    }
}
