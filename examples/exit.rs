//! The end of a program: its result, its error and its exit code.

use core::fmt::Display;
use std::env;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use anyhow::{Error, Result};

/// Prints the error of a program on standard error, and returns the exit code.
pub fn exit_code(result: Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let wanted = env::var_os("RUST_LIB_BACKTRACE").is_some_and(|value| value != "0");
    eprintln!("{}", message(&error, wanted));
    ExitCode::FAILURE
}

/// Prints a text and a newline on standard output. A reader that has seen enough, such as `head`,
/// is no error.
///
/// # Errors
/// The text cannot be written.
pub fn print_text(text: impl Display) -> Result<()> {
    match writeln!(io::stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::from(error).context("standard output"))
        }
        _ => Ok(()),
    }
}

/// Formats an error with its causes. `RUST_BACKTRACE=1` is set for panics, often for a whole shell:
/// a stack backtrace of an error is printed only for `RUST_LIB_BACKTRACE=1`.
fn message(error: &Error, backtrace: bool) -> String {
    if backtrace { format!("error: {error:?}") } else { format!("error: {}", in_one_line(error)) }
}

/// Formats an error with its causes in one line. Many errors name their cause themselves.
pub fn in_one_line(error: &Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_an_error_names_is_not_repeated() {
        let missing = || io::Error::new(io::ErrorKind::NotFound, "no such file");
        let error = Error::from(missing()).context("config.json: no such file").context("opening");
        assert_eq!(in_one_line(&error), "opening: config.json: no such file");
        let error = Error::from(missing()).context("config.json");
        assert_eq!(in_one_line(&error), "config.json: no such file");
    }
}
