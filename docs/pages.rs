//! Checks that pages show the figures of the tables, and that no page types a figure by itself.

use std::fs;

use docs::{made, outside, root, without_figures};

/// Units of numbers that were measured.
const UNITS: [&str; 9] = ["us", "ms", "s", "seconds", "GB", "GB/s", "MB", "%", "times"];

/// The most bytes of the README, and of a page of the guide.
const LENGTH: usize = 8 * 1024;

fn pages() -> Vec<(String, String)> {
    let made = made().expect("figures, and pages with tables that exist");
    let pages: Vec<_> = made.into_iter().filter(|(path, _)| path.ends_with(".md")).collect();
    assert!(pages.len() > 5, "found {} pages", pages.len());
    pages
}

#[test]
fn tables_and_plots_are_what_the_figures_give() {
    let made = made().expect("figures, and pages with tables that exist");
    assert!(made.iter().any(|(path, _)| path.ends_with(".svg")));
    for (path, expected) in made {
        let found = fs::read_to_string(root().join(&path)).unwrap_or_default();
        assert!(found == expected, "{path}: not what its figures give: run `cargo run -p docs`");
    }
}

#[test]
fn every_table_of_figures_has_its_record() {
    let records = pages().into_iter().find(|(path, _)| path == "docs/benchmarks/README.md");
    let (_, records) = records.expect("the page of records");
    let tables = docs::tables().expect("figures");
    assert!(tables.len() > 10);
    for table in tables {
        assert!(records.contains(&format!("`{0}.json`]({0}.json)", table.id)), "{}", table.id);
    }
}

/// Finds the numbers of a line that were measured: in a cell of their own, or before a unit.
fn figures(line: &str) -> Vec<&str> {
    if line.trim_start().starts_with('|') {
        return line.split('|').map(str::trim).filter(|cell| is_number(cell)).collect();
    }
    let words: Vec<_> = line.split_whitespace().collect();
    let unit = |word: &str| UNITS.contains(&word.trim_end_matches(['.', ',', ';', ':', ')']));
    let pairs = words.windows(2).filter(|pair| is_number(pair[0]) && unit(pair[1]));
    pairs.map(|pair| pair[0]).collect()
}

fn is_number(word: &str) -> bool {
    word.trim_start_matches(['+', '-', '(', '~']).parse::<f64>().is_ok()
}

#[test]
fn figures_that_were_measured_are_recognized() {
    assert_eq!(figures("takes 67 us, or (0.5 ms)."), ["67", "(0.5"]);
    assert_eq!(figures("| `a` | 1.50 | +2 | 4 bits |"), ["1.50", "+2"]);
    assert_eq!(figures("blocks of 16, 4.5 bits, 2 GiB, rank 3 or more"), [""; 0]);
}

#[test]
fn no_page_types_a_figure() {
    for (path, text) in pages() {
        for (line, written) in outside(&text) {
            let written = without_figures(written);
            let found = figures(&written);
            assert!(
                found.is_empty(),
                "{path}:{line}: {found:?} was typed: put it into a file of docs/benchmarks"
            );
        }
    }
}

#[test]
fn pages_are_short() {
    let is_short = |path: &str| path == "README.md" || path.contains("/guide/");
    for (path, text) in pages().into_iter().filter(|(path, _)| is_short(path)) {
        assert!(text.len() <= LENGTH, "{path} has {} bytes of at most {LENGTH}", text.len());
    }
}
