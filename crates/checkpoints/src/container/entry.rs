//! A tensor of a file before it is read: what its header says; and how it is found by its name.

use crate::dtype::DataType;

/// One tensor of a file: where its bytes are.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) name: Box<str>,
    pub(crate) dtype: DataType,
    pub(crate) shape: Box<[usize]>,
    pub(crate) file: usize,
    /// Offsets in the file, checked to lie in it.
    pub(crate) begin: usize,
    pub(crate) end: usize,
}

/// The places of entries, by their names: a number each, the names stay where they are.
#[derive(Debug, Default)]
pub(super) struct ByName(Vec<usize>);

impl ByName {
    /// # Errors
    /// The first entry whose name an entry before it has.
    pub(super) fn new(entries: &[Entry]) -> Result<Self, usize> {
        let mut places: Vec<usize> = (0..entries.len()).collect();
        places.sort_unstable_by_key(|&at| (&*entries[at].name, at));
        let twice = places.windows(2).filter(|pair| entries[pair[0]].name == entries[pair[1]].name);
        match twice.map(|pair| pair[1]).min() {
            Some(twice) => Err(twice),
            None => Ok(Self(places)),
        }
    }

    /// The place of the entry of a name.
    pub(super) fn find(&self, entries: &[Entry], name: &str) -> Option<usize> {
        let found = self.0.binary_search_by(|&at| (*entries[at].name).cmp(name)).ok()?;
        Some(self.0[found])
    }
}
