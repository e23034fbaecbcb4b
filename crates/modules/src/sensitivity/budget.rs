//! [`BudgetChoice`]: the candidates with the least error within some bits or bytes.

use burn::module::Module;
use serde::{Deserialize, Serialize};

use crate::budget::Budget;
use crate::config::{Fp4Config, Unused};
use crate::error::Fp4Error;
use crate::pack::quantize::quantize_and_compare;
use crate::report::Fp4Report;
use crate::walk::select::select;

use super::candidate::Candidate;
use super::knapsack::{Item, choose};
use super::measure::measure;
use super::report::{CandidateSensitivity, GroupSensitivity, Sensitivity};

/// Bytes of a tensor scale.
const TENSOR_SCALE: usize = 4;

/// A candidate for every group of weights.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp4_modules::{Budget, Calibration, Candidate, Fp4Config, Fp4Module};
///
/// # let device = Device::flex();
/// # let layer = LinearConfig::new(64, 64).init(&device);
/// let mut inputs = Calibration::new();
/// inputs.add("weight", 0, Tensor::<2>::random([128, 64], Distribution::Default, &device))?;
/// let config = Fp4Config::nvfp4().with_calibration(&inputs);
/// let sensitivity = layer.fp4_sensitivity(&config, &Candidate::DEFAULT)?;
/// let choice = sensitivity.choose(Budget::BitsPerWeight(4.5))?;
/// assert!(choice.bits_per_weight < 4.6);
/// assert!(choice.gap() <= choice.error);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BudgetChoice {
    /// Configuration that quantizes a module like this. Saved, it lacks the calibration. If all
    /// weights stay dense, it selects none, which [`quantize_fp4`](crate::Fp4Module::quantize_fp4)
    /// refuses.
    pub config: Fp4Config,
    /// By group of the [`Sensitivity`], what was chosen.
    pub candidates: Vec<CandidateSensitivity>,
    /// Bits for each value, with tensor scales.
    pub bits_per_weight: f64,
    /// The sum of the [errors](CandidateSensitivity::error) of the groups.
    pub error: f64,
    /// No choice within the budget has a smaller sum.
    pub bound: f64,
}

/// Quantizes by the candidates, of the [default](Candidate::DEFAULT) ones, with the least errors of
/// outputs within a budget.
pub(crate) fn quantize_within<M: Module>(
    module: &mut M,
    config: &Fp4Config,
    budget: Budget,
) -> Result<Fp4Report, Fp4Error> {
    if !config.overrides.is_empty() {
        let problem = "a budget chooses the formats; remove the overrides set using `with`";
        return Err(Fp4Error::Sensitivity(problem));
    }
    let config = Fp4Config { budget: None, ..config.clone() };
    let found = measure(module, &config, &Candidate::DEFAULT, false)?.sensitivity;
    let choice = found.choose(budget)?;
    // A choice has codes for a weight of zeros, which no candidate leaves an error.
    if found.dense_bytes().is_some_and(|dense| dense <= found.most_bytes(budget)) {
        return Err(Fp4Error::Sensitivity("all weights fit the budget as they are"));
    }
    let config = choice.config;
    quantize_and_compare(module, &select(module, &config)?, &config.calibration)
}

impl BudgetChoice {
    /// The error above the bound: no choice within the budget is better by more.
    #[must_use]
    pub fn gap(&self) -> f64 {
        self.error - self.bound
    }
}

