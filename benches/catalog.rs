//! Shared parts of the benchmarks: inputs, medians, and the table of results.

#![allow(clippy::must_use_candidate, reason = "no user calls it")]

use std::time::Instant;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// One measured operation.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Measured operation.
    pub operation: String,
    /// Number of values.
    pub values: usize,
    /// Median time of a run, in microseconds.
    pub microseconds: f64,
    /// Bytes that must be read and written.
    pub bytes: usize,
    /// Values per second, in units of 10^9.
    pub giga_values_per_second: f64,
    /// Bytes per second, in units of 10^9.
    pub gigabytes_per_second: f64,
    /// Time of a copy of the same input divided by this time.
    pub ratio_to_copy: f64,
}

impl Row {
    /// Computes the rates from a time; `copy` is the time of a copy of the input.
    pub fn new(operation: &str, values: usize, bytes: usize, seconds: f64, copy: f64) -> Self {
        Self {
            operation: operation.to_owned(),
            values,
            microseconds: seconds * 1e6,
            bytes,
            giga_values_per_second: values as f64 / seconds / 1e9,
            gigabytes_per_second: bytes as f64 / seconds / 1e9,
            ratio_to_copy: copy / seconds,
        }
    }
}

/// Measures the median seconds of a run, after a warm-up run.
pub fn median_seconds(runs: usize, mut run: impl FnMut()) -> f64 {
    run();
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[runs / 2]
}

/// Prints the rows as a table, or as JSON.
pub fn print(rows: &[Row], json: bool) {
    if json {
        println!("{}", serde_json::to_string_pretty(rows).expect("plain numbers"));
        return;
    }
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header([
        "operation",
        "values",
        "us",
        "G values/s",
        "GB/s",
        "copy time / time",
    ]);
    for row in rows {
        table.add_row([
            row.operation.clone(),
            row.values.to_string(),
            format!("{:.0}", row.microseconds),
            format!("{:.2}", row.giga_values_per_second),
            format!("{:.1}", row.gigabytes_per_second),
            format!("{:.2}", row.ratio_to_copy),
        ]);
    }
    for column in 1..6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    println!("{table}");
}

/// Makes pseudo-random values, roughly normal with standard deviation 0.02.
pub fn weights(count: usize) -> Vec<f32> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..count).map(|_| (uniform() + uniform() + uniform() - 1.5) * 0.04).collect()
}
