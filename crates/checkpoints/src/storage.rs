//! In which order the codes and block scales of a weight lie in a file, and how they are put into
//! rows.
//!
//! ```text
//! Rows          codes [.., N, K/2]   low nibble first     scales [.., N, K/B]     most dialects
//! Columns       codes [.., K/2, N]   low nibble first     scales [.., K/B, N]     ModelOpt
//! Tiled         codes [N, K/2]       low or high first    tiles of 128x4          ComfyUI, torchao
//! Records       17 bytes of 32:  e, then byte j = element j | element j + 16      ggml MXFP4
//!               36 bytes of 64:  s0 s1 s2 s3, then for each of the four runs of 16
//!                                byte j = element j | element j + 8               ggml NVFP4
//! ```

use std::borrow::Cow;

use burn_fp4_formats::{Fp4Format, ScaleLayout};

/// In which order the bytes of a weight lie in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// Row by row.
    Rows,
    /// Every matrix transposed, two codes of a row still in one byte.
    Columns,
    /// Codes row by row; block scales in tiles of 128 rows by 4 blocks.
    Tiled {
        /// True if the even code is the high nibble (comfy-kitchen, `float_utils.py`).
        high_first: bool,
    },
    /// Records of ggml with scales and codes.
    Records,
}

/// Bytes of scales at the front of a record.
const fn record_scales(format: Fp4Format) -> usize {
    match format {
        Fp4Format::MxFp4 => 1,
        Fp4Format::NvFp4 => 4,
    }
}

/// Format and axes of a weight, whatever the order of its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) format: Fp4Format,
    pub(crate) block_size: usize,
    pub(crate) stacked: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Geometry {
    /// Blocks of a row.
    fn blocks(self) -> usize {
        self.cols / self.block_size
    }

    /// Bytes of the scales and of the codes of a record.
    fn record(self) -> (usize, usize) {
        let scales = record_scales(self.format);
        (scales, scales * self.block_size / 2)
    }
}

impl Storage {
    /// The codes of a file in rows.
    pub(crate) fn codes(self, of: Geometry, codes: &[u8]) -> Cow<'_, [u8]> {
        match self {
            Self::Rows | Self::Tiled { high_first: false } => Cow::Borrowed(codes),
            Self::Tiled { high_first: true } => {
                codes.iter().map(|byte| byte.rotate_left(4)).collect()
            }
            Self::Columns => transpose(codes, of.stacked, of.cols / 2, of.rows).into(),
            Self::Records => {
                let (front, back) = of.record();
                let mut rows = Vec::with_capacity(of.stacked * of.rows * of.cols / 2);
                for record in codes.chunks_exact(front + back) {
                    for block in record[front..].chunks_exact(of.block_size / 2) {
                        gather(block, &mut rows);
                    }
                }
                rows.into()
            }
        }
    }

    /// The block scales of a file in rows; records have them among the codes.
    pub(crate) fn scales<'b>(
        self,
        of: Geometry,
        codes: &'b [u8],
        scales: &'b [u8],
    ) -> Cow<'b, [u8]> {
        match self {
            Self::Rows => Cow::Borrowed(scales),
            Self::Columns => transpose(scales, of.stacked, of.blocks(), of.rows).into(),
            Self::Tiled { .. } => {
                let (layout, blocks) = (ScaleLayout::Tiled128x4, of.blocks());
                let at = |index| layout.offset(index / blocks, index % blocks, blocks);
                (0..of.rows * blocks).map(|index| scales[at(index)]).collect()
            }
            Self::Records => {
                let (front, back) = of.record();
                let records = codes.chunks_exact(front + back);
                let scales = records.flat_map(|record| &record[..front]);
                match of.format {
                    Fp4Format::MxFp4 => scales.copied().collect(),
                    // ggml has no sign here and reads NaN as 0 (`ggml_ue4m3_to_fp32`).
                    Fp4Format::NvFp4 => {
                        let unsigned = scales.map(|scale| scale & 0x7F);
                        unsigned.map(|scale| if scale == 0x7F { 0 } else { scale }).collect()
                    }
                }
            }
        }
    }
}

/// `[stack, rows, cols]` as `[stack, cols, rows]`.
pub(crate) fn transpose<T: Copy>(values: &[T], stack: usize, rows: usize, cols: usize) -> Vec<T> {
    let mut turned = Vec::with_capacity(stack * rows * cols);
    for matrix in values.chunks_exact((rows * cols).max(1)) {
        for col in 0..cols {
            turned.extend((0..rows).map(|row| matrix[row * cols + col]));
        }
    }
    turned
}

/// A block of a record: byte j holds element j and element j + half. Becomes pairs of neighbours.
fn gather(block: &[u8], rows: &mut Vec<u8>) {
    for pair in block.chunks_exact(2) {
        rows.push(pair[0] & 0xF | pair[1] << 4);
    }
    for pair in block.chunks_exact(2) {
        rows.push(pair[0] >> 4 | pair[1] & 0xF0);
    }
}

/// The records of ggml, of codes and scales that lie in rows.
pub(crate) fn records(format: Fp4Format, codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let front = record_scales(format);
    let block_size = format.row().block_size;
    let mut records = Vec::with_capacity(codes.len() + scales.len());
    for (scales, codes) in
        scales.chunks_exact(front).zip(codes.chunks_exact(front * block_size / 2))
    {
        records.extend(scales);
        for block in codes.chunks_exact(block_size / 2) {
            let element = |at: usize| block[at / 2] >> (4 * (at % 2)) & 0xF;
            let half = block_size / 2;
            records.extend((0..half).map(|at| element(at) | element(at + half) << 4));
        }
    }
    records
}
