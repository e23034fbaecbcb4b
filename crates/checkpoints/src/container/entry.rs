//! Tensors as the headers of files describe them.

use std::ops::Range;

use crate::dtype::DataType;

/// One tensor of a file.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) dtype: DataType,
    pub(super) shape: Vec<usize>,
    /// Number of the file in the container.
    pub(super) file: usize,
    /// Its bytes in the file.
    pub(super) data: Range<usize>,
}

/// Tensors of a file with their names, in the order of its header.
pub(super) type Entries = Vec<(String, Entry)>;

/// Returns the entries of a file in the order of their data.
pub(super) fn by_data(entries: &Entries) -> Vec<&(String, Entry)> {
    let mut order: Vec<_> = entries.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.data.start, entry.data.end));
    order
}
