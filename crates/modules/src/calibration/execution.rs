//! A recorded forward pass under way on a device, operation by operation.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::Interpreter;
use burn_ir::{TensorId, TensorIr};

use crate::error::Fp4Error;
use crate::pack::weight::AnyWeight;
use crate::walk::parameters::{ModulePath, VisitParameters, visit_parameters};

use super::layer_inputs::RecordedParameter;
use super::recording::Recording;
use super::values::Values;

/// A forward pass under way.
pub(crate) struct Execution<'a> {
    pub(crate) recording: &'a Recording,
    pub(crate) interpreter: Interpreter,
    next: usize,
}

impl<'a> Execution<'a> {
    /// Takes the values that recordings share from `constants` on the same device.
    pub(crate) fn start<M: Module>(
        device: &Device,
        model: &M,
        recording: &'a Recording,
        values: &Values,
        constants: &mut Interpreter,
    ) -> Result<Self, Fp4Error> {
        let parameters = &recording.parameters;
        let mut insert =
            InsertParameters { parameters, interpreter: Interpreter::on(device)?, error: None };
        visit_parameters(model, &mut insert);
        if let Some(error) = insert.error {
            return Err(error);
        }
        let mut interpreter = insert.interpreter;
        for (id, &number) in &recording.values {
            let value = values.get(number);
            if value.is_shared() {
                let (shape, dtype) = (value.data.shape().clone(), value.data.dtype());
                let constant = TensorIr::uninit(TensorId::new(number as u64), shape, dtype);
                interpreter.share(*id, constants, &constant)?;
            } else {
                interpreter.insert_data(*id, value.data.clone());
            }
        }
        Ok(Self { recording, interpreter, next: 0 })
    }

    /// Runs all operations before one.
    pub(crate) fn advance(&mut self, to: usize) {
        while self.next < to {
            self.interpreter.run(&self.recording.operations[self.next]);
            for tensor in &self.recording.forgotten[self.next] {
                self.interpreter.forget(tensor);
            }
            self.next += 1;
        }
    }

    /// Runs all operations before an input that read weights.
    pub(crate) fn finish_reading<'p>(
        &mut self,
        paths: impl Iterator<Item = &'p str>,
        input: usize,
    ) {
        let recording = self.recording;
        let at = recording.inputs[input].at;
        let until = paths.map(|path| recording.parameters[path].read_before(at)).max();
        self.advance(until.unwrap_or(0));
    }

    /// Runs all that is left, and gives the outputs that are kept as matrices `[rows, channels]`.
    pub(crate) fn finish(mut self) -> Vec<Tensor<2>> {
        if self.recording.outputs.is_empty() {
            return Vec::new();
        }
        self.advance(self.recording.operations.len());
        let outputs = self.recording.outputs.iter();
        outputs.map(|output| self.interpreter.matrix(output)).collect()
    }

    /// Replaces the value of a weight, also where an operation has transposed or reshaped it
    /// already.
    pub(crate) fn replace(&mut self, path: &str, weight: &dyn AnyWeight) -> Result<(), Fp4Error> {
        let recording = self.recording;
        // Nothing may read it.
        let Some(RecordedParameter { id, views, .. }) = recording.parameters.get(path) else {
            return Ok(());
        };
        weight.insert(&mut self.interpreter, *id).map_err(|problem| Fp4Error::at(path, problem))?;
        // Views that nothing reads any more are not made anew.
        let next = self.next;
        for (view, _) in views.iter().filter(|(view, until)| *view < next && *until >= next) {
            self.interpreter.run(&recording.operations[*view]);
        }
        Ok(())
    }
}

/// Gives the operations the parameters of a module.
struct InsertParameters<'a> {
    parameters: &'a BTreeMap<String, RecordedParameter>,
    interpreter: Interpreter,
    error: Option<Fp4Error>,
}

impl VisitParameters for InsertParameters<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let path = path.join();
        if let Some(recorded) = self.parameters.get(&path)
            && let Err(problem) = self.interpreter.insert(recorded.id, param.val())
        {
            self.error.get_or_insert(Fp4Error::at(path, problem));
        }
    }
}
