//! A [`Sensitivity`] as a page: bars in a table, in light and dark, and the date.

use std::fmt::Write as _;

use chrono::Utc;

use super::budget::BudgetChoice;
use super::candidate::Candidate;
use super::report::{CandidateSensitivity, GroupSensitivity, Sensitivity, row};

/// Orange for the first candidate, grey for the second: they can be told apart in print.
const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --line: #d7dce1;
  --soft: #6b7681; --bar0: #bc4c00; --bar1: #8c959f; --bar2: #2f6fb3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #14181c; --line: #333b43; --soft: #98a3ad;
    --bar0: #f0883e; --bar1: #6e7681; --bar2: #6aa9e8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; }
th, td { text-align: left; padding: 0.2rem 0.6rem; vertical-align: top; }
tbody tr { border-top: 1px solid var(--line); }
td div { height: 1.5em; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { min-width: 10rem; width: 40%; }
.bar div div { height: 0.8em; position: relative; top: 0.35em; }
.bar0 { background: var(--bar0); } .bar1 { background: var(--bar1); }
.bar2 { background: var(--bar2); } .chosen { font-weight: bold; }
footer { margin-top: 2rem; font-size: 0.85rem; color: var(--soft); }
";

/// Colours of candidates; more of them begin again.
const COLOURS: usize = 3;

impl Sensitivity {
    /// A page for a browser, which needs nothing else: a row for every group, the largest errors
    /// first, with a bar for every candidate in FP4, and all figures. A choice is marked.
    #[must_use]
    pub fn html(&self, choice: Option<&BudgetChoice>) -> String {
        page(self, choice)
    }
}

/// The error that bars show: the one that is known and says most.
#[derive(Clone, Copy)]
enum Shown {
    Loss,
    Outputs,
    Weights,
}

impl Shown {
    fn of(sensitivity: &Sensitivity) -> Self {
        // Dense candidates have errors of 0 whether others are known or not.
        let any = |is: fn(&CandidateSensitivity) -> bool| {
            let all = sensitivity.groups.iter().flat_map(|group| &group.candidates);
            all.filter(|one| one.candidate != Candidate::Dense).any(is)
        };
        match (any(|one| one.loss.is_some()), any(|one| one.output_error.is_some())) {
            (true, _) => Self::Loss,
            (false, true) => Self::Outputs,
            (false, false) => Self::Weights,
        }
    }

    /// Returns the square root of the error of a candidate, if it is known.
    fn root(self, one: &CandidateSensitivity) -> Option<f64> {
        let error = match self {
            Self::Loss => one.loss,
            Self::Outputs => one.output_error,
            Self::Weights => Some(one.weight_error),
        };
        error.map(|error| error.max(0.0).sqrt()).filter(|root| root.is_finite())
    }

    /// Describes the bars, the longest of which is `most` long.
    fn legend(self, most: f64) -> String {
        match self {
            Self::Loss => format!(
                "Bars: square root of the expected growth of the loss; the longest is a growth of \
                 {:.3e}.",
                most * most
            ),
            Self::Outputs => {
                format!("Bars: error of the outputs; the longest is {:.3} %.", 100.0 * most)
            }
            Self::Weights => {
                format!("Bars: error of the weights; the longest is {:.3} %.", 100.0 * most)
            }
        }
    }
}

/// Renders the page.
fn page(sensitivity: &Sensitivity, choice: Option<&BudgetChoice>) -> String {
    let shown = Shown::of(sensitivity);
    let largest = |group: &GroupSensitivity| {
        group.candidates.iter().filter_map(|one| shown.root(one)).fold(0.0, f64::max)
    };
    let most = sensitivity.groups.iter().map(largest).fold(0.0, f64::max);
    let chosen = |at: usize| choice.and_then(|choice| choice.candidates.get(at));
    let mut groups: Vec<_> = sensitivity.groups.iter().enumerate().collect();
    groups.sort_by(|(_, a), (_, b)| largest(b).total_cmp(&largest(a)));
    let mut body = String::new();
    for (at, group) in groups {
        let chosen = chosen(at).map(|one| one.candidate);
        body.push_str(&row_of(group, chosen, |one| shown.root(one).unwrap_or(0.0) / most));
    }
    let budget = choice.map_or(String::new(), |choice| {
        format!(" Bold: the choice, {:.3} bits a value.", choice.bits_per_weight)
    });
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Sensitivity to FP4</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>Error of each weight in FP4</h1>\n\
         <p>{} groups, {} values, the largest errors first. {}{budget}</p>\n\
         <div class=\"wide\"><table>\n<thead><tr><th>weights</th><th>format</th><th></th>\
         <th class=\"number\">bits</th><th class=\"number\">weight error %</th>\
         <th class=\"number\">output error %</th><th class=\"number\">loss</th></tr></thead>\n\
         <tbody>\n{body}</tbody>\n</table></div>\n<footer>burn-fp4 {}, {}</footer>\n</body>\n\
         </html>\n",
        sensitivity.groups.len(),
        sensitivity.groups.iter().map(|group| group.values).sum::<usize>(),
        shown.legend(most),
        env!("CARGO_PKG_VERSION"),
        Utc::now().date_naive(),
    )
}

/// Renders the row of a group, with a line for each candidate in FP4 in every cell. Dense
/// candidates have no error, and are named only where one is chosen. `share` is the length of a
/// bar, of the longest.
fn row_of(
    group: &GroupSensitivity,
    chosen: Option<Candidate>,
    share: impl Fn(&CandidateSensitivity) -> f64,
) -> String {
    let mut cells: [String; 6] = Default::default();
    let fp4 = group.candidates.iter().filter(|one| one.candidate != Candidate::Dense);
    for (at, one) in fp4.enumerate() {
        let [_, name, figures @ ..] = row(group, one).map(escaped);
        let (class, name) = match chosen == Some(one.candidate) {
            true => (" class=\"chosen\"", format!("{name} ✓")),
            false => ("", name),
        };
        // Without any error the longest bar has no length to be a share of.
        let share = share(one);
        let width = if share.is_finite() { 100.0 * share } else { 0.0 };
        let colour = at % COLOURS;
        let bar = format!("<div class=\"bar{colour}\" style=\"width:{width:.2}%\"></div>");
        let lines = [name, bar].into_iter().chain(figures);
        for (cell, line) in cells.iter_mut().zip(lines) {
            let _ = write!(cell, "<div{class}>{line}</div>");
        }
    }
    if chosen == Some(Candidate::Dense) {
        let _ = write!(cells[0], "<div class=\"chosen\">{} ✓</div>", Candidate::Dense);
    }
    let paths = escaped(group.paths.join("\n")).replace('\n', "<br>");
    let [names, bars, figures @ ..] = cells;
    let figures = figures.map(|cell| format!("<td class=\"number\">{cell}</td>")).concat();
    format!("<tr><td>{paths}</td><td>{names}</td><td class=\"bar\">{bars}</td>{figures}</tr>\n")
}

fn escaped(text: String) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
