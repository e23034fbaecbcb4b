//! All pages and pictures that the figures give.

use std::fs;

use crate::files::root;
use crate::page::{DocsError, fill};
use crate::plot;
use crate::table::Table;

/// The folder of the figures.
const FIGURES: &str = "docs/benchmarks";

/// Pages, and folders of pages, with tables.
pub const PAGES: [&str; 4] = ["README.md", "docs/benchmarks", "docs", "crates/burn-fp4/src/guide"];

/// Every file of figures, by name.
///
/// # Errors
/// [`DocsError::Table`] for one that is none, [`DocsError::File`].
pub fn tables() -> Result<Vec<Table>, DocsError> {
    let read = |path: String| {
        let id = path.rsplit('/').next().and_then(|name| name.strip_suffix(".json"));
        Table::read(id.unwrap_or_default(), &text(&path)?)
    };
    listed(FIGURES, ".json")?.into_iter().map(read).collect()
}

/// Paths from the root of the project of all pages and pictures, and what has to be in them.
///
/// # Errors
/// [`DocsError`] naming the figures, the page and line, or the file.
pub fn made() -> Result<Vec<(String, String)>, DocsError> {
    let tables = tables()?;
    let mut made = Vec::new();
    for place in PAGES {
        let pages = match place.ends_with(".md") {
            true => vec![place.to_owned()],
            false => listed(place, ".md")?,
        };
        for page in pages {
            let home = match place {
                "README.md" => Some("docs/benchmarks/README.md"),
                "docs" => Some("benchmarks/README.md"),
                "crates/burn-fp4/src/guide" => Some("../../../../docs/benchmarks/README.md"),
                _ => None,
            };
            let text = fill(&page, &text(&page)?, &tables, home)?;
            made.push((page, text));
        }
    }
    for (name, picture) in plot::pictures(&tables)? {
        made.push((format!("{FIGURES}/{name}"), picture));
    }
    Ok(made)
}

/// The files in a folder that end so, by name.
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
