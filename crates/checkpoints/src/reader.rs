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
use crate::tensor::Tensor;
use crate::weight::{Model, Value, Weight};

/// Reads the tensors of a container. All readers of one share its open files.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'c> {
    container: &'c Container,
}

impl<'c> Reader<'c> {
    /// A reader of a container's files, none of which it opens yet.
    pub fn new(container: &'c Container) -> Self {
        Self { container }
    }

    /// Reads bytes that a tensor borrows from the container's map.
    ///
    /// # Errors
    /// [`TensorProblem::Changed`] if the file is not as long as it was, and what the file system
    /// refuses.
    pub fn read(
        &self,
        tensor: &str,
        mapped: &[u8],
        into: &mut [u8],
    ) -> Result<(), CheckpointError> {
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
