//! Curves in an SVG chart.

use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};

use plotters::prelude::*;

/// A line of a chart.
#[derive(Debug, Clone, Copy)]
pub struct Curve<'a> {
    /// Its name in the legend.
    pub name: &'a str,
    /// Steps and their values.
    pub points: &'a [(usize, f64)],
}

/// Reason that curves cannot be drawn.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// No curve has a point.
    #[error(
        "{path}: {curves} curves without a point; draw a curve of at least one",
        path = .path.display()
    )]
    Nothing {
        /// The file.
        path: PathBuf,
        /// Number of curves.
        curves: usize,
    },
    /// A value is NaN or infinite.
    #[error(
        "{path}: curve `{curve}`, step {step}: {found} is not finite",
        path = .path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// Name of the curve.
        curve: String,
        /// Step of the value.
        step: usize,
        /// The value.
        found: f64,
    },
    /// The file cannot be written.
    #[error("{path}: {problem}", path = .path.display())]
    Draw {
        /// The file.
        path: PathBuf,
        /// Message of the library or the system.
        problem: String,
    },
}

/// Width of the chart with its axes, in pixels.
const CHART: u32 = 880;
/// Width of the legend to the right of it.
const LEGEND: u32 = 240;
/// Height of both.
const HEIGHT: u32 = 540;

/// Draws curves over steps; `unit` labels their values. A curve of one point is a dot.
///
/// # Errors
/// [`PlotError::Nothing`] if no curve has a point, [`PlotError::NotFinite`] naming the first value
/// that is not, [`PlotError::Draw`] if the file cannot be written.
pub fn draw(path: &Path, title: &str, unit: &str, curves: &[Curve<'_>]) -> Result<(), PlotError> {
    for curve in curves {
        if let Some(&(step, found)) = curve.points.iter().find(|(_, value)| !value.is_finite()) {
            let (path, curve) = (path.to_owned(), curve.name.to_owned());
            return Err(PlotError::NotFinite { path, curve, step, found });
        }
    }
    let points = || curves.iter().flat_map(|curve| curve.points);
    let Some(last) = points().map(|(step, _)| *step).max() else {
        return Err(PlotError::Nothing { path: path.to_owned(), curves: curves.len() });
    };
    let values = axis(points().map(|(_, value)| *value));
    chart(path, title, unit, curves, 0..last + 1, values)
        .map_err(|problem| PlotError::Draw { path: path.to_owned(), problem: problem.to_string() })
}

/// Computes the range of finite values with a margin: never empty or infinite. On an infinite axis
/// plotters never stops computing marks.
fn axis(values: impl Iterator<Item = f64>) -> Range<f64> {
    let none = (f64::INFINITY, f64::NEG_INFINITY);
    let (lowest, highest) =
        values.fold(none, |(low, high), value| (low.min(value), high.max(value)));
    let margin = (0.05 * (highest - lowest)).max(0.01 * highest.abs().max(lowest.abs()));
    let margin = if margin > 0.0 { margin } else { 1.0 };
    lowest - margin..highest + margin
}

fn chart(
    path: &Path,
    title: &str,
    unit: &str,
    curves: &[Curve<'_>],
    steps: Range<usize>,
    values: Range<f64>,
) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::new(path, (CHART + LEGEND, HEIGHT)).into_drawing_area();
    area.fill(&WHITE)?;
    let (left, legend) = area.split_horizontally(CHART);
    let mut chart = ChartBuilder::on(&left)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(steps, values)?;
    chart.configure_mesh().x_desc("step").y_desc(unit).draw()?;
    for (index, curve) in curves.iter().enumerate() {
        let style = Palette99::pick(index).stroke_width(2);
        let dot = if curve.points.len() == 1 { 3 } else { 0 };
        let line = LineSeries::new(curve.points.iter().copied(), style).point_size(dot);
        chart.draw_series(line)?;
        let y = 50 + 24 * index as i32;
        legend.draw(&PathElement::new([(0, y), (20, y)], style))?;
        legend.draw(&Text::new(curve.name, (28, y - 7), ("sans-serif", 14)))?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws into a file of its own for each test, and returns the SVG.
    fn drawn(test: &str, curves: &[Curve<'_>]) -> Result<String, PlotError> {
        let file = format!("burn-fp4-plot-{test}-{}.svg", std::process::id());
        let path = std::env::temp_dir().join(file);
        draw(&path, "losses", "nats", curves)?;
        let svg = std::fs::read_to_string(&path).expect("a picture");
        std::fs::remove_file(&path).expect("it was just there");
        Ok(svg)
    }

    #[test]
    fn a_plot_without_points_is_an_error() {
        let none = drawn("none", &[]);
        assert!(matches!(none, Err(PlotError::Nothing { curves: 0, .. })), "{none:?}");
        let empty = drawn("empty", &[Curve { name: "nvfp4", points: &[] }; 2]);
        assert!(matches!(empty, Err(PlotError::Nothing { curves: 2, .. })), "{empty:?}");
    }

    #[test]
    fn a_plot_of_one_point_is_a_dot() {
        let svg = drawn("point", &[Curve { name: "nvfp4", points: &[(9, 2.5)] }]);
        assert!(svg.expect("a picture").contains("<circle"));
    }

    #[test]
    fn a_plot_of_equal_values_is_drawn() {
        for value in [0.0, 2.5, 1e-300, 1e30] {
            let points = [(0, value), (10, value)];
            let svg = drawn("equal", &[Curve { name: "nvfp4", points: &points }]);
            assert!(svg.expect("a picture").contains("<polyline"), "{value}");
        }
    }

    #[test]
    fn a_value_that_is_not_finite_is_named() {
        for value in [f64::NAN, f64::INFINITY] {
            let points = [(0, 1.0), (10, value)];
            let error = drawn("infinite", &[Curve { name: "nvfp4", points: &points }]);
            let error = error.expect_err("a value that is not finite").to_string();
            assert!(error.contains("curve `nvfp4`, step 10"), "{error}");
        }
    }

    #[test]
    fn the_legend_does_not_cover_a_curve() {
        let points = [(0, 3.0), (10, 2.0), (20, 1.0)];
        let svg = drawn("legend", &[Curve { name: "nvfp4", points: &points }]);
        let svg = svg.expect("a picture");
        let number = |digits: &str| digits.parse::<i32>().expect("a coordinate");
        let until_quote = |rest: &str| rest.split('"').next().expect("a value").to_owned();
        let name = svg.split("<text x=\"").find(|text| text.contains("nvfp4")).expect("a name");
        // Marks and axes are lines of two points.
        let curves = svg.split(" points=\"").skip(1).map(until_quote);
        let curve = curves.into_iter().find(|points| points.split_whitespace().count() == 3);
        let curve = curve.expect("a curve of three points");
        let right = curve.split_whitespace().filter_map(|point| point.split(',').next());
        let right = right.map(number).max().expect("three points");
        assert!(right < number(&until_quote(name)), "{svg}");
    }
}
