//! The plan for every tensor and the size of the result, known from headers alone.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use burn_fp4_checkpoints::selection::{Matrices, Selection};
use burn_fp4_checkpoints::{Model, Planned};
use burn_fp4_policy::Decision;
use burn_fp4_search::{Fp4Scheme, Hadamard, Method, ScaleRule};
use serde::Serialize;

use super::device::Device;
use super::options::{ResolvedOptions, Settings};
use crate::accuracy::TallyAt;
use crate::counted::counted;
use crate::fold::{Folded, fold_weights, natural, short, short_reason};
use crate::remarks::Warning;
use crate::size::Size;
use crate::table::{Column, ColumnOrder, table};

/// The plan of a tensor.
#[derive(Serialize)]
pub(super) struct Row {
    name: String,
    shape: Vec<usize>,
    from: String,
    to: String,
    /// The method that chooses its scales and codes; after a run, the one that did. None: it stays.
    method: Option<Method>,
    /// The arithmetic of its scales.
    rule: Option<ScaleRule>,
    /// The size of the Hadamard transform of its inputs.
    hadamard: Option<usize>,
    /// Why it stays, which it shares its tensor scale with, or why another method was used.
    note: String,
    /// The note for a table, where the names of neighbours are short.
    #[serde(skip)]
    short: String,
    /// Its scheme.
    #[serde(skip)]
    scheme: Option<Fp4Scheme>,
    /// The method and the rule for a table, where most weights have others.
    #[serde(skip)]
    by: String,
    bytes_before: u64,
    bytes_after: u64,
}

/// The plan of a checkpoint.
#[derive(Serialize)]
pub(super) struct Report {
    settings: Settings,
    device: Device,
    /// In the natural order of their names.
    weights: Vec<Row>,
    quantized: usize,
    /// The scheme of weights for which nothing else is chosen.
    #[serde(skip)]
    base: Fp4Scheme,
    /// Bytes of the files with tensors, headers included.
    bytes_before: u64,
    bytes_after: u64,
}

/// Order in which columns give way on a narrow terminal.
const ORDER: ColumnOrder<'_> =
    ColumnOrder { first: &["shape", "size"], then: &["method", "note"], last: &[] };

/// Schemes that a summary tells.
const SHOWN: usize = 4;

impl Row {
    /// The name without `.weight`.
    fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }
}

impl Report {
    /// Plans the write of a model whose files with tensors have `bytes_before`.
    pub(super) fn new(
        resolved: &ResolvedOptions,
        device: Device,
        model: &Model<'_>,
        outline: &Model<'_>,
        selection: &Selection,
        planned: &Planned<'_>,
        bytes_before: u64,
    ) -> Self {
        let (settings, base) = (resolved.settings(), resolved.policy.base());
        let after = planned.bytes();
        let row = |at: usize| {
            let (weight, target) = (&model.weights[at], &outline.weights[at]);
            let matrices = Matrices::of(model, weight);
            let guessed = selection.guessed.contains(&at).then_some("guessed by its shape");
            let turned = matrices.transposed.then_some("stored as [inputs, outputs]");
            let decoded = weight.is_lossy().then(|| format!("from {}", weight.kind()));
            let (scheme, [note, short]) = match &selection.decisions[at] {
                Decision::Keep(reason) => {
                    (None, [reason.to_string(), short_reason(reason, &weight.name)])
                }
                Decision::Quantize { scheme, group } => {
                    let with = sharing(model, &selection.groups[*group], at);
                    let note = |with: Option<String>| {
                        let facts = [turned, guessed].into_iter().flatten().map(Into::into);
                        let notes = with.into_iter().chain(decoded.clone()).chain(facts);
                        notes.collect::<Vec<String>>().join("; ")
                    };
                    (Some(scheme), with.map(note))
                }
            };
            Row {
                name: weight.name.clone(),
                shape: weight.shape().to_vec(),
                from: weight.kind(),
                to: planned.decoded_to(at).map_or_else(|| target.kind(), |to| to.to_string()),
                method: scheme.map(|scheme| scheme.method),
                rule: scheme.map(|scheme| scheme.rule),
                hadamard: scheme.and_then(|scheme| scheme.hadamard).map(Hadamard::size),
                note,
                short,
                scheme: scheme.copied(),
                by: scheme.map_or_else(String::new, |scheme| difference(scheme, &base)),
                bytes_before: weight.bytes() as u64,
                bytes_after: after[at],
            }
        };
        let mut weights: Vec<Row> = (0..model.weights.len()).map(row).collect();
        weights.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
        Self {
            settings,
            device,
            quantized: selection.groups.iter().map(Vec::len).sum(),
            base,
            bytes_before,
            bytes_after: planned.length(),
            weights,
        }
    }

