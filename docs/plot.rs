//! Plots: times over rows of input, and errors by method.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::page::DocsError;
use crate::table::Table;

/// Width of a panel, in pixels.
const WIDTH: u32 = 560;
/// Height of a panel, in pixels.
const HEIGHT: u32 = 400;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A panel of a plot.
enum Panel {
    /// Rows as lines, over columns with numbers as names. Both axes are logarithmic.
    Lines { x: &'static str, rows: &'static [&'static str] },
    /// Columns as groups of bars, one group for each row.
    Bars { rows: &'static [&'static str], columns: &'static [&'static str] },
}

/// File of a plot, and title, table and kind of each panel.
type Plot = (&'static str, &'static [(&'static str, &'static str, Panel)]);

/// All plots. Rows and columns have their names in the file of figures.
const PLOTS: &[Plot] = &[(
    "overview.svg",
    &[
        (
            "A layer of 8192 x 8192 on an H200: time, us",
            "gpu-layer",
            Panel::Lines { x: "rows of input", rows: &["bf16 (Burn), us", "NVFP4, us"] },
        ),
        (
            "Error of the outputs of a layer of MiniLM, %",
            "methods",
            Panel::Bars {
                rows: &["`amax`", "`four-over-six`", "`sse`", "`hessian`", "`gptq`"],
                columns: &["NVFP4, `3.up`", "MXFP4, `3.up`"],
            },
        ),
    ],
)];

/// Draws every plot. Returns the names of the files and their SVG.
///
/// # Errors
/// [`DocsError::Table`] if a figure is missing, [`DocsError::File`] if a plot cannot be drawn.
pub(crate) fn plots(tables: &[Table]) -> Result<Vec<(String, String)>, DocsError> {
    PLOTS
        .iter()
        .map(|(name, panels)| {
            let mut svg = String::new();
            draw(&mut svg, panels, tables)
                .map_err(|problem| DocsError::File { path: (*name).to_owned(), problem })?;
            Ok(((*name).to_owned(), svg))
        })
        .collect()
}

fn draw(svg: &mut String, panels: &[(&str, &str, Panel)], tables: &[Table]) -> Result<(), String> {
    let size = (WIDTH * panels.len() as u32, HEIGHT);
    let all = SVGBackend::with_string(svg, size).into_drawing_area();
    all.fill(&WHITE).map_err(|problem| problem.to_string())?;
    for (area, (title, id, panel)) in all.split_evenly((1, panels.len())).iter().zip(panels) {
        let table = tables.iter().find(|table| table.id == *id);
        let table = table.ok_or_else(|| format!("no table `{id}`"))?;
        let drawn = match panel {
            Panel::Lines { x, rows } => lines(area, title, table, x, rows),
            Panel::Bars { rows, columns } => bars(area, title, table, rows, columns),
        };
        drawn.map_err(|problem| format!("{id}: {problem}"))?;
    }
    all.present().map_err(|problem| problem.to_string())
}

/// Grey for the baseline, orange for the result; distinct in black and white print.
const COLOURS: [RGBColor; 2] = [RGBColor(120, 120, 120), RGBColor(214, 96, 30)];

fn lines(
    area: &Area<'_>,
    title: &str,
    table: &Table,
    x: &str,
    rows: &[&str],
) -> Result<(), Box<dyn std::error::Error>> {
    let columns: Vec<_> = table.columns.iter().skip(1).collect();
    let mut curves = Vec::new();
    for row in rows {
        let mut points = Vec::new();
        for column in &columns {
            if let Some(figure) = table.figure(row, column) {
                points.push((column.parse::<f64>()?.log2(), figure.log2()));
            }
        }
        if points.is_empty() {
            return Err(format!("no figures in row `{row}`").into());
        }
        curves.push((row, points));
    }
    let all = || curves.iter().flat_map(|(_, points)| points);
    let ends = |values: Vec<f64>| {
        let lowest = values.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        lowest.floor()..highest.ceil()
    };
    let xs = ends(all().map(|point| point.0).collect());
    let ys = ends(all().map(|point| point.1).collect());
    let labels = |range: &std::ops::Range<f64>| (range.end - range.start) as usize + 1;
    let (x_labels, y_labels) = (labels(&xs), labels(&ys));
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(40)
        .y_label_area_size(48)
        .build_cartesian_2d(xs, ys)?;
    let power = |value: &f64| format!("{}", value.exp2().round());
    chart
        .configure_mesh()
        .x_labels(x_labels)
        .y_labels(y_labels)
        .x_label_formatter(&power)
        .y_label_formatter(&power)
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 16))
        .x_desc(x)
        .draw()?;
    for ((name, points), colour) in curves.into_iter().zip(COLOURS) {
        let style = colour.stroke_width(3);
        chart
            .draw_series(LineSeries::new(points, style).point_size(4))?
            .label(name.split(',').next().unwrap_or(name))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .label_font(("sans-serif", 18))
        .draw()?;
    Ok(())
}

fn bars(
    area: &Area<'_>,
    title: &str,
    table: &Table,
    rows: &[&str],
    columns: &[&str],
) -> Result<(), Box<dyn std::error::Error>> {
    let figures: Vec<Vec<_>> =
        rows.iter().map(|row| columns.iter().map(|c| table.figure(row, c)).collect()).collect();
    let highest = figures.iter().flatten().flatten().copied().fold(0.0, f64::max);
    if figures.iter().any(|row| row.iter().all(Option::is_none)) {
        return Err("a row has no figures in these columns".into());
    }
    let (groups, width) = (rows.len() as f64, 0.8 / columns.len() as f64);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(40)
        .y_label_area_size(48)
        .build_cartesian_2d(0.0..groups, 0.0..1.25 * highest)?;
    let name = |x: &f64| {
        let group = x - 0.5;
        let exact = (group - group.round()).abs() < 1e-6 && group > -0.5;
        let row = rows.get(group.round() as usize).filter(|_| exact);
        row.map_or(String::new(), |row| row.replace('`', ""))
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(2 * rows.len() + 1)
        .x_label_formatter(&name)
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 16))
        .draw()?;
    for (index, (column, colour)) in columns.iter().zip([COLOURS[1], COLOURS[0]]).enumerate() {
        let of_column = figures.iter().enumerate().filter_map(|(group, row)| {
            let left = group as f64 + 0.1 + width * index as f64;
            Some((left, row[index]?))
        });
        let of_column: Vec<_> = of_column.collect();
        let rectangle = |(left, figure): &(f64, f64)| {
            Rectangle::new([(*left, 0.0), (left + width - 0.02, *figure)], colour.filled())
        };
        chart
            .draw_series(of_column.iter().map(rectangle))?
            .label(column.split(',').next().unwrap_or(column))
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        let value = |(left, figure): &(f64, f64)| {
            let place = (left + 0.02, figure + 0.045 * highest);
            Text::new(format!("{figure:.1}"), place, ("sans-serif", 15))
        };
        chart.draw_series(of_column.iter().map(value))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE)
        .label_font(("sans-serif", 18))
        .draw()?;
    Ok(())
}
