//! Statistics in files, for calibrations that are interrupted.

use std::fs;
use std::path::{Path, PathBuf};

use burn_fp4_ops::Gram;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

use crate::Fp4Error;

/// A directory with one file for each input of layers, of one calibration.
pub(crate) struct Cache {
    directory: PathBuf,
}

/// Name of the tensor in a file.
const GRAM: &str = "gram";
/// How many activations it is the sum of.
const ROWS: &str = "rows";
/// Their largest magnitude.
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
        let shape = file.tensor(GRAM).map_err(|error| failed(&path, error))?.shape().to_vec();
        let [blocks, block_size, _] = shape[..] else {
            return Err(failed(&path, format!("a tensor of shape {shape:?}")));
        };
        let values: Vec<_> = words(GRAM)?.into_iter().map(f64::from_le_bytes).collect();
        let number = |name| match words(name)?[..] {
            [word] => Ok(word),
            _ => Err(failed(&path, format!("`{name}` is not one number"))),
        };
        let (rows, amax) = (u64::from_le_bytes(number(ROWS)?), f64::from_le_bytes(number(AMAX)?));
        let (channels, rows, amax) = (blocks * block_size, rows as usize, amax as f32);
        let gram = Gram::from_values(values, channels, block_size, rows, amax);
        gram.map(Some).map_err(|error| failed(&path, error))
    }

    /// Stores statistics, whole or not at all.
    pub(crate) fn store(&self, number: usize, gram: &Gram) -> Result<(), Fp4Error> {
        let path = self.path(number);
        let values: Vec<u8> = gram.values().iter().flat_map(|value| value.to_le_bytes()).collect();
        let rows = (gram.rows() as u64).to_le_bytes();
        let amax = f64::from(gram.amax()).to_le_bytes();
        let size = gram.block_size();
        let shape = vec![gram.channels() / size.max(1), size, size];
        let tensors = [
            (GRAM, TensorView::new(Dtype::F64, shape, &values)),
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
