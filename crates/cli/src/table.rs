//! Tables, on a terminal no wider than that where this is possible.

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle, Width,
};

/// What a column holds.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Column {
    /// Names, which are not broken into lines.
    Name,
    /// Numbers, below each other by their last digits.
    Figure,
    /// Texts, which are broken into lines where a terminal is narrow.
    Text,
}

/// A line below the header, and nothing else: names are long, and borders take their place.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));
/// Characters of a line of a broken text at least.
pub(crate) const NARROWEST: u16 = 16;

/// A table without rows.
pub(crate) fn table(columns: &[(&str, Column)]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(columns.iter().map(|(name, _)| *name));
    // Elsewhere than on a terminal lines are as long as they are.
    table.set_content_arrangement(ContentArrangement::Dynamic);
    for (column, (_, holds)) in table.column_iter_mut().zip(columns) {
        column.set_constraint(match holds {
            Column::Name | Column::Figure => ColumnConstraint::ContentWidth,
            Column::Text => ColumnConstraint::LowerBoundary(Width::Fixed(NARROWEST)),
        });
        // The style separates columns by one more.
        column.set_padding((0, 1));
        if *holds == Column::Figure {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Columns of the terminal that standard output is. None: it is something else.
pub(crate) fn width() -> Option<u16> {
    Table::new().width()
}
