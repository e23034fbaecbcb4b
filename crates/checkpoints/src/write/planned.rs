//! A write that is planned, and what is known of it.

use std::fmt;

use super::keep::Kept;
use super::plan::PlannedFiles;
use super::report::WriteReport;
use super::target::Target;
use crate::dtype::Dtype;
use crate::error::CheckpointError;
use crate::reader::Reader;
use crate::tensor::{Data, NewTensor};
use crate::weight::Model;

/// A write of which everything is known but the numbers: nothing is on the disk yet.
///
/// ```
/// use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight, WriteOptions};
///
/// let weights = [("norm.weight", vec![2]), ("up.weight", vec![1, 2])].map(|(name, shape)| {
///     let tensor = Tensor::new(name, Dtype::F32, shape, vec![0; 8]).expect("8 bytes");
///     Weight::new(name, 0, Value::Plain(tensor))
/// });
/// let model = Model { weights: weights.into(), ..Model::default() };
/// let options = WriteOptions { cast_floats: Some(Dtype::BF16), ..WriteOptions::default() };
/// let planned = model.plan("plain", &options)?;
/// assert!(planned.copies(0) && !planned.copies(1));
/// assert_eq!([0, 1].map(|at| planned.decoded_to(at)), [None, Some(Dtype::BF16)]);
/// assert_eq!(planned.pieces(0)?.len(), 1);
/// assert!(planned.changed().is_empty(), "no weight is FP4");
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
pub struct Planned<'m> {
    pub(super) model: &'m Model<'m>,
    pub(super) target: Target,
    pub(super) plan: PlannedFiles,
    pub(super) kept: Vec<Kept>,
}

impl fmt::Debug for Planned<'_> {
    /// The dialect, and what will be written.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Planned")
            .field("dialect", &self.target.dialect.name())
            .field("report", &self.plan.report)
            .finish_non_exhaustive()
    }
}

/// A part of a weight that is copied: small enough for memory that is short.
pub struct Piece<'p> {
    /// The weight, by its place in the model.
    pub(super) weight: usize,
    pub(super) tensor: String,
    mapped: &'p [u8],
    /// The file, by its place in the plan, and the offset in it.
    pub(super) file: usize,
    pub(super) offset: u64,
}

impl fmt::Debug for Piece<'_> {
    /// Where it goes, and its length.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Piece")
            .field("tensor", &self.tensor)
            .field("offset", &self.offset)
            .field("bytes", &self.mapped.len())
            .finish_non_exhaustive()
    }
}

impl Planned<'_> {
    /// Counts what will be written and what changes on the way, as far as the model tells now.
    #[must_use]
    pub fn report(&self) -> WriteReport {
        self.plan.report
    }

    /// Weights whose values a cast or a folded tensor scale changes, by their places in the model,
    /// with the sums of [`squared_difference`](crate::cast::squared_difference).
    #[must_use]
    pub fn changed(&self) -> &[(usize, [f64; 2])] {
        &self.plan.changed
    }

    /// Weights that are not changed as all others are; see [`Model::plan_keeping`].
    #[must_use]
    pub fn kept(&self) -> &[Kept] {
        &self.kept
    }

    /// Bytes of all files with tensors, headers included.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.plan.files.iter().map(|file| file.length).sum()
    }

    /// Bytes that each weight takes with all of its tensors.
    #[must_use]
    pub fn bytes(&self) -> Vec<u64> {
        (0..self.model.weights.len()).map(|at| self.plan.bytes(at)).collect()
    }

    /// Returns true if a weight of the model is copied, by [pieces](Self::pieces): it is
    /// not quantized to FP8 or FP4, and not decoded.
    #[must_use]
    pub fn copies(&self, at: usize) -> bool {
        self.target.copies(&self.model.weights[at])
    }

    /// Returns the dtype that a weight of the model is decoded or cast to, if it is.
    #[must_use]
    pub fn decoded_to(&self, at: usize) -> Option<Dtype> {
        self.target.decoded_to(&self.model.weights[at])
    }

    /// The pieces of a weight of the model that is copied, one at least.
    ///
    /// # Errors
    /// [`CheckpointError::CannotHold`] for a weight that is not [copied](Self::copies).
    pub fn pieces(&self, at: usize) -> Result<Vec<Piece<'_>>, CheckpointError> {
        let (file, places) = self.plan.places(at);
        let made = |tensor: &str| {
            let what = "a copy of what has to be made";
            CheckpointError::cannot_hold(self.target.dialect.name(), tensor, what)
        };
        if !self.copies(at) {
            return Err(made(&self.model.weights[at].name));
        }
        let mut pieces = Vec::new();
        for (tensor, (begin, expected)) in self.tensors(at)?.into_iter().zip(places) {
            let Data::Bytes(std::borrow::Cow::Borrowed(bytes)) = tensor.data else {
                return Err(made(&tensor.name));
            };
            self.plan.check_length(file, &tensor.name, *expected, bytes.len())?;
            // Also of no bytes: so that it is noted.
            let count = bytes.len().div_ceil(Piece::MOST).max(1);
            pieces.extend((0..count).map(|piece| {
                let begins = piece * Piece::MOST;
                let mapped = &bytes[begins..bytes.len().min(begins + Piece::MOST)];
                let (tensor, offset) = (tensor.name.clone(), begin + begins as u64);
                Piece { weight: at, tensor, mapped, file, offset }
            }));
        }
        Ok(pieces)
    }

    /// The tensors of an unchanged weight of the model.
    fn tensors(&self, at: usize) -> Result<Vec<NewTensor<'_>>, CheckpointError> {
        self.target.tensors(&self.model.weights[at])
    }
}

impl Piece<'_> {
    /// The most bytes that one has.
    pub const MOST: usize = 4 << 20;

    /// The weight, by its place in the model.
    #[must_use]
    pub fn weight(&self) -> usize {
        self.weight
    }

    /// Number of its bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.mapped.len()
    }

    /// Returns true if it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mapped.is_empty()
    }

    /// Reads it.
    ///
    /// # Errors
    /// As [`Reader::read`].
    pub fn read(&self, reader: &Reader<'_>) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = vec![0; self.mapped.len()];
        reader.read(&self.tensor, self.mapped, &mut bytes)?;
        Ok(bytes)
    }
}
