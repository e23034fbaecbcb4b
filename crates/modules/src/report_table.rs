//! An [`Fp4Report`] as a table of 80 columns, with notes below it.

use core::fmt;

use burn_fp4_ops::{Fp4Format, Fp4Scheme, MatmulPath, TensorScaling};
use burn_fp4_policy::fold::{Folded, fold};
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use crate::config::Fp4Config;
use crate::report::{Fp4Report, KeepReason, Outcome, ParameterReport, SquaredError};

/// Columns of a terminal.
const WIDTH: usize = 80;
/// Spaces between columns, and at the beginning of a line that goes on.
const GAP: usize = 2;

/// A line below the header, and nothing else: names are long, and borders take their place.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

impl fmt::Display for Fp4Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows(f.alternate());
        let table = match self.relative_output_error() {
            Some(_) => table(["parameter", "shape", "outcome", "weight %", "output %"], rows, 3),
            None => {
                let rows = rows.into_iter();
                let rows =
                    rows.map(|[path, shape, outcome, error, _]| [path, shape, outcome, error]);
                table(["parameter", "shape", "outcome", "error %"], rows.collect(), 3)
            }
        };
        let mut lines = String::new();
        self.totals(&mut lines)?;
        self.notes(&mut lines)?;
        let lines: Vec<_> = lines.lines().map(wrapped).collect();
        write!(f, "{table}\n\n{}", lines.join("\n"))
    }
}

