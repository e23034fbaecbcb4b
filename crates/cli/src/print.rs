//! What goes to standard output.

use std::io::{ErrorKind, Write, stdout};

use crate::error::CliError;

/// Prints a text and a newline. A reader that has seen enough, such as `head`, is no error.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = stdout().lock();
    match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(CliError::File { path: "standard output".into(), source: error })
        }
        _ => Ok(()),
    }
}

/// Prints an object or array as JSON.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    print(&serde_json::to_string_pretty(value).expect("numbers, texts and lists"))
}
