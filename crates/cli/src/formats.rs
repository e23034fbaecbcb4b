//! `fp4 formats`: tables of codes, and of programs that read dialects.

use std::fmt::Write as _;

use burn_fp4_checkpoints::DataType;
use burn_fp4_search::formats::{E2M1, Fp4Format, ScaleGrid};

use crate::error::CliError;
use crate::print::print;
use crate::readers;
use crate::table::{width, wrapped};

/// Print the formats, their elements, block scales and sizes, the readers of each dialect, and the
/// quantized types of GGUF that are read as floats.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Also print every code of the block scales and what it means.
    #[arg(long)]
    scales: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CliError> {
    let mut text = elements();
    for format in Fp4Format::ALL {
        text.push('\n');
        text.push_str(&facts(format));
        if arguments.scales {
            text.push_str(&scales(format));
        }
    }
    let types: Vec<_> = DataType::decoded_ggml().map(|row| row.name).collect();
    let types = wrapped(&format!("Read as floats from GGUF: {}", types.join(", ")), width());
    let readers = wrapped(&readers::table(), width());
    print(&format!("{text}\n{readers}\n\n{types}\n"))
}

/// The elements, which all formats share.
fn elements() -> String {
    let line = |what: &str, of: fn(u8) -> String| {
        let cells: String = (0..8).map(|code| format!("{:>4}", of(code))).collect();
        format!("  {what:<5}{cells}\n")
    };
    let codes = line("code", |code| code.to_string());
    let values = line("value", |code| E2M1.decode(code).to_string());
    format!("element (E2M1)\n{codes}{values}  codes 8 to 15 are these with a minus\n")
}

fn facts(format: Fp4Format) -> String {
    let row = format.row();
    let scale = row.block_scale;
    let tensor = if row.tensor_scale { ", and an f32 for each tensor" } else { "" };
    let bits = 4.0 + 8.0 / row.block_size as f64;
    let blocks = format!(
        "{}: blocks of {} share an 8-bit scale{tensor}; {bits} bits a weight",
        row.name, row.block_size
    );
    format!(
        "{}\n  block scales up to {} (code {:#04x})\n",
        wrapped(&blocks, width()),
        rounded(scale.max_value()),
        scale.max_code(),
    )
}

/// A number without digits that nobody reads.
fn rounded(number: f32) -> String {
    if number < 1e6 { number.to_string() } else { format!("{number:.1e}") }
}

/// Codes in a line.
const IN_LINE: u8 = 4;

/// Every code of the block scales that is not NaN.
fn scales(format: Fp4Format) -> String {
    let row = format.row();
    let mut text = String::new();
    match row.scale_grid() {
        ScaleGrid::Float(scale) => {
            for first in (0..=scale.max_code()).step_by(IN_LINE.into()) {
                let _ = write!(text, "  {first:#04x}");
                for code in (first..first + IN_LINE).filter(|code| !scale.is_nan(*code)) {
                    let _ = write!(text, " {:>12}", scale.decode(code));
                }
                text.push('\n');
            }
        }
        ScaleGrid::PowersOfTwo(scale) => {
            let (bias, most) = (scale.bias, scale.max_code());
            let _ = writeln!(text, "  code c is 2^(c - {bias}), for c up to {most}");
        }
    }
    text
}
