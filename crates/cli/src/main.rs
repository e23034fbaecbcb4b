//! `fp4`, 4-bit floating point on the command line. `fp4 --help` says what it does.
//!
//! | file            | what it holds                                                          |
//! |-----------------|------------------------------------------------------------------------|
//! | `evaluate.rs`   | `fp4 evaluate`: methods compared on weights and activations of a file  |
//! | `evaluation.rs` | what a method reaches on a weight, and the table of all that           |
//! | `plot.rs`       | the same as a picture                                                  |
//! | `progress.rs`   | how far long work is, also where there is no terminal                  |
//! | `tensors.rs`    | matrices of a safetensors file                                         |
//! | `error.rs`      | what can be wrong, and that it ends with exit code 2                   |

mod error;
mod evaluate;
mod evaluation;
mod plot;
mod progress;
mod tensors;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// 4-bit floating point (NVFP4, MXFP4) for neural network weights.
#[derive(Parser)]
#[command(name = "fp4", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Evaluate(evaluate::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Evaluate(arguments) => evaluate::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
