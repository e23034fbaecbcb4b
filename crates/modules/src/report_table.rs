//! An [`Fp4Report`] as a table, with notes below it.

use core::fmt;

use burn_fp4_ops::Products;
use comfy_table::{CellAlignment, Table, presets};

use crate::report::{Fp4Report, Outcome, ParameterReport};

impl fmt::Display for Fp4Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
            "parameter",
            "shape",
            "dtype",
            "outcome",
            "bits",
            "error %",
            "bytes",
            "was",
        ]);
        for parameter in &self.parameters {
            table.add_row(row(parameter));
        }
        for column in 4..8 {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        writeln!(f, "{table}")?;
        self.totals(f)?;
        self.notes(f)
    }
}

/// The cells of a parameter.
fn row(parameter: &ParameterReport) -> [String; 8] {
    // Known of packed parameters only.
    let error = parameter.relative_error();
    let error = error.map_or(String::new(), |error| format!("{:.3}", 100.0 * error));
    [
        parameter.path.clone(),
        format!("{:?}", parameter.shape),
        parameter.dtype.clone(),
        outcome(&parameter.outcome),
        format!("{:.3}", parameter.bits_per_value()),
        error,
        parameter.bytes_after.to_string(),
        parameter.bytes_before.to_string(),
    ]
}

/// What was done to a parameter, or why not, in a line.
fn outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Quantized {
            scheme, asked, chosen_by, fallback, axis, shares_scale_with, ..
        } => {
            let shares = shares_scale_with
                .as_ref()
                .map_or(String::new(), |group| format!(", one tensor scale for {group}"));
            let fallback = fallback
                .as_ref()
                .map_or(String::new(), |reason| format!(", asked {asked}: {reason}"));
            let format = scheme.format();
            format!(
                "{format} {} {chosen_by} / {}, axis {axis}{shares}{fallback}",
                scheme.rule, scheme.block_size
            )
        }
        Outcome::Given { format, block_size, axis, .. } => {
            format!("{format} as given / {block_size}, axis {axis}")
        }
        Outcome::FakeQuantized { scheme, axis, learned } => {
            let learned = if *learned { ", tensor scale learned" } else { "" };
            format!(
                "fake {} {} {} / {}, axis {axis}{learned}",
                scheme.format(),
                scheme.rule,
                scheme.search,
                scheme.block_size
            )
        }
        Outcome::Kept { reason } => format!("kept: {reason}"),
    }
}

impl Fp4Report {
    /// The line below the table.
    fn totals(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_fake = |parameter: &&ParameterReport| {
            matches!(parameter.outcome, Outcome::FakeQuantized { .. })
        };
        let fake = self.parameters.iter().filter(is_fake).count();
        if fake > 0 {
            return write!(f, "{fake} of {} parameters fake-quantized", self.parameters.len());
        }
        write!(
            f,
            "{} of {} parameters quantized, {:.3} bits per weight, error {:.3} %, {} bytes of {}",
            self.quantized().count(),
            self.parameters.len(),
            self.bits_per_weight(),
            100.0 * self.relative_error(),
            self.bytes_after(),
            self.bytes_before(),
        )?;
        if self.multiplies_codes() {
            write!(f, ", multiplied straight from the codes")?;
        }
        Ok(())
    }

    /// Lines below the table: weights whose products are slow, and what nothing uses.
    fn notes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Weights of which the same is to be said share a line.
        let mut slow: Vec<(&Products, Vec<&str>)> = Vec::new();
        for parameter in &self.parameters {
            match parameter.products() {
                None | Some(Products::FromCodes) => {}
                Some(products) => match slow.iter_mut().find(|(known, _)| *known == products) {
                    Some((_, paths)) => paths.push(&parameter.path),
                    None => slow.push((products, vec![&parameter.path])),
                },
            }
        }
        for (products, paths) in slow {
            match paths[..] {
                [first, _, ..] => {
                    write!(f, "\n`{first}` and {} more: {products}", paths.len() - 1)?;
                }
                _ => write!(f, "\n`{}`: {products}", paths.concat())?,
            }
        }
        for line in &self.unused {
            write!(f, "\nnote: {line}")?;
        }
        Ok(())
    }
}
