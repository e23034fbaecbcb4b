//! Numbers in JSON, which has no infinity and no NaN.

use serde::{Serialize, Serializer};

/// Writes a number; one that JSON does not have as the text "inf", "-inf" or "nan".
pub(crate) fn number<S: Serializer>(
    number: &(impl Copy + Into<f64> + Serialize),
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match (*number).into() {
        f64::INFINITY => serializer.serialize_str("inf"),
        f64::NEG_INFINITY => serializer.serialize_str("-inf"),
        wide if wide.is_nan() => serializer.serialize_str("nan"),
        _ => number.serialize(serializer),
    }
}

/// [`number`], or null if there is none.
pub(crate) fn optional<S: Serializer>(
    value: &Option<f64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => number(value, serializer),
        None => serializer.serialize_none(),
    }
}
