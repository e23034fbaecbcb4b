//! Tables, on a terminal no wider than that.

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};

/// A table without rows. The columns of these numbers hold figures; what is in the first, a name,
/// is not broken into lines.
pub(crate) fn table(header: &[&str], figures: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header);
    // Elsewhere than on a terminal lines are as long as they are.
    table.set_content_arrangement(ContentArrangement::Dynamic);
    for (at, column) in table.column_iter_mut().enumerate() {
        if at == 0 {
            column.set_constraint(ColumnConstraint::ContentWidth);
        }
        if figures.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
