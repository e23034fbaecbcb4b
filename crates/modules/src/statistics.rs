//! [`Calibration`]: statistics of the inputs of layers, by weight. [`Inputs`]: of one weight.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use burn_fp4_ops::search::SearchError;
use burn_fp4_ops::{Gram, gram};

use crate::error::Fp4Error;

/// Statistics of the inputs of layers: a Gram matrix `[in, in]` by the path of the weight, the axis
/// of it that is contracted (0 in `x W`, 1 in `x W^T`), and the slice of it.
///
/// A weight of rank 2 has one slice. One of higher rank is a stack of matrices, such as those
/// `[experts, in, out]` of a mixture of experts; its slices are numbered over the leading axes.
/// Statistics are of use to weights that are quantized along the same axis.
///
/// Gathered by running an unmodified module:
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp4_modules::{Calibration, Fp4Config, Fp4Module, Method};
///
/// let device = Device::flex();
/// let mut model = LinearConfig::new(64, 32).init(&device);
/// let normal = Distribution::Normal(0.0, 1.0);
/// let batches = (0..4).map(|_| Tensor::<2>::random([64, 64], normal, &device));
///
/// let forward = |model: &Linear, batch| model.forward(batch);
/// let calibration = Calibration::of(&model).run(batches, forward)?;
/// let config = Fp4Config::nvfp4().method(Method::GPTQ).with_calibration(&calibration);
/// let report = model.quantize_fp4(&config)?;
/// # assert!(report.to_string().contains("gptq"));
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
///
/// or from inputs that were kept elsewhere:
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_modules::{Calibration, ops::Gram};
///
/// let mut calibration = Calibration::new();
/// for tokens in [3, 5] {
///     calibration.add("query.weight", 0, Tensor::<2>::ones([tokens, 64], &Device::flex()))?;
/// }
/// calibration.insert("key.weight", 0, Gram::of(&[1.0; 2 * 64], 64)?);
/// calibration.insert_slice("experts.up", 1, 7, Gram::of(&[1.0; 2 * 64], 64)?);
/// assert_eq!(calibration.get("query.weight", 0).unwrap().rows(), 3 + 5);
/// assert_eq!(calibration.slices("experts.up", 1), 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Clones share what they hold.
#[derive(Clone, Default, PartialEq)]
pub struct Calibration {
    grams: BTreeMap<(String, usize, usize), Arc<Gram>>,
    unreached: BTreeSet<String>,
    /// Where it was gathered.
    devices: Vec<Device>,
}

impl fmt::Debug for Calibration {
    /// Without the matrices, which have millions of elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self
            .iter()
            .map(|(path, axis, slice, gram)| ((path, axis, slice), (gram.rows(), gram.channels())));
        f.debug_map().entries(entries).finish()
    }
}

impl Calibration {
    /// Without any statistics.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds inputs `[.., in]` of the layer whose weight has this path and this axis of length `in`,
    /// to those added before. Of a weight of rank 3 or more these are the inputs of slice 0; for
    /// other slices there is [`insert_slice`](Self::insert_slice).
    ///
    /// Every call reads a matrix `[in, in]` back from the device: few large batches beat many small
    /// ones.
    ///
    /// # Errors
    /// [`Fp4Error::Parameter`] naming the path: a value that is not finite, another number of
    /// channels than before, or a dtype that is not a float; [`Fp4Error::Device`].
    pub fn add<const D: usize>(
        &mut self,
        path: &str,
        axis: usize,
        inputs: Tensor<D>,
    ) -> Result<(), Fp4Error> {
        let found = gram(inputs).map_err(|problem| Fp4Error::at(path, problem))?;
        self.merge([(path, axis, 0)], found)
    }

