//! Counter-based random numbers: Philox 4x32 with 10 rounds (Salmon et al., "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011). The draw for an element depends on a key and a counter
//! alone, not on the engine or the order.

/// Number of rounds.
pub const ROUNDS: u32 = 10;

/// Multipliers of the first and the third word of the counter.
pub const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];

/// Increments of the words of the key, each round.
pub const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Returns four random words for a counter.
///
/// ```
/// use burn_fp4_search::philox::philox;
///
/// let known = [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8];
/// assert_eq!(philox([0; 4], [0; 2]), known);
/// ```
#[inline(always)]
#[must_use]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [first, third] =
            [0, 1].map(|word| u64::from(MULTIPLIERS[word]) * u64::from(counter[2 * word]));
        counter = [
            (third >> 32) as u32 ^ counter[1] ^ key[0],
            third as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers in the tests of the authors' library.
    #[test]
    fn known_answers() {
        let of = |counter, key| philox(counter, key);
        assert_eq!(of([0; 4], [0; 2]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(of([!0; 4], [!0; 2]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        assert_eq!(
            of([0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344], [0xA409_3822, 0x299F_31D0]),
            [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]
        );
    }
}
