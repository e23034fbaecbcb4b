//! Two 4-bit codes in a byte, the even one in the low nibble.
//!
//! For readers and writers of files and for plain arithmetic over codes
//! (`burn_fp4_search::modelopt`); the engines pack whole words.

/// Packs 4-bit codes two to a byte, the even one in the low nibble.
///
/// The upper four bits of each input byte are ignored.
///
/// ```
/// use burn_fp4_formats::{pack_nibbles, unpack_nibbles};
///
/// let (mut bytes, mut codes) = ([0; 2], [0; 4]);
/// pack_nibbles(&[1, 2, 3, 4], &mut bytes);
/// assert_eq!(bytes, [0x21, 0x43]);
/// unpack_nibbles(&bytes, &mut codes);
/// assert_eq!(codes, [1, 2, 3, 4]);
/// ```
///
/// # Panics
/// If `bytes` is not half as long as `codes`.
pub fn pack_nibbles(codes: &[u8], bytes: &mut [u8]) {
    assert_eq!(codes.len(), 2 * bytes.len(), "two codes make a byte");
    for (byte, pair) in bytes.iter_mut().zip(codes.chunks_exact(2)) {
        *byte = pair[0] & 0xF | pair[1] << 4;
    }
}

/// Unpacks bytes into 4-bit codes, the low nibble first.
///
/// # Panics
/// If `codes` is not twice as long as `bytes`.
pub fn unpack_nibbles(bytes: &[u8], codes: &mut [u8]) {
    assert_eq!(codes.len(), 2 * bytes.len(), "two codes make a byte");
    for (byte, pair) in bytes.iter().zip(codes.chunks_exact_mut(2)) {
        pair[0] = byte & 0xF;
        pair[1] = byte >> 4;
    }
}
