//! Tables that fit the terminal: some columns are left out first, then names are cut at the left.

use std::collections::{BTreeMap, BTreeSet};

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle, Width,
};

/// The content of a column.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Column {
    /// Names, which are not broken into lines.
    Name,
    /// Numbers, below each other by their last digits.
    Figure,
    /// Texts, which are broken into lines where a terminal is narrow.
    Text,
}

/// The order in which columns are left out where a terminal is narrow, from the start of each list.
/// The names in the first column, and columns of none of the lists, stay.
pub(crate) struct ColumnOrder<'o> {
    /// Columns that go before names are cut.
    pub(crate) first: &'o [&'o str],
    /// Columns that go when names are cut to [`NARROWEST`].
    pub(crate) then: &'o [&'o str],
    /// Columns that go when names are cut to [`SHORTEST`].
    pub(crate) last: &'o [&'o str],
}

/// A line below the header, and nothing else: names are long, and borders take their place.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));
/// The least characters of a line of a broken text, and of a name next to columns that can go.
const NARROWEST: usize = 16;
/// The least characters of a name.
const SHORTEST: usize = 10;
/// Spaces between columns.
const GAP: usize = 2;

/// Lays out a table for a terminal of `width` columns, or with lines of any length without one.
/// Empty if there are no rows.
///
/// Columns without a text are left out. Where there is no room, so are others in their `order`, and
/// a last line names them. The names in the first column are cut at the left.
pub(crate) fn table(
    columns: &[(&str, Column)],
    order: &ColumnOrder<'_>,
    mut rows: Vec<Vec<String>>,
    width: Option<u16>,
) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let widths: Vec<usize> = (0..columns.len()).map(|at| needed(columns[at], &rows, at)).collect();
    let total = |shown: &[usize]| shown.iter().map(|&at| widths[at] + GAP).sum::<usize>();
    let has_text = |at: &usize| rows.iter().any(|row| row.get(*at).is_some_and(|c| !c.is_empty()));
    let mut shown: Vec<usize> = (0..columns.len()).filter(has_text).collect();
    let (all, whole) = (shown.clone(), total(&shown));
    if let Some(room) = width.map(usize::from) {
        // With names of this length at most.
        let least = |shown: &[usize], names: usize| {
            total(shown).saturating_sub(widths[shown[0]].saturating_sub(names))
        };
        let lists = [(order.first, usize::MAX), (order.then, NARROWEST), (order.last, SHORTEST)];
        for (list, names) in lists {
            for left_out in list {
                if least(&shown, names) > room {
                    shown.retain(|&at| columns[at].0 != *left_out);
                }
            }
        }
        if total(&shown) > room {
            let names = room.saturating_sub(total(&shown[1..]) + GAP).max(SHORTEST);
            shorten(&mut rows, names);
        }
    }
    let left_out: Vec<String> = all
        .iter()
        .filter(|at| !shown.contains(at))
        .map(|&at| columns[at].0.replace('\n', " "))
        .collect();
    let columns: Vec<_> = shown.iter().map(|&at| (columns[at], widths[at])).collect();
    let mut table = empty(&columns);
    if let Some(width) = width {
        table.set_width(width);
    }
    for row in &rows {
        table.add_row(shown.iter().map(|&at| row.get(at).map_or("", String::as_str)));
    }
    let mut text = table.trim_fmt();
    if !left_out.is_empty() {
        let names = left_out.join(", ");
        let hint = format!("no room for {names}: use {whole} columns or --json");
        text.push_str(&format!("\n{}", wrapped(&hint, width)));
    }
    text
}

/// Breaks lines at spaces to fit the terminal. What follows a break is indented.
pub(crate) fn wrapped(text: &str, width: Option<u16>) -> String {
    let Some(room) = width.map(|width| usize::from(width).max(NARROWEST)) else {
        return text.to_owned();
    };
    text.split('\n').map(|line| broken_at_spaces(line, room)).collect::<Vec<_>>().join("\n")
}

/// Units, which stay on the line of their number.
const UNITS: [&str; 5] = ["%", "kB", "MB", "GB", "TB"];

/// Divides a text into words, a number and its unit together.
fn words_of(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let is_unit = UNITS.contains(&word.trim_end_matches([',', ';', ':', '.', ')']));
        match words.last_mut().filter(|_| is_unit) {
            Some(number) => number.push_str(&format!(" {word}")),
            None => words.push(word.to_owned()),
        }
    }
    words
}

/// Breaks a line at spaces. Escape sequences, such as colors, take no room. The second column of a
/// row stays below itself, or where there is no room for that, below the first one.
fn broken_at_spaces(line: &str, room: usize) -> String {
    let words = line.trim_start_matches(' ');
    let indent = line.len() - words.len();
    let columns = words.split_once("  ").filter(|_| indent + length(words) > room);
    let Some((first, second)) = columns else {
        return " ".repeat(indent) + &flow(words, indent, indent + GAP, room);
    };
    let second = second.trim_start_matches(' ');
    let (begin, _) = line.split_at(line.len() - second.len());
    let column = length(begin);
    if column + NARROWEST <= room {
        return begin.to_owned() + &flow(second, column, column, room);
    }
    let below = indent + GAP;
    let [indent, gap] = [indent, below].map(|count| " ".repeat(count));
    format!("{indent}{first}\n{gap}{}", flow(second, below, below, room))
}

