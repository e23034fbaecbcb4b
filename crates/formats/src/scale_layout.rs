//! [`ScaleLayout`]: the order of the block scales in memory.
//!
//! This project keeps scales row by row. Use the tiled order to hand them to the block-scaled
//! matrix multiplication of cuBLAS or CUTLASS, and for files in that order.

use serde::{Deserialize, Serialize};

use crate::error::{FormatError, check_length};

/// Orders a `[rows, blocks]` matrix of scales in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleLayout {
    /// Row by row, unpadded: the order of checkpoints.
    #[default]
    RowMajor,
    /// Tiles of 128 rows by 4 blocks, 512 bytes each: the order of the block-scaled matrix
    /// multiplication of cuBLAS and CUTLASS. Rows are padded to 128 and blocks to 4 with zeros.
    Tiled128x4,
}

const TILE_ROWS: usize = 128;
const TILE_BLOCKS: usize = 4;

impl ScaleLayout {
    /// Number of bytes of the scales.
    #[must_use]
    pub const fn len(self, rows: usize, blocks: usize) -> usize {
        match self {
            Self::RowMajor => rows * blocks,
            Self::Tiled128x4 => {
                rows.next_multiple_of(TILE_ROWS) * blocks.next_multiple_of(TILE_BLOCKS)
            }
        }
    }

    /// Returns the offset of the scale of (`row`, `block`) in a matrix with `blocks` scales a row.
    ///
    /// Within a tile the 128 rows stand as 32 groups of the rows r, r + 32, r + 64, r + 96 (cuBLAS,
    /// "1D block scaling factors layout").
    #[must_use]
    pub const fn offset(self, row: usize, block: usize, blocks: usize) -> usize {
        match self {
            Self::RowMajor => row * blocks + block,
            Self::Tiled128x4 => {
                let tile = row / TILE_ROWS * blocks.div_ceil(TILE_BLOCKS) + block / TILE_BLOCKS;
                tile * TILE_ROWS * TILE_BLOCKS
                    + row % 32 * 16
                    + row % TILE_ROWS / 32 * 4
                    + block % TILE_BLOCKS
            }
        }
    }

    /// Orders row-major scales in this layout; padding is 0.
    ///
    /// ```
    /// use burn_fp4_formats::ScaleLayout;
    ///
    /// let tiled = ScaleLayout::Tiled128x4.arrange(&[1, 2, 3, 4], 2, 2)?; // 2 rows of 2 blocks
    /// assert_eq!((tiled[..2].to_vec(), tiled[16..18].to_vec()), (vec![1, 2], vec![3, 4]));
    /// assert_eq!(ScaleLayout::Tiled128x4.offset(1, 0, 2), 16); // row 1, block 0
    /// assert_eq!(tiled.len(), ScaleLayout::Tiled128x4.len(2, 2));
    /// assert_eq!(ScaleLayout::Tiled128x4.restore(&tiled, 2, 2)?, [1, 2, 3, 4]);
    /// # Ok::<(), burn_fp4_formats::FormatError>(())
    /// ```
    ///
    /// # Errors
    /// [`FormatError::Length`] unless there are `rows * blocks` scales.
    pub fn arrange(
        self,
        scales: &[u8],
        rows: usize,
        blocks: usize,
    ) -> Result<Vec<u8>, FormatError> {
        check_length("block scales", rows * blocks, scales.len())?;
        let mut arranged = vec![0; self.len(rows, blocks)];
        for row in 0..rows {
            for block in 0..blocks {
                arranged[self.offset(row, block, blocks)] = scales[row * blocks + block];
            }
        }
        Ok(arranged)
    }

    /// Orders scales of this layout row by row; padding is dropped.
    ///
    /// # Errors
    /// [`FormatError::Length`] unless there are [`len`](Self::len) bytes.
    pub fn restore(
        self,
        arranged: &[u8],
        rows: usize,
        blocks: usize,
    ) -> Result<Vec<u8>, FormatError> {
        check_length("block scales", self.len(rows, blocks), arranged.len())?;
        let offsets =
            (0..rows).flat_map(|row| (0..blocks).map(move |block| self.offset(row, block, blocks)));
        Ok(offsets.map(|offset| arranged[offset]).collect())
    }
}
