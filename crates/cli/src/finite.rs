//! Values that are NaN or infinite, in bytes as files have them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use burn_fp4_checkpoints::{Dtype, Model, Output, Value};

use crate::counted::counted;
use crate::remarks::{Remarks, Warning};

/// Counts the numbers of a dtype that are NaN or infinite: all bits of their exponents are set. A
/// dtype without such numbers, or none, has 0.
pub(crate) fn count_not_finite(dtype: Option<Dtype>, bytes: &[u8]) -> u64 {
    match dtype {
        Some(Dtype::F64) => count(bytes, |[.., low, high]: [u8; 8]| [low, high], 0x7FF0),
        Some(Dtype::F32) => count(bytes, |[.., low, high]: [u8; 4]| [low, high], 0x7F80),
        Some(Dtype::BF16) => count(bytes, |bytes: [u8; 2]| bytes, 0x7F80),
        Some(Dtype::F16) => count(bytes, |bytes: [u8; 2]| bytes, 0x7C00),
        Some(Dtype::F8_E5M2) => count(bytes, |[byte]: [u8; 1]| [0, byte], 0x7C00),
        // No infinity, and one NaN with two signs.
        Some(Dtype::F8_E4M3) => count(bytes, |[byte]: [u8; 1]| [0, byte], 0x7F00),
        Some(_) | None => 0,
    }
}

/// Counts the numbers whose highest two bytes, in little-endian order, have all bits of a mask.
fn count<const N: usize>(bytes: &[u8], high: impl Fn([u8; N]) -> [u8; 2], mask: u16) -> u64 {
    let (numbers, _) = bytes.as_chunks::<N>();
    let is_not_finite = |bytes: &&[u8; N]| u16::from_le_bytes(high(**bytes)) & mask == mask;
    numbers.iter().filter(is_not_finite).count() as u64
}

/// The kind of the warnings about such values.
pub(crate) const NOT_FINITE: &str = "not-finite";

/// Names a number of such values.
pub(crate) fn described(count: u64) -> String {
    counted(count as usize, "NaN or infinite value")
}

/// The values of weights that are copied that are NaN or infinite, by places in the model.
#[derive(Default)]
pub(crate) struct Copied(Mutex<BTreeMap<usize, u64>>);

impl Copied {
    /// Looks at bytes of a weight that are copied.
    pub(crate) fn look(&self, model: &Model<'_>, at: usize, bytes: &[u8]) {
        let Value::Plain(tensor) = &model.weights[at].value else { return };
        let found = count_not_finite(tensor.plain(), bytes);
        if found > 0 {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(at).or_default() += found;
        }
    }

    /// The count of a weight, as the note on it. Empty: every value was finite.
    pub(crate) fn note(&self, at: usize) -> String {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        found.get(&at).map_or_else(String::new, u64::to_string)
    }

    /// The counts that an earlier run has noted.
    pub(crate) fn noted(output: &Output<'_>) -> Self {
        let counts = output.earlier().filter_map(|(at, note)| Some((at, note.parse().ok()?)));
        Self(Mutex::new(counts.collect()))
    }

    /// Warns of these weights by name.
    pub(crate) fn warn(self, model: &Model<'_>, remarks: &mut Remarks) {
        let found = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (at, count) in found {
            let what = format!("{}, copied into the result; fix the weight", described(count));
            remarks.warn(Warning::of(NOT_FINITE, &model.weights[at].name, what));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_every_float_are_finite_or_counted() {
        let numbers = [1.0, f64::MAX, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0];
        let bytes = numbers.map(f64::to_le_bytes).concat();
        assert_eq!(count_not_finite(Some(Dtype::F64), &bytes), 3);
        let numbers = [1.0, f32::MAX, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
        let bytes = numbers.map(f32::to_le_bytes).concat();
        assert_eq!(count_not_finite(Some(Dtype::F32), &bytes), 3);
        let bytes = [0x7F80_u16, 0x7C00, 0xFF80, 0x3F80].map(u16::to_le_bytes).concat();
        assert_eq!(count_not_finite(Some(Dtype::BF16), &bytes), 2);
        assert_eq!(count_not_finite(Some(Dtype::F16), &bytes), 3);
        assert_eq!(count_not_finite(Some(Dtype::U8), &bytes), 0);
        let bytes = [0x7F, 0xFF, 0x7E, 0x7C, 0xFC, 0x7B];
        assert_eq!(count_not_finite(Some(Dtype::F8_E4M3), &bytes), 2);
        assert_eq!(count_not_finite(Some(Dtype::F8_E5M2), &bytes), 5);
    }
}
