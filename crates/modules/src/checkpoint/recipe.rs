//! Recipes of the command `fp4`: of what was done to a module, and for one.
//!
//! Names and shapes of parameters in files decide about both, by the same selection as in the
//! command.

use std::collections::{BTreeMap, HashMap};
use std::iter;
use std::path::Path;

use burn::module::Module;
use burn_fp4_checkpoints::selection::Selection;
use burn_fp4_checkpoints::{DataType, Dtype, Model, Pattern, Syntax, Tensor, Value, Weight};
use burn_fp4_ops::Fp4Scheme;
use burn_fp4_policy::{Decision, Policy, Preset, Recipe, RecipeError, RecipeFormat, RecipeWeights};

use crate::config::{Container, Fp4Config};
use crate::error::Fp4Error;
use crate::report::{Fp4Report, KeepReason, Outcome, ParameterReport};
use crate::walk::parameters::{Parameter, Walk};

use super::map::{CheckpointMap, turned};
use super::mismatch::Mismatch;
use super::names::{Names, Wanted};

/// All names, as a pattern.
const ALL: &str = "*";

impl Fp4Report {
    /// Saves what was done as a recipe, which does the same again: to the files of the model, by
    /// `fp4 quantize --recipe`, and to a module, by [`Fp4Config::of_recipe`]. Formats that a
    /// [budget](Fp4Config::budget) has chosen become a file so. Names are those that the map gives
    /// weights in checkpoints; it is that of [`save_fp4`](crate::Fp4Module::save_fp4).
    ///
    /// Formats, block sizes, rules and methods are the same there, and so are the codes, but for
    /// methods that take statistics of inputs, which have to be given again
    /// ([`Calibration::save`](crate::Calibration::save)), and for weights of rank 3 in formats with
    /// a tensor scale: a file has one for each matrix. Where some weights got another method for
    /// want of statistics ([`Fallback`](crate::Fallback)) the recipe says which.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::ops::Fp4Scheme;
    /// use burn_fp4_modules::{CheckpointMap, Fp4Config, Fp4Module, Recipe};
    ///
    /// # let folder = std::env::temp_dir().join(format!("burn-fp4-recipe-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder).unwrap();
    /// # let path = folder.join("recipe.toml");
    /// let device = Device::flex();
    /// let dense: Vec<_> = (0..3).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
    /// let (mut first, mut again) = (dense.clone(), dense);
    /// let config = Fp4Config::nvfp4().exclude("0.*").with("2.*", Fp4Scheme::mxfp4());
    /// let map = CheckpointMap::new();
    /// first.quantize_fp4(&config)?.save_recipe(&path, &map)?;
    ///
    /// let config = Fp4Config::of_recipe(&Recipe::read(&path)?, &again, &map)?;
    /// again.quantize_fp4(&config)?;
    /// assert_eq!(again[2].weight.val().into_data(), first[2].weight.val().into_data());
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`recipe`](Self::recipe), and [`Fp4Error::Recipe`] if the file cannot be written.
    pub fn save_recipe(&self, path: impl AsRef<Path>, map: &CheckpointMap) -> Result<(), Fp4Error> {
        Ok(self.recipe(map)?.save(path)?)
    }

    /// Returns the recipe that [`save_recipe`](Self::save_recipe) writes.
    ///
    /// # Errors
    /// [`Fp4Error::RecipeParameter`] for what a recipe cannot say: schemes with more than a rule,
    /// a block size and a method, blocks along another axis than in files, codes that
    /// were handed over or packed before, and tensor scales that are shared by others than the
    /// layers that inference engines run as one. [`Fp4Error::Mismatch`], [`Fp4Error::Rename`],
    /// [`Fp4Error::Group`] and [`Fp4Error::Experts`] for the map.
    pub fn recipe(&self, map: &CheckpointMap) -> Result<Recipe, Fp4Error> {
        let attached = Outcome::Kept { reason: KeepReason::PartOfReparameterization };
        let parameters: Vec<&ParameterReport> =
            self.parameters.iter().filter(|one| one.outcome != attached).collect();
        let known = parameters.iter().map(|one| (&*one.path, &*one.container, &*one.shape));
        let files = Files::new(&known.collect::<Vec<_>>(), map)?;
        let mut schemes = Vec::with_capacity(files.of.len());
        let mut lists: Vec<(Fp4Scheme, Vec<String>)> = Vec::new();
        for (weight, of) in files.model.weights.iter().zip(&files.of) {
            let scheme = to_recipe(parameters[of[0]], map)?;
            for &other in &of[1..] {
                if to_recipe(parameters[other], map)? != scheme {
                    let what = format!("that it differs from others in `{}`", weight.name);
                    return Err(not_representable(&parameters[other].path, &what));
                }
            }
            schemes.push(scheme);
            let Some(scheme) = scheme else { continue };
            let exact = Pattern::Exact(weight.name.clone()).write(Syntax::Recipe);
            let name = exact.unwrap_or_else(|| weight.name.clone());
            match lists.iter_mut().find(|(known, _)| *known == scheme) {
                Some((_, names)) => names.push(name),
                None => lists.push((scheme, vec![name])),
            }
        }
        let all = || vec![ALL.to_owned()];
        let kept = RecipeWeights {
            names: all(),
            format: Some(RecipeFormat::Dense),
            ..RecipeWeights::default()
        };
        let list = |(how, names): (Fp4Scheme, Vec<String>)| RecipeWeights {
            names,
            format: Some(RecipeFormat::Fp4(how.format())),
            block_size: Some(how.block_size),
            method: Some(how.method),
            rule: Some(how.rule),
        };
        let recipe = Recipe {
            only: all(),
            together: Some(parameters.iter().any(|one| scale_group(one).is_some())),
            weights: [kept].into_iter().chain(lists.into_iter().map(list)).collect(),
            ..Recipe::default()
        };
        check(&recipe, &files, &parameters, &schemes)?;
        Ok(recipe)
    }
}