/// Puts words one behind the other, behind `used` columns. Lines that follow have an indent.
fn flow(words: &str, mut used: usize, indent: usize, room: usize) -> String {
    let mut text = String::new();
    for (at, word) in words_of(words).iter().enumerate() {
        let length = length(word);
        if at > 0 && used + 1 + length > room {
            text.push_str(&format!("\n{}", " ".repeat(indent)));
            used = indent;
        } else if at > 0 {
            text.push(' ');
            used += 1;
        }
        text.push_str(word);
        used += length;
    }
    text
}

/// The characters of a text that are seen.
fn length(text: &str) -> usize {
    anstream::adapter::strip_str(text).map(|part| part.chars().count()).sum()
}

/// Returns the characters that a column takes: of a text the least, in which no word is broken, of
/// others the most.
fn needed((head, holds): (&str, Column), rows: &[Vec<String>], at: usize) -> usize {
    let cells = || rows.iter().filter_map(|row| row.get(at)).flat_map(|cell| cell.lines());
    let lines = || cells().chain(head.lines());
    let widest = lines().map(|line| line.chars().count()).max().unwrap_or(0);
    let words = lines().flat_map(|line| line.split(' ')).map(|word| word.chars().count());
    match holds {
        Column::Name | Column::Figure => widest,
        Column::Text => widest.min(NARROWEST).max(words.max().unwrap_or(0)),
    }
}

