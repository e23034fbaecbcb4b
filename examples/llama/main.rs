//! `llama`: trains, runs, measures, quantizes, distills and reports on Llama, Mistral and Qwen.
//! `cargo run --release --bin llama -- --help`.

mod commands;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Runs, quantizes and trains Llama, Mistral, Qwen2 and Qwen3 from Hugging Face folders.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(commands::train::Arguments),
    Generate(commands::generate::Arguments),
    Perplexity(commands::perplexity::Arguments),
    Quantize(commands::quantize::Arguments),
    Distill(commands::distill::Arguments),
    Compare(commands::compare::Arguments),
    Report(commands::report::Arguments),
    Sensitivity(commands::sensitivity::Arguments),
}

fn main() -> ExitCode {
    examples::exit_code(run(Arguments::parse().command))
}

fn run(command: Command) -> Result<()> {
    // Has to come before the first operation on a GPU: enables fused FP4 kernels.
    burn_fp4::init()?;
    match command {
        Command::Train(arguments) => commands::train::run(&arguments),
        Command::Generate(arguments) => commands::generate::run(&arguments),
        Command::Perplexity(arguments) => commands::perplexity::run(&arguments),
        Command::Quantize(arguments) => commands::quantize::run(&arguments),
        Command::Distill(arguments) => commands::distill::run(&arguments),
        Command::Compare(arguments) => commands::compare::run(&arguments),
        Command::Report(arguments) => commands::report::run(&arguments),
        Command::Sensitivity(arguments) => commands::sensitivity::run(&arguments),
    }
}

/// Returns the peak memory of the host so far, in MB.
fn peak_memory_mb() -> f64 {
    f64::from(MEMORY.peak_usage_as_mb())
}
