//! A language model from its folder to its first FP4 token: trains, runs, measures, quantizes and
//! distills Llama and its relatives. `cargo run --release --bin llama -- --help`.

mod commands;

use anyhow::Result;
use clap::{Parser, Subcommand};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Llama and its relatives (Mistral, Qwen2, Qwen3) from the folders of Hugging Face, in floats and
/// in FP4.
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
    Sensitivity(commands::sensitivity::Arguments),
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    // Before any operation on a GPU: layers read codes there from now on.
    burn_fp4::init()?;
    match arguments.command {
        Command::Train(arguments) => commands::train::run(&arguments),
        Command::Generate(arguments) => commands::generate::run(&arguments),
        Command::Perplexity(arguments) => commands::perplexity::run(&arguments),
        Command::Quantize(arguments) => commands::quantize::run(&arguments),
        Command::Distill(arguments) => commands::distill::run(&arguments),
        Command::Compare(arguments) => commands::compare::run(&arguments),
        Command::Sensitivity(arguments) => commands::sensitivity::run(&arguments),
    }
}

/// The most that the host's allocator had given out at a time, in MB.
fn peak_memory_mb() -> f64 {
    f64::from(MEMORY.peak_usage_as_mb())
}
