//! How far long work is, on a terminal or in lines.

use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle, WeakProgressBar};

/// Time between two lines where there is no terminal.
const INTERVAL: Duration = Duration::from_secs(10);

/// A bar on a terminal; elsewhere, where indicatif shows nothing, a line on stderr every ten
/// seconds.
pub(crate) fn bar(length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:32} {pos}/{len} {elapsed} {msg}");
    let bar = ProgressBar::new(length as u64).with_style(style.expect("a template"));
    if bar.is_hidden() {
        let watched = bar.downgrade();
        thread::spawn(move || lines(&watched, INTERVAL, |line| eprintln!("{line}")));
    }
    bar
}

/// Says how far the work is until it is finished.
fn lines(bar: &WeakProgressBar, interval: Duration, mut say: impl FnMut(String)) {
    loop {
        thread::sleep(interval);
        let Some(bar) = bar.upgrade().filter(|bar| !bar.is_finished()) else { break };
        let (done, of) = (bar.position(), bar.length().unwrap_or(0));
        say(format!("{done}/{of} after {} s: {}", bar.elapsed().as_secs(), bar.message()));
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
            lines(&watched, interval, |line| sender.send(line).expect("someone listens"));
        });
        let line = said.recv().expect("a line");
        assert!(line.starts_with("1/4 after ") && line.ends_with(" s: up nvfp4 gptq"), "{line}");
        said.recv().expect("another line");
        bar.finish_and_clear();
        thread.join().expect("it ends");
    }
}
