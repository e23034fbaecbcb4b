//! Counts of the codes and scales of an FP4 weight.

use burn_fp4_formats::E2M1;

use crate::fp4::Fp4Weight;

/// Counts of an FP4 weight.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Fp4Facts {
    /// Blocks.
    pub blocks: u64,
    /// Blocks whose codes are all zero.
    pub zero_blocks: u64,
    /// Blocks that have the largest block scale, beyond which nothing goes.
    pub saturated_blocks: u64,
    /// Blocks that are not zero and have one of the smallest scales: the smaller half of the
    /// subnormal numbers of their format, which are too far apart to be precise.
    pub small_blocks: u64,
    /// Blocks whose scale is 0 though their codes are not: their values are lost.
    pub lost_blocks: u64,
    /// Blocks whose scale is NaN.
    pub nan_blocks: u64,
    /// The smallest and the largest product of block scale and tensor scale, of blocks that are
    /// not zero.
    pub scales: [f32; 2],
    /// The largest magnitude of a value.
    pub largest: f32,
    /// The count of each code.
    pub codes: [u64; 16],
    /// The multiplier of the first matrix.
    pub multiplier: f32,
}

impl Fp4Weight<'_> {
    /// Counts codes and scales.
    #[must_use]
    pub fn facts(&self) -> Fp4Facts {
        let grid = self.format.row().block_scale;
        let (codes, scales, multipliers) =
            (self.plain_codes(), self.plain_scales(), self.multipliers());
        let matrix = self.rows() * self.cols() / self.block_size;
        let smallest = 1..(1_u8 << grid.mantissa_bits) / 2;
        let mut facts = Fp4Facts {
            blocks: scales.len() as u64,
            zero_blocks: 0,
            saturated_blocks: 0,
            small_blocks: 0,
            lost_blocks: 0,
            nan_blocks: 0,
            scales: [f32::INFINITY, 0.0],
            largest: 0.0,
            codes: [0; 16],
            multiplier: multipliers.first().copied().unwrap_or(1.0),
        };
        let blocks = codes.chunks_exact(self.block_size / 2).zip(scales.iter());
        for (at, (codes, &scale)) in blocks.enumerate() {
            let mut largest = 0;
            for byte in codes {
                for code in [byte & 0xF, byte >> 4] {
                    facts.codes[usize::from(code)] += 1;
                    largest = largest.max(code & 7);
                }
            }
            facts.nan_blocks += u64::from(grid.is_nan(scale));
            facts.saturated_blocks += u64::from(scale == grid.max_code());
            if largest == 0 {
                facts.zero_blocks += 1;
                continue;
            }
            facts.small_blocks += u64::from(smallest.contains(&scale));
            let scale = grid.decode(scale) * multipliers[at / matrix];
            facts.lost_blocks += u64::from(scale == 0.0);
            let [least, most] = &mut facts.scales;
            // A NaN is counted, and is no end of a range.
            (*least, *most) = (least.min(scale), most.max(scale));
            facts.largest = facts.largest.max(E2M1.decode(largest) * scale);
        }
        // No block had a scale that is a number, or all of them are zero.
        if facts.scales[0] > facts.scales[1] {
            facts.scales = [0.0; 2];
        }
        facts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_whose_scales_are_all_nan_has_no_range_of_scales() {
        let format = burn_fp4_formats::Fp4Format::MxFp4;
        let mut weight = Fp4Weight::outline(format, 32, vec![1, 32], false, false);
        (weight.codes, weight.scales) = (vec![0x22; 16].into(), vec![0xFF].into());
        let facts = weight.facts();
        assert_eq!((facts.nan_blocks, facts.zero_blocks, facts.largest), (1, 0, 0.0));
        assert_eq!(facts.scales, [0.0; 2]);
    }
}
