//! Results printed row by row, as a table or as JSON.

use std::io::{self, Write};

use benches::Row;

/// Prints each result as soon as it is measured.
pub(crate) struct Figures {
    json: bool,
    printed: usize,
}

impl Figures {
    /// None yet.
    pub(crate) fn new(json: bool) -> Self {
        Self { json, printed: 0 }
    }

    /// Prints a row; the first one after its header.
    pub(crate) fn push(&mut self, row: Row) {
        let first = self.printed == 0;
        self.printed += 1;
        let text = if self.json {
            let object = serde_json::to_string(&row).expect("plain numbers");
            format!("{}  {object}", if first { "[\n" } else { ",\n" })
        } else {
            let header = if first { header() } else { String::new() };
            let row = line([
                row.operation,
                row.values.to_string(),
                format!("{:.0}", row.microseconds),
                format!("{:.2}", row.giga_values_per_second),
                format!("{:.1}", row.gigabytes_per_second),
                format!("{:.2}", row.ratio_to_copy),
            ]);
            header + &row
        };
        print(&text);
    }

    /// Prints the end of the JSON array.
    pub(crate) fn finish(self) {
        if self.json {
            print(if self.printed == 0 { "[]\n" } else { "\n]\n" });
        }
    }
}

fn print(text: &str) {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).expect("stdout is open");
}

fn header() -> String {
    let names = ["operation", "values", "us", "G values/s", "GB/s", "copy time / time"];
    line(names.map(str::to_owned)) + "|:--|--:|--:|--:|--:|--:|\n"
}

fn line([name, values, time, rate, bytes, copy]: [String; 6]) -> String {
    format!("| {name:<64} | {values:>10} | {time:>9} | {rate:>10} | {bytes:>7} | {copy:>16} |\n")
}
