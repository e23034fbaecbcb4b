//! Lines for standard output and standard error.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::path::Path;

use anstyle::{AnsiColor, Style};

use crate::error::CliError;

/// Prints a text and a newline; colors only reach a terminal, unless NO_COLOR is set. A reader that
/// has seen enough, such as `head`, is no error.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = anstream::stdout().lock();
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

const RED: Style = AnsiColor::Red.on_default().bold();
const YELLOW: Style = AnsiColor::Yellow.on_default().bold();

/// A warning in its color.
pub(crate) fn warning(text: impl Display) -> String {
    format!("{YELLOW}warning:{YELLOW:#} {text}")
}

/// Prints a warning on standard error.
pub(crate) fn warn(text: impl Display) {
    say(warning(text));
}

/// Prints a note on standard error.
pub(crate) fn note(text: impl Display) {
    say(format!("note: {text}"));
}

/// Prints what ended a command on standard error.
pub(crate) fn fail(error: impl Display) {
    say(format!("{RED}error:{RED:#} {error}"));
}

/// Prints a line on standard error. Nothing is lost where that is closed: exit codes tell it too.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(anstream::stderr(), "{line}");
}

/// Says the command that looks at what was made.
pub(crate) fn next(out: &Path) -> String {
    format!("next: fp4 inspect {}", quoted(&out.display().to_string()))
}

/// Formats a path for a shell, in quotes if it needs them.
pub(crate) fn quoted(path: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%,".contains(c);
    match path.chars().all(plain) {
        true => path.to_owned(),
        false => format!("'{}'", path.replace('\'', "'\\''")),
    }
}
