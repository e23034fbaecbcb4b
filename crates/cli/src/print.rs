//! Lines for standard output and standard error.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::path::Path;

use anstyle::{AnsiColor, Style};

use crate::error::CliError;
use crate::table::{width, wrapped};

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

/// A warning in its color, in lines that fit a terminal.
pub(crate) fn warning(text: impl Display, width: Option<u16>) -> String {
    labelled("warning:", YELLOW, text, width)
}

/// A text behind a label in its color, in lines that fit a terminal.
fn labelled(label: &str, style: Style, text: impl Display, width: Option<u16>) -> String {
    let text = wrapped(&format!("{label} {text}"), width);
    format!("{style}{label}{style:#}{}", &text[label.len()..])
}

/// Prints a warning on standard error.
pub(crate) fn warn(text: impl Display) {
    say(warning(text, width()));
}

/// Prints a note on standard error.
pub(crate) fn note(text: impl Display) {
    say(labelled("note:", Style::new(), text, width()));
}

/// Prints what ended a command on standard error.
pub(crate) fn fail(error: &CliError) {
    // A line of a command that is to be copied is not broken.
    let width = width().filter(|_| !error.has_command());
    say(labelled("error:", RED, error, width));
}

/// Prints a line on standard error. Nothing is lost where that is closed: exit codes tell it too.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(anstream::stderr(), "{line}");
}

/// Returns the command that looks at what was made.
pub(crate) fn next(out: &Path) -> String {
    format!("fp4 inspect {}", quoted(&out.display().to_string()))
}

/// Formats a path for a shell, in quotes if it needs them.
pub(crate) fn quoted(path: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%,".contains(c);
    match path.chars().all(plain) {
        true => path.to_owned(),
        false => format!("'{}'", path.replace('\'', "'\\''")),
    }
}
