//! The bytes of tensors by reading their files: one that was cut off meanwhile is an error here,
//! where touching the memory map would end the process; and what was read counts as memory only
//! while it is kept.

use std::borrow::Cow;
use std::fs::File;
use std::io::ErrorKind;
use std::sync::Arc;

use crate::container::Container;
use crate::error::{CheckpointError, TensorProblem};
use crate::fp4::TensorScale;
use crate::fp8::Fp8Weight;
use crate::system;
use crate::tensor::{PIECE, Tensor};
use crate::weight::{Model, Value, Weight};

/// Reads the tensors of a container. All readers of one share its open files.
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
/// let reader = Reader::new(checkpoint.container());
/// let weights = checkpoint.weights()?;
/// for region in Reader::regions(&weights[0]) {
///     reader.will_read(region); // the system may fetch it ahead
/// }
/// assert_eq!(reader.weight(&weights[0])?.values()?, (vec![1], vec![2.0]));
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Reader<'c> {
    container: &'c Container,
}

impl<'c> Reader<'c> {
    /// Most bytes of a file that [`values`](Self::values) has in memory at a time, of a weight that
    /// is not quantized to FP8 or FP4.
    pub const PIECE: usize = PIECE;

    /// A reader of a container's files, none of which it opens yet.
    #[must_use]
    pub fn new(container: &'c Container) -> Self {
        Self { container }
    }

    /// Reads bytes that a tensor borrows from the container's map.
    ///
    /// # Errors
    /// [`TensorProblem::Bytes`] if `into` is not as long as `mapped`, [`TensorProblem::Changed`] if
    /// the file is not as long as it was, and what the file system refuses.
    pub fn read(
        &self,
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
        let file = self.handle(at).map_err(io)?;
        let found = file.metadata().map_err(io)?.len();
        if found != expected {
            return Err(changed(found));
        }
        match system::read_exact_at(&file, into, offset) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                Err(changed(file.metadata().map_err(io)?.len()))
            }
            Err(error) => Err(io(error)),
        }
    }

    /// Says that bytes that a tensor borrows from the container's map will be read: the system may
    /// bring them into its cache meanwhile. Whatever is wrong with them shows when they are read.
    pub fn will_read(&self, mapped: &[u8]) {
        let Some((at, offset)) = self.container.place_of(mapped) else { return };
        if let Ok(file) = self.handle(at) {
            system::will_read(&file, offset, mapped.len() as u64);
        }
    }

    fn handle(&self, at: usize) -> std::io::Result<Arc<File>> {
        self.container.handle(at, || File::open(self.container.file(at).0))
    }

    /// Gives a model of the container the scales of its tensors and inputs in memory of their own:
    /// whoever looks at these numbers touches no map then.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn scales(&self, model: &mut Model<'c>) -> Result<(), CheckpointError> {
        for weight in &mut model.weights {
            weight.input_scale = self.scale(&weight.name, weight.input_scale.as_ref())?;
            if let Value::Fp4(fp4) = &mut weight.value {
                fp4.tensor_scale = self.scale(&weight.name, fp4.tensor_scale.as_ref())?;
            }
        }
        Ok(())
    }

    /// The bytes that the numbers of a weight are, which [`weight`](Self::weight) reads: for
    /// [`will_read`](Self::will_read). Scales of a whole tensor, a few bytes each, are not among
    /// them.
    #[must_use]
    pub fn regions<'w>(weight: &'w Weight<'_>) -> Vec<&'w [u8]> {
        match &weight.value {
            Value::Plain(tensor) => vec![&tensor.bytes],
            Value::Fp8(fp8) => vec![&fp8.values.bytes, &fp8.scales.bytes],
            Value::Fp4(fp4) => vec![&fp4.codes, &fp4.scales],
        }
    }

    /// The weight with bytes of its own.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn weight(&self, weight: &Weight<'c>) -> Result<Weight<'c>, CheckpointError> {
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

    /// Reads the values of a weight, as [`Weight::values`] gives them. One that is not quantized is
    /// read by pieces of at most [`PIECE`](Self::PIECE) bytes.
    ///
    /// # Errors
    /// As [`read`](Self::read) and [`Weight::values`].
    pub fn values(&self, weight: &Weight<'c>) -> Result<Vec<f32>, CheckpointError> {
        let Value::Plain(tensor) = &weight.value else {
            return Ok(self.weight(weight)?.values()?.1);
        };
        let mut values = Vec::with_capacity(tensor.len());
        for piece in tensor.pieces() {
            let bytes = self.bytes(&tensor.name, piece)?;
            tensor.append_values(&bytes, &mut values)?;
        }
        Ok(values)
    }

    fn tensor(&self, tensor: &Tensor<'c>) -> Result<Tensor<'c>, CheckpointError> {
        let bytes: Cow<'c, [u8]> = self.bytes(&tensor.name, &tensor.bytes)?.into();
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        Ok(Tensor { name, file: tensor.file, dtype: tensor.dtype, shape, bytes })
    }

    fn bytes(&self, name: &str, mapped: &[u8]) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = vec![0; mapped.len()];
        self.read(name, mapped, &mut bytes)?;
        Ok(bytes)
    }

    fn scale(
        &self,
        name: &str,
        scale: Option<&TensorScale<'c>>,
    ) -> Result<Option<TensorScale<'c>>, CheckpointError> {
        let read = |mapped: &[u8]| self.bytes(name, mapped);
        Ok(match scale {
            None => None,
            Some(TensorScale::Multiplier(numbers)) => {
                Some(TensorScale::Multiplier(numbers.try_map(read)?))
            }
            Some(TensorScale::Divisor(numbers)) => {
                Some(TensorScale::Divisor(numbers.try_map(read)?))
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
        let reader = Reader::new(&container);
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