    /// Adds statistics to slices of weights. Slices that shared statistics before
    /// share the sums.
    pub(crate) fn merge<'a>(
        &mut self,
        uses: impl IntoIterator<Item = (&'a str, usize, usize)>,
        found: Gram,
    ) -> Result<(), Fp4Error> {
        let found = Arc::new(found);
        let mut times: BTreeMap<(&str, usize, usize), usize> = BTreeMap::new();
        for of in uses {
            *times.entry(of).or_default() += 1;
        }
        // Taken out: statistics that nothing else holds are added to where they are.
        let mut all: Vec<Sharing<'_>> = Vec::new();
        for ((path, axis, slice), times) in times {
            let known = self.grams.remove(&(path.to_owned(), axis, slice));
            let pointer = |known: &Option<Arc<Gram>>| known.as_ref().map(Arc::as_ptr);
            let same = |shared: &&mut Sharing<'_>| {
                shared.times == times && pointer(&shared.known) == pointer(&known)
            };
            match all.iter_mut().find(same) {
                Some(shared) => shared.uses.push((path, axis, slice)),
                None => all.push(Sharing { known, times, uses: vec![(path, axis, slice)] }),
            }
        }
        let mut outcome = Ok(());
        for Sharing { mut known, times, uses } in all {
            for _ in 0..times {
                let merged = match &mut known {
                    Some(sum) => Arc::make_mut(sum).merge(&found),
                    none => {
                        *none = Some(found.clone());
                        Ok(())
                    }
                };
                outcome = outcome.and(merged.map_err(|problem| Fp4Error::at(uses[0].0, problem)));
            }
            for (path, axis, slice) in uses {
                let known = known.clone().map(|known| ((path.to_owned(), axis, slice), known));
                self.grams.extend(known);
            }
        }
        outcome
    }

    /// Sets the statistics of slice 0 to those that were gathered elsewhere.
    pub fn insert(&mut self, path: impl Into<String>, axis: usize, gram: Gram) {
        self.insert_slice(path, axis, 0, gram);
    }

    /// Sets the statistics of a slice to those that were gathered elsewhere.
    pub fn insert_slice(&mut self, path: impl Into<String>, axis: usize, slice: usize, gram: Gram) {
        self.grams.insert((path.into(), axis, slice), Arc::new(gram));
    }

    /// Iterates over the statistics, with the path, axis and slice of their weights.
    pub fn iter(&self) -> impl Iterator<Item = (&str, usize, usize, &Gram)> {
        let grams = self.grams.iter();
        grams.map(|((path, axis, slice), gram)| (path.as_str(), *axis, *slice, &**gram))
    }

    /// Iterates as [`iter`](Self::iter), over statistics to be shared.
    pub(crate) fn shared(&self) -> impl Iterator<Item = (&str, usize, usize, &Arc<Gram>)> {
        let grams = self.grams.iter();
        grams.map(|((path, axis, slice), gram)| (path.as_str(), *axis, *slice, gram))
    }

    /// Statistics of the inputs that are contracted with this axis of slice 0 of a weight.
    #[must_use]
    pub fn get(&self, path: &str, axis: usize) -> Option<&Gram> {
        self.get_slice(path, axis, 0)
    }

    /// Statistics of the inputs that are contracted with this axis of a slice of a weight.
    ///
    /// ```
    /// use burn_fp4_modules::{Calibration, ops::Gram};
    ///
    /// let mut calibration = Calibration::new();
    /// calibration.insert_slice("experts", 1, 7, Gram::of(&[1.0; 2 * 64], 64)?);
    /// assert_eq!(calibration.get_slice("experts", 1, 7).unwrap().rows(), 2);
    /// assert!(calibration.get_slice("experts", 1, 6).is_none());
    /// assert_eq!(calibration.tokens("experts", 1, 7), 2);
    /// # Ok::<(), burn_fp4_modules::ops::search::SearchError>(())
    /// ```
    #[must_use]
    pub fn get_slice(&self, path: &str, axis: usize, slice: usize) -> Option<&Gram> {
        self.grams.get(&(path.to_owned(), axis, slice)).map(|gram| &**gram)
    }

    /// One more than the last slice that there are statistics for; 0 if there is none.
    #[must_use]
    pub fn slices(&self, path: &str, axis: usize) -> usize {
        let key = |slice| (path.to_owned(), axis, slice);
        let mut slices = self.grams.range(key(0)..=key(usize::MAX));
        slices.next_back().map_or(0, |((_, _, slice), _)| slice + 1)
    }

    /// Number of inputs of a slice that were not all zero: for an expert whose other inputs are
    /// masked, the inputs that it was chosen for.
    pub fn tokens(&self, path: &str, axis: usize, slice: usize) -> usize {
        self.get_slice(path, axis, slice).map_or(0, Gram::tokens)
    }

    /// Paths of matrices that the forward pass multiplies nothing by, such as embeddings.
    ///
    /// ```
    /// use burn::nn::{EmbeddingConfig, LinearConfig};
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_fp4_modules::Calibration;
    ///
    /// let device = Device::flex();
    /// let embedding = EmbeddingConfig::new(10, 64).init(&device);
    /// let model = (embedding, LinearConfig::new(64, 32).init(&device));
    /// let calibration = Calibration::of(&model)
    ///     .run([Tensor::<2, Int>::ones([1, 4], &device)], |(embedding, linear), tokens| {
    ///         linear.forward(embedding.forward(tokens))
    ///     })?;
    /// assert_eq!(calibration.unreached().collect::<Vec<_>>(), ["0.weight"]);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    pub fn unreached(&self) -> impl Iterator<Item = &str> {
        self.unreached.iter().map(String::as_str)
    }

    pub(crate) fn set_unreached(&mut self, paths: BTreeSet<String>) {
        self.unreached = paths;
    }

    /// The devices that the statistics were gathered on; none if they come from elsewhere. Weights
    /// that are quantized by them are divided among these devices.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub(crate) fn set_devices(&mut self, devices: Vec<Device>) {
        self.devices = devices;
    }
}

