//! `fp4 report`: a finished model against its original, on one page.
//!
//! | file          | what it holds                                                         |
//! |---------------|-----------------------------------------------------------------------|
//! | `findings.rs` | [`Report`]: errors, bits and saturation of each weight, and readers   |
//! | `text.rs`     | the page for a terminal                                               |
//! | `html.rs`     | the page for a browser                                                |

mod findings;
mod html;
mod text;

use std::path::PathBuf;

pub use findings::{Report, Text};

use crate::checkpoint::{open, readable};
use crate::compare::html_file;
use crate::error::CliError;
use crate::page::check_writable;
use crate::print::{print, print_json, quoted};
use crate::remarks::Remarks;
use crate::table::{width, wrapped};

/// Report how good a finished model is: errors, bits and saturation of each weight against the
/// original, and the programs that read the files.
///
/// MODEL and the reference may be in any dialect. The error of a weight is |W' - W| / |W| with
/// Euclidean norms. No forward pass is run: `llama report` adds perplexity, divergence and the
/// errors of outputs on texts.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A safetensors or GGUF file, or a folder of a Hugging Face model.
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// The original model.
    #[arg(long, value_name = "DENSE")]
    reference: PathBuf,
    /// The dialect to read MODEL in, if nothing in it says which.
    #[arg(long, value_name = "DIALECT", value_parser = readable())]
    from: Option<String>,
    /// The dialect to read the reference in, if nothing in it says which.
    #[arg(long, value_name = "DIALECT", value_parser = readable())]
    from_reference: Option<String>,
    #[command(flatten)]
    output: Output,
}

/// Options of the page.
#[derive(Debug, clap::Args)]
pub struct Output {
    /// Write a page with plots, in one file.
    #[arg(long, value_name = "FILE.html", value_parser = html_file)]
    html: Option<PathBuf>,
    /// Print a line for every weight. Otherwise names that differ in numbers alone are one line,
    /// with the mean and the largest error.
    #[arg(long)]
    all: bool,
    /// Print a JSON object instead of a page. Its weights are the worst first.
    #[arg(long)]
    json: bool,
}

impl Output {
    /// Checks that the page can be written, before the work that it is about.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn check(&self) -> Result<(), CliError> {
        self.html.as_deref().map_or(Ok(()), check_writable)
    }

    /// Prints a report on standard output, and writes its page if asked.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, report: &Report) -> Result<(), CliError> {
        if let Some(path) = &self.html {
            let write = std::fs::write(path, html::page(report));
            write.map_err(|source| CliError::File { path: path.clone(), source })?;
        }
        match self.json {
            true => print_json(report),
            false => print(&text::page(report, self.all, width())),
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CliError> {
    let Arguments { model, reference, from, from_reference, output } = arguments;
    output.check()?;
    let mut remarks = Remarks::default();
    let checkpoint = open(model, from.as_deref(), &mut remarks)?;
    let original = open(reference, from_reference.as_deref(), &mut remarks);
    let original = original.map_err(|error| error.with_option("--from-reference"))?;
    let report = Report::new(&checkpoint, &original, |_| None);
    let mut report = report.map_err(CliError::during_run)?;
    report.remarks.append(remarks);
    output.write(&report)?;
    if !output.json {
        let [model, reference] = [model, reference].map(|path| quoted(&path.display().to_string()));
        let next = format!(
            "next: llama report {model} --reference {reference} (the example `llama`, for the \
             perplexity of Llama, Mistral and Qwen)"
        );
        print(&wrapped(&next, width()))?;
    }
    Ok(())
}
