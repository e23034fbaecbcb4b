//! Statistics in files, for calibrations that are interrupted.

use std::fs;
use std::path::{Path, PathBuf};

use burn_fp4_ops::{Gram, GramTiles};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::Fp4Error;

/// A directory with one file for each input of layers, of one calibration.
pub(crate) struct Cache {
    directory: PathBuf,
}

/// Names of the tensors in a file: the tiles of [`Gram::layout`],
const TILES: &str = "tiles";
/// what that follows from,
const CHANNELS: &str = "channels";
const BLOCK: &str = "block_size";
/// how many activations it is the sum of,
const ROWS: &str = "rows";
/// and their largest magnitude.
const AMAX: &str = "amax";

impl Cache {
    /// Opens the part of a directory that belongs to what has this digest.
    pub(crate) fn open(directory: &Path, digest: u64) -> Result<Self, Fp4Error> {
        let directory = directory.join(format!("{digest:016x}"));
        fs::create_dir_all(&directory).map_err(|error| failed(&directory, error))?;
        Ok(Self { directory })
    }

    /// What was stored under a number.
    pub(crate) fn load(&self, number: usize) -> Result<Option<Gram>, Fp4Error> {
        let path = self.path(number);
        if !path.exists() {
            return Ok(None);
        }
        let bytes = fs::read(&path).map_err(|error| failed(&path, error))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| failed(&path, error))?;
        let words = |name: &str| -> Result<Vec<[u8; 8]>, Fp4Error> {
            let tensor = file.tensor(name).map_err(|error| failed(&path, error))?;
            let words = tensor.data().chunks_exact(8);
            Ok(words.map(|word| word.try_into().expect("eight bytes")).collect())
        };
        let number = |name| match words(name)?[..] {
            [word] => Ok(word),
            _ => Err(failed(&path, format!("`{name}` is not one number"))),
        };
        let count = |name| number(name).map(|word| u64::from_le_bytes(word) as usize);
        let [channels, block_size, rows] = [count(CHANNELS)?, count(BLOCK)?, count(ROWS)?];
        let amax = f64::from_le_bytes(number(AMAX)?) as f32;
        let layout = GramTiles::compact(channels, block_size);
        let values: Vec<_> = words(TILES)?.into_iter().map(f64::from_le_bytes).collect();
        let tiles: Vec<_> = values.chunks(layout.tile_len()).collect();
        let gram = Gram::from_tiles(&tiles, layout, block_size, rows, amax);
        gram.map(Some).map_err(|error| failed(&path, error))
    }

    /// Stores statistics, whole or not at all.
    pub(crate) fn store(&self, number: usize, gram: &Gram) -> Result<(), Fp4Error> {
        let path = self.path(number);
        let values: Vec<u8> = gram.values().iter().flat_map(|value| value.to_le_bytes()).collect();
        let layout = gram.layout();
        let shape = vec![layout.count(), layout.side(), layout.side()];
        let counts = [gram.channels(), gram.block_size(), gram.rows()];
        let [channels, block_size, rows] = counts.map(|count| (count as u64).to_le_bytes());
        let amax = f64::from(gram.amax()).to_le_bytes();
        let tensors = [
            (TILES, TensorView::new(Dtype::F64, shape, &values)),
            (CHANNELS, TensorView::new(Dtype::U64, vec![1], &channels)),
            (BLOCK, TensorView::new(Dtype::U64, vec![1], &block_size)),
            (ROWS, TensorView::new(Dtype::U64, vec![1], &rows)),
            (AMAX, TensorView::new(Dtype::F64, vec![1], &amax)),
        ];
        let tensors = tensors.map(|(name, tensor)| (name, tensor.expect("whole tensors")));
        let bytes = serialize(tensors, None).map_err(|error| failed(&path, error))?;
        let unfinished = path.with_extension("part");
        fs::write(&unfinished, bytes).map_err(|error| failed(&unfinished, error))?;
        fs::rename(&unfinished, &path).map_err(|error| failed(&path, error))
    }

    fn path(&self, number: usize) -> PathBuf {
        self.directory.join(format!("{number:05}.safetensors"))
    }
}

fn failed(path: &Path, error: impl std::fmt::Display) -> Fp4Error {
    Fp4Error::Cache { path: path.to_owned(), problem: error.to_string() }
}
