//! `fp4 completions`: what a shell completes.

use clap::Command;
use clap_complete::Shell;

use crate::error::CliError;
use crate::print::print;

/// Print completions for a shell.
///
/// For bash: `fp4 completions bash > ~/.local/share/bash-completion/completions/fp4`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments, command: &mut Command) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, command, "fp4", &mut script);
    print(&String::from_utf8_lossy(&script))
}
