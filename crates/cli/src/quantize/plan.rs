//! What will be done to every tensor, and how large the result will be: known from headers alone.

use burn_fp4_checkpoints::selection::{Decision, Matrices, Selection};
use burn_fp4_checkpoints::{Model, Planned};
use comfy_table::Table;
use serde::Serialize;

use super::device::Device;
use super::options::Settings;
use crate::size::Size;
use crate::table::{Column, table};

/// The plan of a tensor.
#[derive(Serialize)]
pub(super) struct Row {
    name: String,
    shape: Vec<usize>,
    from: String,
    to: String,
    /// Why it stays, or which it shares its tensor scale with.
    note: String,
    bytes_before: u64,
    bytes_after: u64,
}

/// The plan of a checkpoint.
#[derive(Serialize)]
pub(super) struct Report {
    settings: Settings,
    device: Device,
    weights: Vec<Row>,
    quantized: usize,
    bytes_before: u64,
    bytes_after: u64,
}

impl Report {
    pub(super) fn new(
        settings: Settings,
        device: Device,
        model: &Model<'_>,
        outline: &Model<'_>,
        selection: &Selection,
        planned: &Planned<'_>,
    ) -> Self {
        let after = planned.bytes();
        let row = |at: usize| {
            let (weight, target) = (&model.weights[at], &outline.weights[at]);
            let matrices = Matrices::of(model, weight);
            let note = match &selection.decisions[at] {
                Decision::Keep(reason) => reason.to_string(),
                Decision::Quantize(group) => match &selection.groups[*group][..] {
                    [_] if matrices.transposed => "along its second to last axis".to_owned(),
                    [_] => String::new(),
                    members => {
                        let other = members.iter().find(|&&other| other != at).unwrap_or(&at);
                        format!("one tensor scale with `{}`", model.weights[*other].name)
                    }
                },
            };
            Row {
                name: weight.name.clone(),
                shape: weight.shape().to_vec(),
                from: weight.kind(),
                to: target.kind(),
                note,
                bytes_before: weight.bytes() as u64,
                bytes_after: after[at],
            }
        };
        let weights: Vec<Row> = (0..model.weights.len()).map(row).collect();
        Self {
            settings,
            device,
            quantized: selection.groups.iter().map(Vec::len).sum(),
            bytes_before: weights.iter().map(|row| row.bytes_before).sum(),
            bytes_after: planned.length(),
            weights,
        }
    }

    /// A line for every tensor.
    pub(super) fn table(&self) -> Table {
        let mut table = table(&[
            ("weight", Column::Name),
            ("shape", Column::Name),
            ("from", Column::Name),
            ("to", Column::Name),
            ("bytes", Column::Figure),
            ("note", Column::Text),
        ]);
        for row in &self.weights {
            let to = if row.from == row.to { "=".to_owned() } else { row.to.clone() };
            let bytes = Size(row.bytes_after).to_string();
            let (name, shape) = (row.name.clone(), format!("{:?}", row.shape));
            // A neighbour is known by its last words.
            let module = row.name.strip_suffix(".weight").unwrap_or(&row.name);
            let note = match module.rsplit_once('.') {
                Some((parent, _)) => row.note.replace(&format!("`{parent}."), "`"),
                None => row.note.clone(),
            };
            let note = note.replace(".weight`", "`");
            table.add_row([name, shape, row.from.clone(), to, bytes, note]);
        }
        table
    }

    /// The counts, the settings and the sizes, in a line.
    pub(super) fn summary(&self) -> String {
        let [before, after] = [self.bytes_before, self.bytes_after].map(Size);
        let (quantized, of) = (self.quantized, self.weights.len());
        let on = match self.device {
            Device::Flex => String::new(),
            device => format!(", on {}", device.name()),
        };
        let settings = &self.settings;
        let formats = match &self.formats()[..] {
            [] | [_] => String::new(),
            formats => {
                let counts = formats.iter().map(|(format, count)| format!("{count} {format}"));
                format!(", {}", counts.collect::<Vec<_>>().join(", "))
            }
        };
        let share = 100.0 * self.bytes_after as f64 / self.bytes_before.max(1) as f64;
        format!(
            "{quantized} of {of} weights quantized{formats} ({settings}{on}): {before} -> {after} \
             ({share:.0} %)"
        )
    }

    /// The formats of what is quantized, with the number of weights in each.
    fn formats(&self) -> Vec<(&str, usize)> {
        let mut formats: Vec<(&str, usize)> = Vec::new();
        for row in self.weights.iter().filter(|row| row.from != row.to) {
            let format = row.to.split(' ').next().unwrap_or_default();
            match formats.iter_mut().find(|(known, _)| *known == format) {
                Some((_, count)) => *count += 1,
                None => formats.push((format, 1)),
            }
        }
        formats
    }
}