/// Makes a table without rows. Each column has its least width.
fn empty(columns: &[((&str, Column), usize)]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(columns.iter().map(|((name, _), _)| *name));
    table.set_content_arrangement(ContentArrangement::Dynamic);
    for (column, ((_, holds), least)) in table.column_iter_mut().zip(columns) {
        column.set_constraint(match holds {
            Column::Name | Column::Figure => ColumnConstraint::ContentWidth,
            Column::Text => ColumnConstraint::LowerBoundary(Width::Fixed(*least as u16)),
        });
        // The style separates columns by one more.
        column.set_padding((0, 1));
        if *holds == Column::Figure {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Shortens the first cells to `room` characters. Names that would look the same are broken into
/// lines instead.
fn shorten(rows: &mut [Vec<String>], room: usize) {
    let mut names: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in rows.iter() {
        names.entry(end_of(&row[0], room)).or_default().insert(row[0].clone());
    }
    for row in rows {
        let end = end_of(&row[0], room);
        let alone = names[&end].len() == 1;
        row[0] = if alone { end } else { broken(&row[0], room) };
    }
}

/// Returns the last `most` characters of a name, behind a sign that something is missing.
pub(crate) fn end_of(name: &str, most: usize) -> String {
    let count = name.chars().count();
    match count.checked_sub(most) {
        None | Some(0) => name.to_owned(),
        Some(more) => ['…'].into_iter().chain(name.chars().skip(more + 1)).collect(),
    }
}

/// Breaks a name into lines of at most `most` characters, behind dots where there are some.
fn broken(name: &str, most: usize) -> String {
    let mut lines = vec![String::new()];
    for word in name.split_inclusive('.') {
        let letters: Vec<char> = word.chars().collect();
        for part in letters.chunks(most - GAP) {
            let last = lines.last_mut().expect("there is a first line");
            if last.chars().count() + part.len() > most {
                lines.push(" ".repeat(GAP));
            }
            lines.last_mut().expect("there is a line").extend(part);
        }
    }
    lines.join("\n")
}

/// The columns of helps. Narrower terminals get fewer, and no two columns of words.
pub(crate) const COLUMNS: u16 = 80;

/// Returns true for a terminal that has no room for two columns of words.
pub(crate) fn is_narrow() -> bool {
    width().is_some_and(|width| width < COLUMNS)
}

/// Returns the columns of the terminal: of COLUMNS if that is set, else of standard output. None:
/// it is not a terminal.
pub(crate) fn width() -> Option<u16> {
    let stated = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    stated.filter(|&columns| columns > 0).or_else(|| Table::new().width())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: [(&str, Column); 3] =
        [("weight", Column::Name), ("bytes", Column::Figure), ("note", Column::Text)];

    const ORDER: ColumnOrder<'_> =
        ColumnOrder { first: &["bytes"], then: &["note"], last: &["format"] };

    fn shown(names: &[&str], width: u16) -> String {
        let row = |name: &&str| vec![(*name).to_owned(), "1.0 MB".to_owned(), "a note".repeat(9)];
        table(&FACTS, &ORDER, names.iter().map(row).collect(), Some(width))
    }

    #[test]
    fn the_end_of_a_name_is_what_tells_it_from_others() {
        assert_eq!(end_of("model.up", 8), "model.up");
        assert_eq!(end_of("model.up", 4), "….up");
    }

    #[test]
    fn columns_are_left_out_before_names_are_cut() {
        let name = "model.layers.31.self_attn.q_proj";
        let wide = table(&FACTS, &ORDER, vec![vec![name.into(), "1.0 MB".into()]], None);
        assert!(wide.contains("bytes") && wide.contains(name), "{wide}");
        for (width, bytes, whole) in [(62, true, true), (54, false, true), (40, false, false)] {
            let text = shown(&[name], width);
            assert_eq!((text.contains("1.0 MB"), text.contains(name)), (bytes, whole), "{text}");
            assert!(text.contains("self_attn.q_proj"), "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= width.into()), "{text}");
        }
    }

    #[test]
    fn columns_without_room_are_named_and_columns_without_text_are_not_there() {
        let row = vec!["model.layers.31.self_attn.q_proj".to_owned(), "1.0 MB".to_owned()];
        let text = table(&FACTS, &ORDER, vec![row.clone()], Some(80));
        assert!(text.contains("bytes") && !text.contains("note") && !text.contains("no room"));
        let narrow = table(&FACTS, &ORDER, vec![row], Some(36));
        assert!(narrow.ends_with("\nno room for bytes: use 42 columns or\n  --json"), "{narrow}");
        assert_eq!(table(&FACTS, &ORDER, Vec::new(), Some(80)), "");
    }

    #[test]
    fn names_are_cut_before_the_last_columns_go() {
        let columns = [
            ("weight", Column::Name),
            ("format", Column::Name),
            ("note", Column::Text),
            ("error", Column::Figure),
        ];
        let row = ["model.layers.31.mlp.up_proj", "nvfp4 16", "a note of words", "8.12 %"];
        let of = |width| {
            let rows = vec![row.map(str::to_owned).to_vec()];
            table(&columns, &ORDER, rows, Some(width))
        };
        for (width, name, format, note) in [
            (80, "model.layers.31.mlp.up_proj", true, true),
            (60, "….layers.31.mlp.up_proj", true, true),
            (44, "layers.31.mlp.up_proj", true, false),
            (32, "…mlp.up_proj", true, false),
            (24, "…1.mlp.up_proj", false, false),
        ] {
            let text = of(width);
            let found = [name, "8.12 %"].map(|word| text.contains(word));
            assert_eq!(found, [true, true], "{width}: {text}");
            let found = [text.contains("nvfp4 16"), text.contains("a note")];
            assert_eq!(found, [format, note], "{width}: {text}");
            assert!(text.lines().all(|line| line.chars().count() <= width.into()), "{text}");
        }
    }

    #[test]
    fn a_long_line_is_broken_at_spaces() {
        let line = "14 of 19 weights quantized (nvfp4): 1.0 MB -> 0.4 MB";
        let broken = "14 of 19 weights quantized\n  (nvfp4): 1.0 MB -> 0.4 MB";
        assert_eq!(wrapped(line, Some(30)), broken);
        assert_eq!(wrapped(line, None), line);
        let word = "w".repeat(40);
        assert_eq!(wrapped(&format!("a {word} b"), Some(30)), format!("a\n  {word}\n  b"));
        // A number keeps its unit.
        let line = "28 weights: mean error 8.16 %; 0.80 % of 510.3 kB, and more";
        let broken = "28 weights: mean error\n  8.16 %; 0.80 % of\n  510.3 kB, and more";
        assert_eq!(wrapped(line, Some(28)), broken);
        // Words of a second column stay in it, or below the first one.
        let row = "  nvfp4  blocks of 16 share a scale";
        let broken = "  nvfp4  blocks of 16\n         share a scale";
        assert_eq!(wrapped(row, Some(26)), broken);
        let broken = "  nvfp4\n    blocks of 16\n    share a scale";
        assert_eq!(wrapped(row, Some(20)), broken);
        assert_eq!(wrapped(row, Some(40)), row);
        // Lines and their indents stay, and colors take no room.
        assert_eq!(wrapped("a\n\n  b c", Some(20)), "a\n\n  b c");
        let colored = "\u{1b}[31ma tip:\u{1b}[0m of 20 columns\n    of two words more";
        let broken = "\u{1b}[31ma tip:\u{1b}[0m of 20 columns\n    of two words\n      more";
        assert_eq!(wrapped(colored, Some(20)), broken);
    }

    #[test]
    fn names_that_would_look_the_same_are_broken_into_lines() {
        let names = ["model.layers.21.mlp.down_proj", "model.layers.31.mlp.down_proj", "up"];
        let text = shown(&names, 36);
        for word in ["model.layers.21.", "model.layers.31.", "  mlp.down_proj", "up "] {
            assert!(text.contains(word), "{text} does not say {word}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 36), "{text}");
        assert_eq!(broken("model.layers.31.up", 12), "model.\n  layers.31.\n  up");
    }
}
