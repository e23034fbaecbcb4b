//! Numbers of things as people write them.

/// Writes a number of things: 1 weight, 2 weights.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    let end = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_not_a_plural() {
        let all = [0, 1, 2].map(|count| counted(count, "more weight"));
        assert_eq!(all, ["0 more weights", "1 more weight", "2 more weights"]);
    }
}
