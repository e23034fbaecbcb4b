use std::path::Path;

use plotters::prelude::*;

use crate::error::CliError;
use crate::evaluate::Evaluation;

/// Height of a bar with its gap, in pixels.
const BAR: u32 = 24;
/// What a panel needs besides its bars.
const FRAME: u32 = 80;
/// Width of the picture.
const WIDTH: u32 = 900;

/// Draws a panel of horizontal bars for every weight, format and block size: the error of the outputs on the
/// evaluation activations, one bar a method.
pub(crate) fn draw(path: &Path, evaluations: &[Evaluation]) -> Result<(), CliError> {
    let panels: Vec<_> = evaluations
        .chunk_by(|a, b| (&a.name, a.format, a.block) == (&b.name, b.format, b.block))
        .collect();
    draw_panels(path, &panels)
        .map_err(|problem| CliError::Plot { path: path.to_owned(), problem: problem.to_string() })
}

fn draw_panels(path: &Path, panels: &[&[Evaluation]]) -> Result<(), Box<dyn std::error::Error>> {
    let heights: Vec<u32> = panels.iter().map(|panel| FRAME + BAR * panel.len() as u32).collect();
    let mut rest = SVGBackend::new(path, (WIDTH, heights.iter().sum())).into_drawing_area();
    rest.fill(&WHITE)?;
    for (panel, height) in panels.iter().zip(heights) {
        let (area, below) = rest.split_vertically(height);
        rest = below;
        let largest =
            panel.iter().map(|bar| bar.evaluation_error_percent).fold(0.0, f64::max).max(1e-9);
        let first = &panel[0];
        let title = format!("{}, {} {}: output error, %", first.name, first.format, first.block);
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 16))
            .margin(8)
            .x_label_area_size(24)
            .y_label_area_size(150)
            .build_cartesian_2d(0.0..largest * 1.12, 0.0..panel.len() as f64)?;
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
            let (error, y) = (bar.evaluation_error_percent, (panel.len() - index) as f64);
            chart.draw_series([Rectangle::new(
                [(0.0, y - 0.85), (error, y - 0.15)],
                BLUE.mix(0.6).filled(),
            )])?;
            let label = Text::new(format!(" {error:.3}"), (error, y - 0.35), ("sans-serif", 13));
            chart.draw_series([label])?;
        }
    }
    rest.present()?;
    Ok(())
}
