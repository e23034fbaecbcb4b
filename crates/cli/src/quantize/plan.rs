//! The plan for every tensor, and the size of the result: known from headers alone.

use std::collections::BTreeMap;

use burn_fp4_checkpoints::selection::{Decision, Matrices, Reason, Selection, Warning};
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
    /// The note for a table, where the names of neighbours are short.
    #[serde(skip)]
    short: String,
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
}

/// The module of a weight in the words in which it differs from another one.
fn short<'n>(name: &'n str, other: &str) -> &'n str {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let parent = other.strip_suffix(".weight").unwrap_or(other).rsplit_once('.');
    let within = |(parent, _): (&str, &str)| module.strip_prefix(parent)?.strip_prefix('.');
    parent.and_then(within).unwrap_or(module)
}

/// The end of a name that has so many characters, behind a sign that something is missing.
fn end_of(name: &str, most: usize) -> String {
    let count = name.chars().count();
    match count.checked_sub(most) {
        None | Some(0) => name.to_owned(),
        Some(more) => ['…'].into_iter().chain(name.chars().skip(more + 1)).collect(),
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
            let [note, short] = match &selection.decisions[at] {
                Decision::Keep(reason) => {
                    let short = match reason {
                        Reason::With(other) => {
                            Reason::With(short(other, &weight.name).to_owned()).to_string()
                        }
                        other => other.to_string(),
                    };
                    [reason.to_string(), short]
                }
                Decision::Quantize(group) => match &selection.groups[*group][..] {
                    [_] if matrices.transposed => {
                        ["stored as [inputs, outputs]"; 2].map(Into::into)
                    }
                    [_] => Default::default(),
                    members => {
                        let other = members.iter().find(|&&other| other != at).unwrap_or(&at);
                        let other = &model.weights[*other].name;
                        let short = short(other, &weight.name);
                        [
                            format!("one tensor scale with `{other}`"),
                            format!("one scale with `{short}`"),
                        ]
                    }
                },
            };
            Row {
                name: weight.name.clone(),
                shape: weight.shape().to_vec(),
                from: weight.kind(),
                to: target.kind(),
                note,
                short,
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
    pub(super) fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// A line for every pattern of names, or with `all` for every tensor, on a terminal of this
    /// width: where there is no room, without bytes, and with the ends of long names.
    pub(super) fn table(&self, all: bool, width: Option<u16>) -> Table {
        let columns = [
            ("weight", Column::Name),
            ("shape", Column::Name),
            ("becomes", Column::Name),
            ("bytes", Column::Figure),
            ("note", Column::Text),
        ];
        let mut lines: Vec<[String; 5]> = match all {
            true => (0..self.weights.len()).map(|at| self.line(&self.alone(at))).collect(),
            false => self.folded().iter().map(|one| self.line(one)).collect(),
        };
        let widest = |at: usize| {
            let cells = lines.iter().map(|line| line[at].chars().count());
            cells.chain([columns[at].0.len()]).max().unwrap_or(0)
        };
        // Columns are separated by two.
        let needed = |shown: &[usize]| shown.iter().map(|&at| widest(at) + 2).sum::<usize>();
        let room = width.map(|width| usize::from(width.saturating_sub(NARROWEST)));
        let mut shown = vec![0, 1, 2, 3, 4];
        if room.is_some_and(|room| needed(&[0, 1, 2, 3]) > room) {
            shown.retain(|&at| columns[at].0 != "bytes");
        }
        if let Some(room) = room.filter(|room| needed(&[0, 1, 2]) > *room) {
            let room = room.saturating_sub(needed(&[1, 2]) + 2).max(usize::from(NARROWEST));
            lines.iter_mut().for_each(|line| line[0] = end_of(&line[0], room));
        }
        let mut table = table(&shown.iter().map(|&at| columns[at]).collect::<Vec<_>>());
        for line in &lines {
            table.add_row(shown.iter().map(|&at| &line[at]));
        }
        table
    }

    fn alone(&self, at: usize) -> Folded {
        Folded { name: self.weights[at].module().to_owned(), members: vec![at] }
    }

    /// Matrices of one pattern that become the same, and behind them the vectors by what keeps
    /// them, of which a model has many.
    fn folded(&self) -> Vec<Folded> {
        let (vectors, matrices): (Vec<usize>, Vec<usize>) =
            (0..self.weights.len()).partition(|&at| self.weights[at].shape.len() < 2);
        let same = |row: &'_ Row| (row.shape.clone(), row.from.clone(), row.to.clone());
        let rows = matrices.iter().map(|&at| &self.weights[at]);
        let folded = fold(rows.map(|row| (row.module(), (same(row), row.short.clone()))));
        let places = |one: Folded| Folded {
            members: one.members.into_iter().map(|at| matrices[at]).collect(),
            ..one
        };
        let mut alike: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for at in vectors {
            let row = &self.weights[at];
            alike.entry((&row.to, &row.short)).or_default().push(at);
        }
        let name = |members: Vec<usize>| match members[..] {
            [one] => self.alone(one),
            _ => Folded { name: "vectors and scalars (see --all)".to_owned(), members },
        };
        let vectors = alike.into_values().map(name);
        folded.into_iter().map(places).chain(vectors).collect()
    }

    fn line(&self, Folded { name, members }: &Folded) -> [String; 5] {
        let first = &self.weights[members[0]];
        let shape = match (members.len(), first.shape.len()) {
            (1, _) => format!("{:?}", first.shape),
            (count, 0 | 1) => format!("{count} tensors"),
            (count, _) => format!("{count} x {:?}", first.shape),
        };
        let bytes = members.iter().map(|&at| self.weights[at].bytes_after).sum();
        [name.clone(), shape, first.to.clone(), Size(bytes).to_string(), first.short.clone()]
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

#[cfg(test)]
mod tests {
    use burn_fp4_checkpoints::{Dtype, Tensor, Value, Weight, WriteOptions};
    use burn_fp4_search::Recipe;

    use super::super::options::ResolvedOptions;
    use super::*;

    fn report(names: &[(String, Vec<usize>)]) -> Report {
        let weight = |(name, shape): &(String, Vec<usize>)| {
            let bytes = vec![0; 2 * shape.iter().product::<usize>()];
            let tensor = Tensor::new(name.clone(), Dtype::BF16, shape.clone(), bytes);
            Weight::new(name.clone(), 0, Value::Plain(tensor.expect("a shape")))
        };
        let weights = names.iter().map(weight).collect();
        let model = Model { weights, ..Model::default() };
        let resolved = ResolvedOptions::of(Recipe::default(), None, &model, None).expect("choices");
        let selection = Selection::of(&model, &resolved.choice).expect("a selection");
        let outline = selection.outline(&model);
        let planned = outline.plan(&resolved.choice.dialect, &WriteOptions::default());
        let planned = planned.expect("a plan");
        Report::new(resolved.settings(), Device::Flex, &model, &outline, &selection, &planned)
    }

    fn layers(count: usize) -> Report {
        let matrix = ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"];
        let matrices = (0..count).flat_map(|layer| {
            matrix.map(|name| (format!("model.layers.{layer}.{name}.weight"), vec![64, 64]))
        });
        let norms = (0..count).map(|layer| (format!("model.layers.{layer}.norm.weight"), vec![64]));
        report(&matrices.chain(norms).collect::<Vec<_>>())
    }

    #[test]
    fn a_plan_of_a_repeated_layer_fits_a_terminal_of_80_columns() {
        let report = layers(36);
        let wide = report.table(false, None).to_string();
        let row = "model.layers.{0..35}.self_attn.k_proj  36 x [64, 64]  nvfp4 16";
        assert!(wide.contains(row), "{wide}");
        assert!(wide.contains("bytes") && wide.contains("36 tensors"), "{wide}");
        assert_eq!(wide.lines().count(), 6, "{wide}");
        for width in [80, 60] {
            let shown = report.table(false, Some(width)).column_max_content_widths();
            // The note is broken into lines; the others are as wide as their content.
            let fixed: u16 = shown[..shown.len() - 1].iter().map(|width| width + 2).sum();
            assert!(fixed + NARROWEST <= width, "{width}: {shown:?}");
        }
        assert!(report.table(false, Some(60)).to_string().contains("…"));
        assert_eq!(report.table(true, None).to_string().lines().count(), 2 + 4 * 36);
    }

    #[test]
    fn the_end_of_a_name_is_what_tells_it_from_others() {
        assert_eq!(end_of("model.up", 8), "model.up");
        assert_eq!(end_of("model.up", 4), "….up");
    }
}
