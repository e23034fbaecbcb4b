//! Progress of long work, with and without a terminal.

use std::thread;
use std::time::Duration;

pub use indicatif::ProgressBar;
use indicatif::{ProgressStyle, WeakProgressBar};

/// Shows a bar on a terminal. Elsewhere indicatif shows nothing: a line is printed to stderr every
/// ten seconds.
pub fn bar(length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}, {msg}, {eta} left");
    let bar = ProgressBar::new(length as u64).with_style(style.expect("a template"));
    if bar.is_hidden() {
        let watched = bar.downgrade();
        thread::spawn(move || print_lines(&watched));
    }
    bar
}

/// Prints the progress until the work is finished.
fn print_lines(bar: &WeakProgressBar) {
    loop {
        thread::sleep(Duration::from_secs(10));
        let Some(bar) = bar.upgrade().filter(|bar| !bar.is_finished()) else { break };
        let (done, of) = (bar.position(), bar.length().unwrap_or(0));
        let [elapsed, left] = [bar.elapsed(), bar.eta()].map(|time| time.as_secs());
        // The first step tells how long the others take.
        let left = if done > 0 { format!(", {left} s left") } else { String::new() };
        eprintln!("{done}/{of} after {elapsed} s{left}: {}", bar.message());
    }
}
