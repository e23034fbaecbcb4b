//! `fp4`, 4-bit floating point on the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    burn_fp4_cli::run()
}
