//! The end of a program: its error and its exit code.

use std::env;
use std::process::ExitCode;

use anyhow::{Error, Result};

/// Prints the error of a program on standard error, and returns the exit code.
pub fn exit_code(result: Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let wanted = env::var_os("RUST_LIB_BACKTRACE").is_some_and(|value| value != "0");
    eprintln!("{}", message(&error, wanted));
    ExitCode::FAILURE
}

/// Formats an error with its causes in one line. `RUST_BACKTRACE=1` is set for panics, often for a
/// whole shell: a stack backtrace of an error is printed only for `RUST_LIB_BACKTRACE=1`.
fn message(error: &Error, backtrace: bool) -> String {
    if backtrace { format!("error: {error:?}") } else { format!("error: {error:#}") }
}
