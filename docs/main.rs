//! `cargo run -p docs`: writes every table and plot from the JSON in `docs/benchmarks`.

use std::fs;
use std::process::ExitCode;

fn main() -> ExitCode {
    match write() {
        Ok(changed) => {
            println!("{changed} files changed");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

fn write() -> Result<usize, Box<dyn std::error::Error>> {
    let mut changed = 0;
    for (path, text) in docs::made()? {
        let file = docs::root().join(&path);
        if fs::read_to_string(&file).ok().as_ref() != Some(&text) {
            fs::write(&file, text).map_err(|problem| format!("{path}: {problem}"))?;
            println!("{path}");
            changed += 1;
        }
    }
    Ok(changed)
}