impl Fp4Config {
    /// Makes a configuration that does to a module what a recipe of `fp4 quantize` does to its
    /// files: the selected weights, their schemes, the method and the shared tensor scales. Use the
    /// map of [`save_fp4`](crate::Fp4Module::save_fp4). [`Fp4Report::save_recipe`] has an example.
    ///
    /// Layers that run as one share a tensor scale, unless the recipe says `together = false`, or
    /// names a dialect of which readers do not need that. Statistics of inputs are handed over by
    /// [`with_calibration`](Self::with_calibration): the recipe's `calibration` is a file of the
    /// command.
    ///
    /// # Errors
    /// [`Fp4Error::Recipe`] for choices that do not go together, and for the preset `miles`, which
    /// is for files; [`Fp4Error::Checkpoint`] for names that match nothing, a dialect that is
    /// unknown, formats that layers that run as one cannot have, and if nothing is selected;
    /// [`Fp4Error::RecipeParameter`] for what a configuration cannot say. For the map as
    /// [`Fp4Report::recipe`].
    pub fn of_recipe<M: Module>(
        recipe: &Recipe,
        module: &M,
        map: &CheckpointMap,
    ) -> Result<Self, Fp4Error> {
        let mut parameters = Walk::over_values(module).parameters;
        parameters.retain(|one| !one.inside_reparameterization);
        let known = parameters.iter().map(|one| (&*one.path, &*one.container, &*one.shape));
        let files = Files::new(&known.collect::<Vec<_>>(), map)?;
        let policy = policy(recipe)?;
        let selection = Selection::of(&files.model, &policy)?;
        selection.check_not_empty(&files.model)?;
        // One for each parameter that a tensor is made of.
        let mut schemes: BTreeMap<usize, Option<Fp4Scheme>> = BTreeMap::new();
        for (tensor, of) in files.of.iter().enumerate() {
            let scheme = match &selection.decisions[tensor] {
                Decision::Keep(_) => None,
                Decision::Quantize { scheme, .. } => Some(*scheme),
            };
            for &at in of {
                if *schemes.entry(at).or_insert(scheme) != scheme {
                    let problem = "its matrices are several tensors in files, of several schemes";
                    return Err(impossible(&parameters[at].path, problem));
                }
            }
        }
        let chosen = schemes.iter().filter_map(|(&at, scheme)| Some((&parameters[at], (*scheme)?)));
        let chosen: Vec<(&Parameter, Fp4Scheme)> = chosen.collect();
        let mut config = with_containers(Fp4Config::new(policy.base()), &chosen, map)?;
        for (Parameter { path, .. }, how) in &chosen {
            config = config.include(path).with(path, *how);
        }
        for group in selection.groups.iter().filter(|group| group.len() > 1) {
            let path = |&at: &usize| &*parameters[files.of[at][0]].path;
            let paths: Vec<&str> = group.iter().map(path).collect();
            // A stacked parameter is a tensor in files for each of its matrices.
            if !config.share_scale_of.iter().any(|known| *known == paths) {
                config = config.share_scale_of(paths);
            }
        }
        Ok(config)
    }
}

