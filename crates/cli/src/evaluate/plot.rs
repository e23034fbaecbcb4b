//! The errors of evaluations as bars in an SVG file.

use std::path::Path;

use plotters::prelude::*;

use super::evaluation::{Evaluation, Outcome};
use crate::error::CliError;

/// Height of a bar with its gap, in pixels.
const BAR: u32 = 24;
/// What a panel needs besides its bars.
const FRAME: u32 = 80;
/// Width of the picture.
const WIDTH: u32 = 900;

/// Draws a panel of horizontal bars for every weight, format and block size: the error of the
/// outputs on the evaluation activations, one bar a method. A method that failed has no bar.
pub(crate) fn draw(path: &Path, evaluations: &[Evaluation]) -> Result<(), CliError> {
    if evaluations.iter().all(|evaluation| finite_error(evaluation).is_none()) {
        let of = evaluations.len();
        return Err(CliError::NothingToDraw { path: path.to_owned(), of });
    }
    let panels: Vec<_> = evaluations
        .chunk_by(|a, b| (&a.name, a.format, a.block) == (&b.name, b.format, b.block))
        .collect();
    draw_panels(path, &panels)
        .map_err(|problem| CliError::Plot { path: path.to_owned(), problem: problem.to_string() })
}

/// Length of a bar.
fn finite_error(evaluation: &Evaluation) -> Option<f64> {
    match &evaluation.outcome {
        Outcome::Measured(figures) => {
            Some(figures.evaluation_error_percent).filter(|error| error.is_finite())
        }
        Outcome::Failed { .. } => None,
    }
}

/// What is written next to a bar.
fn value(evaluation: &Evaluation) -> String {
    match &evaluation.outcome {
        Outcome::Measured(figures) => format!(" {:.3}", figures.evaluation_error_percent),
        Outcome::Failed { .. } => " failed".to_owned(),
    }
}

/// End of an axis that starts at 0: finite and above 0. Of an infinite axis plotters computes marks
/// without end.
fn axis_end(panel: &[Evaluation]) -> f64 {
    let largest = panel.iter().filter_map(finite_error).fold(0.0, f64::max);
    if largest > 0.0 { 1.12 * largest } else { 1.0 }
}

fn draw_panels(path: &Path, panels: &[&[Evaluation]]) -> Result<(), Box<dyn std::error::Error>> {
    let heights: Vec<u32> = panels.iter().map(|panel| FRAME + BAR * panel.len() as u32).collect();
    let mut rest = SVGBackend::new(path, (WIDTH, heights.iter().sum())).into_drawing_area();
    rest.fill(&WHITE)?;
    for (panel, height) in panels.iter().zip(heights) {
        let (area, below) = rest.split_vertically(height);
        rest = below;
        let first = &panel[0];
        let title = format!("{}, {} {}: output error, %", first.name, first.format, first.block);
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 16))
            .margin(8)
            .x_label_area_size(24)
            .y_label_area_size(150)
            .build_cartesian_2d(0.0..axis_end(panel), 0.0..panel.len() as f64)?;
        let name = |y: &f64| {
            // The first method on top.
            let row = panel.len() as f64 - y - 0.5;
            let exact = (row.round() - row).abs() < 1e-6;
            match panel.get(row.round() as usize) {
                Some(bar) if exact && row > -0.5 => bar.label(),
                _ => String::new(),
            }
        };
        chart
            .configure_mesh()
            .disable_y_mesh()
            .y_labels(2 * panel.len() + 1)
            .y_label_formatter(&name)
            .draw()?;
        for (index, bar) in panel.iter().enumerate() {
            let (error, y) = (finite_error(bar).unwrap_or(0.0), (panel.len() - index) as f64);
            chart.draw_series([Rectangle::new(
                [(0.0, y - 0.85), (error, y - 0.15)],
                BLUE.mix(0.6).filled(),
            )])?;
            let label = Text::new(value(bar), (error, y - 0.35), ("sans-serif", 13));
            chart.draw_series([label])?;
        }
    }
    rest.present()?;
    Ok(())
}