/// Statistics of the inputs of a weight: one Gram matrix for each slice over its leading axes, such
/// as the experts of `[experts, in, out]`; a matrix is one slice. Weights with the same inputs
/// share them.
#[derive(Default, Clone)]
pub(crate) struct Inputs {
    slices: Vec<Option<Arc<Gram>>>,
}

impl Inputs {
    /// Makes a container without any statistics.
    pub(crate) fn new(slices: usize) -> Self {
        Self { slices: vec![None; slices] }
    }

    /// Adds statistics of a slice to the existing ones.
    pub(crate) fn add(&mut self, slice: usize, gram: &Arc<Gram>) -> Result<(), SearchError> {
        match &mut self.slices[slice] {
            Some(sum) => Arc::make_mut(sum).merge(gram)?,
            none => *none = Some(gram.clone()),
        }
        Ok(())
    }

    /// Returns the Gram matrix of a slice, if inputs other than zeros were seen.
    pub(crate) fn of(&self, slice: usize) -> Option<&Arc<Gram>> {
        let gram = self.slices.get(slice)?.as_ref()?;
        (gram.tokens() > 0).then_some(gram)
    }

    /// Returns the Gram matrices of all slices that have one.
    pub(crate) fn grams(&self) -> impl Iterator<Item = &Arc<Gram>> {
        self.slices.iter().flatten()
    }
}

/// Slices of weights that share statistics, and how many times new ones are added to these.
struct Sharing<'a> {
    known: Option<Arc<Gram>>,
    times: usize,
    uses: Vec<(&'a str, usize, usize)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_share_statistics_go_on_sharing_them() {
        let found = |value: f32| Gram::of(&[value; 4], 2).expect("finite");
        let mut calibration = Calibration::new();
        let merge = |calibration: &mut Calibration, paths: &[&'static str], found| {
            calibration.merge(paths.iter().map(|path| (*path, 0, 0)), found).unwrap()
        };
        merge(&mut calibration, &["query", "key"], found(1.0));
        merge(&mut calibration, &["output"], found(1.0));
        // One of them twice.
        merge(&mut calibration, &["query", "key", "output", "output"], found(2.0));
        let [query, key, output] =
            ["query", "key", "output"].map(|path| calibration.get(path, 0).unwrap());
        assert!(std::ptr::eq(query, key));
        assert_eq!((query.values(), query.rows()), (&[10.0; 4][..], 4));
        assert_eq!((output.values(), output.rows()), (&[18.0; 4][..], 6));
    }

    #[test]
    fn slices_have_statistics_of_their_own() {
        let mut calibration = Calibration::new();
        let found = |x: &[f32]| Gram::of(x, 2).expect("finite");
        calibration.merge([("experts", 1, 0), ("experts", 1, 1)], found(&[1.0; 4])).unwrap();
        calibration.merge([("experts", 1, 1)], found(&[0.0, 0.0, 0.0, 2.0])).unwrap();
        calibration.insert_slice("experts", 1, 3, found(&[0.0; 2]));
        assert_eq!((calibration.slices("experts", 1), calibration.slices("experts", 0)), (4, 0));
        let tokens = |slice| calibration.tokens("experts", 1, slice);
        assert_eq!([0, 1, 2, 3].map(tokens), [2, 3, 0, 0]);
        assert_eq!(calibration.get("experts", 1), calibration.get_slice("experts", 1, 0));
        assert_eq!(calibration.get_slice("experts", 1, 2), None);
        let slices: Vec<_> = calibration.iter().map(|(_, _, slice, _)| slice).collect();
        assert_eq!(slices, [0, 1, 3]);
    }
}