/// Path, container and shape of a parameter.
type Known<'p> = (&'p str, &'p str, &'p [usize]);

/// The tensors that parameters are in files, without their values.
struct Files {
    model: Model<'static>,
    /// By tensor the parameters that it is made of, or that take it, by their places.
    of: Vec<Vec<usize>>,
}

impl Files {
    /// # Errors
    /// [`Fp4Error::Rename`], [`Fp4Error::Group`] and [`Fp4Error::Experts`] for a map that is none;
    /// [`Fp4Error::Mismatch`] for names that are not loaded back.
    fn new(parameters: &[Known<'_>], map: &CheckpointMap) -> Result<Self, Fp4Error> {
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
        for (at, &(path, container, shape)) in parameters.iter().enumerate() {
            if let Some(with) = tied_to(&names, parameters, at) {
                tied.push((at, with));
                continue;
            }
            let input_first = map.placement(container, shape.len()).input_first();
            let shape = turned(shape, input_first);
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
            let tensor = names.in_file(&name);
            let loaded = names.in_module(&tensor);
            if loaded != name {
                let parameter = parameters[of[0]].0.to_owned();
                errors.push(Mismatch::RenamedBack { parameter, tensor, loaded });
                continue;
            }
            weights.push(outline(tensor, shape));
            places.push(of);
        }
        match errors.is_empty() {
            true => Ok(Self { model: Model { weights, ..Model::default() }, of: places }),
            false => Err(Fp4Error::Mismatch(errors)),
        }
    }
}

/// The parameter whose tensors a parameter takes, at the end of its ties; none if it has its own.
fn tied_to(names: &Names<'_>, parameters: &[Known<'_>], at: usize) -> Option<usize> {
    let next = |at: usize| {
        let with = names.tied_to(parameters[at].0)?;
        parameters.iter().position(|(path, ..)| *path == with).filter(|with| *with != at)
    };
    // Ties in a circle have no end.
    iter::successors(next(at), |&at| next(at)).take(parameters.len()).last()
}

/// A dense weight without values.
fn outline(name: String, shape: Vec<usize>) -> Weight<'static> {
    let tensor = Tensor {
        name: name.clone().into(),
        file: Path::new(""),
        dtype: DataType::Plain(Dtype::F32),
        shape: shape.into(),
        bytes: (&[]).into(),
    };
    Weight::new(name, 0, Value::Plain(tensor))
}

/// Makes the policy of a recipe.
fn policy(recipe: &Recipe) -> Result<Policy, Fp4Error> {
    let policy = Policy::new(recipe.clone())?;
    match policy.preset() {
        Preset::Miles => Err(RecipeError::Preset(policy.preset().to_string()).into()),
        _ => Ok(policy),
    }
}

/// Returns the error of something that a recipe cannot express.
fn not_representable(path: &str, what: &str) -> Fp4Error {
    impossible(path, &format!("a recipe cannot say {what}"))
}

fn impossible(path: &str, problem: &str) -> Fp4Error {
    Fp4Error::RecipeParameter { path: path.to_owned(), problem: problem.to_owned() }
}

