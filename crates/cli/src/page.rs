//! Parts of pages and pictures: escaped texts, the scale of bars, and the date.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Escapes a text for HTML and SVG.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Returns the marks of a scale from 0 to `most` or a little more, at multiples of 1, 2 or 5 times
/// a power of ten, with their texts. `most` is positive and finite.
pub(crate) fn marks(most: f64) -> Vec<(f64, String)> {
    let power = (most / 5.0).log10().floor();
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * 10_f64.powf(power));
    let step = steps.into_iter().find(|step| most / step <= 5.0).unwrap_or(steps[3]);
    let digits = (-step.log10().floor()).max(0.0) as usize;
    let text = |mark: f64| match digits {
        _ if mark == 0.0 => "0".to_owned(),
        0..=3 => format!("{mark:.digits$}"),
        _ => format!("{mark:.0e}"),
    };
    let last = (most / step).ceil() as usize;
    (0..=last).map(|at| at as f64 * step).map(|mark| (mark, text(mark))).collect()
}

/// Returns the version of this program and the date in UTC, for the end of a page.
pub(crate) fn made() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    format!("fp4 {}, {}", env!("CARGO_PKG_VERSION"), date(seconds / (24 * 60 * 60)))
}

/// Returns the date and the time in UTC that are a duration after 1970-01-01, to the nanosecond.
pub(crate) fn time(since: Duration) -> String {
    let (seconds, nanoseconds) = (since.as_secs(), since.subsec_nanos());
    let [hours, minutes] = [seconds / 3600 % 24, seconds / 60 % 60];
    let date = date(seconds / (24 * 60 * 60));
    format!("{date} {hours:02}:{minutes:02}:{:02}.{nanoseconds:09} UTC", seconds % 60)
}

/// Returns the date that is a number of days after 1970-01-01.
fn date(mut days: u64) -> String {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_has_few_round_marks_that_reach_the_longest_bar() {
        for (most, expected) in [
            (8.1, "0 2 4 6 8 10"),
            (100.0, "0 20 40 60 80 100"),
            (1.0, "0 0.2 0.4 0.6 0.8 1.0"),
            (0.012, "0 0.005 0.010 0.015"),
            (3e-6, "0 1e-6 2e-6 3e-6"),
        ] {
            let marks = marks(most);
            assert!(marks.last().expect("a mark").0 >= most * 0.999_999);
            let texts: Vec<&str> = marks.iter().map(|(_, text)| text.as_str()).collect();
            assert_eq!(texts.join(" "), expected);
        }
    }

    #[test]
    fn days_are_dates() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_453, "2025-12-31"),
            (20_454, "2026-01-01"),
        ] {
            assert_eq!(date(days), expected);
        }
        let since = Duration::new(11_016 * 24 * 60 * 60 + 3 * 3600 + 4 * 60 + 5, 60_000);
        assert_eq!(time(since), "2000-02-29 03:04:05.000060000 UTC");
    }
}