    /// Notes the weights that were quantized by another method, as their statistics are all zero.
    /// Returns a warning about them.
    pub(super) fn fell_back(&mut self, model: &Model<'_>, tallies: &[TallyAt]) -> Option<Warning> {
        let note = |(at, tally): &TallyAt| {
            let whole = tally.unseen[0] == tally.unseen[1];
            Some((model.weights[*at].name.as_str(), (tally.fallback()?, whole)))
        };
        let notes: BTreeMap<&str, (String, bool)> = tallies.iter().filter_map(note).collect();
        let method = Method::FALLBACK;
        let mut first = None;
        for row in &mut self.weights {
            let Some((note, whole)) = notes.get(row.name.as_str()) else { continue };
            if *whole {
                row.method = Some(method);
                row.scheme = row.scheme.map(|scheme| scheme.with_method(method));
            }
            row.note = match row.note.is_empty() {
                true => note.clone(),
                false => format!("{}; {note}", row.note),
            };
            first.get_or_insert_with(|| format!("`{}`: {note}", row.name));
        }
        let others = match notes.len() {
            0 | 1 => String::new(),
            count => format!(" (and {})", counted(count - 1, "more weight")),
        };
        let weights = notes.keys().map(|name| (*name).to_owned()).collect();
        let remedy = "calibrate with more text, or pass --keep for these weights";
        first.map(|first| Warning {
            kind: "unseen-inputs",
            weights,
            text: format!("{first}{others}; {remedy}"),
        })
    }

    /// Lays out the plan with a line for every pattern of names, or with `all` for every tensor.
    pub(super) fn table(&self, all: bool, width: Option<u16>) -> String {
        let columns = [
            ("weight", Column::Name),
            ("shape", Column::Name),
            ("becomes", Column::Name),
            ("size", Column::Figure),
            ("method", Column::Text),
            ("note", Column::Text),
        ];
        let rows = self.folded(all).iter().map(|one| self.line(one)).collect();
        table(&columns, &ORDER, rows, width)
    }

    fn folded(&self, all: bool) -> Vec<Folded> {
        if all {
            let rows = self.weights.iter().enumerate();
            return rows.map(|(at, row)| Folded::alone(row.module(), at)).collect();
        }
        let key = |row: &Row| [&row.from, &row.to, &row.by, &row.short].map(Clone::clone);
        let rows = self.weights.iter().map(|row| (row.module(), &row.shape[..], key(row)));
        fold_weights(&rows.collect::<Vec<_>>())
    }

    fn line(&self, folded: &Folded) -> Vec<String> {
        let first = &self.weights[folded.members[0]];
        let bytes = folded.members.iter().map(|&at| self.weights[at].bytes_after).sum();
        let (name, shape) = (folded.name.clone(), folded.shape(&first.shape));
        let size = Size(bytes).to_string();
        vec![name, shape, first.to.clone(), size, first.by.clone(), first.short.clone()]
    }

    /// The schemes of what is quantized, with the number of weights of each; the base if nothing
    /// is.
    fn schemes(&self) -> Vec<(Fp4Scheme, usize)> {
        let mut counts: Vec<(Fp4Scheme, usize)> = Vec::new();
        for scheme in self.weights.iter().filter_map(|row| row.scheme) {
            match counts.iter_mut().find(|(known, _)| *known == scheme) {
                Some((_, count)) => *count += 1,
                None => counts.push((scheme, 1)),
            }
        }
        if counts.is_empty() {
            counts.push((self.base, 0));
        }
        counts.sort_by_key(|(_, count)| Reverse(*count));
        counts
    }

