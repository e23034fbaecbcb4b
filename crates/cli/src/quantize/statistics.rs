//! Statistics of the inputs of layers, read from a file.

use std::path::{Path, PathBuf};

use burn_fp4_checkpoints::selection::Matrices;
use burn_fp4_checkpoints::{Container, DataType, Dtype, Metadata, Reader, Tensor, Weight};
use burn_fp4_search::{Fp4Scheme, Gram, Hadamard, Method, Needs, SearchError, Statistics};

use crate::counted::counted;
use crate::error::CliError;

/// A file of statistics: safetensors, or an imatrix of llama.cpp.
pub(super) struct StatisticsFile {
    path: PathBuf,
    file: Container,
    imatrix: bool,
}

/// Statistics of the inputs of a matrix.
pub(super) enum Known {
    Nothing,
    /// All of them are zero, as for an expert that saw no token: no method can choose by them.
    Unseen,
    SecondMoments(Vec<f32>),
    Gram(Gram),
}

impl Known {
    /// The statistics after a Hadamard transform of the inputs. Second moments say nothing of it.
    pub(super) fn transformed(self, hadamard: Hadamard) -> Result<Self, SearchError> {
        match self {
            Self::Gram(gram) => gram.transformed(hadamard).map(Self::Gram),
            Self::SecondMoments(_) => Err(SearchError::TransformedMoments),
            Self::Nothing | Self::Unseen => Ok(self),
        }
    }

    /// The statistics that a method chooses by.
    pub(super) fn given(&self, how: &Fp4Scheme) -> Statistics<'_> {
        match self {
            Self::SecondMoments(moments) => Statistics::SecondMoments(moments),
            Self::Gram(gram) if how.method.row().calibrated => Statistics::Gram(gram),
            Self::Nothing | Self::Unseen | Self::Gram(_) => Statistics::None,
        }
    }
}

/// The program that writes such files for any model of transformers.
pub(super) const MADE_BY: &str = "tests/interop/calibration.py of burn-fp4";

/// Bytes of statistics that are read at a time.
const PIECE: usize = 1 << 20;

impl StatisticsFile {
    /// Opens the file.
    pub(super) fn open(path: &Path) -> Result<Self, CliError> {
        let file = Container::open(path)?;
        let imatrix = matches!(file.metadata(), Some(Metadata::Gguf(_)));
        Ok(Self { path: path.to_owned(), file, imatrix })
    }

