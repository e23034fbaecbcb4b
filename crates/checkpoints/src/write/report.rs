//! The report of a write: counts of what was written, and of what changed on the way.

use std::fmt;

use crate::cast::CastReport;

/// Report of a conversion, and of what it changed.
///
/// Displayed it is a line for what was written, and one for everything that changed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct WriteReport {
    /// Files with tensors.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// FP4 weights that were cast to another format.
    pub cast: CastReport,
    /// FP4 weights whose tensor scale was folded into the block scales.
    pub folded: CastReport,
    /// Tensor scales of which the reciprocal was written, as the dialect states the other.
    pub inverted: u64,
    /// Inverted scales that do not come back when they are inverted again.
    pub inverted_inexactly: u64,
    /// Inverted scales whose reciprocal is not an f32, and was rounded to one.
    pub inverted_rounded: u64,
    /// The largest relative error of these, of 2^-24 at most.
    pub inverted_error: f64,
    /// Scales of inputs for which the dialect has no place.
    pub input_scales_left_out: u64,
    /// Layers whose inputs the source may quantize as they run, with scales that no file has, and
    /// what was written does not.
    pub dynamic_inputs_left_out: u64,
    /// Weights that were decoded to floats.
    pub decoded: u64,
}

impl WriteReport {
    /// Values that a cast or a folded tensor scale changed.
    pub(super) fn changed_values(&self) -> u64 {
        self.cast.changed_values + self.folded.changed_values
    }
}

impl fmt::Display for WriteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tensors: {} of {} bytes, files: {}", self.tensors, self.bytes, self.files)?;
        for (what, cast) in [
            ("blocks that were cast to another format", self.cast),
            ("blocks that took in a tensor scale", self.folded),
        ] {
            let CastReport { blocks, changed_blocks, changed_values } = cast;
            if blocks > 0 {
                let changed = format!("{changed_values} values of {changed_blocks} changed");
                writeln!(f, "{what}: {blocks}, {changed}")?;
            }
        }
        if self.inverted > 0 {
            let (inverted, rounded) = (self.inverted, self.inverted_rounded);
            let (lost, error) = (self.inverted_inexactly, self.inverted_error);
            let rounded = format!("rounded to f32: {rounded}, by {error:.1e} at most");
            let lost = format!("different when converted back: {lost}");
            let written = format!("tensor scales of which 1 / scale was written: {inverted}");
            writeln!(f, "{written}; {rounded}; {lost}")?;
        }
        match self.input_scales_left_out {
            0 => {}
            count => writeln!(f, "scales of quantized inputs that were left out: {count}")?,
        }
        match self.dynamic_inputs_left_out {
            0 => {}
            count => writeln!(f, "inputs that are no longer quantized as layers run: {count}")?,
        }
        match self.decoded {
            0 => Ok(()),
            count => writeln!(f, "weights that were decoded to floats: {count}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changed_has_a_line() {
        let report = WriteReport { files: 1, tensors: 3, bytes: 144, ..WriteReport::default() };
        assert_eq!(report.to_string(), "tensors: 3 of 144 bytes, files: 1\n");
        let folded = CastReport { blocks: 8, changed_blocks: 2, changed_values: 5 };
        let (inverted, inverted_inexactly, inverted_rounded, inverted_error) = (6, 1, 5, 4e-8);
        let (input_scales_left_out, dynamic_inputs_left_out, decoded) = (4, 3, 7);
        let report = WriteReport {
            folded,
            inverted,
            inverted_inexactly,
            inverted_rounded,
            inverted_error,
            input_scales_left_out,
            dynamic_inputs_left_out,
            decoded,
            ..report
        };
        let lines = [
            "tensors: 3 of 144 bytes, files: 1",
            "blocks that took in a tensor scale: 8, 5 values of 2 changed",
            "tensor scales of which 1 / scale was written: 6; rounded to f32: 5, by 4.0e-8 at \
             most; different when converted back: 1",
            "scales of quantized inputs that were left out: 4",
            "inputs that are no longer quantized as layers run: 3",
            "weights that were decoded to floats: 7",
        ];
        assert_eq!(report.to_string().lines().collect::<Vec<_>>(), lines);
    }
}