    /// The counts, the settings and the sizes, in a sentence.
    pub(super) fn summary(&self) -> String {
        let [before, after] = [self.bytes_before, self.bytes_after].map(Size);
        let (quantized, of) = (self.quantized, counted(self.weights.len(), "weight"));
        let on = match self.device {
            Device::Flex => String::new(),
            device => format!(", on {}", device.name()),
        };
        let settings = &self.settings;
        let all = self.schemes();
        let schemes = all.iter().take(SHOWN).map(|(scheme, count)| {
            let Fp4Scheme { block_size, method, rule, hadamard, .. } = scheme;
            let count = if all.len() > 1 { format!("{count} ") } else { String::new() };
            let rule = match *rule == ScaleRule::of_format(scheme.format()) {
                true => String::new(),
                false => format!(" by rule {rule}"),
            };
            let transform = hadamard
                .map(|hadamard| format!(" after a Hadamard transform of {}", hadamard.size()));
            let transform = transform.unwrap_or_default();
            format!(
                "{count}{} in blocks of {block_size}, {method}{rule}{transform}",
                scheme.format()
            )
        });
        let mut schemes: Vec<String> = schemes.collect();
        if all.len() > SHOWN {
            let others = all[SHOWN..].iter().map(|(_, count)| count).sum();
            schemes.push(counted(others, "weight") + " by other schemes");
        }
        let schemes = schemes.join("; ");
        let share = match self.bytes_before {
            all if all > 0 && !self.weights.is_empty() => {
                format!(" ({:.0} %)", 100.0 * self.bytes_after as f64 / all as f64)
            }
            _ => String::new(),
        };
        format!(
            "{quantized} of {of} quantized ({schemes}; {settings}{on}): {before} -> {after}{share}"
        )
    }
}

/// The weights that one shares its tensor scale with: in whole names, and for a table.
fn sharing(model: &Model<'_>, group: &[usize], at: usize) -> [Option<String>; 2] {
    let own = &model.weights[at].name;
    let others = group.iter().filter(|&&other| other != at);
    let mut others: Vec<&str> = others.map(|&other| &*model.weights[other].name).collect();
    if others.is_empty() {
        return [None, None];
    }
    others.sort_by_key(|name| natural(name));
    let quoted: Vec<_> = others.iter().map(|name| format!("`{name}`")).collect();
    let names: Vec<_> = others.iter().map(|name| short(name, own)).collect();
    [
        Some(format!("shares a tensor scale with {}", quoted.join(", "))),
        Some(format!("shares a scale with {}", names.join(", "))),
    ]
}

/// Names the method and the rule of a scheme that differ from the base, or in another format from
/// the recommended scheme.
fn difference(scheme: &Fp4Scheme, base: &Fp4Scheme) -> String {
    let usual = match scheme.format() == base.format() {
        true => *base,
        false => Fp4Scheme::recommended(scheme.format()),
    };
    let method = (scheme.method != usual.method).then(|| scheme.method.to_string());
    let rule = (scheme.rule != usual.rule).then(|| format!("rule {}", scheme.rule));
    method.into_iter().chain(rule).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use burn_fp4_checkpoints::{Dtype, Tensor, Value, Weight, WriteOptions};
    use burn_fp4_policy::Recipe;

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
        let selection = Selection::of(&model, &resolved.policy).expect("a selection");
        let outline = selection.outline(&model);
        let planned = outline.plan(resolved.dialect(), &WriteOptions::default());
        let planned = planned.expect("a plan");
        Report::new(&resolved, Device::Flex, &model, &outline, &selection, &planned, 0)
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
        let wide = report.table(false, None);
        let row = "model.layers.{0..35}.self_attn.k_proj  36 x [64, 64]  nvfp4 16";
        assert!(wide.contains(row), "{wide}");
        assert!(wide.contains("size") && wide.contains("36 tensors"), "{wide}");
        assert_eq!(wide.lines().count(), 6, "{wide}");
        for width in [80, 60] {
            let text = report.table(false, Some(width));
            assert!(text.lines().all(|line| line.chars().count() <= width.into()), "{text}");
        }
        assert!(report.table(false, Some(60)).contains("…"));
        assert_eq!(report.table(true, None).lines().count(), 2 + 4 * 36);
    }

    #[test]
    fn rows_whose_names_have_no_room_stay_distinguishable() {
        let name = |at: usize| format!("model.layers.{at}.mlp.shared_experts.down_proj.weight");
        let layers = [0, 1, 7].map(|at| (name(at), vec![4096, 64]));
        let text = report(&layers).table(true, Some(56));
        for word in [".0.mlp", ".1.mlp", ".7.mlp"] {
            assert!(text.contains(word), "{text} does not say {word}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 56), "{text}");
    }
}
