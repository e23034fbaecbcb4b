//! `fp4`, 4-bit floating point on the command line. `fp4 --help` says what it does. The page of
//! [`report`] is public: programs that run a model add what a forward pass tells.
//!
//! | file             | what it holds                                                         |
//! |------------------|-----------------------------------------------------------------------|
//! | `quantize/`      | `fp4 quantize`: plan, recipe, statistics, and the line of threads     |
//! | `convert.rs`     | `fp4 convert`: the same numbers in another dialect                    |
//! | `inspect.rs`     | `fp4 inspect`: the weights of a checkpoint, and its defects           |
//! | `compare/`       | `fp4 compare`: the difference of two checkpoints, and a page of it    |
//! | `report/`        | `fp4 report`: a finished model against its original, on one page      |
//! | `evaluate/`      | `fp4 evaluate`: methods compared on weights and activations of a file |
//! | `formats.rs`     | `fp4 formats`: tables of codes, and of programs that read dialects    |
//! | `warnings.rs`    | `fp4 warnings`: kinds of warnings, and the bounds that they have      |
//! | `completions.rs` | `fp4 completions`: for shells                                         |
//! | `listed.rs`      | the names that an option takes, as its help lists them                |
//! | `readers.rs`     | programs that read what is written, as helps and notes name them      |
//! | `checkpoint.rs`  | how a checkpoint is named on the command line                         |
//! | `counted.rs`     | numbers of things as people write them                                |
//! | `unheld.rs`      | ways out for a weight that a dialect has no place for                 |
//! | `size.rs`        | bytes as people write and read them                                   |
//! | `finite.rs`      | values that are NaN or infinite                                       |
//! | `percent.rs`     | relative errors as people read them                                   |
//! | `number.rs`      | numbers in JSON, also infinite ones                                   |
//! | `accuracy.rs`    | the errors of a run, by weight                                        |
//! | `blocks.rs`      | counts and errors of the blocks of a weight                           |
//! | `tried.rs`       | losses of weights that are not quantized yet, measured on some blocks |
//! | `unmet.rs`       | weights that are chosen and cannot be quantized                       |
//! | `cast.rs`        | errors of casting and decoding weights to floats                      |
//! | `remarks.rs`     | warnings and notes, printed and in JSON                               |
//! | `table.rs`       | tables that fit the terminal                                          |
//! | `page.rs`        | parts of pages and pictures                                           |
//! | `fold.rs`        | names of a repeated pattern as one row, and their natural order       |
//! | `print.rs`       | what goes to standard output and standard error                       |
//! | `progress.rs`    | how far long work is, also where there is no terminal                 |
//! | `interrupt.rs`   | what is said when a signal ends a run                                 |
//! | `error.rs`       | what can be wrong, and with which exit code it ends                   |

mod accuracy;
mod blocks;
mod cast;
mod checkpoint;
mod compare;
mod completions;
mod convert;
mod counted;
mod error;
mod evaluate;
mod finite;
mod fold;
mod formats;
mod inspect;
mod interrupt;
mod listed;
mod number;
mod page;
mod percent;
mod print;
mod progress;
mod quantize;
mod readers;
mod remarks;
pub mod report;
mod size;
mod table;
mod tried;
mod unheld;
mod unmet;
mod warnings;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

pub use error::CliError;
use table::{COLUMNS, is_narrow};

/// 4-bit floating point (NVFP4, MXFP4) for neural network weights.
#[derive(Parser)]
#[command(name = "fp4", version, after_help = EXIT_CODES)]
#[command(max_term_width = usize::from(COLUMNS))]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// The last lines of the help.
const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 `compare` found a difference; 2 the command, or a file that it names, is \
wrong; 3 the machine failed (disk full, a read error, a file that changed meanwhile); 130 and 143 \
stopped by a signal.";

#[derive(Subcommand)]
enum Command {
    Quantize(quantize::Arguments),
    Convert(convert::Arguments),
    Inspect(inspect::Arguments),
    Compare(compare::Arguments),
    Report(report::Arguments),
    Evaluate(evaluate::Arguments),
    Formats(formats::Arguments),
    Warnings(warnings::Arguments),
    Completions(completions::Arguments),
}

/// Replaces the tip of an error where the parser's own would not help.
fn with_tip(mut error: clap::Error) -> clap::Error {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    let (argument, value) = (text(ContextKind::InvalidArg), text(ContextKind::InvalidValue));
    let command = std::env::args_os().nth(1).unwrap_or_default();
    let writes = command == "quantize" || command == "convert";
    let tip = match error.kind() {
        ErrorKind::UnknownArgument if writes && !argument.starts_with('-') => {
            format!("to write to '{argument}', use '--out {argument}'")
        }
        ErrorKind::InvalidValue if argument.starts_with("--device") && value == "gpu" => {
            "NVIDIA GPUs are 'cuda'".to_owned()
        }
        ErrorKind::InvalidValue if argument.starts_with("--device") && value == "cpu" => {
            "the CPU is 'flex', the default".to_owned()
        }
        _ => return error,
    };
    error.remove(ContextKind::SuggestedValue);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    error
}

/// Ends the program with the help that is asked for, or with an error in lines that fit a terminal.
fn refuse(error: &clap::Error) -> ! {
    let text = error.render().ansi().to_string();
    let text = table::wrapped(text.trim_end(), table::width());
    let mut code = error.exit_code();
    if error.use_stderr() {
        print::say(text);
    } else if let Err(error) = print::print(&text) {
        print::fail(&error);
        code = error.exit_code().into();
    }
    std::process::exit(code)
}

/// Runs the command of the arguments of this process, and returns its exit code.
pub fn run() -> ExitCode {
    // Two columns of words have no room on a narrow terminal.
    let found = Arguments::command().next_line_help(is_narrow()).try_get_matches();
    let arguments = found.and_then(|found| Arguments::from_arg_matches(&found));
    let arguments = arguments.unwrap_or_else(|error| refuse(&with_tip(error)));
    let result = match arguments.command {
        Command::Quantize(arguments) => quantize::run(&arguments).map(|()| 0),
        Command::Convert(arguments) => convert::run(&arguments).map(|()| 0),
        Command::Inspect(arguments) => inspect::run(&arguments).map(|()| 0),
        Command::Compare(arguments) => compare::run(&arguments).map(u8::from),
        Command::Report(arguments) => report::run(&arguments).map(|()| 0),
        Command::Evaluate(arguments) => evaluate::run(&arguments).map(|()| 0),
        Command::Formats(arguments) => formats::run(&arguments).map(|()| 0),
        Command::Warnings(arguments) => warnings::run(&arguments).map(|()| 0),
        Command::Completions(arguments) => {
            completions::run(&arguments, &mut Arguments::command()).map(|()| 0)
        }
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            print::fail(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
