//! Numbers and texts one behind another in few bytes (LEB128): a number takes at most as many as
//! it has decimal digits, so that nothing is longer than the JSON that says it.

/// The bytes of a number.
pub(super) fn width(number: u64) -> usize {
    // Seven bits in each; a zero takes one, too.
    (u64::BITS - (number | 1).leading_zeros()).div_ceil(7) as usize
}

/// Puts a number behind what is there.
pub(super) fn push(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Bytes that were pushed and are not taken yet.
pub(super) struct Rest<'a>(pub(super) &'a [u8]);

impl<'a> Rest<'a> {
    /// Takes a number.
    pub(super) fn number(&mut self) -> u64 {
        let (mut number, mut shift) = (0, 0);
        loop {
            let (&byte, rest) = self.0.split_first().expect("a number was pushed");
            self.0 = rest;
            number |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return number;
            }
            shift += 7;
        }
    }

    /// Takes a number, and as many bytes.
    pub(super) fn bytes(&mut self) -> &'a [u8] {
        let length = self.number() as usize;
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_no_longer_than_their_digits() {
        let powers = (0..64).map(|bit| 1_u64 << bit);
        let numbers: Vec<u64> = powers.flat_map(|power| [power - 1, power]).collect();
        let numbers = [&numbers[..], &[u64::MAX]].concat();
        let mut bytes = Vec::new();
        for &number in &numbers {
            let before = bytes.len();
            push(&mut bytes, number);
            assert_eq!(bytes.len() - before, width(number));
            assert!(width(number) <= number.to_string().len());
        }
        bytes.extend([2, b'a', b'b']);
        let mut rest = Rest(&bytes);
        assert!(numbers.iter().all(|&number| rest.number() == number));
        assert_eq!(rest.bytes(), b"ab");
        assert!(rest.0.is_empty());
    }
}