/// Returns how a recipe says that a parameter was quantized; none for one that was kept.
fn to_recipe(one: &ParameterReport, map: &CheckpointMap) -> Result<Option<Fp4Scheme>, Fp4Error> {
    let cannot = |what: &str| Err(not_representable(&one.path, what));
    let (scheme, axis) = match &one.outcome {
        Outcome::Quantized { scheme, axis, .. } => (scheme, *axis),
        Outcome::Kept { reason: KeepReason::AlreadyQuantized } => {
            return cannot("how it was quantized before");
        }
        Outcome::Kept { .. } | Outcome::Merged => return Ok(None),
        Outcome::Provided { .. } => return cannot("which codes were provided for it"),
        Outcome::FakeQuantized { .. } | Outcome::Adapted { .. } => {
            return cannot("that it is trained");
        }
    };
    let placement = map.placement(&one.container, one.shape.len());
    if placement.axis != axis || !placement.has_matrices() {
        return cannot("that blocks run along another axis than in files");
    }
    let own = Fp4Scheme::of(scheme.rule).with_block_size(scheme.block_size);
    let own = own.with_method(scheme.method);
    if *scheme != own {
        return cannot("more of a scheme than its rule, block size and method");
    }
    Ok(Some(own))
}

/// The group of parameters whose tensor scale it shares.
fn scale_group(one: &ParameterReport) -> Option<&str> {
    match &one.outcome {
        Outcome::Quantized { shares_scale_with, .. } => shares_scale_with.as_deref(),
        _ => None,
    }
}

/// Checks that a recipe decides about tensors as was decided about parameters.
fn check(
    recipe: &Recipe,
    files: &Files,
    parameters: &[&ParameterReport],
    schemes: &[Option<Fp4Scheme>],
) -> Result<(), Fp4Error> {
    let selection = Selection::of(&files.model, &policy(recipe)?)?;
    let mut sharing: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (tensor, of) in files.of.iter().enumerate() {
        if let Some(group) = scale_group(parameters[of[0]]) {
            sharing.entry(group).or_default().push(tensor);
        }
    }
    for (tensor, of) in files.of.iter().enumerate() {
        let one = parameters[of[0]];
        match (&selection.decisions[tensor], schemes[tensor]) {
            (Decision::Keep(reason), Some(_)) => {
                let problem = format!("`fp4 quantize` would keep it: {reason}");
                return Err(impossible(&one.path, &problem));
            }
            (Decision::Quantize { group, .. }, Some(how)) if how.format().row().tensor_scale => {
                let alone = vec![tensor];
                let expected = scale_group(one).map_or(&alone, |group| &sharing[group]);
                if selection.groups[*group] != *expected {
                    let what = "which weights share its tensor scale, but for those that engines \
                                run as one";
                    return Err(not_representable(&one.path, what));
                }
            }
            (Decision::Keep(_) | Decision::Quantize { .. }, _) => {}
        }
    }
    Ok(())
}

/// The configuration with the containers of parameters, along the axes of their blocks in files.
fn with_containers(
    mut config: Fp4Config,
    chosen: &[(&Parameter, Fp4Scheme)],
    map: &CheckpointMap,
) -> Result<Fp4Config, Fp4Error> {
    let mut axes: BTreeMap<&str, usize> = BTreeMap::new();
    for (Parameter { path, container, shape, .. }, _) in chosen {
        let placement = map.placement(container, shape.len());
        let axis = *axes.entry(container).or_insert(placement.axis);
        if axis != placement.axis || !placement.has_matrices() {
            return Err(impossible(path, "its container has its blocks along another axis"));
        }
    }
    for (container, axis) in axes {
        let same = |known: &Container| known.name == container && known.axis == axis;
        if !config.containers.iter().any(same) {
            config = config.container(container, axis);
        }
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_that_are_tied_in_a_row_take_one_tensor() {
        let paths = ["a.weight", "b.weight", "c.weight", "d.weight"];
        let known = paths.map(|path| (path, "Linear", &[64, 64][..]));
        let map = CheckpointMap::new().tie("a.weight", "b.weight").tie("b.weight", "c.weight");
        let files = Files::new(&known, &map).expect("files");
        let names = files.model.weights.iter().map(|weight| weight.name.as_str());
        assert!(names.eq(["c.weight", "d.weight"]));
        assert_eq!(files.of, [vec![2, 0, 1], vec![3]]);
    }
}