    /// The tensor with the statistics of a weight.
    fn find(&self, weight: &str) -> Option<Tensor<'_>> {
        if self.imatrix {
            return self.file.get(&format!("{weight}.in_sum2"));
        }
        let module = weight.strip_suffix(".weight").unwrap_or(weight);
        self.file.get(weight).or_else(|| self.file.get(module))
    }

    /// Checks that there are statistics of one weight at least: otherwise it is another model's
    /// file, or no file of statistics.
    pub(super) fn check_any(&self, weights: &[&Weight<'_>]) -> Result<(), CliError> {
        let (Some(first), true) =
            (weights.first(), weights.iter().all(|weight| self.find(&weight.name).is_none()))
        else {
            return Ok(());
        };
        let found = self.file.tensors().next();
        Err(CliError::Conflict(format!(
            "{}: no statistics of the {} to quantize, such as `{}`; it has {}; write them for this \
             model with {MADE_BY}",
            self.path.display(),
            counted(weights.len(), "weight"),
            first.name,
            found.map_or("nothing".to_owned(), |tensor| format!("`{}`", tensor.name))
        )))
    }

    /// Checks, by headers alone, that a weight of these matrices and columns has statistics that
    /// a scheme can use.
    pub(super) fn check(
        &self,
        weight: &str,
        [stacked, cols]: [usize; 2],
        how: &Fp4Scheme,
    ) -> Result<(), CliError> {
        let method = how.method;
        let Some(found) = self.find(weight) else {
            let (path, weight) = (self.path.clone(), weight.to_owned());
            return Err(CliError::NoStatistics { path, weight, made_by: MADE_BY });
        };
        let moments = self.moments(&found, stacked, cols);
        let needs_gram = how.needs() > Needs::SecondMoments;
        let usable = match moments {
            true => !needs_gram,
            false => found.len() == stacked * cols * cols,
        };
        if moments && needs_gram {
            let path = self.path.display();
            let fits = Method::NAMED.into_iter().filter(|row| row.needs == Needs::SecondMoments);
            let others = fits.map(|row| format!("`{}`", row.name));
            let others = others.collect::<Vec<_>>().join(" or ");
            let holder = match self.imatrix {
                true => "an imatrix".to_owned(),
                false => format!("`{}`", found.name),
            };
            let what = match how.hadamard {
                Some(_) => format!(
                    "{path}: {holder} holds mean squares only, and a Hadamard transform needs \
                     X^T X; leave out the transform"
                ),
                None => format!(
                    "{path}: {holder} holds mean squares only, and method `{method}` needs X^T X; \
                     use {others}"
                ),
            };
            return Err(CliError::Conflict(what));
        }
        if usable && found.dtype == DataType::Plain(Dtype::F32) {
            return Ok(());
        }
        let expected = if needs_gram { "X^T X" } else { "mean squares or X^T X" };
        let what = format!(
            "{}: `{}`: expected {expected} of {stacked} x {cols} inputs in F32, found {:?} of {}; \
             write it again with {MADE_BY}",
            self.path.display(),
            found.name,
            found.shape,
            found.dtype
        );
        Err(CliError::Conflict(what))
    }

    /// Returns true if there is the whole `X^T X` of a weight of these matrices.
    pub(super) fn has_gram(&self, weight: &str, matrices: &Matrices) -> bool {
        let Matrices { stacked, cols, .. } = *matrices;
        self.find(weight).is_some_and(|found| {
            !self.moments(&found, stacked, cols)
                && found.len() == stacked * cols * cols
                && found.dtype == DataType::Plain(Dtype::F32)
        })
    }

    /// Returns true if two weights have the same statistics, or neither has any.
    pub(super) fn is_same(&self, first: &str, other: &str) -> Result<bool, CliError> {
        let (first, other) = match (self.find(first), self.find(other)) {
            (Some(first), Some(other)) => (first, other),
            (first, other) => return Ok(first.is_none() && other.is_none()),
        };
        if first.shape != other.shape || first.dtype != other.dtype {
            return Ok(false);
        }
        let reader = Reader::new(&self.file);
        let [mut a, mut b] = [(); 2].map(|()| vec![0; PIECE.min(first.bytes.len())]);
        for (left, right) in first.bytes.chunks(PIECE).zip(other.bytes.chunks(PIECE)) {
            let (a, b) = (&mut a[..left.len()], &mut b[..right.len()]);
            reader.read(&first.name, left, a)?;
            reader.read(&other.name, right, b)?;
            if a != b {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn moments(&self, found: &Tensor<'_>, stacked: usize, cols: usize) -> bool {
        self.imatrix || (found.len() == stacked * cols && found.shape.len() <= 2)
    }

    /// Bytes of memory that the statistics of a weight of these matrices take.
    pub(super) fn memory(&self, weight: &str, matrices: &Matrices, method: Method) -> u64 {
        let cols = matrices.cols as u64;
        let values = match self.has_gram(weight, matrices) {
            // The numbers of the file in f64, and the half that a Gram matrix keeps.
            true => 12 * cols * cols,
            false if method.row().calibrated && self.find(weight).is_some() => 8 * cols,
            false => return 0,
        };
        // Statistics of two weights are compared piece by piece.
        values + 2 * PIECE as u64
    }

    /// The statistics of one of the matrices of a weight.
    pub(super) fn of(
        &self,
        weight: &str,
        at: usize,
        [stacked, cols]: [usize; 2],
    ) -> Result<Known, CliError> {
        let Some(found) = self.find(weight) else { return Ok(Known::Nothing) };
        if self.moments(&found, stacked, cols) {
            let moments: Vec<f32> = self.slice(&found, at * cols, cols, |value| value)?;
            return Ok(match moments.iter().all(|&moment| moment == 0.0) {
                true => Known::Unseen,
                false => Known::SecondMoments(moments),
            });
        }
        let square = cols * cols;
        let values: Vec<f64> = self.slice(&found, at * square, square, f64::from)?;
        if values.iter().all(|&value| value == 0.0) {
            return Ok(Known::Unseen);
        }
        let gram = Gram::from_values(&values, cols, cols, cols, 1.0);
        Ok(Known::Gram(gram.map_err(|source| self.blame(weight, source))?))
    }

    /// Some of a tensor's numbers, which were checked to be f32 and as many as are asked for.
    fn slice<T>(
        &self,
        tensor: &Tensor<'_>,
        begin: usize,
        count: usize,
        wide: impl Fn(f32) -> T,
    ) -> Result<Vec<T>, CliError> {
        let reader = Reader::new(&self.file);
        let mapped = tensor.bytes.get(4 * begin..4 * (begin + count)).unwrap_or_default();
        let mut piece = vec![0; PIECE.min(mapped.len())];
        let mut values = Vec::with_capacity(count);
        for mapped in mapped.chunks(PIECE) {
            let piece = &mut piece[..mapped.len()];
            reader.read(&tensor.name, mapped, piece)?;
            let numbers = piece.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
            values.extend(numbers.map(|bytes| wide(f32::from_le_bytes(bytes))));
        }
        Ok(values)
    }

    /// The error, of the statistics of a weight.
    pub(super) fn blame(&self, weight: &str, source: SearchError) -> CliError {
        let name = self.find(weight).map_or_else(|| weight.to_owned(), |t| t.name.to_string());
        CliError::TensorOf { file: self.path.clone(), name, source }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_of_statistics_that_is_cut_off_meanwhile_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("moments.safetensors");
        // More than a page, of which what is left of the file is not.
        let header = r#"{"up.weight":{"dtype":"F32","shape":[4096],"data_offsets":[0,16384]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(1.0_f32.to_le_bytes().repeat(4096));
        fs::write(&path, &bytes).expect("a file");
        let statistics = StatisticsFile::open(&path).expect("statistics");
        let file = fs::OpenOptions::new().write(true).open(&path).expect("the file");
        file.set_len(100).expect("it is cut off");
        let error = statistics.of("up.weight", 0, [1, 4096]).err().expect("an error");
        let text = error.to_string();
        assert!(text.contains("moments.safetensors: tensor `up.weight`: its file had"), "{text}");
        assert_eq!(error.exit_code(), 3);
    }
}
