//! A [`Sensitivity`] as a page: bars in a table, in light and dark.

use std::fmt::Write as _;

use super::report::{Sensitivity, row};

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c2024; --paper: #ffffff; --line: #d7dce1;
  --bar: #2f6fb3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #14181c; --line: #333b43; --bar: #6aa9e8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; }
th, td { text-align: left; padding: 0.2rem 0.6rem; vertical-align: top; }
tbody { border-top: 1px solid var(--line); }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { min-width: 10rem; width: 40%; vertical-align: middle; }
.bar div { background: var(--bar); height: 0.8em; }
";

impl Sensitivity {
    /// A page for a browser, which needs nothing else: a bar for every candidate of every group,
    /// and all figures.
    pub fn html(&self) -> String {
        page(self)
    }
}

/// The page. Bars are as long as the square root of the error that candidates are compared by.
fn page(sensitivity: &Sensitivity) -> String {
    let errors = sensitivity.groups.iter().flat_map(|group| &group.candidates);
    let most = errors.filter_map(|one| one.error()).fold(0.0, f64::max).sqrt();
    let mut body = String::new();
    for group in &sensitivity.groups {
        body.push_str("<tbody>\n");
        for (at, candidate) in group.candidates.iter().enumerate() {
            let [paths, name, bits, weight, output, loss] = row(group, candidate).map(escaped);
            let paths = if at == 0 { paths.replace('\n', "<br>") } else { String::new() };
            let share = candidate.error().map_or(0.0, |error| error.max(0.0).sqrt() / most);
            let width = if share.is_finite() { 100.0 * share } else { 0.0 };
            let _ = writeln!(
                body,
                "<tr><td>{paths}</td><td>{name}</td><td class=\"bar\"><div \
                 style=\"width:{width:.2}%\"></div></td><td class=\"number\">{bits}</td>\
                 <td class=\"number\">{weight}</td><td class=\"number\">{output}</td>\
                 <td class=\"number\">{loss}</td></tr>"
            );
        }
        body.push_str("</tbody>\n");
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>FP4 sensitivity</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>What FP4 costs each weight</h1>\n\
         <p>{} groups, {} values. Bars: the growth of the loss where it is known, else the error \
         of the outputs; both as square roots.</p>\n\
         <table>\n<thead><tr><th>weights</th><th>candidate</th><th></th>\
         <th class=\"number\">bits</th><th class=\"number\">weight error %</th>\
         <th class=\"number\">output error %</th><th class=\"number\">loss</th></tr></thead>\n\
         {body}</table>\n</body>\n</html>\n",
        sensitivity.groups.len(),
        sensitivity.groups.iter().map(|group| group.values).sum::<usize>(),
    )
}

fn escaped(text: String) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