/// A table that is as wide as a terminal at most: what is longer in the first column loses its
/// beginning. Columns from `figures` on are figures.
pub(crate) fn table<const N: usize>(
    header: [&str; N],
    mut rows: Vec<[String; N]>,
    figures: usize,
) -> String {
    let width = |at: usize| {
        let cells = rows.iter().flat_map(|row| row[at].lines()).map(|line| line.chars().count());
        cells.max().unwrap_or(0).max(header[at].len())
    };
    let others: usize = (1..N).map(|at| GAP + width(at)).sum();
    let left = WIDTH.saturating_sub(others).max(header[0].len());
    for row in &mut rows {
        let lines: Vec<_> = row[0].lines().map(|line| end_of(line, left)).collect();
        row[0] = lines.join("\n");
    }
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header).add_rows(rows);
    for (at, column) in table.column_iter_mut().enumerate() {
        // The style separates columns by one more.
        column.set_padding((0, if at + 1 < N { GAP as u16 - 1 } else { 0 }));
        if at >= figures {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// Breaks a line at spaces to fit a terminal. What follows a break is indented.
fn wrapped(line: &str) -> String {
    let (mut text, mut used) = (String::new(), 0);
    for (at, word) in line.split(' ').enumerate() {
        let length = word.chars().count();
        if at > 0 && used + 1 + length > WIDTH {
            text.push_str("\n  ");
            used = GAP;
        } else if at > 0 {
            text.push(' ');
            used += 1;
        }
        text.push_str(word);
        used += length;
    }
    text
}

/// The end of a name that is longer than a width.
fn end_of(name: &str, width: usize) -> String {
    let skipped = name.chars().count().saturating_sub(width);
    if skipped == 0 {
        return name.to_owned();
    }
    let end: String = name.chars().skip(skipped + 1).collect();
    format!("…{end}")
}

/// Returns the cells of a row for the parameters of one pattern. An error is over all values of the
/// parameters; its cell is empty if it is unknown.
fn row(folded: &Folded, members: &[&ParameterReport]) -> [String; 5] {
    let percent = |of: fn(&ParameterReport) -> Option<SquaredError>| {
        let error = SquaredError::sum(members.iter().filter_map(|one| of(one)));
        error.map_or(String::new(), |error| format!("{:.3}", 100.0 * error.relative()))
    };
    [
        folded.name.clone(),
        folded.shape(&members[0].shape),
        outcome(members[0]),
        percent(ParameterReport::weight_error),
        percent(ParameterReport::output_error),
    ]
}

fn name(format: Fp4Format) -> String {
    format.to_string().to_uppercase()
}

/// Names the outcome of a parameter in a few words; [`details`] has the others.
fn outcome(parameter: &ParameterReport) -> String {
    match &parameter.outcome {
        Outcome::Quantized { scheme, .. } => name(scheme.format()),
        Outcome::Provided { format, .. } => format!("{}, provided", name(*format)),
        Outcome::FakeQuantized { scheme, .. } => format!("{}, trained", name(scheme.format())),
        Outcome::Adapted { .. } => "adapter".to_owned(),
        Outcome::Merged => "dense, merged".to_owned(),
        Outcome::Kept { reason } => {
            let kept = match reason {
                KeepReason::Container => return format!("kept: {}", parameter.container),
                KeepReason::Excluded { .. } => "excluded",
                KeepReason::FirstLayers { .. } => "first layers",
                KeepReason::LastLayers { .. } => "last layers",
                KeepReason::Indivisible { .. } => "indivisible",
                KeepReason::Reparameterized { .. } => "attachment",
                reason => return format!("kept: {reason}"),
            };
            format!("kept: {kept}")
        }
    }
}

/// Describes a scheme in the same words whatever the amax of its tensor scale: layers differ in it.
fn without_amax(scheme: &Fp4Scheme) -> String {
    match scheme.tensor_scale {
        TensorScaling::Amax(_) => {
            let other = scheme.with_tensor_scale(TensorScaling::Tensor);
            format!("{other}, tensor scale of a given amax")
        }
        _ => scheme.to_string(),
    }
}

/// Says what the table has no room for, in the same words for parameters with the same outcome.
fn details(parameter: &ParameterReport) -> Option<String> {
    Some(match &parameter.outcome {
        Outcome::Quantized { scheme, asked, fallback, axis, .. } => {
            let fallback = fallback
                .as_ref()
                .map_or(String::new(), |reason| format!(" instead of {asked} ({reason})"));
            format!("{}{fallback}, along axis {axis}", without_amax(scheme))
        }
        Outcome::Provided { format, block_size, axis, .. } => {
            format!("{}, blocks of {block_size}, as provided, along axis {axis}", name(*format))
        }
        Outcome::FakeQuantized { scheme, axis, learned } => {
            let learned = if *learned { ", tensor scale learned" } else { "" };
            format!("trained as {}, along axis {axis}{learned}", without_amax(scheme))
        }
        Outcome::Adapted { rank, scale } => format!("adapter of rank {rank}, scale {scale}"),
        Outcome::Merged => "dense, with the adapter added".to_owned(),
        Outcome::Kept { reason } => match reason {
            KeepReason::Container => {
                let name = &parameter.container;
                let axis = Fp4Config::axis_of_container(name);
                let axis = axis.map_or("axis".to_owned(), |axis| axis.to_string());
                format!("kept: {reason}; `.container(\"{name}\", {axis})` adds it")
            }
            KeepReason::Excluded { .. }
            | KeepReason::FirstLayers { .. }
            | KeepReason::LastLayers { .. }
            | KeepReason::Indivisible { .. }
            | KeepReason::Reparameterized { .. } => format!("kept: {reason}"),
            _ => return None,
        },
    })
}

/// Bytes in three digits and a decimal unit.
fn size(bytes: usize) -> String {
    let mut value = bytes as f64;
    let mut units = ["bytes", "kB", "MB", "GB"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    for larger in units {
        // What would be shown as 1000.
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1000.0, larger);
    }
    let digits = match value {
        _ if unit == "bytes" => 0,
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

impl Fp4Report {
    /// The rows of the table: one for each pattern of parameters with the same outcome, or for each
    /// parameter.
    fn rows(&self, all: bool) -> Vec<[String; 5]> {
        let parameters = self.parameters.iter();
        let folded: Vec<Folded> = match all {
            true => {
                let alone = |(at, one): (usize, &ParameterReport)| Folded::alone(&one.path, at);
                parameters.enumerate().map(alone).collect()
            }
            false => fold(parameters.map(|one| {
                // A scheme or axis that only a note tells; layers of a reason may differ.
                let is_kept = matches!(one.outcome, Outcome::Kept { .. });
                let details = details(one).filter(|_| !is_kept);
                (one.path.as_str(), (&one.shape, outcome(one), details))
            })),
        };
        let members = |folded: &Folded| -> Vec<_> {
            folded.members.iter().map(|&at| &self.parameters[at]).collect()
        };
        folded.iter().map(|folded| row(folded, &members(folded))).collect()
    }

    /// The lines below the table.
    fn totals(&self, f: &mut impl fmt::Write) -> fmt::Result {
        let parameters = self.parameters.len();
        let count = |is: fn(&Outcome) -> bool| {
            self.parameters.iter().filter(|parameter| is(&parameter.outcome)).count()
        };
        let fake = count(|outcome| matches!(outcome, Outcome::FakeQuantized { .. }));
        if fake > 0 {
            return write!(f, "{fake} of {parameters} parameters fake-quantized");
        }
        let adapted = self.adapted().count();
        if adapted > 0 {
            return write!(
                f,
                "{adapted} of {parameters} parameters have an adapter, the others are frozen"
            );
        }
        let quantized = self.quantized().count();
        let merged = count(|outcome| matches!(outcome, Outcome::Merged));
        write!(f, "{quantized} of {parameters} parameters quantized")?;
        if quantized > 0 {
            let (error, bits) = (100.0 * self.relative_error(), self.bits_per_weight());
            write!(f, ": error {error:.3} %")?;
            if let Some(error) = self.relative_output_error() {
                write!(f, ", of outputs {:.3} %", 100.0 * error)?;
            }
            write!(f, ", {bits:.3} bits per weight")?;
            let errors = self.parameters.iter();
            let errors = errors.filter_map(|one| Some((one, one.relative_error()?)));
            let worst = errors.max_by(|(_, a), (_, b)| a.total_cmp(b));
            if let Some((worst, error)) = worst.filter(|_| quantized > 1) {
                write!(f, "\nworst: `{}`, error {:.3} %", worst.path, 100.0 * error)?;
            }
        }
        if merged > 0 {
            write!(f, "\n{merged} dense weights merged with their adapters")?;
        }
        let (after, before) = (self.bytes_after(), self.bytes_before());
        write!(f, "\n{} -> {}", size(before), size(after))?;
        if before > 0 {
            write!(f, " ({:.0} %)", 100.0 * after as f64 / before as f64)?;
        }
        if quantized > 0 && self.multiplies_codes() {
            write!(f, ", multiplied directly from the packed weights")?;
        }
        Ok(())
    }

    /// Notes below the totals: how weights were quantized, what is slow and what nothing uses.
    fn notes(&self, f: &mut impl fmt::Write) -> fmt::Result {
        let slow = |parameter: &ParameterReport| match parameter.products() {
            None | Some(MatmulPath::FromCodes) => None,
            Some(products) => Some(products.to_string()),
        };
        let infinite = |parameter: &ParameterReport| {
            let dtype = &parameter.dtype;
            let is_infinite = parameter.relative_error().is_some_and(f64::is_infinite);
            is_infinite.then(|| {
                format!(
                    "values became infinite in {dtype}; cast the weight to f32, or use `exclude` \
                     to keep it dense"
                )
            })
        };
        self.grouped(f, details)?;
        self.grouped(f, infinite)?;
        self.grouped(f, slow)?;
        self.sharing(f)?;
        for line in &self.unused {
            write!(f, "\nnote: {line}")?;
        }
        Ok(())
    }

    /// A line for each note, with the parameters that it is about.
    fn grouped(
        &self,
        f: &mut impl fmt::Write,
        note: impl Fn(&ParameterReport) -> Option<String>,
    ) -> fmt::Result {
        let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
        for parameter in &self.parameters {
            let Some(note) = note(parameter) else { continue };
            match lines.iter_mut().find(|(known, _)| *known == note) {
                Some((_, paths)) => paths.push(&parameter.path),
                None => lines.push((note, vec![&parameter.path])),
            }
        }
        for (note, paths) in lines {
            match paths[..] {
                [first, _, ..] => write!(f, "\n`{first}` and {} more: {note}", paths.len() - 1)?,
                _ => write!(f, "\n`{}`: {note}", paths.concat())?,
            }
        }
        Ok(())
    }

    /// The line about groups of weights that share a tensor scale.
    fn sharing(&self, f: &mut impl fmt::Write) -> fmt::Result {
        let mut groups: Vec<&str> = Vec::new();
        for parameter in &self.parameters {
            if let Outcome::Quantized { shares_scale_with: Some(group), .. } = &parameter.outcome
                && !groups.contains(&group.as_str())
            {
                groups.push(group);
            }
        }
        match groups[..] {
            [] => Ok(()),
            [group] => write!(f, "\nshared tensor scale:\n  {group}"),
            [first, ..] => {
                write!(f, "\nshared tensor scales, {} in all:\n  {first}", groups.len())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits_and_a_unit() {
        for (bytes, expected) in [
            (0, "0 bytes"),
            (999, "999 bytes"),
            (1000, "1.00 kB"),
            (9_994, "9.99 kB"),
            (9_995, "10.0 kB"),
            (110_024, "110 kB"),
            (999_499, "999 kB"),
            (999_500, "1.00 MB"),
            (281_128_000, "281 MB"),
            (16_000_000_000, "16.0 GB"),
        ] {
            assert_eq!(size(bytes), expected, "{bytes}");
        }
    }

    #[test]
    fn long_names_lose_their_beginning() {
        assert_eq!(end_of("layers.0.weight", 15), "layers.0.weight");
        assert_eq!(end_of("layers.0.weight", 8), "….weight");
    }
}
