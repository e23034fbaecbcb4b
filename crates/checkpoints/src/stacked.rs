//! Stacked matrices (the experts of a layer) as weights of their own, and weights as a stack.

use std::borrow::Cow;
use std::path::Path;

use crate::error::{CheckpointError, TensorProblem};
use crate::fp4::{Fp4Weight, Numbers, TensorScale};
use crate::storage::Storage;

impl Fp4Weight<'_> {
    /// The stacked matrices as weights `[rows, cols]`; one if there is a single matrix.
    ///
    /// Nothing is copied but shapes: codes, block scales and tensor scales are views of this
    /// weight's, in its storage and as its file states them. [`join`](Self::join) is the inverse.
    #[must_use]
    pub fn split(&self) -> Vec<Fp4Weight<'_>> {
        let (stacked, shape) = (self.stacked(), vec![self.rows(), self.cols()]);
        let part = |bytes: &'_ [u8], at: usize| {
            let length = bytes.len() / stacked;
            at * length..(at + 1) * length
        };
        let matrix = |at: usize| Fp4Weight {
            format: self.format,
            block_size: self.block_size,
            shape: shape.clone(),
            transposed: self.transposed,
            storage: self.storage,
            codes: Cow::Borrowed(&self.codes[part(&self.codes, at)]),
            scales: Cow::Borrowed(&self.scales[part(&self.scales, at)]),
            tensor_scale: self.tensor_scale.as_ref().map(|scale| scale.of_matrix(at)),
            hadamard: self.hadamard,
            order: self.order,
        };
        (0..stacked).map(matrix).collect()
    }

    /// Weights of one format and shape as one, `[stack, rows, cols]`, in their order; a single
    /// matrix stays `[rows, cols]`. Each comes with its name, for errors.
    ///
    /// Codes, block scales and tensor scales keep their bits. They are copied, and put into rows
    /// unless all weights have one storage.
    ///
    /// # Errors
    /// No weight at all; [`TensorProblem::Unlike`] with the name of the first weight that is not
    /// like the one before it.
    pub fn join(
        name: &str,
        weights: &[(&str, &Fp4Weight<'_>)],
    ) -> Result<Fp4Weight<'static>, CheckpointError> {
        let Some((_, first)) = weights.first() else {
            let problem = TensorProblem::Shape { expected: "matrices".into(), found: vec![] };
            return Err(CheckpointError::tensor(Path::new(""), name, problem));
        };
        for pair in weights.windows(2) {
            like(pair[0].1, pair[1])?;
        }
        let all = || weights.iter().map(|(_, weight)| *weight);
        // Tiles belong to a single matrix.
        let tiled = matches!(first.storage, Storage::Tiled { .. });
        let as_stored = !tiled && all().all(|weight| weight.storage == first.storage);
        let bytes = |stored: fn(&'_ Fp4Weight<'_>) -> Vec<u8>, rows: fn(&'_ Fp4Weight<'_>) -> _| {
            let bytes: Vec<u8> = all().flat_map(if as_stored { stored } else { rows }).collect();
            Cow::Owned(bytes)
        };
        let stacked = all().map(Fp4Weight::stacked).sum();
        let mut shape = vec![first.rows(), first.cols()];
        if stacked > 1 {
            shape.insert(0, stacked);
        }
        let numbers = all()
            .filter_map(|weight| Some(weight.tensor_scale.as_ref()?.of_matrices(weight.stacked())));
        let numbers = Numbers::new(&numbers.flatten().collect::<Vec<f32>>());
        Ok(Fp4Weight {
            format: first.format,
            block_size: first.block_size,
            shape,
            transposed: first.transposed,
            storage: if as_stored { first.storage } else { Storage::Rows },
            codes: bytes(|w| w.codes.to_vec(), |w| w.plain_codes().into_owned()),
            scales: bytes(|w| w.scales.to_vec(), |w| w.plain_scales().into_owned()),
            tensor_scale: first.tensor_scale.as_ref().map(|scale| match scale {
                TensorScale::Multiplier(_) => TensorScale::Multiplier(numbers),
                TensorScale::Divisor(_) => TensorScale::Divisor(numbers),
            }),
            hadamard: first.hadamard,
            order: first.order,
        })
    }
}

/// Checks that two weights can be stacked.
fn like(
    before: &Fp4Weight<'_>,
    (name, weight): (&str, &Fp4Weight<'_>),
) -> Result<(), CheckpointError> {
    for ((what, expected), (_, found)) in facts(before).into_iter().zip(facts(weight)) {
        if expected != found {
            let problem = TensorProblem::Unlike { what, expected, found };
            return Err(CheckpointError::tensor(Path::new(""), name, problem));
        }
    }
    Ok(())
}

/// Facts that stacked matrices have in common.
fn facts(weight: &Fp4Weight<'_>) -> [(&'static str, String); 7] {
    let scale = match weight.tensor_scale {
        None => "none",
        Some(TensorScale::Multiplier(_)) => "a multiplier",
        Some(TensorScale::Divisor(_)) => "a divisor",
    };
    [
        ("format", weight.format.to_string()),
        ("block size", weight.block_size.to_string()),
        ("matrices", format!("{:?}", [weight.rows(), weight.cols()])),
        ("transposed", weight.transposed.to_string()),
        ("tensor scale", scale.to_owned()),
        ("order of products", format!("{:?}", weight.order)),
        ("Hadamard transform", format!("{:?}", weight.hadamard)),
    ]
}
