//! [`Fp4Module::quantize_fp4`](crate::Fp4Module::quantize_fp4).

use burn::module::Module;

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::report::Fp4Report;
use crate::statistics::Calibration;
use crate::walk::plan::Selection;
use crate::walk::select::select;

use super::inputs::inputs_by_weight;
use super::install::{PackSource, pack};
use super::measure::measure;
use super::schedule::run_on_devices;
use super::weight::WeightTask;

/// Checks everything, then [packs](pack).
pub(crate) fn quantize<M: Module>(
    module: &mut M,
    config: &Fp4Config,
) -> Result<Fp4Report, Fp4Error> {
    let mut selection = select(module, config)?;
    selection.check_calibration_used(config)?;
    quantize_selected(module, &selection, &config.calibration)
}

/// Quantizes selected weights. Their calibration need not be used by a method: the report tells the
/// errors of outputs from it.
pub(crate) fn quantize_selected<M: Module>(
    module: &mut M,
    selection: &Selection,
    calibration: &Calibration,
) -> Result<Fp4Report, Fp4Error> {
    let measured = measure(module, selection, false)?;
    let inputs = inputs_by_weight(selection, &measured, calibration)?;
    let usable = |at: usize, plan| {
        let inputs = inputs.get(&measured.tied_to(at));
        WeightTask { plan, amax: None, inputs }.choice().method.needs_inputs()
    };
    selection.check_calibrated(usable)?;
    let devices = calibration.devices();
    let packed = run_on_devices(module, selection, devices, &inputs, &measured)?;
    pack(module, selection, PackSource { measured, inputs, packed, dense: None })
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Distribution, Tensor};
    use burn_fp4_ops::search::{Method, Sse};
    use burn_fp4_ops::{
        Fp4Scheme, Fp4Tensor, Importance, gram, quantize_by_importance,
        quantize_with_best_tensor_scale,
    };

    use super::*;
    use crate::packed_weight::PackedWeight;
    use crate::report::Outcome;

    /// A layer that was quantized by a configuration, its dense weight, and the method reported.
    fn quantized(layer: &Linear, config: &Fp4Config) -> (Fp4Tensor<2>, Method) {
        let mut layer = layer.clone();
        let report = quantize(&mut layer, config).unwrap();
        let Outcome::Quantized { asked, scheme, .. } = report.parameters[0].outcome else {
            panic!("a packed weight")
        };
        assert_eq!(asked, scheme.method);
        let packed = layer.weight.reparameterization::<PackedWeight>().expect("packed");
        (packed.tensor(), asked)
    }

    fn assert_same(found: &Fp4Tensor<2>, expected: &Fp4Tensor<2>) {
        assert_eq!(found.codes().into_data(), expected.codes().into_data());
        assert_eq!(found.scales().into_data(), expected.scales().into_data());
        let bits = |packed: &Fp4Tensor<2>| packed.tensor_scale_bits().into_data();
        assert_eq!(bits(found), bits(expected));
    }

    #[test]
    fn weighted_and_tensor_scale_methods_take_effect() {
        let device = Device::flex();
        let layer = LinearConfig::new(64, 32).with_bias(false).init(&device);
        let dense = layer.weight.val();
        let sse = Fp4Scheme::nvfp4().with_method(Method::SSE);

        let config = Fp4Config::nvfp4().method(Method::Sse(Sse::TensorScale));
        let (found, by) = quantized(&layer, &config);
        assert_eq!(by, Method::Sse(Sse::TensorScale));
        let best = quantize_with_best_tensor_scale(dense.clone(), 0, &sse).unwrap();
        assert_same(&found, &best);

        let inputs = Tensor::<2>::random([128, 64], Distribution::Normal(0.0, 1.0), &device);
        let inputs = inputs.clone() * inputs.clone() * inputs;
        let statistics = gram(inputs).unwrap();
        let weights: Vec<f32> = statistics.diagonal().map(|value| value as f32).collect();
        let mut calibration = Calibration::new();
        calibration.insert("weight", 0, statistics);
        let config =
            Fp4Config::nvfp4().method(Method::Sse(Sse::Weighted)).with_calibration(&calibration);
        let (found, by) = quantized(&layer, &config);
        assert_eq!(by, Method::Sse(Sse::Weighted));
        let importance = Importance::Channels(&weights);
        let weighted = quantize_by_importance(dense.clone(), 0, &sse, importance).unwrap();
        assert_same(&found, &weighted);
    }

    #[test]
    fn a_method_that_the_scheme_does_not_allow_is_an_error() {
        let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
        for method in [Method::Sse(Sse::TensorScale), Method::FOUR_OVER_SIX] {
            let error = quantize(&mut layer, &Fp4Config::mxfp4().method(method)).unwrap_err();
            assert!(matches!(error, Fp4Error::Scheme(_)), "{method}: {error}");
        }
        let error = quantize(&mut layer, &Fp4Config::nvfp4().method(Method::Sse(Sse::Weighted)));
        assert!(matches!(error, Err(Fp4Error::Uncalibrated { .. })));
        assert!(layer.weight.reparameterization::<PackedWeight>().is_none());
    }
}
