//! [`Fp4Report::save_recipe`]: a recipe of what was done to a module.

use std::path::Path;

use burn_fp4_ops::{Fp4Scheme, Hadamard};
use burn_fp4_policy::{
    Decision, Decisions, Pattern, Policy, Recipe, RecipeFormat, RecipeWeights, Syntax,
};

use crate::error::Fp4Error;
use crate::report::{Fp4Report, KeepReason, Outcome, ParameterReport};

use super::decide::{decide, impossible};
use super::map::CheckpointMap;
use super::outline::{Outline, ParameterOutline};

/// All names, as a pattern.
const ALL: &str = "*";

impl Fp4Report {
    /// Saves what was done as a recipe, which does the same again: to the files of the model, by
    /// `fp4 quantize --recipe`, and to a module, by
    /// [`Fp4Config::of_recipe`](crate::Fp4Config::of_recipe). Formats that a
    /// [budget](crate::Fp4Config::budget) has chosen become a file so. Names are those that the map
    /// gives weights in checkpoints; it is that of [`save_fp4`](crate::Fp4Module::save_fp4).
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
    /// let config = Fp4Config::of_recipe(&Recipe::read(&path)?, &map)?;
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
    /// a block size, a method and a Hadamard transform, blocks along another axis than in files,
    /// codes that were handed over or packed before, and tensor scales that are shared by others
    /// than the layers that inference engines run as one. [`Fp4Error::Mismatch`],
    /// [`Fp4Error::Rename`], [`Fp4Error::Group`] and [`Fp4Error::Experts`] for the map.
    pub fn recipe(&self, map: &CheckpointMap) -> Result<Recipe, Fp4Error> {
        let attached = Outcome::Kept { reason: KeepReason::PartOfReparameterization };
        let known = self.parameters.iter().map(|one| ParameterOutline {
            path: &one.path,
            container: &one.container,
            shape: &one.shape,
            attached: one.outcome == attached,
        });
        let known: Vec<ParameterOutline<'_>> = known.collect();
        let schemes = self.parameters.iter().map(|one| scheme(one, map));
        let schemes: Vec<Option<Fp4Scheme>> = schemes.collect::<Result<_, _>>()?;
        let outline = Outline::new(&known, map)?;
        let mut lists: Vec<(Fp4Scheme, Vec<String>)> = Vec::new();
        for (weight, of) in outline.model.weights.iter().zip(&outline.of) {
            if let Some(&other) = of.iter().find(|&&other| schemes[other] != schemes[of[0]]) {
                let what = format!("that it differs from others in `{}`", weight.name);
                return Err(not_representable(known[other].path, &what));
            }
            let Some(scheme) = schemes[of[0]] else { continue };
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
            hadamard: how.hadamard.map(Hadamard::size),
        };
        let recipe = Recipe {
            only: all(),
            together: Some(self.parameters.iter().any(|one| scale_group(one).is_some())),
            weights: [kept].into_iter().chain(lists.into_iter().map(list)).collect(),
            ..Recipe::default()
        };
        self.check(&decide(&known, &Policy::new(recipe.clone())?, map)?)?;
        Ok(recipe)
    }

    /// Checks that a recipe decides about parameters as was decided before.
    fn check(&self, decided: &Decisions) -> Result<(), Fp4Error> {
        for (at, one) in self.parameters.iter().enumerate() {
            let Outcome::Quantized { scheme, .. } = &one.outcome else { continue };
            match &decided.weights[at] {
                Decision::Keep(reason) => {
                    let problem = format!("`fp4 quantize` would keep it: {reason}");
                    return Err(impossible(&one.path, &problem));
                }
                Decision::Quantize { group, .. } if scheme.format().row().tensor_scale => {
                    let shares = |other: &usize| {
                        let own = scale_group(one);
                        *other == at
                            || (own.is_some() && scale_group(&self.parameters[*other]) == own)
                    };
                    let expected = (0..self.parameters.len()).filter(shares);
                    if !expected.eq(decided.groups[*group].iter().copied()) {
                        let what = "which weights share its tensor scale, but for those that \
                                    engines run as one";
                        return Err(not_representable(&one.path, what));
                    }
                }
                Decision::Quantize { .. } => {}
            }
        }
        Ok(())
    }
}

/// Returns the error of something that a recipe cannot express.
fn not_representable(path: &str, what: &str) -> Fp4Error {
    impossible(path, &format!("a recipe cannot say {what}"))
}

/// Returns the scheme by which a parameter was quantized; none for one that was kept.
///
/// # Errors
/// [`Fp4Error::RecipeParameter`] for what a recipe cannot say.
fn scheme(one: &ParameterReport, map: &CheckpointMap) -> Result<Option<Fp4Scheme>, Fp4Error> {
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
    let unsigned = scheme.hadamard.filter(|hadamard| hadamard.signs() == 0);
    let own = own.with_method(scheme.method).with_hadamard(unsigned);
    if *scheme != own {
        let more = "more of a scheme than its rule, block size, method and Hadamard transform \
                    without signs";
        return cannot(more);
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
