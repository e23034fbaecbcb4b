//! [`Outline`]: the tensors that the parameters of a module are in files, without their values.

use std::collections::HashMap;
use std::iter;
use std::path::Path;

use burn_fp4_checkpoints::{DataType, Dtype, Model, Tensor, Value, Weight};
use serde_json::json;

use crate::error::Fp4Error;

use super::map::{CheckpointMap, turned};
use super::names::{Names, Wanted};

/// A float parameter of a module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ParameterOutline<'p> {
    pub(crate) path: &'p str,
    pub(crate) container: &'p str,
    pub(crate) shape: &'p [usize],
    /// Set if it belongs to something that is attached to another parameter. Files lack it.
    pub(crate) attached: bool,
}

/// The tensors that parameters are in files, without their values.
pub(crate) struct Outline {
    pub(crate) model: Model<'static>,
    /// By tensor the parameters that it is made of, or that take it, by their places.
    pub(crate) of: Vec<Vec<usize>>,
}

impl Outline {
    /// # Errors
    /// [`Fp4Error::Rename`], [`Fp4Error::Group`] and [`Fp4Error::Experts`] for a map that is none;
    /// [`Fp4Error::Mismatch`] for names that are not loaded back.
    pub(crate) fn new(
        parameters: &[ParameterOutline<'_>],
        map: &CheckpointMap,
    ) -> Result<Self, Fp4Error> {
        let names = Names::new(map)?;
        // By tensor its name before it is renamed, its shape and its parameters. A stacked one is
        // added once for each of its matrices.
        let mut tensors: Vec<(String, Vec<usize>, Vec<usize>)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        let mut add = |name: String, shape: Vec<usize>, parameter: usize| {
            let place = *places.entry(name.clone()).or_insert(tensors.len());
            let Some((_, known, of)) = tensors.get_mut(place) else {
                return tensors.push((name, shape, vec![parameter]));
            };
            if let (Some(known), Some(more)) = (known.first_mut(), shape.first()) {
                *known = (*known).max(*more);
            }
            of.push(parameter);
        };
        let mut tied = Vec::new();
        for (at, &ParameterOutline { path, container, shape, attached }) in
            parameters.iter().enumerate()
        {
            if attached {
                continue;
            }
            if let Some(with) = tied_to(&names, parameters, at) {
                tied.push((at, with));
                continue;
            }
            let placement = map.placement(container, shape.len());
            // An architecture says itself which files have the input first.
            let turn = match map.model_type {
                Some(_) => placement.turns_dense(),
                None => placement.input_first(),
            };
            let shape = turned(shape, turn);
            match names.wanted(path, container) {
                // The last one is the name in files.
                Wanted::One(mut wanted) => {
                    let name = wanted.pop().unwrap_or_else(|| path.to_owned());
                    add(name, shape, at);
                }
                Wanted::Each(before, behind) => {
                    let [count, matrix @ ..] = &shape[..] else { continue };
                    for index in 0..*count {
                        let name = Wanted::numbered(&before, &behind, index);
                        add(name, matrix.to_vec(), at);
                    }
                }
                Wanted::Matrix(name, index) => {
                    add(name, [&[index + 1], &shape[..]].concat(), at);
                }
            }
        }
        for (at, with) in tied {
            let takes = tensors.iter_mut().filter(|(.., of)| of.contains(&with));
            takes.for_each(|(.., of)| of.push(at));
        }
        let (mut weights, mut places, mut errors) = (Vec::new(), Vec::new(), Vec::new());
        for (name, shape, of) in tensors {
            match names.saved(&name, parameters[of[0]].path) {
                Ok(tensor) => {
                    weights.push(dense(tensor, shape));
                    places.push(of);
                }
                Err(mismatch) => errors.push(mismatch),
            }
        }
        if !errors.is_empty() {
            return Err(Fp4Error::Mismatch(errors));
        }
        let config = map.model_type.as_ref().map(|name| json!({ "model_type": name }));
        Ok(Self { model: Model { weights, config, ..Model::default() }, of: places })
    }
}

/// The parameter whose tensors a parameter takes, at the end of its ties; none if it has its own.
fn tied_to(names: &Names<'_>, parameters: &[ParameterOutline<'_>], at: usize) -> Option<usize> {
    let next = |at: usize| {
        let with = names.tied_to(parameters[at].path)?;
        parameters.iter().position(|one| one.path == with).filter(|with| *with != at)
    };
    // Ties in a circle have no end.
    iter::successors(next(at), |&at| next(at)).take(parameters.len()).last()
}

/// A dense weight without values.
fn dense(name: String, shape: Vec<usize>) -> Weight<'static> {
    let tensor = Tensor {
        name: name.clone().into(),
        file: Path::new(""),
        dtype: DataType::Plain(Dtype::F32),
        shape: shape.into(),
        bytes: (&[]).into(),
    };
    Weight::new(name, 0, Value::Plain(tensor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_that_are_tied_in_a_row_take_one_tensor() {
        let paths = ["a.weight", "b.weight", "c.weight", "d.weight"];
        let shape = &[64, 64][..];
        let known = paths.map(|path| ParameterOutline {
            path,
            container: "Linear",
            shape,
            attached: false,
        });
        let map = CheckpointMap::new().tie("a.weight", "b.weight").tie("b.weight", "c.weight");
        let outline = Outline::new(&known, &map).expect("an outline");
        let names = outline.model.weights.iter().map(|weight| weight.name.as_str());
        assert!(names.eq(["c.weight", "d.weight"]));
        assert_eq!(outline.of, [vec![2, 0, 1], vec![3]]);
    }
}
