//! Records forward passes on a device that computes nothing.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use burn::backend::Capture;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::panic_message;
use burn_ir::TensorId;

use crate::error::Fp4Error;
use crate::walk::parameters::{MapParameters, map_parameters};

use super::layer_inputs::RecordedParameter;
use super::recording::Recording;
use super::values::Values;

/// Records forward passes, one after the other.
pub(crate) struct Recorder {
    device: Device,
    values: Values,
    /// Set once a pass has failed on the device, whose state is then unknown.
    failed: bool,
}

/// Capture devices that no calibration uses now.
///
/// Burn numbers them by 16 bits, uses no number twice and keeps the settings of each for as long
/// as the process runs, so a new one for every calibration would run out of numbers.
static FREE_DEVICES: Mutex<Vec<Device>> = Mutex::new(Vec::new());

impl Recorder {
    /// # Errors
    /// [`Fp4Error::Recording`] if this process has no capture device left.
    pub(crate) fn new() -> Result<Self, Fp4Error> {
        let free = FREE_DEVICES.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let device = free.map_or_else(|| catch_unwind(Device::capture), Ok).map_err(|_| {
            let problem = "this process has used up Burn's 65536 capture devices, one for each \
                           calibration that failed and one for each that ran next to others";
            Fp4Error::Recording { problem: problem.to_owned() }
        })?;
        Ok(Self { device, values: Values::default(), failed: false })
    }

    /// Records a forward pass over a batch. Nothing is computed, and no float parameter is read.
    /// `forward` says which of its outputs are kept.
    ///
    /// # Errors
    /// [`Fp4Error::Recording`] if the pass reads values, or panics for another reason.
    pub(crate) fn record<M: Module, I: Module, O>(
        &mut self,
        model: &M,
        batch: I,
        forward: &mut impl FnMut(&M, I) -> (O, Vec<TensorId>),
    ) -> Result<Recording, Fp4Error> {
        let capture = &self.device;
        let mut kept = Vec::new();
        let mut stand_ins = StandIns { device: capture.clone(), found: BTreeMap::new() };
        let recorded = catch_unwind(AssertUnwindSafe(|| {
            capture.capture_scope(|scope| {
                // Clones share running statistics, so that these would be moved for all of them.
                let model = map_parameters(model.valid(), &mut stand_ins).to_device(capture);
                let outputs;
                (outputs, kept) = forward(&model, batch.to_device(capture));
                drop(outputs);
                scope.complete([], [])
            })
        }));
        let failed = |found: &str| {
            let problem = format!(
                "the forward pass cannot be recorded: {found}; it has to run the module on the \
                 batch it is given, without reading values (control flow that depends on data \
                 cannot be recorded)"
            );
            Fp4Error::Recording { problem }
        };
        match recorded {
            Ok(Ok(graph)) => {
                let recording = Recording::new(graph, stand_ins.found, &kept, &mut self.values);
                recording.ok_or_else(|| failed("it gives an output that it does not compute"))
            }
            Ok(Err(error)) => {
                self.failed = true;
                Err(failed(&error.to_string()))
            }
            Err(panic) => {
                self.failed = true;
                Err(failed(&panic_message(&*panic)))
            }
        }
    }

    /// The values of all recordings.
    pub(crate) fn into_values(mut self) -> Values {
        std::mem::take(&mut self.values)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.failed {
            FREE_DEVICES.lock().unwrap_or_else(PoisonError::into_inner).push(self.device.clone());
        }
    }
}

/// Puts tensors of the capture device in the place of float parameters.
struct StandIns {
    device: Device,
    found: BTreeMap<String, RecordedParameter>,
}

