//! A tensor of a file before it is read: what its header says.

use crate::dtype::DataType;

/// One tensor of a file: where its bytes are.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: DataType,
    pub(crate) shape: Vec<usize>,
    pub(crate) file: usize,
    /// Offsets in the file, checked to lie in it.
    pub(crate) begin: usize,
    pub(crate) end: usize,
}
