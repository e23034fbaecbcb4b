use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::search::SearchError;
use burn_fp4_ops::{Gram, gram};

use crate::Fp4Error;
use crate::calibrate::Calibrate;

/// What is known of the inputs of layers, by the path of their weight.
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
    grams: BTreeMap<String, Arc<Gram>>,
    unreached: BTreeSet<String>,
    /// Where it was found.
    devices: Vec<Device>,
}

impl fmt::Debug for Calibration {
    /// Without the matrices, which have millions of elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.iter().map(|(path, gram)| (path, (gram.rows(), gram.channels())));
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

    /// Adds inputs `[.., in]` of the layer whose weight has this path, to those added before.
    ///
    /// Every call reads a matrix `[in, in]` back from the device: few large batches beat many small ones.
    ///
    /// # Errors
    /// [`Fp4Error::Parameter`] naming the path: a value that is not finite, another number of channels than
    /// before, or a dtype that is not a float.
    pub fn add<const D: usize>(&mut self, path: &str, inputs: Tensor<D>) -> Result<(), Fp4Error> {
        let found =
            gram(inputs).map_err(|source| Fp4Error::Parameter { path: path.to_owned(), source })?;
        self.merge([path], found)
    }

    /// Adds statistics to those known. Layers that share what is known go on sharing it.
    pub(crate) fn merge<'a>(
        &mut self,
        paths: impl IntoIterator<Item = &'a str>,
        found: Gram,
    ) -> Result<(), Fp4Error> {
        let found = Arc::new(found);
        let mut times: BTreeMap<&str, usize> = BTreeMap::new();
        for path in paths {
            *times.entry(path).or_default() += 1;
        }
        // What is known, taken out: if nothing else holds it, it is added to where it is.
        let mut all: Vec<Shared<'_>> = Vec::new();
        for (path, times) in times {
            let known = self.grams.remove(path);
            let pointer = |known: &Option<Arc<Gram>>| known.as_ref().map(Arc::as_ptr);
            let same = |shared: &&mut Shared<'_>| {
                shared.times == times && pointer(&shared.known) == pointer(&known)
            };
            match all.iter_mut().find(same) {
                Some(shared) => shared.paths.push(path),
                None => all.push(Shared { known, times, paths: vec![path] }),
            }
        }
        let mut outcome = Ok(());
        for Shared { mut known, times, paths } in all {
            for _ in 0..times {
                let merged = match &mut known {
                    Some(sum) => Arc::make_mut(sum).merge(&found),
                    none => {
                        *none = Some(found.clone());
                        Ok(())
                    }
                };
                let named = |error: SearchError| Fp4Error::Parameter {
                    path: paths[0].to_owned(),
                    source: error.into(),
                };
                outcome = outcome.and(merged.map_err(named));
            }
            for path in paths {
                self.grams.extend(known.clone().map(|known| (path.to_owned(), known)));
            }
        }
        outcome
    }

    /// Takes statistics that were gathered elsewhere.
    pub fn insert(&mut self, path: impl Into<String>, gram: Gram) {
        self.grams.insert(path.into(), Arc::new(gram));
    }

    /// Paths, and what is known of the inputs there.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Gram)> {
        self.grams.iter().map(|(path, gram)| (path.as_str(), &**gram))
    }

    /// What is known of the inputs of a layer.
    pub fn get(&self, path: &str) -> Option<&Gram> {
        self.grams.get(path).map(|gram| &**gram)
    }

    /// Paths of matrices that no product of the forward pass contracted along their first axis, such as embeddings.
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
    paths: Vec<&'a str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_share_what_is_known_go_on_sharing_it() {
        let found = |value: f32| Gram::of(&[value; 4], 2).expect("finite");
        let mut calibration = Calibration::new();
        calibration.merge(["query", "key"], found(1.0)).unwrap();
        calibration.merge(["output"], found(1.0)).unwrap();
        // One of them is met twice.
        calibration.merge(["query", "key", "output", "output"], found(2.0)).unwrap();
        let [query, key, output] =
            ["query", "key", "output"].map(|path| calibration.get(path).unwrap());
        assert!(std::ptr::eq(query, key));
        assert_eq!((query.values(), query.rows()), (&[10.0; 4][..], 4));
        assert_eq!((output.values(), output.rows()), (&[18.0; 4][..], 6));
    }
}
