//! The bytes of tensors by reading their files: one that was cut off meanwhile is an error here,
//! where touching the memory map would end the process; and what was read counts as memory only
//! while it is kept.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};

use crate::container::Container;
use crate::error::{CheckpointError, TensorProblem};
use crate::fp4::TensorScale;
use crate::fp8::Fp8Weight;
use crate::tensor::Tensor;
use crate::weight::{Value, Weight};

/// Reads the tensors of a container.
///
/// ```
/// use burn_fp4_checkpoints::{Checkpoint, Reader};
///
/// # let header = br#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
/// # let length = (header.len() as u64).to_le_bytes();
/// # let file = [&length[..], &header[..], &2_f32.to_le_bytes()].concat();
/// # let path = format!("burn-fp4-reader-{}.safetensors", std::process::id());
/// # let path = std::env::temp_dir().join(path);
/// # std::fs::write(&path, file)?;
/// let checkpoint = Checkpoint::open(&path)?;
/// let mut reader = Reader::new(checkpoint.container());
/// let weight = reader.weight(&checkpoint.weights()?[0])?;
/// assert_eq!(weight.values()?, (vec![1], vec![2.0]));
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Reader<'c> {
    container: &'c Container,
    open: HashMap<usize, File>,
}

impl fmt::Debug for Reader<'_> {
    /// What it reads, and how many of the files are open.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("path", &self.container.root())
            .field("open", &self.open.len())
            .finish_non_exhaustive()
    }
}

impl<'c> Reader<'c> {
    /// A reader that has opened nothing yet.
    pub fn new(container: &'c Container) -> Self {
        Self { container, open: HashMap::new() }
    }

    /// Reads bytes that a tensor borrows from the container's map.
    ///
    /// # Errors
    /// [`TensorProblem::Bytes`] if `into` is not as long as `mapped`, [`TensorProblem::Changed`] if
    /// the file is not as long as it was, and what the file system refuses.
    pub fn read(
        &mut self,
        tensor: &str,
        mapped: &[u8],
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
        if into.len() != mapped.len() {
            let (expected, found) = (mapped.len() as u64, into.len() as u64);
            let problem = TensorProblem::Bytes { expected, found };
            return Err(CheckpointError::tensor(self.container.root(), tensor, problem));
        }
        let Some((at, offset)) = self.container.place_of(mapped).filter(|_| !mapped.is_empty())
        else {
            // Made in memory, or nothing.
            into.copy_from_slice(mapped);
            return Ok(());
        };
        let (path, expected) = self.container.file(at);
        let io = |source| CheckpointError::TensorIo {
            file: path.to_owned(),
            tensor: tensor.to_owned(),
            source,
        };
        let changed = |found| {
            CheckpointError::tensor(path, tensor, TensorProblem::Changed { expected, found })
        };
        let file = match self.open.entry(at) {
            std::collections::hash_map::Entry::Occupied(open) => open.into_mut(),
            std::collections::hash_map::Entry::Vacant(none) => {
                let file = File::open(path).map_err(io)?;
                let found = file.metadata().map_err(io)?.len();
                if found != expected {
                    return Err(changed(found));
                }
                none.insert(file)
            }
        };
        file.seek(SeekFrom::Start(offset)).map_err(io)?;
        match file.read_exact(into) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(changed(file.metadata().map_err(io)?.len()))
            }
            Err(error) => Err(io(error)),
        }
    }

    /// The weight with bytes of its own.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn weight(&mut self, weight: &Weight<'c>) -> Result<Weight<'c>, CheckpointError> {
        let name = &weight.name;
        let value = match &weight.value {
            Value::Plain(tensor) => Value::Plain(self.tensor(tensor)?),
            Value::Fp8(fp8) => Value::Fp8(Fp8Weight {
                values: self.tensor(&fp8.values)?,
                scales: self.tensor(&fp8.scales)?,
                granularity: fp8.granularity,
            }),
            Value::Fp4(fp4) => {
                let mut copy = fp4.clone();
                copy.codes = self.bytes(name, &fp4.codes)?.into();
                copy.scales = self.bytes(name, &fp4.scales)?.into();
                copy.tensor_scale = self.scale(name, fp4.tensor_scale.as_ref())?;
                Value::Fp4(copy)
            }
        };
        let smoothing = weight.pre_quant_scale.as_ref();
        Ok(Weight {
            name: name.clone(),
            file: weight.file,
            value,
            input_scale: self.scale(name, weight.input_scale.as_ref())?,
            pre_quant_scale: smoothing.map(|tensor| self.tensor(tensor)).transpose()?,
        })
    }

    fn tensor(&mut self, tensor: &Tensor<'c>) -> Result<Tensor<'c>, CheckpointError> {
        let bytes: Cow<'c, [u8]> = self.bytes(&tensor.name, &tensor.bytes)?.into();
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        Ok(Tensor { name, file: tensor.file, dtype: tensor.dtype, shape, bytes })
    }

    fn bytes(&mut self, name: &str, mapped: &[u8]) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = vec![0; mapped.len()];
        self.read(name, mapped, &mut bytes)?;
        Ok(bytes)
    }

    fn scale(
        &mut self,
        name: &str,
        scale: Option<&TensorScale<'c>>,
    ) -> Result<Option<TensorScale<'c>>, CheckpointError> {
        let mut read = |mapped: &[u8]| self.bytes(name, mapped);
        Ok(match scale {
            None => None,
            Some(TensorScale::Multiplier(numbers)) => {
                Some(TensorScale::Multiplier(numbers.try_map(&mut read)?))
            }
            Some(TensorScale::Divisor(numbers)) => {
                Some(TensorScale::Divisor(numbers.try_map(&mut read)?))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_of_another_length_is_an_error() {
        let path = format!("burn-fp4-reader-lengths-{}.safetensors", std::process::id());
        let path = std::env::temp_dir().join(path);
        let header = br#"{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
        let length = (header.len() as u64).to_le_bytes();
        std::fs::write(&path, [&length[..], &header[..], &[1, 2]].concat()).expect("written");
        let container = Container::open(&path).expect("a file");
        let mapped = container.get("x").expect("a tensor").bytes;
        let mut reader = Reader::new(&container);
        let mut whole = [0; 2];
        reader.read("x", &mapped, &mut whole).expect("as long");
        assert_eq!(whole, [1, 2]);
        for bytes in [&*mapped, &[1, 2]] {
            let shorter = reader.read("x", bytes, &mut whole[..1]);
            let Err(CheckpointError::Tensor { problem, .. }) = shorter else {
                panic!("a byte is missing");
            };
            assert_eq!(problem, TensorProblem::Bytes { expected: 2, found: 1 });
        }
        std::fs::remove_file(&path).expect("removed");
    }
}
