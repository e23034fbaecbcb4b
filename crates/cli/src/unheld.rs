//! Ways out for a weight that a dialect has no place for.

use burn_fp4_checkpoints::{Weight, dialect};

/// Returns the pattern of `--keep` for a weight: its module, where numbers of layers are stars.
pub(crate) fn pattern(weight: &str) -> String {
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    let word = |word| match str::bytes(word).all(|byte| byte.is_ascii_digit()) {
        true => "*",
        false => word,
    };
    module.split('.').map(word).collect::<Vec<_>>().join(".")
}

/// Names the dialects that hold a weight, as an option.
pub(crate) fn holders(weight: Option<&Weight<'_>>) -> String {
    let holds = |name: &&str| {
        let writer = dialect::writer(name);
        writer.is_ok_and(|by| weight.is_some_and(|weight| dialect::tensors(by, weight).is_ok()))
    };
    let names: Vec<_> = dialect::written().into_iter().filter(holds).collect();
    match &names[..] {
        [] => "another --dialect".to_owned(),
        names => format!("--dialect {}", names.join(" or ")),
    }
}
