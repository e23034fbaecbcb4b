//! What will be done to every tensor, and how large the result will be: known from headers alone.

use burn_fp4_checkpoints::selection::{Decision, Matrices, Selection, Warning};
use burn_fp4_checkpoints::{Model, Planned};
use comfy_table::Table;
use serde::Serialize;

use super::device::Device;
use super::options::Settings;
use crate::fold::{Folded, fold, natural};
use crate::size::Size;
use crate::table::{Column, NARROWEST, table};

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
    warnings: Vec<Warning>,
    /// In the natural order of their names.
    weights: Vec<Row>,
    quantized: usize,
    bytes_before: u64,
    bytes_after: u64,
}

impl Row {
    /// The name without `.weight`.
    fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }

    /// The note, in which a neighbour is known by its last words.
    fn short_note(&self) -> String {
        let note = match self.module().rsplit_once('.') {
            Some((parent, _)) => self.note.replace(&format!("`{parent}."), "`"),
            None => self.note.clone(),
        };
        note.replace(".weight`", "`")
    }
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
                    [_] if matrices.transposed => "stored as [inputs, outputs]".to_owned(),
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
        let mut weights: Vec<Row> = (0..model.weights.len()).map(row).collect();
        weights.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
        Self {
            settings,
            device,
            warnings: selection.warnings.clone(),
            quantized: selection.groups.iter().map(Vec::len).sum(),
            bytes_before: weights.iter().map(|row| row.bytes_before).sum(),
            bytes_after: planned.length(),
            weights,
        }
    }

    /// The warnings, as lines.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        self.warnings.iter().map(|warning| format!("warning: {warning}"))
    }

    /// A line for every pattern of names, or with `all` for every tensor, on a terminal of this
    /// width. It has no bytes if there is no room for them.
    pub(super) fn table(&self, all: bool, width: Option<u16>) -> Table {
        let columns = [
            ("weight", Column::Name),
            ("shape", Column::Name),
            ("becomes", Column::Name),
            ("bytes", Column::Figure),
            ("note", Column::Text),
        ];
        let lines: Vec<[String; 5]> = self.folded(all).iter().map(|one| self.line(one)).collect();
        let widest = |at: usize| {
            let cells = lines.iter().map(|line| line[at].chars().count());
            cells.chain([columns[at].0.len()]).max().unwrap_or(0)
        };
        // Columns are separated by two.
        let needed: usize = (0..4).map(|at| widest(at) + 2).sum();
        let narrow = width.is_some_and(|width| needed + usize::from(NARROWEST) > width.into());
        let is_shown = |at: usize| !narrow || columns[at].0 != "bytes";
        let shown: Vec<usize> = (0..columns.len()).filter(|&at| is_shown(at)).collect();
        let mut table = table(&shown.iter().map(|&at| columns[at]).collect::<Vec<_>>());
        for line in &lines {
            table.add_row(shown.iter().map(|&at| &line[at]));
        }
        table
    }

    /// Tensors of one pattern that become the same.
    fn folded(&self, all: bool) -> Vec<Folded> {
        if all {
            let alone = |(at, row): (usize, &Row)| Folded {
                name: row.module().to_owned(),
                members: vec![at],
            };
            return self.weights.iter().enumerate().map(alone).collect();
        }
        let same = |row: &'_ Row| (row.shape.clone(), row.from.clone(), row.to.clone());
        fold(self.weights.iter().map(|row| (row.module(), (same(row), row.short_note()))))
    }

    fn line(&self, Folded { name, members }: &Folded) -> [String; 5] {
        let first = &self.weights[members[0]];
        let count = if members.len() > 1 { format!("{} x ", members.len()) } else { String::new() };
        let bytes = members.iter().map(|&at| self.weights[at].bytes_after).sum();
        [
            name.clone(),
            format!("{count}{:?}", first.shape),
            first.to.clone(),
            Size(bytes).to_string(),
            first.short_note(),
        ]
    }

    /// What comes of it, in a line or two.
    pub(super) fn summary(&self) -> String {
        let [before, after] = [self.bytes_before, self.bytes_after].map(Size);
        let (quantized, of) = (self.quantized, self.weights.len());
        let on = match self.device {
            Device::Flex => String::new(),
            device => format!(", on {}", device.name()),
        };
        let settings = &self.settings;
        format!("{quantized} of {of} weights quantized ({settings}{on}): {before} become {after}")
    }
}
