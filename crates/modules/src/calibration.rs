use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::search::SearchError;
use burn_fp4_ops::{Gram, gram};

use crate::Fp4Error;
use crate::calibrate::Calibrate;

/// What is known of the inputs of layers, by the path of their weight and the axis of it that they meet: 0 in `x W`, 1 in
/// `x W^T`. It is of use to weights that are quantized along the same axis.
///
/// Gathered by running a module that knows nothing of it:
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp4_modules::{Calibration, Fp4Config, Fp4Module, ops::Gptq};
///
/// let device = Device::flex();
/// let mut model = LinearConfig::new(64, 32).init(&device);
/// let batches = (0..4).map(|_| Tensor::<2>::random([64, 64], Distribution::Normal(0.0, 1.0), &device));
///
/// let calibration = Calibration::of(&model).run(batches, |model: &Linear, batch| model.forward(batch))?;
/// let config = Fp4Config::nvfp4().gptq(Gptq::default()).with_calibration(&calibration);
/// let report = model.quantize_fp4(&config)?;
/// # assert!(report.to_string().contains("gptq"));
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
///
/// or from inputs that were kept elsewhere, by [`add`](Self::add). Clones share what they hold.
#[derive(Clone, Default, PartialEq)]
pub struct Calibration {
    grams: BTreeMap<(String, usize), Arc<Gram>>,
    unreached: BTreeSet<String>,
    /// Where it was found.
    devices: Vec<Device>,
}

impl fmt::Debug for Calibration {
    /// Without the matrices, which have millions of elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known =
            self.iter().map(|(path, axis, gram)| ((path, axis), (gram.rows(), gram.channels())));
        f.debug_map().entries(known).finish()
    }
}

impl Calibration {
    /// Of nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Of a module, from forward passes: to be [run](Calibrate::run).
    pub fn of<M: Module>(model: &M) -> Calibrate<'_, M> {
        Calibrate::new(model)
    }

    /// Adds inputs `[.., in]` of the layer whose weight has this path and this axis of length `in`, to those added
    /// before.
    ///
    /// Every call reads a matrix `[in, in]` back from the device: few large batches beat many small ones.
    ///
    /// # Errors
    /// [`Fp4Error::Parameter`] naming the path: a value that is not finite, another number of channels than
    /// before, or a dtype that is not a float.
    pub fn add<const D: usize>(
        &mut self,
        path: &str,
        axis: usize,
        inputs: Tensor<D>,
    ) -> Result<(), Fp4Error> {
        let found =
            gram(inputs).map_err(|source| Fp4Error::Parameter { path: path.to_owned(), source })?;
        self.merge([(path, axis)], found)
    }

    /// Adds statistics to those known. Layers that share what is known go on sharing it.
    pub(crate) fn merge<'a>(
        &mut self,
        uses: impl IntoIterator<Item = (&'a str, usize)>,
        found: Gram,
    ) -> Result<(), Fp4Error> {
        let found = Arc::new(found);
        let mut times: BTreeMap<(&str, usize), usize> = BTreeMap::new();
        for of in uses {
            *times.entry(of).or_default() += 1;
        }
        // What is known, taken out: if nothing else holds it, it is added to where it is.
        let mut all: Vec<Shared<'_>> = Vec::new();
        for ((path, axis), times) in times {
            let known = self.grams.remove(&(path.to_owned(), axis));
            let pointer = |known: &Option<Arc<Gram>>| known.as_ref().map(Arc::as_ptr);
            let same = |shared: &&mut Shared<'_>| {
                shared.times == times && pointer(&shared.known) == pointer(&known)
            };
            match all.iter_mut().find(same) {
                Some(shared) => shared.uses.push((path, axis)),
                None => all.push(Shared { known, times, uses: vec![(path, axis)] }),
            }
        }
        let mut outcome = Ok(());
        for Shared { mut known, times, uses } in all {
            for _ in 0..times {
                let merged = match &mut known {
                    Some(sum) => Arc::make_mut(sum).merge(&found),
                    none => {
                        *none = Some(found.clone());
                        Ok(())
                    }
                };
                let named = |error: SearchError| Fp4Error::Parameter {
                    path: uses[0].0.to_owned(),
                    source: error.into(),
                };
                outcome = outcome.and(merged.map_err(named));
            }
            for (path, axis) in uses {
                self.grams.extend(known.clone().map(|known| ((path.to_owned(), axis), known)));
            }
        }
        outcome
    }

    /// Takes statistics that were gathered elsewhere.
    pub fn insert(&mut self, path: impl Into<String>, axis: usize, gram: Gram) {
        self.grams.insert((path.into(), axis), Arc::new(gram));
    }

    /// Paths, axes, and what is known of the inputs there.
    pub fn iter(&self) -> impl Iterator<Item = (&str, usize, &Gram)> {
        self.grams.iter().map(|((path, axis), gram)| (path.as_str(), *axis, &**gram))
    }

    /// What is known of the inputs that meet this axis of a weight.
    pub fn get(&self, path: &str, axis: usize) -> Option<&Gram> {
        self.grams.get(&(path.to_owned(), axis)).map(|gram| &**gram)
    }

    /// Paths of matrices that the forward pass multiplies nothing by, such as embeddings.
    pub fn unreached(&self) -> impl Iterator<Item = &str> {
        self.unreached.iter().map(String::as_str)
    }

    pub(crate) fn set_unreached(&mut self, paths: BTreeSet<String>) {
        self.unreached = paths;
    }

    /// The devices that it was found on, among which the weights are divided that are quantized by it; none where it was
    /// gathered elsewhere.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub(crate) fn set_devices(&mut self, devices: Vec<Device>) {
        self.devices = devices;
    }
}

/// What is known of layers that share it, and how often each meets what is added.
struct Shared<'a> {
    known: Option<Arc<Gram>>,
    times: usize,
    uses: Vec<(&'a str, usize)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_share_what_is_known_go_on_sharing_it() {
        let found = |value: f32| Gram::of(&[value; 4], 2).expect("finite");
        let mut calibration = Calibration::new();
        let merge = |calibration: &mut Calibration, paths: &[&'static str], found| {
            calibration.merge(paths.iter().map(|path| (*path, 0)), found).unwrap()
        };
        merge(&mut calibration, &["query", "key"], found(1.0));
        merge(&mut calibration, &["output"], found(1.0));
        // One of them is met twice.
        merge(&mut calibration, &["query", "key", "output", "output"], found(2.0));
        let [query, key, output] =
            ["query", "key", "output"].map(|path| calibration.get(path, 0).unwrap());
        assert!(std::ptr::eq(query, key));
        assert_eq!((query.values(), query.rows()), (&[10.0; 4][..], 4));
        assert_eq!((output.values(), output.rows()), (&[18.0; 4][..], 6));
    }
}
