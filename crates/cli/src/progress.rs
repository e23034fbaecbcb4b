//! The progress of long work, on a terminal or in lines.

use std::fmt::Write;
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressState, ProgressStyle, WeakProgressBar};

use crate::size::Size;

/// Time between two lines where there is no terminal.
const INTERVAL: Duration = Duration::from_secs(10);

/// A bar on a terminal; elsewhere, where indicatif shows nothing, a line on stderr every ten
/// seconds.
pub(crate) fn bar(length: usize) -> ProgressBar {
    start(length as u64, style("{bar:24} {pos}/{len} {elapsed} {wide_msg}"), of_steps)
}

/// The same for bytes, with the rate and the time that is left; `before` were done earlier.
pub(crate) fn bytes(length: u64, before: u64) -> ProgressBar {
    // Sizes are rounded as everywhere else.
    let size = |of: fn(&ProgressState) -> u64| {
        move |state: &ProgressState, text: &mut dyn Write| {
            let _ = write!(text, "{}", Size(of(state)));
        }
    };
    let style = style("{bar:24} {done}/{all} {rate}/s, {eta} left {wide_msg}")
        .with_key("done", size(ProgressState::pos))
        .with_key("all", size(|state| state.len().unwrap_or(0)))
        .with_key("rate", size(|state| state.per_sec() as u64));
    let bar = start(length, style, move |bar| of_bytes(bar, before));
    bar.set_position(before);
    bar.reset_eta();
    bar
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("a template")
}

fn start(
    length: u64,
    style: ProgressStyle,
    describe: impl Fn(&ProgressBar) -> String + Send + 'static,
) -> ProgressBar {
    let bar = ProgressBar::new(length).with_style(style);
    if bar.is_hidden() {
        let watched = bar.downgrade();
        thread::spawn(move || lines(&watched, INTERVAL, describe, |line| eprintln!("{line}")));
    }
    bar
}

fn of_steps(bar: &ProgressBar) -> String {
    let (done, of) = (bar.position(), bar.length().unwrap_or(0));
    format!("{done}/{of} after {} s: {}", bar.elapsed().as_secs(), bar.message())
}

/// The rate is that of this run, which began behind `before` bytes.
fn of_bytes(bar: &ProgressBar, before: u64) -> String {
    let (done, of) = (bar.position(), bar.length().unwrap_or(0));
    let own = done.saturating_sub(before);
    if own == 0 {
        return format!("{} of {}: {}", Size(done), Size(of), bar.message());
    }
    let seconds = bar.elapsed().as_secs_f64();
    let rate = own as f64 / seconds.max(1e-3);
    let left = (of.saturating_sub(done)) as f64 / rate.max(1.0);
    let [done, of, rate] = [done, of, rate as u64].map(Size);
    format!("{done} of {of}, {rate}/s, {left:.0} s left: {}", bar.message())
}

/// Says how far the work is until it is finished.
fn lines(
    bar: &WeakProgressBar,
    interval: Duration,
    describe: impl Fn(&ProgressBar) -> String,
    mut say: impl FnMut(String),
) {
    loop {
        thread::sleep(interval);
        let Some(bar) = bar.upgrade().filter(|bar| !bar.is_finished()) else { break };
        say(describe(&bar));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn without_a_terminal_lines_come_until_the_work_is_finished() {
        let bar = ProgressBar::hidden();
        bar.set_length(4);
        bar.set_message("up nvfp4 gptq");
        bar.inc(1);
        let (sender, said) = mpsc::channel();
        let watched = bar.downgrade();
        let interval = Duration::from_millis(5);
        let thread = thread::spawn(move || {
            let say = |line| sender.send(line).expect("someone listens");
            lines(&watched, interval, of_steps, say);
        });
        let line = said.recv().expect("a line");
        assert!(line.starts_with("1/4 after ") && line.ends_with(" s: up nvfp4 gptq"), "{line}");
        said.recv().expect("another line");
        bar.finish_and_clear();
        thread.join().expect("it ends");
    }

    #[test]
    fn bytes_come_with_a_rate_and_the_time_that_is_left() {
        let bar = ProgressBar::hidden();
        bar.set_length(4_000_000);
        bar.inc(1_000_000);
        bar.set_message("up");
        let line = of_bytes(&bar, 0);
        assert!(line.starts_with("1.0 MB of 4.0 MB, ") && line.ends_with(" s left: up"), "{line}");
    }

    #[test]
    fn the_rate_of_work_that_is_gone_on_with_is_its_own() {
        let bar = ProgressBar::hidden();
        bar.set_length(4_000_000_000_000);
        bar.set_position(3_000_000_000_000);
        let none = of_bytes(&bar, 3_000_000_000_000);
        assert_eq!(none, "3.0 TB of 4.0 TB: ");
        bar.inc(1000);
        thread::sleep(Duration::from_millis(10));
        let line = of_bytes(&bar, 3_000_000_000_000);
        assert!(line.contains(" kB/s, "), "{line}");
    }
}
