//! Statistics of inputs as the command `fp4` reads them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn_fp4_ops::Gram;
use safetensors::{Dtype, View, serialize_to_file};

use crate::error::Fp4Error;
use crate::statistics::Calibration;

use super::map::CheckpointMap;
use super::names::{Names, Wanted};

impl Calibration {
    /// Writes the statistics for `fp4 quantize --calibration`: a safetensors file that holds for
    /// each weight, under the name that the map gives it in checkpoints, `X^T X [in, in]` in f32;
    /// of stacked matrices `[experts, in, in]`, zeros for an expert without inputs. Where only
    /// blocks of it were gathered, it holds the mean squares of the inputs, `[in]` or
    /// `[experts, in]`. The map is that of [`save_fp4`](crate::Fp4Module::save_fp4).
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn_fp4_modules::{Calibration, CheckpointMap};
    ///
    /// # let folder = std::env::temp_dir().join("burn-fp4-doc-statistics");
    /// # std::fs::create_dir_all(&folder).unwrap();
    /// let device = Device::flex();
    /// let layers = vec![LinearConfig::new(64, 32).init(&device)];
    /// let batches = [Tensor::<2>::random([64, 64], Distribution::Default, &device)];
    /// let forward = |layers: &Vec<Linear>, batch| layers[0].forward(batch);
    /// let calibration = Calibration::of(&layers).run(batches, forward)?;
    ///
    /// // `0.weight` is `model.layers.0.weight` in the checkpoint.
    /// let map = CheckpointMap::new()
    ///     .rename(r"^model\.layers\.", "")
    ///     .rename_back("^", "model.layers.");
    /// calibration.save(folder.join("statistics.safetensors"), &map)?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::Statistics`] for a file that cannot be written, for a weight of which inputs
    /// along both axes are known, or that two paths lead to, and for a name that
    /// [`rename`](CheckpointMap::rename) does not lead back from; [`Fp4Error::Rename`] and
    /// [`Fp4Error::Experts`] for a map that is none.
    pub fn save(&self, path: impl AsRef<Path>, map: &CheckpointMap) -> Result<(), Fp4Error> {
        let path = path.as_ref();
        let failed = |problem: String| Fp4Error::Statistics { path: path.to_owned(), problem };
        let names = Names::new(map)?;
        let mut tensors: BTreeMap<String, BTreeMap<usize, &Gram>> = BTreeMap::new();
        for (weight, _, slice, gram) in self.iter() {
            let (name, at) = match names.wanted(weight, "") {
                Wanted::One(wanted) => (wanted[0].clone(), slice),
                Wanted::Each(before, behind) => (Wanted::numbered(&before, &behind, slice), 0),
                Wanted::Matrix(name, index) => (name, index),
            };
            let tensor = names.saved(&name, weight);
            let tensor = tensor.map_err(|mismatch| failed(mismatch.to_string()))?;
            let matrices = tensors.entry(tensor).or_default();
            let fits = matrices.values().all(|other| other.channels() == gram.channels());
            if matrices.insert(at, gram).is_some() || !fits {
                return Err(failed(format!("`{name}`: several statistics, one of `{weight}`")));
            }
        }
        // Experts behind the last one that has inputs.
        let mut experts: BTreeMap<String, usize> = BTreeMap::new();
        for weight in self.unreached() {
            if let Wanted::Matrix(name, index) = names.wanted(weight, "") {
                let count = experts.entry(names.in_file(&name)).or_default();
                *count = (*count).max(index + 1);
            }
        }
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".part");
        let unfinished = PathBuf::from(unfinished);
        let tensors = tensors.into_iter().map(|(name, grams)| {
            let least = experts.get(&name).copied().unwrap_or(0);
            (name, Statistics::new(grams, least))
        });
        let written = serialize_to_file(tensors, None, &unfinished)
            .map_err(|error| error.to_string())
            .and_then(|()| fs::rename(&unfinished, path).map_err(|error| error.to_string()));
        written.map_err(|problem| {
            // What was begun; there may be nothing.
            let _ = fs::remove_file(&unfinished);
            failed(problem)
        })
    }
}

/// A tensor of the file, whose values are made when they are written.
struct Statistics<'a> {
    shape: Vec<usize>,
    whole: bool,
    matrices: Vec<Option<&'a Gram>>,
}

impl<'a> Statistics<'a> {
    /// Makes the statistics of a stack from matrices by number, of which there is at least one. The
    /// stack has at least `least` matrices, including those without inputs.
    fn new(grams: BTreeMap<usize, &'a Gram>, least: usize) -> Self {
        let count = grams.keys().next_back().map_or(0, |last| last + 1).max(least);
        let channels = grams.values().next().map_or(0, |gram| gram.channels());
        let whole = grams.values().all(|gram| gram.is_whole());
        let stacked = (count > 1).then_some(count);
        let matrix = if whole { vec![channels; 2] } else { vec![channels] };
        let shape = stacked.into_iter().chain(matrix).collect();
        let matrices = (0..count).map(|at| grams.get(&at).copied()).collect();
        Self { shape, whole, matrices }
    }

    fn values(&self, gram: Option<&Gram>) -> Vec<f32> {
        let matrix = &self.shape[self.shape.len() - if self.whole { 2 } else { 1 }..];
        let Some(gram) = gram else { return vec![0.0; matrix.iter().product()] };
        if !self.whole {
            let rows = gram.rows().max(1) as f64;
            return gram.diagonal().map(|sum| (sum / rows) as f32).collect();
        }
        let channels = gram.channels();
        let value = |at: usize| gram.get(at / channels, at % channels).expect("it is whole") as f32;
        (0..channels * channels).map(value).collect()
    }
}

impl View for Statistics<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let values = self.matrices.iter().flat_map(|gram| self.values(*gram));
        Cow::Owned(values.flat_map(f32::to_le_bytes).collect())
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * size_of::<f32>()
    }
}
