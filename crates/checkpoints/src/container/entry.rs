//! Tensors of files before they are read: what the headers say of them, in less memory than the
//! headers themselves take; and how they are found by their names.
//!
//! The shortest that a header says of a tensor is `"a":["U8",[0],[0,0]],`: 20 bytes and its name.
//! Here it takes 18 and its name: 6 in [`FileEntries`], 12 in [`Entries`]. Larger numbers take more
//! in the header, too.

use std::ops::Range;

use super::leb128::{self, Rest};
use crate::dtype::DataType;

/// One tensor of a file.
pub(super) struct Entry<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: DataType,
    pub(super) shape: Vec<usize>,
    /// Its bytes in the file.
    pub(super) data: Range<usize>,
}

/// The tensors of a file, in the order of its header.
#[derive(Debug)]
pub(super) struct FileEntries {
    /// A run for each tensor: the length of its name, the name, the offset of its data behind
    /// `start`, how many bytes these are, which of `dtypes` it has, how many axes, and the axes.
    bytes: Vec<u8>,
    dtypes: Vec<DataType>,
    count: usize,
    /// Where the data begin in the file.
    start: usize,
}

/// The most bytes that a tensor with a name of so many bytes takes, but for its axes and for where
/// its data are: dtypes and axes are counted by a byte.
pub(super) fn room(name: usize) -> usize {
    leb128::width(name as u64) + name + 2
}

impl FileEntries {
    /// No tensors yet, with room for bytes of them: a vector that grows takes three times as many.
    pub(super) fn new(start: usize, room: usize) -> Self {
        Self { bytes: Vec::with_capacity(room), dtypes: Vec::new(), count: 0, start }
    }

    /// Adds a tensor whose data are so many bytes behind the first of all data. Of the bytes of all
    /// tensors there may be less than 2^32.
    pub(super) fn push(&mut self, name: &str, dtype: DataType, shape: &[usize], data: Range<u64>) {
        let known = self.dtypes.iter().position(|known| *known == dtype);
        let dtype = known.unwrap_or_else(|| {
            self.dtypes.push(dtype);
            self.dtypes.len() - 1
        });
        leb128::push(&mut self.bytes, name.len() as u64);
        self.bytes.extend_from_slice(name.as_bytes());
        let numbers = [data.start, data.end - data.start, dtype as u64, shape.len() as u64];
        let axes = shape.iter().map(|&axis| axis as u64);
        numbers.into_iter().chain(axes).for_each(|number| leb128::push(&mut self.bytes, number));
        self.count += 1;
    }

    /// How many tensors there are.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Where each tensor and its data are, in the order of the data.
    pub(super) fn by_data(&self) -> impl Iterator<Item = (u32, Range<u64>)> {
        let mut order: Vec<u32> = self.places().collect();
        order.sort_unstable_by_key(|&at| {
            let data = self.data(at);
            (data.start, data.end, at)
        });
        order.into_iter().map(move |at| (at, self.data(at)))
    }

    /// The name of the tensor there.
    pub(super) fn name(&self, at: u32) -> &str {
        text(self.name_bytes(at))
    }

    fn name_bytes(&self, at: u32) -> &[u8] {
        self.rest(at).bytes()
    }

    fn data(&self, at: u32) -> Range<u64> {
        let mut rest = self.rest(at);
        rest.bytes();
        let begin = rest.number();
        begin..begin + rest.number()
    }

    fn get(&self, at: u32) -> Entry<'_> {
        let mut rest = self.rest(at);
        let name = text(rest.bytes());
        let [begin, bytes, dtype, axes] = [(); 4].map(|()| rest.number() as usize);
        let shape = (0..axes).map(|_| rest.number() as usize).collect();
        let begin = self.start + begin;
        Entry { name, dtype: self.dtypes[dtype], shape, data: begin..begin + bytes }
    }

    fn rest(&self, at: u32) -> Rest<'_> {
        Rest(&self.bytes[at as usize..])
    }

    /// Where each tensor is among the bytes.
    fn places(&self) -> impl Iterator<Item = u32> {
        let mut rest = Rest(&self.bytes);
        (0..self.count).map(move |_| {
            let at = self.bytes.len() - rest.0.len();
            rest.bytes();
            let [_, _, _, axes] = [(); 4].map(|()| rest.number());
            (0..axes).for_each(|_| _ = rest.number());
            at as u32
        })
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("a name was a text")
}

/// The tensors of all files: by their order, and by their names. The first is 0.
#[derive(Debug, Default)]
pub(super) struct Entries {
    files: Vec<FileEntries>,
    /// The file of each tensor, and where it is among those of the file.
    places: Vec<(u32, u32)>,
    /// All of them, in the order of their names.
    by_name: Vec<u32>,
}

impl Entries {
    /// The tensors of all files, one file after the other: less than 2^32.
    ///
    /// # Errors
    /// File and name of the first whose name one before it has.
    pub(super) fn new(files: Vec<FileEntries>) -> Result<Self, (usize, String)> {
        let count: usize = files.iter().map(FileEntries::len).sum();
        let mut places = Vec::with_capacity(count);
        for (file, entries) in files.iter().enumerate() {
            places.extend(entries.places().map(|at| (file as u32, at)));
        }
        let mut by_name: Vec<u32> = (0..count as u32).collect();
        let entries = Self { files, places, by_name: Vec::new() };
        let name = |at: u32| entries.name_bytes(at);
        by_name.sort_unstable_by_key(|&at| (name(at), at));
        let twice = by_name.windows(2).filter(|pair| name(pair[0]) == name(pair[1]));
        match twice.map(|pair| pair[1]).min() {
            Some(twice) => Err((entries.file(twice as usize), text(name(twice)).to_owned())),
            None => Ok(Self { by_name, ..entries }),
        }
    }

    /// Gives every tensor its place in another order.
    pub(super) fn reorder(&mut self, order: &[u32]) {
        let mut places = vec![(0, 0); self.places.len()];
        for (&at, &place) in order.iter().zip(&self.places) {
            places[at as usize] = place;
        }
        self.places = places;
        self.by_name.iter_mut().for_each(|at| *at = order[*at as usize]);
    }

    /// How many tensors there are.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The tensor of a name.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        let found = self.by_name.binary_search_by(|&at| self.name_bytes(at).cmp(name.as_bytes()));
        Some(self.by_name[found.ok()?] as usize)
    }

    /// The file of a tensor.
    pub(super) fn file(&self, at: usize) -> usize {
        self.places[at].0 as usize
    }

    /// Returns the facts of a tensor.
    pub(super) fn get(&self, at: usize) -> Entry<'_> {
        let (file, at) = self.places[at];
        self.files[file as usize].get(at)
    }

    /// Where the data of each file begin.
    pub(super) fn starts(&self) -> impl Iterator<Item = usize> {
        self.files.iter().map(|file| file.start)
    }

    fn name_bytes(&self, at: u32) -> &[u8] {
        let (file, at) = self.places[at as usize];
        self.files[file as usize].name_bytes(at)
    }
}
