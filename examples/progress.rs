//! Progress of long work, with and without a terminal.

use std::fmt::Write;
use std::thread;
use std::time::Duration;

pub use indicatif::ProgressBar;
use indicatif::{ProgressState, ProgressStyle, WeakProgressBar};

/// Shows a bar on a terminal. Elsewhere indicatif shows nothing: a line is printed to stderr every
/// ten seconds.
pub fn bar(length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}, {msg}{left}");
    let left = |state: &ProgressState, text: &mut dyn Write| {
        let left = left(state.elapsed(), state.pos(), state.len().unwrap_or(0));
        let _ = text.write_str(&left);
    };
    let style = style.expect("a template").with_key("left", left);
    let bar = ProgressBar::new(length as u64).with_style(style);
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
        let (elapsed, message) = (bar.elapsed(), bar.message());
        let left = left(elapsed, done, of);
        eprintln!("{done}/{of} after {} s{left}: {message}", elapsed.as_secs());
    }
}

/// Formats the time that is left, by the mean of the steps so far; nothing before the first one.
/// indicatif's own estimate forgets what is a minute old: it is no use for steps as long as that.
fn left(elapsed: Duration, done: u64, of: u64) -> String {
    if done == 0 {
        return String::new();
    }
    let left = elapsed.as_secs_f64() * of.saturating_sub(done) as f64 / done as f64;
    format!(", {left:.0} s left")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_that_is_left_is_the_mean_of_all_steps() {
        assert_eq!(left(Duration::from_secs(60), 0, 8), "");
        assert_eq!(left(Duration::from_secs(60), 2, 8), ", 180 s left");
        assert_eq!(left(Duration::from_secs(60), 8, 8), ", 0 s left");
    }
}