impl MapParameters for StandIns {
    fn float<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let device = &self.device;
        let param = param.map(|tensor| Tensor::zeros(tensor.shape(), (device, tensor.dtype())));
        let stand_in = param.val().try_into_primitive::<Capture>().expect("just made there");
        let (id, shape) = (stand_in.id(), param.shape().to_vec());
        self.found.insert(path.to_owned(), RecordedParameter::new(id, shape));
        param
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Distribution, TensorData};

    use super::*;

    fn record<M: Module, I: Module, O>(
        model: &M,
        batches: impl IntoIterator<Item = I>,
        mut forward: impl FnMut(&M, I) -> O,
    ) -> (Vec<Recording>, Values) {
        let mut recorder = Recorder::new().unwrap();
        let mut forward = |model: &M, batch| (forward(model, batch), Vec::new());
        let record = |batch| recorder.record(model, batch, &mut forward).unwrap();
        let recordings = batches.into_iter().map(record).collect();
        (recordings, recorder.into_values())
    }

    #[test]
    fn calibrations_one_after_the_other_do_not_run_out_of_capture_devices() {
        for number in 0..=u32::from(u16::MAX) + 1 {
            let recorder = Recorder::new();
            assert!(recorder.is_ok(), "number {number}");
        }
    }

    #[test]
    fn views_take_no_memory_of_their_own() {
        let device = Device::flex();
        let mlp = [LinearConfig::new(4, 8), LinearConfig::new(8, 4)];
        let mlp = mlp.map(|config| config.with_bias(false).init(&device)).to_vec();
        let batch = Tensor::<3>::ones([2, 3, 4], &device);
        // Every tensor of four channels has 96 bytes.
        let (recordings, values) = record(&mlp, [batch], |mlp: &Vec<_>, x: Tensor<3>| {
            let [up, down]: &[Linear; 2] = mlp[..].try_into().expect("two layers");
            let hidden = up.forward(x.clone());
            // Reshaping what was transposed copies it.
            let turned = x.clone().swap_dims(1, 2).reshape([2, 3, 4]);
            down.forward(hidden) + turned + x
        });
        let recording = &recordings[0];
        let inputs: Vec<_> = recording.inputs.iter().map(|input| &input.weights[0].path).collect();
        assert_eq!(inputs, ["0.weight", "1.weight"]);
        // The batch, twice as much of what is hidden, and the copy; the last product is not run.
        let memory = recording.memory(&values);
        assert_eq!((memory.waiting, memory.peak), (4 * 96, 4 * 96));
    }

    #[test]
    fn values_that_recordings_have_in_common_are_kept_once() {
        let device = Device::flex();
        let random = |rows| Tensor::<2>::random([rows, 8], Distribution::Default, &device);
        let layer = LinearConfig::new(8, 4).with_bias(false).init(&device);
        let model = (vec![random(16), random(16)], layer);
        let batches = [random(1), random(1), random(1)];
        let forward = |(table, layer): &(Vec<Tensor<2>>, Linear), x: Tensor<2>| {
            layer.forward(table.iter().fold(x, |x, table| x + table.clone()))
        };
        let (recordings, values) = record(&model, batches, forward);
        assert_eq!(recordings.iter().map(|recording| recording.values.len()).sum::<usize>(), 9);
        let sizes: Vec<_> = values.shared().map(|(_, data)| data.num_elements()).collect();
        assert_eq!((sizes, values.all.len()), (vec![128; 2], 5));
        assert_eq!(values.shared_bytes(), 2 * 128 * 4);
        // Both sums.
        let peaks = recordings.iter().map(|recording| recording.memory(&values).peak);
        assert_eq!(peaks.collect::<Vec<_>>(), [2 * 512; 3]);
    }

    /// By input: how many parts it has, their rows, and the slices of the weight.
    fn experts<const D: usize>(
        input: [usize; D],
        forward: impl Fn(Tensor<3>, Tensor<D>) -> Tensor<D>,
    ) -> Vec<(usize, usize, Range<usize>, usize)> {
        let device = Device::flex();
        let weights = vec![Param::from_tensor(Tensor::<3>::ones([3, 4, 5], &device))];
        let batch = Tensor::<D>::ones(input, &device);
        let run = |weights: &Vec<Param<Tensor<3>>>, x| forward(weights[0].val(), x);
        let (recordings, _) = record(&weights, [batch], run);
        let inputs = recordings[0].inputs.iter();
        let found = inputs.map(|input| {
            let [weight] = &input.weights[..] else { panic!("one weight") };
            (input.slices, input.rows(), weight.slices.clone(), weight.axis)
        });
        found.collect()
    }

    #[test]
    fn every_expert_has_inputs_of_its_own() {
        assert_eq!(experts([3, 2, 4], |w, x| x.matmul(w)), [(3, 2, 0..3, 1)]);
        let transposed = |w: Tensor<3>, x: Tensor<3>| x.matmul(w.swap_dims(1, 2));
        assert_eq!(experts([3, 2, 5], transposed), [(3, 2, 0..3, 2)]);
        // All of them the same.
        assert_eq!(experts([1, 2, 4], |w, x| x.matmul(w)), [(1, 2, 0..3, 1)]);
        let batched = |w: Tensor<3>, x: Tensor<4>| x.matmul(w.unsqueeze());
        assert_eq!(experts([7, 3, 2, 4], batched), [(3, 14, 0..3, 1)]);
        assert_eq!(experts([7, 1, 2, 4], batched), [(1, 14, 0..3, 1)]);
        // One by one.
        let one = |w: Tensor<3>, x: Tensor<2>| {
            let of = |expert: usize| w.clone().slice([expert..expert + 1, 0..4]).reshape([4, 5]);
            x.clone().matmul(of(1)) + (x + 1.0).matmul(of(2))
        };
        assert_eq!(experts([2, 4], one), [(1, 2, 1..2, 1), (1, 2, 2..3, 1)]);
        let some = |w: Tensor<3>, x: Tensor<3>| x.matmul(w.slice([1..3, 0..4]));
        assert_eq!(experts([2, 2, 4], some), [(2, 2, 1..3, 1)]);
        // A part of its columns is another weight.
        let columns = |w: Tensor<3>, x: Tensor<3>| x.matmul(w.slice([0..3, 0..4, 1..4]));
        assert!(experts([3, 2, 4], columns).is_empty());
    }

    #[test]
    fn inputs_are_cut_into_those_of_experts() {
        let device = Device::flex();
        let weights = vec![Param::from_tensor(Tensor::<3>::ones([3, 4, 5], &device))];
        let batch = Tensor::<4>::ones([2, 3, 2, 4], &device);
        let (recordings, _) = record(&weights, [batch], |weights: &Vec<Param<Tensor<3>>>, x| {
            let weight: Tensor<4> = weights[0].val().unsqueeze();
            Tensor::<4>::matmul(x, weight)
        });
        let input = &recordings[0].inputs[0];
        let rows: Vec<f32> = (0..12).flat_map(|row| [row as f32; 4]).collect();
        let rows = Tensor::<2>::from_data(TensorData::new(rows, [12, 4]), &device);
        let first = |part: Tensor<2>| part.slice([0..4, 0..1]).into_data().iter::<f32>().collect();
        let parts: Vec<Vec<f32>> = input.cut(rows).into_iter().map(first).collect();
        assert_eq!(parts, [[0.0, 1.0, 6.0, 7.0], [2.0, 3.0, 8.0, 9.0], [4.0, 5.0, 10.0, 11.0]]);
        assert_eq!(input.uses(2).collect::<Vec<_>>(), [("0", 1, 2)]);
    }
}
