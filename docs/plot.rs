//! The picture of the README, in a light and a dark variant: bars of the figures of a table.

use std::fmt::Write;

use crate::page::DocsError;
use crate::table::Table;

const WIDTH: usize = 760;
/// Distance of bars, and of the panels from the title above.
const STEP: usize = 30;
const TOP: usize = 62;
/// Width of the names of bars, and of the longest bar.
const NAMES: usize = 128;
const LONGEST: f64 = 176.0;

/// A quantity of both pictures, with a bar for each cell.
struct Panel {
    title: &'static str,
    /// Digits after the point.
    digits: usize,
    bars: &'static [Bar],
}

/// A cell of the table. The name decides about its color.
struct Bar {
    name: &'static str,
    row: &'static str,
    column: &'static str,
}

const TABLE: &str = "gpu-language-model";
const TITLE: &str = "An 8B decoder, one sequence, on an NVIDIA H100";
const PANELS: [Panel; 2] = [
    Panel {
        title: "Tokens a second",
        digits: 0,
        bars: &[
            bar("bf16", "a token, bf16", "tokens a second"),
            bar("NVFP4", "a token, NVFP4", "tokens a second"),
        ],
    },
    Panel {
        title: "Gigabytes",
        digits: 1,
        bars: &[
            bar("bf16, file", "a token, bf16", "file, GB"),
            bar("NVFP4, file", "a token, NVFP4", "file, GB"),
            bar("bf16, GPU", "a token, bf16", "GPU, GB"),
            bar("NVFP4, GPU", "a token, NVFP4", "GPU, GB"),
        ],
    },
];

const fn bar(name: &'static str, row: &'static str, column: &'static str) -> Bar {
    Bar { name, row, column }
}

/// Colors of text, of the dense bars and of NVFP4's, as on GitHub's pages; without a background.
struct Colors {
    text: &'static str,
    dense: &'static str,
    packed: &'static str,
}

const VARIANTS: [(&str, Colors); 2] = [
    ("speed.svg", Colors { text: "#1f2328", dense: "#8c959f", packed: "#bc4c00" }),
    ("speed-dark.svg", Colors { text: "#e6edf3", dense: "#6e7681", packed: "#f0883e" }),
];

/// Every picture, with the name of its file.
///
/// # Errors
/// [`DocsError::File`] for figures that are not there.
pub(crate) fn pictures(tables: &[Table]) -> Result<Vec<(String, String)>, DocsError> {
    VARIANTS
        .iter()
        .map(|(name, colors)| Ok(((*name).to_owned(), draw(name, colors, tables)?)))
        .collect()
}

fn draw(path: &str, colors: &Colors, tables: &[Table]) -> Result<String, DocsError> {
    let most = PANELS.iter().map(|panel| panel.bars.len()).max().unwrap_or_default();
    let height = TOP + 30 + most * STEP;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" fill=\"{}\" font-size=\"15\" \
         font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">\n",
        colors.text
    );
    let _ =
        writeln!(svg, "<text x=\"0\" y=\"22\" font-size=\"17\" font-weight=\"600\">{TITLE}</text>");
    for (index, panel) in PANELS.iter().enumerate() {
        let (left, digits) = (index * WIDTH / PANELS.len(), panel.digits);
        let _ = writeln!(
            svg,
            "<text x=\"{left}\" y=\"{TOP}\" font-weight=\"600\">{}</text>",
            panel.title
        );
        let figures = panel.bars.iter().map(|bar| figure(path, bar, tables));
        let figures = figures.collect::<Result<Vec<_>, _>>()?;
        let highest = figures.iter().copied().fold(0.0, f64::max);
        for (place, (bar, figure)) in panel.bars.iter().zip(figures).enumerate() {
            let packed = bar.name.starts_with("NVFP4");
            let color = if packed { colors.packed } else { colors.dense };
            let weight = if packed { " font-weight=\"600\"" } else { "" };
            let y = TOP + 16 + place * STEP;
            let (start, width) = (left + NAMES, (LONGEST * figure / highest).round());
            let (base, end) = (y + 16, start as f64 + width + 8.0);
            let _ = write!(
                svg,
                "<text x=\"{left}\" y=\"{base}\">{}</text>\n\
                 <rect x=\"{start}\" y=\"{y}\" width=\"{width}\" height=\"22\" rx=\"3\" \
                 fill=\"{color}\"/>\n\
                 <text x=\"{end}\" y=\"{base}\"{weight}>{figure:.digits$}</text>\n",
                bar.name
            );
        }
    }
    Ok(svg + "</svg>\n")
}

fn figure(path: &str, bar: &Bar, tables: &[Table]) -> Result<f64, DocsError> {
    let Bar { row, column, .. } = bar;
    let found = tables.iter().find(|table| table.id == TABLE);
    found.and_then(|found| found.figure(row, column)).ok_or_else(|| DocsError::File {
        path: path.to_owned(),
        problem: format!("{TABLE}.json has no figure `{row}`, `{column}`"),
    })
}
