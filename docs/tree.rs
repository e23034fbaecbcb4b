//! All generated pages and plots.

use std::fs;
use std::path::{Path, PathBuf};

use crate::page::{DocsError, fill};
use crate::plot;
use crate::table::Table;

/// Folder of the figures.
const FIGURES: &str = "docs/benchmarks";

/// Pages with tables, and folders of such pages.
pub const PAGES: [&str; 4] = ["README.md", "docs/benchmarks", "docs", "crates/burn-fp4/src/guide"];

/// Returns the root of the project.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Reads every file of figures, sorted by name.
///
/// # Errors
/// [`DocsError::Table`] for a malformed file, [`DocsError::File`] for one that cannot be read.
pub fn tables() -> Result<Vec<Table>, DocsError> {
    let read = |path: String| {
        let id = path.rsplit('/').next().and_then(|name| name.strip_suffix(".json"));
        Table::read(id.unwrap_or_default(), &text(&path)?)
    };
    listed(FIGURES, ".json")?.into_iter().map(read).collect()
}

/// Generates all pages and plots. Returns their paths from the root of the project and their texts.
///
/// # Errors
/// [`DocsError`] with the file of figures, the page and line, or the file.
pub fn generated() -> Result<Vec<(String, String)>, DocsError> {
    let tables = tables()?;
    let mut generated = Vec::new();
    for place in PAGES {
        let pages = match place.ends_with(".md") {
            true => vec![place.to_owned()],
            false => listed(place, ".md")?,
        };
        for page in pages {
            // The guide is rustdoc of a crate: it cannot link to a file of the repository.
            let records = match place {
                "README.md" => Some("docs/benchmarks/README.md"),
                "docs" => Some("benchmarks/README.md"),
                _ => None,
            };
            let text = fill(&page, &text(&page)?, &tables, records)?;
            generated.push((page, text));
        }
    }
    for (name, plot) in plot::plots(&tables)? {
        generated.push((format!("{FIGURES}/{name}"), plot));
    }
    Ok(generated)
}

/// Lists the files of a folder with an ending, sorted by name.
fn listed(folder: &str, ending: &str) -> Result<Vec<String>, DocsError> {
    let problem = |problem: std::io::Error| DocsError::File {
        path: folder.to_owned(),
        problem: problem.to_string(),
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join(folder)).map_err(problem)? {
        let name = entry.map_err(problem)?.file_name().to_string_lossy().into_owned();
        if name.ends_with(ending) {
            found.push(format!("{folder}/{name}"));
        }
    }
    found.sort();
    Ok(found)
}

fn text(path: &str) -> Result<String, DocsError> {
    let problem = |problem: std::io::Error| DocsError::File {
        path: path.to_owned(),
        problem: problem.to_string(),
    };
    fs::read_to_string(root().join(path)).map_err(problem)
}