impl Sensitivity {
    /// Candidates whose [errors](CandidateSensitivity::error) have a small sum within a budget: a
    /// multiple-choice knapsack problem, solved by its linear relaxation and repaired.
    /// [`BudgetChoice::gap`] bounds how far the sum is from the smallest. Without a loss the errors
    /// are relative ones of outputs, of which each group has the same say, however large.
    ///
    /// # Errors
    /// [`Fp4Error::Budget`] if the smallest candidates of all groups take more, or the budget is
    /// not a number; [`Fp4Error::NotComparable`] naming the weights that have neither a loss nor an
    /// error of outputs, or one that is not finite; [`Fp4Error::Sensitivity`] for the configuration
    /// [of a recipe](Fp4Config::of_recipe).
    pub fn choose(&self, budget: Budget) -> Result<BudgetChoice, Fp4Error> {
        if self.config.files.is_some() {
            let problem = "a recipe has chosen the formats; select weights using `include`";
            return Err(Fp4Error::Sensitivity(problem));
        }
        let incomparable = self.groups.iter().filter(|group| {
            group.candidates.iter().any(|one| one.error().is_none_or(|error| !error.is_finite()))
        });
        let paths: Vec<_> = incomparable.flat_map(|group| group.paths.clone()).collect();
        if !paths.is_empty() {
            return Err(Fp4Error::NotComparable { paths });
        }
        let item = |one: &CandidateSensitivity| Item {
            bytes: one.bytes,
            error: one.error().unwrap_or_default(),
        };
        let items: Vec<Vec<Item>> =
            self.groups.iter().map(|group| group.candidates.iter().map(item).collect()).collect();
        let values: usize = self.groups.iter().map(|group| group.values).sum();
        let smallest = |group: &Vec<Item>| group.iter().map(|one| one.bytes).min().unwrap_or(0);
        let least: usize = items.iter().map(smallest).sum();
        let Some(choice) = choose(&items, self.most_bytes(budget)) else {
            return Err(Fp4Error::Budget {
                asked: budget,
                least_bytes: least,
                least_bits: 8.0 * least as f64 / values as f64,
            });
        };
        let chosen: Vec<CandidateSensitivity> = self
            .groups
            .iter()
            .zip(&choice.items)
            .map(|(group, &item)| group.candidates[item].clone())
            .collect();
        let taken: usize = chosen.iter().map(|one| one.bytes).sum();
        Ok(BudgetChoice {
            config: self.config_of(&chosen),
            error: chosen.iter().filter_map(CandidateSensitivity::error).sum(),
            candidates: chosen,
            bits_per_weight: 8.0 * taken as f64 / values as f64,
            bound: choice.bound,
        })
    }

    /// The bytes that a budget allows.
    fn most_bytes(&self, budget: Budget) -> usize {
        match budget {
            // As many as there are, if it is more than any number of them.
            Budget::BitsPerWeight(bits) if bits >= 0.0 => {
                let weights: usize = self.groups.iter().map(|group| group.paths.len()).sum();
                let values: usize = self.groups.iter().map(|group| group.values).sum();
                ((bits * values as f64 / 8.0) as usize).saturating_add(weights * TENSOR_SCALE)
            }
            Budget::BitsPerWeight(_) => 0,
            Budget::Bytes(bytes) => bytes,
        }
    }

    /// The bytes of all weights as they are, if each may stay so.
    fn dense_bytes(&self) -> Option<usize> {
        let dense = |group: &GroupSensitivity| {
            let found = group.candidates.iter().find(|one| one.candidate == Candidate::Dense)?;
            Some(found.bytes)
        };
        self.groups.iter().map(dense).sum()
    }

    /// The configuration that makes this choice.
    fn config_of(&self, chosen: &[CandidateSensitivity]) -> Fp4Config {
        let mut config = self.config.clone();
        // What this said of weights that were not selected holds no longer once fewer are: their
        // numbers from either end, and siblings of which one was to be quantized.
        (config.keep_first, config.keep_last, config.unused) = (0, 0, Unused::Report);
        (config.overrides, config.include, config.exclude) = Default::default();
        for (group, one) in self.groups.iter().zip(chosen) {
            let Some(scheme) = one.candidate.scheme(&self.config) else { continue };
            for path in &group.paths {
                config = config.include(path.clone()).with(path.clone(), scheme);
            }
        }
        if config.include.is_empty() {
            config = config.exclude("**");
        }
        config
    }
}
