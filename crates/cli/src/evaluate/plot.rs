//! The errors of evaluations as bars in an SVG file, in light and dark.

use std::fmt::Write as _;
use std::path::Path;

use super::evaluation::Evaluation;
use crate::error::CliError;
use crate::page::{escaped, marks};
use crate::table::end_of;

/// Height of a bar with its gap, in pixels.
const BAR: usize = 24;
/// Height of the title above the bars of a panel, and of the scale below them.
const TITLE: usize = 40;
const SCALE: usize = 40;
/// Width of the picture.
const WIDTH: usize = 900;
/// Place of the bars, and the length of the longest one; the figures stand to its right.
const LEFT: usize = 200;
const LONGEST: usize = 600;
const FIGURES: usize = 870;
/// Characters of a title for which there is room.
const CHARACTERS: usize = 100;

/// The colours of the other pictures of this project: orange, and grey for a second format.
const STYLE: &str = "
text { font: 14px system-ui, sans-serif; fill: #1f2328; }
.title { font-size: 16px; font-weight: bold; }
.paper { fill: #ffffff; } line { stroke: #d7dce1; }
.bar0 { fill: #bc4c00; } .bar1 { fill: #8c959f; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .paper { fill: #14181c; } line { stroke: #333b43; }
  .bar0 { fill: #f0883e; } .bar1 { fill: #6e7681; } }
";

/// Draws a panel of horizontal bars for every weight, format and block size: the error of the
/// outputs on the evaluation activations, one bar a method. A method that failed has no bar.
pub(crate) fn draw(path: &Path, evaluations: &[Evaluation]) -> Result<(), CliError> {
    if evaluations.iter().all(|evaluation| finite_error(evaluation).is_none()) {
        let of = evaluations.len();
        return Err(CliError::NothingToDraw { path: path.to_owned(), of });
    }
    std::fs::write(path, picture(evaluations))
        .map_err(|source| CliError::File { path: path.to_owned(), source })
}

/// The length of a bar.
fn finite_error(evaluation: &Evaluation) -> Option<f64> {
    let error = evaluation.figures()?.evaluation_error_percent;
    Some(error).filter(|error| error.is_finite())
}

fn picture(evaluations: &[Evaluation]) -> String {
    let panels: Vec<_> = evaluations
        .chunk_by(|a, b| (&a.name, a.format, a.block) == (&b.name, b.format, b.block))
        .collect();
    let height: usize = panels.iter().map(|panel| TITLE + BAR * panel.len() + SCALE).sum();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\">\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n"
    );
    let mut top = 0;
    for panel in panels {
        let colour = usize::from(panel[0].format != evaluations[0].format);
        // Panels of a weight have one scale, so that their bars can be compared.
        let of_weight = evaluations.iter().filter(|one| one.name == panel[0].name);
        let most = of_weight.filter_map(finite_error).fold(0.0, f64::max);
        draw_panel(&mut svg, panel, top, (colour, most));
        top += TITLE + BAR * panel.len() + SCALE;
    }
    svg + "</svg>\n"
}

fn draw_panel(svg: &mut String, panel: &[Evaluation], top: usize, (colour, most): (usize, f64)) {
    let first = &panel[0];
    let title = format!("{}, {} {}: error of outputs, %", first.name, first.format, first.block);
    let title = escaped(&end_of(&title, CHARACTERS));
    let (begin, bottom) = (top + TITLE, top + TITLE + BAR * panel.len());
    let _ = writeln!(svg, "<text class=\"title\" x=\"20\" y=\"{}\">{title}</text>", top + 28);
    let marks = marks(if most > 0.0 { most } else { 1.0 });
    let end = marks.last().map_or(1.0, |(mark, _)| *mark);
    let length = |error: f64| LONGEST as f64 * error / end;
    // Bars cover the lines of the scale, which are drawn first.
    for (mark, text) in &marks {
        let x = LEFT as f64 + length(*mark);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{begin}\" x2=\"{x:.1}\" y2=\"{}\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
            bottom + 4,
            bottom + 20
        );
    }
    for (at, evaluation) in panel.iter().enumerate() {
        let (y, label) = (begin + BAR * at, escaped(&evaluation.label()));
        let width = length(finite_error(evaluation).unwrap_or(0.0));
        let figure = match evaluation.figures() {
            Some(figures) => format!("{:.3}", figures.evaluation_error_percent),
            None => "failed".to_owned(),
        };
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{label}</text>\
             <rect class=\"bar{colour}\" x=\"{LEFT}\" y=\"{}\" width=\"{width:.1}\" height=\"16\"/>\
             <text x=\"{FIGURES}\" y=\"{}\" text-anchor=\"end\">{figure}</text>",
            LEFT - 10,
            y + 17,
            y + 4,
            y + 17
        );
    }
}
