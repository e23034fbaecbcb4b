//! Modules quantized in place: selection, reports, records, devices.

use burn::module::{Lora, Module, ModuleVisitor, Param};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, LinearLayout,
};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use burn_fp4::ops::Fp8Path;
use burn_fp4::{
    Activations, Blocks, Calibration, Candidate, DequantizeReason, FakeQuantizeConfig, Fp4Config,
    Fp4Embedding, Fp4Error, Fp4Linear, Fp4Module, Fp4Scheme, Fp4TrainLinear, Gptq, Indivisible,
    KeepReason, MatmulPath, Method, NonFinite, OpsError, Outcome, PackedWeight, ScaleRule, Sse,
    Unused,
};
use tests::engines::devices;
use tests::inputs::normals;
use tests::modules::{seeded, unwrapped};
use tests::tensors::{floats, random};

#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    layers: Vec<Linear>,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            embedding: EmbeddingConfig::new(20, 32).init(device),
            layers: (0..4).map(|_| LinearConfig::new(32, 32).init(device)).collect(),
            norm: LayerNormConfig::new(32).init(device),
            head: LinearConfig::new(32, 6).with_bias(false).init(device),
        };
        seeded(net, 1)
    }

    fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let mut hidden = self.embedding.forward(tokens);
        for layer in &self.layers {
            hidden = layer.forward(hidden).tanh();
        }
        self.head.forward(self.norm.forward(hidden))
    }
}

fn tokens(device: &Device) -> Tensor<2, Int> {
    Tensor::from_ints([[1, 2, 3, 4, 19], [0, 5, 6, 7, 8]], device)
}

/// Reads the effective values of all linear layers. Devices sum products in different orders:
/// outputs are compared on one device only.
fn weights(net: &Net) -> Vec<Vec<f32>> {
    net.layers.iter().chain([&net.head]).map(|layer| floats(layer.weight.val())).collect()
}

/// Returns the paths of the quantized parameters.
fn quantized(report: &burn_fp4::Fp4Report) -> Vec<&str> {
    report.quantized().map(|parameter| parameter.path.as_str()).collect()
}

fn reason<'a>(report: &'a burn_fp4::Fp4Report, path: &str) -> &'a KeepReason {
    let parameter = report.parameters.iter().find(|parameter| parameter.path == path);
    match &parameter.unwrap_or_else(|| panic!("no parameter `{path}` in the report")).outcome {
        Outcome::Kept { reason } => reason,
        other => panic!("`{path}`: {other:?}"),
    }
}

#[test]
fn linears_are_quantized_and_everything_else_is_untouched() {
    for (name, device, _) in devices() {
        let dense = Net::new(&device);
        let mut net = dense.clone();
        let report = net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let expected: Vec<_> = (0..4).map(|layer| format!("layers.{layer}.weight")).collect();
        let expected: Vec<_> = expected.iter().map(String::as_str).chain(["head.weight"]).collect();
        assert_eq!(quantized(&report), expected, "{name}");
        assert_eq!(*reason(&report, "embedding.weight"), KeepReason::Container);
        assert_eq!(*reason(&report, "layers.0.bias"), KeepReason::Rank);
        // Every float parameter is in the report.
        assert_eq!(report.parameters.len(), 1 + 4 * 2 + 2 + 1);

        assert_eq!(floats(net.embedding.weight.val()), floats(dense.embedding.weight.val()));
        assert_eq!(
            floats(net.layers[1].bias.as_ref().unwrap().val()),
            floats(dense.layers[1].bias.as_ref().unwrap().val())
        );
        // `val()` equals the quantized tensor.
        let weight = burn_fp4::ops::quantize(dense.layers[2].weight.val(), 0, &Fp4Scheme::nvfp4());
        assert_eq!(floats(net.layers[2].weight.val()), floats(weight.unwrap().dequantize()));
        assert_eq!(net.layers[2].weight.val().dtype(), DType::F32);
        assert_eq!(net.layers[2].weight.id, dense.layers[2].weight.id);

        assert_eq!(net.num_params(), dense.num_params(), "{name}");
        assert_eq!(format!("{net}"), format!("{dense}"), "{name}");
        let (before, after) =
            (floats(dense.forward(tokens(&device))), floats(net.forward(tokens(&device))));
        let error: f32 = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).sum();
        let size: f32 = before.iter().map(|a| a.abs()).sum();
        assert!(error > 0.0 && error < 0.3 * size, "{name}: {error} of {size}");
        assert_eq!(net.num_params(), dense.num_params(), "{name} after use");
    }
}

#[test]
fn weights_are_selected_by_pattern_container_and_layer() {
    let device = Device::flex();
    let select = |config: Fp4Config| {
        let report = Net::new(&device).quantize_fp4(&config).unwrap();
        let paths: Vec<_> = quantized(&report).into_iter().map(str::to_owned).collect();
        (paths, report)
    };
    let (paths, report) =
        select(Fp4Config::nvfp4().include("layers.*.weight").exclude("layers.2.*"));
    assert_eq!(paths, ["layers.0.weight", "layers.1.weight", "layers.3.weight"]);
    assert_eq!(*reason(&report, "head.weight"), KeepReason::NotIncluded);
    let excluded = KeepReason::Excluded { pattern: "layers.2.*".to_owned() };
    assert_eq!(*reason(&report, "layers.2.weight"), excluded);

    // `*` crosses dots, and the name of a layer is one of its weight too.
    for (pattern, left) in [("layers*", 1), ("*.2.weight", 4), ("**.head.*", 4), ("head", 4)] {
        let (paths, _) = select(Fp4Config::nvfp4().exclude(pattern));
        assert_eq!(paths.len(), left, "{pattern}: {paths:?}");
    }

    let (paths, report) = select(Fp4Config::nvfp4().keep_first(1).keep_last(2));
    assert_eq!(paths, ["layers.1.weight", "head.weight"]);
    assert_eq!(*reason(&report, "layers.0.weight"), KeepReason::FirstLayers { layer: 0 });
    assert_eq!(*reason(&report, "layers.2.weight"), KeepReason::LastLayers { layer: 2 });

    let embedding = Fp4Config::nvfp4().without_container("Linear").container("Embedding", 1);
    let (paths, report) = select(embedding);
    assert_eq!(paths, ["embedding.weight"]);
    assert!(matches!(report.parameters[0].outcome, Outcome::Quantized { axis: 1, .. }));

    let nothing = Net::new(&device).quantize_fp4(&Fp4Config::nvfp4().include("nothing"));
    assert!(matches!(nothing, Err(Fp4Error::NothingSelected(_))));
    let broken = Net::new(&device).quantize_fp4(&Fp4Config::nvfp4().include("re:(a"));
    assert!(matches!(&broken, Err(Fp4Error::Policy(_))), "{broken:?}");
    assert!(broken.unwrap_err().to_string().starts_with("pattern `re:(a`: "));
}

#[test]
fn layers_that_are_no_siblings_share_a_tensor_scale_by_their_paths() {
    let config = Fp4Config::nvfp4().share_scale(["layers.0", "head"]);
    let report = Net::new(&Device::flex()).quantize_fp4(&config).unwrap();
    let shares = |path| match &report.get(path).unwrap().outcome {
        Outcome::Quantized { shares_scale_with, .. } => shares_scale_with.clone(),
        other => panic!("{path}: {other:?}"),
    };
    assert_eq!(shares("layers.0.weight").as_deref(), Some("{layers.0,head}.weight"));
    assert_eq!(shares("head.weight"), shares("layers.0.weight"));
    assert_eq!(shares("layers.1.weight"), None);
}

#[test]
fn a_module_without_layer_lists_has_its_weights_as_layers() {
    #[derive(Module, Debug)]
    struct Three {
        a: Linear,
        b: Linear,
        c: Linear,
    }
    let device = Device::flex();
    let linear = || LinearConfig::new(16, 16).init(&device);
    let mut net = Three { a: linear(), b: linear(), c: linear() };
    let report = net.quantize_fp4(&Fp4Config::nvfp4().keep_first(1).keep_last(1)).unwrap();
    assert_eq!(quantized(&report), ["b.weight"]);
}

#[test]
fn siblings_share_a_tensor_scale() {
    let device = Device::flex();
    let config = TransformerEncoderConfig::new(32, 64, 4, 2);
    let mut encoder: TransformerEncoder = config.init(&device);
    let mut unchecked = encoder.clone();
    let shared = Fp4Config::nvfp4().share_scale(["query", "key", "value"]);
    let report = encoder.quantize_fp4(&shared).unwrap();
    assert_eq!(quantized(&report).len(), 2 * 6);
    for layer in &encoder.layers {
        let scale = |linear: &Linear| {
            let packed = linear.weight.reparameterization::<PackedWeight>().unwrap();
            packed.tensor::<2>().to_packed().unwrap().tensor_scale.of_row(0)
        };
        let mha = &layer.mha;
        assert_eq!(scale(&mha.query), scale(&mha.key));
        assert_eq!(scale(&mha.query), scale(&mha.value));
        assert_ne!(scale(&mha.query), scale(&mha.output));
    }
    // Unchecked values are read up front only if they share a tensor scale.
    let follow = Fp4Scheme::nvfp4().with_non_finite(NonFinite::FollowReference);
    let follow = Fp4Config::new(follow).share_scale(["query", "key", "value"]);
    unchecked.quantize_fp4(&follow).unwrap();
    for (layer, unchecked) in encoder.layers.iter().zip(&unchecked.layers) {
        let packed = |linear: &Linear| {
            let packed = linear.weight.reparameterization::<PackedWeight>().unwrap();
            packed.tensor::<2>().to_packed().unwrap()
        };
        assert_eq!(packed(&layer.mha.key), packed(&unchecked.mha.key));
        assert_eq!(packed(&layer.mha.output), packed(&unchecked.mha.output));
    }
    let group = "layers.0.mha.{query,key,value}.weight".to_owned();
    let shares = report.quantized().filter(|parameter| match &parameter.outcome {
        Outcome::Quantized { shares_scale_with, .. } => shares_scale_with.as_ref() == Some(&group),
        _ => false,
    });
    assert_eq!(shares.count(), 3);
    let input = Tensor::random([2, 5, 32], Distribution::Normal(0.0, 1.0), &device);
    assert_eq!(encoder.forward(TransformerEncoderInput::new(input)).dims(), [2, 5, 32]);
}

#[test]
fn an_axis_that_blocks_do_not_divide_is_an_error_or_a_reported_skip() {
    let device = Device::flex();
    let odd =
        || vec![LinearConfig::new(24, 16).init(&device), LinearConfig::new(32, 8).init(&device)];
    let mut net = odd();
    let before = floats(net[1].weight.val());
    let error = net.quantize_fp4(&Fp4Config::nvfp4()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "parameter `0.weight`: axis 0: its 24 values are not a multiple of the block size 16; use \
         `exclude` to keep it dense, or `indivisible(Indivisible::Skip)` for all such weights"
    );
    // Nothing was changed.
    assert!(net[1].weight.reparameterization::<PackedWeight>().is_none());
    assert_eq!(floats(net[1].weight.val()), before);

    let report = odd().quantize_fp4(&Fp4Config::nvfp4().indivisible(Indivisible::Skip)).unwrap();
    assert_eq!(quantized(&report), ["1.weight"]);
    let skipped = KeepReason::Indivisible { axis: 0, length: 24, block_size: 16 };
    assert_eq!(*reason(&report, "0.weight"), skipped);
}

#[test]
fn a_value_that_is_not_finite_is_an_error_naming_the_parameter() {
    let device = Device::flex();
    for bad in [f32::NAN, f32::INFINITY] {
        for scheme in
            [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4(), Fp4Scheme::of(ScaleRule::NoTensorScale)]
        {
            let mut net = vec![
                LinearConfig::new(32, 16).init(&device),
                LinearConfig::new(32, 16).init(&device),
            ];
            net[1].weight = net[1].weight.clone().map(|weight| {
                weight.slice_assign([3..4, 2..3], Tensor::full([1, 1], bad, &device))
            });
            let error = net.quantize_fp4(&Fp4Config::new(scheme)).unwrap_err();
            let Fp4Error::Parameter { path, problem } = &error else { panic!("{error}") };
            assert_eq!(path, "1.weight");
            assert!(matches!(problem, OpsError::NonFinite { .. }), "{error}");
            assert!(error.to_string().ends_with("use `exclude` to keep the weight dense"));
            assert!(net[0].weight.reparameterization::<PackedWeight>().is_none());

            let follow = scheme.with_non_finite(NonFinite::FollowReference);
            net.quantize_fp4(&Fp4Config::new(follow)).unwrap();
        }
    }
}

#[test]
fn packed_weights_are_stored_in_4_6_bits() {
    struct Stored {
        floats: usize,
        integers: usize,
    }
    impl ModuleVisitor for Stored {
        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            let value = param.val();
            self.integers += value.shape().num_elements() * value.dtype().size();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            // The stored form: what a record holds of it.
            let stored = param.transform_for_save().val();
            self.floats += stored.shape().num_elements() * stored.dtype().size();
        }
    }
    for (name, device, _) in devices() {
        let mut linear = LinearConfig::new(128, 64).with_bias(false).init(&device);
        let report = linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let mut stored = Stored { floats: 0, integers: 0 };
        linear.visit(&mut stored);
        let bits = 8.0 * (stored.floats + stored.integers) as f64 / (128.0 * 64.0);
        assert_eq!(stored.integers, 128 * 64 / 2 + 128 * 64 / 16 + 4, "{name}");
        assert_eq!(stored.floats, 4, "{name}");
        assert!(bits <= 4.6, "{name}: {bits}");
        assert!((report.bits_per_weight() - bits).abs() < 1e-9, "{name}");
        assert_eq!(report.bytes_before(), 128 * 64 * 4);
        assert_eq!(report.bytes_after(), stored.floats + stored.integers);
    }
}

#[test]
fn records_load_into_fresh_and_quantized_modules_on_any_device() {
    let config = Fp4Config::nvfp4();
    let target = |device: &Device| {
        let (fresh, mut quantized) = (Net::new(device), Net::new(device));
        quantized.quantize_fp4(&config).unwrap();
        (fresh, quantized)
    };
    let targets: Vec<_> = devices().iter().map(|(_, device, _)| target(device)).collect();
    for (from, device, _) in devices() {
        let mut net = Net::new(&device);
        net.quantize_fp4(&config).unwrap();
        let expected = weights(&net);
        let bytes = net.clone().into_record().into_bytes().unwrap();
        let dense_bytes = Net::new(&device).into_record().into_bytes().unwrap().len();
        assert!(bytes.len() < dense_bytes, "{} of {dense_bytes}", bytes.len());
        let record = || ModuleRecord::from_bytes(bytes.clone()).unwrap();

        for ((to, ..), (fresh, quantized)) in devices().into_iter().zip(&targets) {
            let mut fresh = fresh.clone();
            fresh.load_fp4_record(record()).unwrap();
            assert_eq!(weights(&fresh), expected, "{from} to {to}");
            assert_eq!(fresh.layers[0].weight.id, net.layers[0].weight.id);
            assert_eq!(fresh.num_params(), net.num_params());

            let mut other = quantized.clone();
            other.load_fp4_record(record()).unwrap();
            assert_eq!(weights(&other), expected, "{from} to quantized {to}");

            // By Burn's own function, without its check that the dense values are there.
            let other = quantized.clone().try_load_record(record().validate(false)).unwrap();
            assert_eq!(weights(&other), expected, "{from} to {to}, by Burn");
        }
    }
}

#[test]
fn records_of_another_shape_are_refused_and_change_nothing() {
    let device = Device::flex();
    let mut net = Net::new(&device);
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let record = net.into_record().into_bytes().unwrap();
    let record = || ModuleRecord::from_bytes(record.clone()).unwrap();

    let mut wrong = vec![LinearConfig::new(32, 32).init(&device)];
    let before = floats(wrong[0].weight.val());
    let error = wrong.load_fp4_record(record()).unwrap_err();
    assert!(matches!(&error, Fp4Error::Record { names, .. } if !names.is_empty()), "{error}");
    assert_eq!(floats(wrong[0].weight.val()), before);

    let mut narrow = Net::new(&device);
    narrow.head = LinearConfig::new(32, 5).with_bias(false).init(&device);
    let error = narrow.load_fp4_record(record()).unwrap_err();
    assert!(error.to_string().contains("head.weight"), "{error}");
    assert!(narrow.layers[0].weight.reparameterization::<PackedWeight>().is_none());

    // A module packed along another axis has other names in its record.
    let mut other = Net::new(&device);
    other
        .quantize_fp4(&Fp4Config::nvfp4().include("layers.*.weight").container("Linear", 1))
        .unwrap();
    assert!(matches!(other.load_fp4_record(record()), Err(Fp4Error::Record { .. })));
}

#[test]
fn records_are_files_of_packed_size() {
    let device = Device::flex();
    let path = std::env::temp_dir().join(format!("burn-fp4-test-{}.bpk", std::process::id()));
    let mut linear = LinearConfig::new(1024, 512).with_bias(false).init(&device);
    linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let expected = floats(linear.weight.val());
    linear.save_file(&path).unwrap();
    let bits = 8.0 * std::fs::metadata(&path).unwrap().len() as f64 / (1024.0 * 512.0);
    let mut fresh = LinearConfig::new(1024, 512).with_bias(false).init(&device);
    fresh.load_fp4_file(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(floats(fresh.weight.val()), expected);
    assert!(bits < 4.6, "{bits} bits per weight on disk");
    let missing = fresh.load_fp4_file("no such file").unwrap_err();
    assert!(missing.to_string().contains("no such file"), "{missing}");
}

#[test]
fn moving_between_devices_keeps_the_bits() {
    for (from, device, _) in devices() {
        let mut net = Net::new(&device);
        net.quantize_fp4(&Fp4Config::mxfp4()).unwrap();
        let expected = weights(&net);
        for (to, device, _) in devices() {
            let mut moved = net.clone().to_device(&device);
            assert_eq!(weights(&moved), expected, "{from} to {to}");
            moved.compact_fp4();
            assert_eq!(weights(&moved), expected, "{from} to {to}, compacted");
            assert_eq!(moved.num_params(), net.num_params());
        }
    }
}

#[test]
fn materialize_makes_a_dense_module_with_the_same_outputs() {
    for (name, device, _) in devices() {
        let mut net = Net::new(&device);
        net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let expected = floats(net.forward(tokens(&device)));
        let num_params = net.num_params();
        let dense = net.materialize();
        assert!(dense.head.weight.reparameterization::<PackedWeight>().is_none());
        assert_eq!(floats(dense.forward(tokens(&device))), expected, "{name}");
        assert_eq!(dense.num_params(), num_params);
        // Its record is that of any dense module.
        let loaded = Net::new(&device).load_record(dense.into_record());
        assert_eq!(floats(loaded.forward(tokens(&device))), expected, "{name}");
    }
}

#[test]
fn column_layout_keeps_its_records() {
    let device = Device::flex();
    let config = LinearConfig::new(32, 16).with_layout(LinearLayout::Col);
    let mut linear = config.init(&device);
    linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let expected = floats(linear.weight.val());
    let record = linear.clone().into_record();
    let mut fresh = config.init(&device);
    fresh.load_fp4_record(record).unwrap();
    assert_eq!(floats(fresh.weight.val()), expected);
    // Materialized, it is saved transposed again, as Burn does for this layout.
    let loaded = config.init(&device).load_record(fresh.materialize().into_record());
    assert_eq!(floats(loaded.weight.val()), expected);
}

#[test]
fn half_precision_weights_stay_half_precision() {
    let device = Device::flex();
    for dtype in [DType::F16, DType::BF16] {
        let mut linear = LinearConfig::new(32, 16).with_bias(false).init(&device);
        linear.weight = Param::from_tensor(Tensor::random(
            [32, 16],
            Distribution::Normal(0.0, 0.1),
            (&device, dtype),
        ));
        let dense = linear.weight.val();
        linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        assert_eq!(linear.weight.val().dtype(), dtype);
        let expected = burn_fp4::ops::quantize(dense, 0, &Fp4Scheme::nvfp4()).unwrap();
        assert_eq!(floats(linear.weight.val()), floats(expected.dequantize_to(dtype.into())));
        let mut fresh = LinearConfig::new(32, 16).with_bias(false).init(&device);
        fresh.load_fp4_record(linear.clone().into_record()).unwrap();
        assert_eq!(fresh.weight.val().dtype(), dtype);
    }
}

#[test]
fn quantizing_again_leaves_packed_weights_alone() {
    let device = Device::flex();
    let mut net = Net::new(&device);
    net.quantize_fp4(&Fp4Config::nvfp4().include("layers.*.weight")).unwrap();
    let before = floats(net.layers[0].weight.val());
    let report = net.quantize_fp4(&Fp4Config::mxfp4()).unwrap();
    assert_eq!(quantized(&report), ["head.weight"]);
    assert_eq!(*reason(&report, "layers.0.weight"), KeepReason::AlreadyQuantized);
    assert_eq!(floats(net.layers[0].weight.val()), before);

    let error = net.quantize_fp4(&Fp4Config::mxfp4()).unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with("every selected weight is quantized already; "), "{message}");
    assert_eq!(message.lines().count(), 1 + 5, "{message}");
    // A misspelt pattern is an error.
    let error = net.quantize_fp4(&Fp4Config::mxfp4().include("haed.*")).unwrap_err();
    assert!(matches!(error, Fp4Error::NothingSelected(_)), "{error}");
}

#[test]
fn adapters_of_burn_are_left_alone() {
    use burn::module::Lora;
    let device = Device::flex();
    let mut net = vec![
        LinearConfig::new(32, 16).init(&device).apply_lora(Lora::new(2, 4.0)),
        LinearConfig::new(32, 16).init(&device),
    ];
    let report = net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    assert_eq!(quantized(&report), ["1.weight"]);
    assert_eq!(
        *reason(&report, "0.weight"),
        KeepReason::Reparameterized { name: "lora".to_owned() }
    );
    assert_eq!(*reason(&report, "0.weight.lora.a"), KeepReason::PartOfReparameterization);
    assert!(net[0].weight.adapter().is_some());
}

#[test]
fn tied_weights_stay_tied() {
    let device = Device::flex();
    let linear = LinearConfig::new(32, 32).init(&device);
    let mut net = vec![linear.clone(), linear.clone()];
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    assert_eq!(net[0].weight.id, net[1].weight.id);
    assert_eq!(floats(net[0].weight.val()), floats(net[1].weight.val()));

    // It is quantized once, for the inputs of both places, and the report lists both.
    let inputs =
        |seed| Tensor::<2>::from_data(TensorData::new(normals(seed, 96 * 32), [96, 32]), &device);
    let mut calibration = Calibration::new();
    calibration.add("1.weight", 0, inputs(1)).unwrap();
    let config = Fp4Config::nvfp4().method(Method::GPTQ);
    let mut one = vec![linear.clone(), linear.clone()];
    let report = one.quantize_fp4(&config.with_calibration(&calibration)).unwrap();
    for parameter in report.quantized() {
        let Outcome::Quantized { scheme, .. } = parameter.outcome else { unreachable!() };
        assert_eq!(scheme.method, Method::Gptq(Gptq::default()), "{}", parameter.path);
    }
    calibration.add("0.weight", 0, inputs(2)).unwrap();
    let mut both = vec![linear.clone(), linear.clone()];
    both.quantize_fp4(&config.with_calibration(&calibration)).unwrap();
    let mut gram = calibration.get("0.weight", 0).unwrap().clone();
    gram.merge(calibration.get("1.weight", 0).unwrap()).unwrap();
    let expected = burn_fp4::ops::quantize_gptq(
        linear.weight.val(),
        0,
        &config.scheme,
        &Gptq::default(),
        &gram,
    );
    let expected = floats(expected.unwrap().dequantize());
    assert_eq!(floats(both[0].weight.val()), expected);
    assert_eq!(floats(both[1].weight.val()), expected);
    assert_ne!(floats(one[0].weight.val()), expected);
}

#[test]
fn an_autodiff_module_trains_around_its_packed_weights() {
    let device = Device::flex().autodiff();
    let mut net =
        vec![LinearConfig::new(32, 32).init(&device), LinearConfig::new(32, 16).init(&device)];
    net.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let input =
        Tensor::<2>::random([4, 32], Distribution::Normal(0.0, 1.0), &device).require_grad();
    let output = net[1].forward(net[0].forward(input.clone()));
    let gradients = output.sum().backward();
    // Through a packed weight the gradient is that of the dense weight it stands for.
    let ones = Tensor::<2>::ones([4, 16], &Device::flex());
    let [first, second] =
        [0, 1].map(|at: usize| net[at].weight.val().without_autodiff().transpose());
    let expected = ones.matmul(second).matmul(first);
    let found = input.grad(&gradients).expect("the input is tracked");
    assert_eq!(floats(found), floats(expected));
    assert!(net[0].bias.as_ref().unwrap().val().grad(&gradients).is_some());
    let restored = net.valid().train();
    assert!(restored[0].weight.reparameterization::<PackedWeight>().is_some());
}

#[test]
fn reports_serialize_and_display() {
    let device = Device::flex();
    let scheme = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
    let report = Net::new(&device).quantize_fp4(&Fp4Config::new(scheme)).unwrap();
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<burn_fp4::Fp4Report>(&json).unwrap(), report);
    let all = format!("{report:#}");
    for parameter in &report.parameters {
        assert!(all.contains(&parameter.path), "{all}");
    }
    let text = unwrapped(&report);
    assert!(text.contains("NVFP4, tiles of 16 x 16, rule te, method amax, along axis 0"), "{text}");
    assert!(text.contains("`.container(\"Embedding\", 1)` adds it"), "{text}");
    assert!(text.contains(" 20.5 kB -> "), "{text}"); // 5120 values
    let worst = report.quantized().max_by(|a, b| {
        let [a, b] = [a, b].map(|one| one.relative_error().unwrap());
        a.total_cmp(&b)
    });
    assert!(text.contains(&format!("worst: `{}`, error ", worst.unwrap().path)), "{text}");

    assert!(report.relative_error() > 0.01 && report.relative_error() < 0.2);
    let config = Fp4Config::mxfp4().exclude("head.*").keep_last(1);
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<Fp4Config>(&text).unwrap(), config);
}

#[test]
fn codes_depend_on_the_calibration() {
    for (name, device, _) in devices() {
        let build = || Net::new(&device);
        let tokens = tokens(&device);
        let mut calibration = Calibration::new();
        // The inputs of the first layer are the embeddings; the head is not calibrated.
        let inputs = build().embedding.forward(tokens.clone());
        calibration.add("layers.0.weight", 0, inputs.clone()).unwrap();
        calibration.add("layers.0.weight", 0, inputs.clone()).unwrap();
        assert_eq!(calibration.get("layers.0.weight", 0).unwrap().rows(), 20);
        let base = Fp4Config::nvfp4().include("layers.0.weight").include("layers.1.weight");
        let hessian = |search| {
            let mut config = base.clone();
            config.scheme = config.scheme.with_method(search);
            config
        };
        let output_error = |config: &Fp4Config| {
            let mut net = build();
            let exact = net.layers[0].forward(inputs.clone());
            let calibrated = config.with_calibration(&calibration).unused(Unused::Report);
            let report = net.quantize_fp4(&calibrated).unwrap();
            let error = (net.layers[0].forward(inputs.clone()) - exact).powf_scalar(2.0).sum();
            (floats(error)[0], report)
        };
        let (sse, _) = output_error(&hessian(Method::SSE));
        let (by_hessian, report) = output_error(&hessian(Method::CoordinateDescent));
        let (by_gptq, gptq_report) = output_error(&base.clone().method(Method::GPTQ));
        assert!(by_hessian < sse && by_gptq < by_hessian, "{name}: {sse} {by_hessian} {by_gptq}");
        let chosen = |report: &burn_fp4::Fp4Report, path: &str| {
            let parameter = report.parameters.iter().find(|parameter| parameter.path == path);
            match &parameter.expect("a parameter").outcome {
                Outcome::Quantized { scheme, .. } => scheme.method,
                kept => panic!("{kept:?}"),
            }
        };
        let fallback = Method::SSE;
        let descent = Method::CoordinateDescent;
        assert_eq!(chosen(&report, "layers.0.weight"), descent);
        assert_eq!(chosen(&report, "layers.1.weight"), fallback);
        assert_eq!(chosen(&gptq_report, "layers.0.weight"), Method::Gptq(Gptq::default()));
        assert_eq!(chosen(&gptq_report, "layers.1.weight"), fallback);
        let text = unwrapped(&gptq_report);
        assert!(text.contains("NVFP4, blocks of 16, rule te, method gptq"), "{text}");

        let mut wrong = Calibration::new();
        wrong.add("layers.0.weight", 0, Tensor::<2>::ones([3, 16], &device)).unwrap();
        let wrongly = base.clone().method(Method::GPTQ).with_calibration(&wrong);
        let error = build().quantize_fp4(&wrongly).unwrap_err();
        assert!(error.to_string().contains("`layers.0.weight`"), "{error}");
        let error =
            wrong.add("layers.0.weight", 0, Tensor::<2>::ones([3, 32], &device)).unwrap_err();
        assert!(error.to_string().contains("`layers.0.weight`"), "{error}");
        let mut unknown = Calibration::new();
        unknown.add("layers.9.weight", 0, Tensor::<2>::ones([3, 32], &device)).unwrap();
        let unknown = base.clone().method(Method::GPTQ).with_calibration(&unknown);
        let error = build().quantize_fp4(&unknown).unwrap_err();
        assert!(matches!(&error, Fp4Error::Calibration { path, .. } if path == "layers.9.weight"));
    }
}

#[test]
fn reports_show_the_error_of_outputs_where_the_method_takes_whole_gram_matrices() {
    for (name, device, _) in devices() {
        let dense = Net::new(&device);
        let inputs = dense.embedding.forward(tokens(&device));
        let mut calibration = Calibration::new();
        calibration.add("layers.0.weight", 0, inputs.clone()).unwrap();
        let base = Fp4Config::nvfp4().include("layers.0.weight").include("layers.1.weight");
        let quantized = |config: Fp4Config| {
            let mut net = dense.clone();
            let config = config.with_calibration(&calibration).unused(Unused::Report);
            let report = net.quantize_fp4(&config).unwrap();
            (net, report)
        };
        let output_error = |report: &burn_fp4::Fp4Report| {
            report.get("layers.0.weight").unwrap().relative_output_error().unwrap()
        };
        let (net, report) = quantized(base.clone().method(burn_fp4::Method::GPTQ));
        let product = |weight: Tensor<2>| inputs.clone().reshape([-1, 32]).matmul(weight);
        let exact = product(dense.layers[0].weight.val());
        let norm = |of: Tensor<2>| f64::from(floats(of.powf_scalar(2.0).sum().sqrt())[0]);
        let error = norm(product(net.layers[0].weight.val()) - exact.clone());
        let (found, expected) = (output_error(&report), error / norm(exact));
        assert!((found - expected).abs() <= 1e-3 * expected, "{name}: {found} {expected}");
        assert_eq!(report.relative_output_error(), Some(found), "{name}");
        assert_eq!(report.get("layers.1.weight").unwrap().relative_output_error(), None);

        // It would take as long as the search of another method.
        for method in [burn_fp4::Method::SSE, burn_fp4::Method::Hessian] {
            let (_, other) = quantized(base.clone().method(method));
            assert_eq!(other.relative_output_error(), None, "{name}: {other}");
        }

        let table = report.to_string();
        let figure = format!("{:.3}", 100.0 * found);
        assert!(table.contains("weight %  output %"), "{table}");
        assert!(table.lines().any(|line| line.ends_with(&format!("  {figure}"))), "{table}");
        assert!(unwrapped(&report).contains(&format!(", of outputs {figure} %")), "{table}");
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<burn_fp4::Fp4Report>(&json).unwrap(), report);
    }
}

#[test]
fn options_of_gptq_are_checked_before_anything_changes() {
    let device = Device::flex();
    let dense = Net::new(&device);
    let mut calibration = Calibration::new();
    let inputs = dense.embedding.forward(tokens(&device));
    calibration.add("layers.1.weight", 0, inputs).unwrap();
    let refused = |net: &Net, config: Fp4Config| {
        let mut changed = net.clone();
        let error = changed.quantize_fp4(&config.with_calibration(&calibration)).unwrap_err();
        assert_eq!(weights(&changed), weights(net));
        error.to_string()
    };
    let damped = |damping| Gptq { damping, ..Gptq::default() };
    let error = refused(&dense, Fp4Config::nvfp4().method(Method::Gptq(damped(-1.0))));
    assert!(error.contains("damping"), "{error}");
    let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
    refused(&dense, Fp4Config::new(tiles).method(Method::GPTQ));

    // GPTQ is not defined for infinity, so the scheme cannot allow it either.
    let mut infinite = dense.clone();
    let values = infinite.layers[2].weight.val().slice_fill([0..1, 0..1], f32::INFINITY);
    infinite.layers[2].weight = Param::from_tensor(values);
    let follow = Fp4Scheme::nvfp4().with_non_finite(NonFinite::FollowReference);
    let error = refused(&infinite, Fp4Config::new(follow).method(Method::GPTQ));
    assert!(error.contains("`layers.2.weight`"), "{error}");
}

#[test]
fn fp4_linear_has_the_outputs_and_records_of_linear() {
    for (name, device, _) in devices() {
        // Kernels compile for seconds on CubeCL's CPU runtime; tests/fused.rs runs them without a
        // bias too.
        let biases = if name == "cpu" { vec![true] } else { vec![false, true] };
        for bias in biases {
            let mut linear = seeded(LinearConfig::new(64, 40).with_bias(bias).init(&device), 3);
            let x = Tensor::<3>::from_data(
                TensorData::new(normals(4, 2 * 3 * 64), [2, 3, 64]),
                &device,
            );
            let dense = Fp4Linear::from(linear.clone()).forward(x.clone());
            assert_eq!(floats(dense), floats(linear.forward(x.clone())), "{name}");
            let mut straight = Fp4Linear::from(linear.clone());
            let report = straight.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
            assert_eq!(report.quantized().count(), 1, "{name}");
            linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
            let expected = floats(linear.forward(x.clone()));
            let close = |found: Vec<f32>, what: &str| {
                for (found, expected) in found.iter().zip(&expected) {
                    let near = (found - expected).abs() <= 2e-3 * (1.0 + expected.abs());
                    assert!(near, "{name} {what}: {found}, not {expected}");
                }
            };
            close(floats(straight.forward(x.clone())), "quantized");
            // Either's record loads into the other.
            let fresh = || LinearConfig::new(64, 40).with_bias(bias).init(&device);
            let mut loaded = Fp4Linear::from(fresh());
            loaded.load_fp4_record(linear.clone().into_record()).unwrap();
            close(floats(loaded.forward(x.clone())), "loaded");
            let mut back = fresh();
            back.load_fp4_record(straight.into_record()).unwrap();
            assert_eq!(floats(back.forward(x.clone())), expected, "{name}");
        }
    }
}

#[test]
fn every_layer_of_a_model_multiplies_in_int8() {
    let device = Device::flex();
    let table = seeded(Fp4Embedding::from(EmbeddingConfig::new(40, 576).init(&device)), 5);
    let layer = Fp4Linear::from(seeded(LinearConfig::new(576, 40).init(&device), 6));
    let by_burn: Linear = LinearConfig::new(576, 40).init(&device);
    let x = Tensor::<2>::from_data(TensorData::new(normals(4, 3 * 576), [3, 576]), &device);
    let outputs = |model: &(Fp4Embedding, (Fp4Linear, Linear))| {
        let (table, (layer, by_burn)) = model;
        [table.project(x.clone()), layer.forward(x.clone()), by_burn.forward(x.clone())].map(floats)
    };
    let mut model = (table, (layer, by_burn));
    let error = model.set_fp4_activations(Activations::Int8).unwrap_err();
    assert!(matches!(error, Fp4Error::NoFp4Layers), "{error}");
    model.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let expected = outputs(&model);
    let lookups = |model: &(Fp4Embedding, _)| {
        floats(model.0.forward(Tensor::<2, Int>::from_ints([[3, 39]], &device)))
    };
    let looked_up = lookups(&model);
    let paths = model.fp8_paths(8, DType::F32).unwrap();
    assert_eq!(paths.keys().collect::<Vec<_>>(), ["0.weight", "1.0.weight"]);
    assert!(paths.values().all(|path| matches!(path, Fp8Path::Inexact { .. })), "{paths:?}");
    assert_eq!(model.set_fp4_activations(Activations::Int8).unwrap(), 2);
    let found = outputs(&model);
    assert_eq!(found[2], expected[2], "Burn's layer dequantizes");
    assert_eq!(lookups(&model), looked_up);
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>();
    for (found, expected) in found.iter().zip(&expected).take(2) {
        let error = squares(&mut found.iter().zip(expected).map(|(a, b)| a - b));
        let relative = (error / squares(&mut expected.iter().copied())).sqrt();
        assert!((1e-3..8e-3).contains(&relative), "{relative}");
    }
    // Kept by moves and by weights into which a record is loaded, not by records.
    let mut moved = model.clone().to_device(&device);
    assert_eq!(outputs(&moved), found);
    moved.load_fp4_record(model.clone().into_record()).unwrap();
    assert_eq!(outputs(&moved), found);
    let mut fresh = model.clone().materialize();
    fresh.load_fp4_record(moved.into_record()).unwrap();
    assert_eq!(outputs(&fresh), expected);
    // In training and out of it, and FP8 of a tied table too.
    let back = model.clone().train().valid();
    assert_eq!(outputs(&back), found);
    model.set_fp4_activations(Activations::Fp8Rounded).unwrap();
    let path = Fp8Path::Emulated;
    assert!(model.fp8_paths(8, DType::F32).unwrap().values().all(|one| *one == path));
    let rounded = outputs(&model);
    assert!(rounded[0] != expected[0] && rounded[1] != expected[1]);
    model.set_fp4_activations(Activations::Int8).unwrap();
    assert_eq!(outputs(&model), found);
    // A part of it.
    assert_eq!(model.1.set_fp4_activations(Activations::F32).unwrap(), 1);
    assert_eq!(outputs(&model)[..2], [found[0].clone(), expected[1].clone()]);
}

#[test]
fn an_adapted_table_follows_activations_once_it_is_merged() {
    let device = Device::flex();
    let mut table = seeded(Fp4Embedding::from(EmbeddingConfig::new(40, 64).init(&device)), 5);
    let x = Tensor::<2>::from_data(TensorData::new(normals(4, 3 * 64), [3, 64]), &device);
    let config = Fp4Config::nvfp4();
    table.quantize_fp4(&config).unwrap();
    let mut in_f32 = table.clone();
    for table in [&mut table, &mut in_f32] {
        // The second factor is zeros: the merged weight is the old one.
        table.lora_fp4(&Lora::new(4, 8.0)).unwrap();
    }
    assert_eq!(table.set_fp4_activations(Activations::Int8).unwrap(), 1);
    assert_eq!(floats(table.project(x.clone())), floats(in_f32.project(x.clone())));
    for table in [&mut table, &mut in_f32] {
        table.merge_lora_fp4(&config).unwrap();
    }
    assert_ne!(floats(table.project(x.clone())), floats(in_f32.project(x.clone())));
    in_f32.set_fp4_activations(Activations::Int8).unwrap();
    assert_eq!(floats(table.project(x.clone())), floats(in_f32.project(x)));
}

#[test]
fn inputs_without_rows_have_outputs_without_rows() {
    for (name, device, _) in devices() {
        let mut linear = Fp4Linear::from(LinearConfig::new(64, 32).init(&device));
        let mut embedding = Fp4Embedding::from(EmbeddingConfig::new(10, 64).init(&device));
        linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        embedding.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
        let train = Fp4TrainLinear::from(LinearConfig::new(64, 32).init(&device));
        let round = FakeQuantizeConfig::new(64).init(&device).unwrap();
        assert_eq!(linear.forward(Tensor::<2>::zeros([0, 64], &device)).dims(), [0, 32], "{name}");
        for [batch, length] in [[0, 0], [0, 2], [2, 0]] {
            let what = format!("{name} {batch} {length}");
            let input = Tensor::<3>::zeros([batch, length, 64], &device);
            assert_eq!(linear.forward(input.clone()).dims(), [batch, length, 32], "{what}");
            assert_eq!(train.forward(input.clone()).dims(), [batch, length, 32], "{what}");
            assert_eq!(round.forward(input.clone()).dims(), [batch, length, 64], "{what}");
            let rounded = burn_fp4::ops::fake_quantize(input, 2, &Fp4Scheme::nvfp4()).unwrap();
            assert_eq!(rounded.dims(), [batch, length, 64], "{what}");
            let indices = Tensor::<2, Int>::zeros([batch, length], &device);
            assert_eq!(embedding.forward(indices).dims(), [batch, length, 64], "{what}");
        }
        // Statistics of nothing change nothing.
        let mut calibration = Calibration::new();
        calibration.add("weight", 0, Tensor::<3>::zeros([2, 0, 64], &device)).unwrap();
        assert!(calibration.get("weight", 0).is_none_or(|gram| gram.tokens() == 0), "{name}");
    }
}

#[test]
fn a_tied_lm_head_multiplies_by_the_embedding() {
    for (name, device, _) in devices() {
        let mut table = seeded(Fp4Embedding::from(EmbeddingConfig::new(40, 64).init(&device)), 5);
        let values = TensorData::new(normals(6, 2 * 3 * 64), [2, 3, 64]);
        let hidden = Tensor::<3>::from_data(values, &device);
        let empty = Tensor::<3>::zeros([2, 0, 64], &device);
        for packed in [false, true] {
            if packed {
                table.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
            }
            // On flex: CubeCL's CPU runtime would tune one more product for seconds.
            let flex = Device::flex();
            let weight = table.weight.val().to_device(&flex).transpose().unsqueeze::<3>();
            let input = hidden.clone().to_device(&flex);
            let expected = floats(input.matmul(weight.expand([2, 64, 40])));
            let logits = table.project(hidden.clone());
            assert_eq!(logits.dims(), [2, 3, 40], "{name}");
            for (found, expected) in floats(logits).iter().zip(&expected) {
                let near = (found - expected).abs() <= 2e-3 * (1.0 + expected.abs());
                assert!(near, "{name} packed {packed}: {found}, not {expected}");
            }
            assert_eq!(table.project(empty.clone()).dims(), [2, 0, 40], "{name} {packed}");
        }
    }
}

#[test]
fn a_loss_without_rows_has_a_backward_pass() {
    let device = Device::flex().autodiff();
    let mut linear = Fp4Linear::from(LinearConfig::new(64, 32).init(&device));
    linear.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    linear.lora_fp4(&Lora::new(4, 8.0)).unwrap();
    let train = Fp4TrainLinear::from(LinearConfig::new(64, 32).init(&device));
    let gradient = |forward: &dyn Fn(Tensor<3>) -> Tensor<3>| {
        let input = Tensor::<3>::zeros([2, 0, 64], &device).require_grad();
        let gradients = forward(input.clone()).sum().backward();
        input.grad(&gradients).expect("a gradient").dims()
    };
    assert_eq!(gradient(&|input| linear.forward(input)), [2, 0, 64]);
    assert_eq!(gradient(&|input| train.forward(input)), [2, 0, 64]);
}

#[test]
fn an_empty_batch_does_not_change_the_running_amax() {
    let device = Device::flex().autodiff();
    let round = FakeQuantizeConfig::new(64).init(&device).unwrap();
    let _ = round.forward(Tensor::<2>::ones([1, 64], &device));
    let seen = floats(round.amax.value_sync());
    let _ = round.forward(Tensor::<2>::ones([0, 64], &device));
    assert_eq!(floats(round.amax.value_sync()), seen);
}

#[test]
fn weights_without_values_stay_dense_with_a_reason() {
    for (name, device, _) in devices() {
        for shape in [[0, 16], [16, 0], [0, 0]] {
            let weight = |shape: [usize; 2]| Linear {
                weight: Param::from_tensor(Tensor::zeros(shape, &device)),
                bias: None,
            };
            let mut layers = vec![weight(shape), weight([16, 16])];
            for method in [burn_fp4::Method::Amax, burn_fp4::Method::SSE] {
                let mut layers = layers.clone();
                let report = layers.quantize_fp4(&Fp4Config::nvfp4().method(method)).unwrap();
                assert_eq!(*reason(&report, "0.weight"), KeepReason::Empty, "{name}");
                assert_eq!(layers[0].weight.val().dims(), shape, "{name}");
                assert_eq!(report.get("0.weight").unwrap().bits_per_value(), 0.0);
                assert!(!report.to_string().contains("inf"), "{report}");
            }
            let report = layers.lora_fp4(&Lora::new(4, 8.0)).unwrap();
            assert_eq!(*reason(&report, "0.weight"), KeepReason::Empty, "{name}");
            // Codes of it that are given are codes of nothing.
            let given = layers[..1].to_vec().pack_fp4(|weight| {
                let values = weight.tensor::<2>().expect("a matrix");
                let packed = burn_fp4::ops::quantize(values, 0, &Fp4Scheme::nvfp4())?;
                Ok(Some(packed.into()))
            });
            assert!(given.is_ok(), "{name}");
        }
    }
}

#[test]
fn reports_with_long_names_fit_a_terminal() {
    #[derive(Module, Debug)]
    struct Attention {
        query_projection_of_the_decoder: Linear,
        key_projection_of_the_decoder: Linear,
    }
    let device = Device::flex();
    let linear = || LinearConfig::new(64, 64).init(&device);
    let mut layers: Vec<_> = (0..2)
        .map(|_| Attention {
            query_projection_of_the_decoder: linear(),
            key_projection_of_the_decoder: linear(),
        })
        .collect();
    let names = ["query_projection_of_the_decoder", "key_projection_of_the_decoder"];
    let mut calibration = Calibration::new();
    for path in ["0.query_projection_of_the_decoder", "1.key_projection_of_the_decoder"] {
        let inputs = random(3, [80, 64], &device);
        calibration.add(&format!("{path}.weight"), 0, inputs).unwrap();
    }
    let config = Fp4Config::nvfp4().share_scale(names).with_calibration(&calibration);
    let config = config.unused(Unused::Report);
    let sensitivity = layers.fp4_sensitivity(&config, &Candidate::DEFAULT).unwrap();
    let sensitivity = format!("{sensitivity:#}");
    let by_gptq = config.method(burn_fp4::Method::GPTQ);
    let report = layers.quantize_fp4(&by_gptq).unwrap().to_string();
    assert!(report.contains("output %"), "{report}");
    for table in [&sensitivity, &report] {
        assert!(table.lines().count() > 8, "{table}");
        assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
        // The end of a name says more than its beginning.
        assert!(table.contains("decoder.weight"), "{table}");
    }
    assert!(report.contains(" in all:\n  0.{"), "{report}");
}

#[test]
fn parameters_of_a_pattern_are_one_row_of_the_report() {
    let device = Device::flex();
    let linear = |_| LinearConfig::new(64, 64).init(&device);
    let mut layers: Vec<_> = (0..12).map(linear).collect();
    let report = layers.quantize_fp4(&Fp4Config::nvfp4().keep_first(1)).unwrap();
    let text = report.to_string();
    for row in ["{1..11}.weight  11 x [64, 64]  NVFP4", "{0..11}.bias", "0.weight"] {
        assert!(text.contains(row), "{text}");
    }
    // A header and its line, and the three rows.
    assert_eq!(text.lines().position(str::is_empty), Some(5), "{text}");
    let error = format!("{:.3}", 100.0 * report.relative_error());
    let row = text.lines().find(|line| line.starts_with("{1..11}.weight")).expect("the row");
    assert!(row.ends_with(&error), "{text}");
    assert_eq!(format!("{report:#}").lines().position(str::is_empty), Some(2 + 24));
}

#[test]
fn advice_for_layers_of_burn_can_be_followed() {
    let device = Device::flex();
    let mut encoder = TransformerEncoderConfig::new(32, 64, 2, 1).init(&device);
    let report = encoder.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    for (path, layer) in [
        ("layers.0.mha.query.weight", "MultiHeadAttention"),
        ("layers.0.pwff.linear_inner.weight", "PositionWiseFeedForward"),
    ] {
        let products = report.get(path).unwrap().products().unwrap();
        assert_eq!(
            *products,
            MatmulPath::Dequantized(DequantizeReason::Inside { layer: layer.to_owned() })
        );
        assert!(products.to_string().contains("use `exclude` to keep it dense"), "{products}");
    }
    assert!(!report.to_string().contains("Fp4Linear::from"), "{report}");
    // As advised.
    let mut encoder = TransformerEncoderConfig::new(32, 64, 2, 1).init(&device);
    let config = Fp4Config::nvfp4().exclude("**.mha.*");
    let report = encoder.quantize_fp4(&config).unwrap();
    assert!(!report.to_string().contains("MultiHeadAttention`"), "{report}");
}

/// Makes a layer with these weights.
fn with_weights(values: Vec<f32>, shape: [usize; 2], dtype: DType, device: &Device) -> Linear {
    let weight = Tensor::<2>::from_data(TensorData::new(values, shape), (device, DType::F32));
    Linear { weight: Param::from_tensor(weight.cast(dtype)), bias: None }
}

#[test]
fn relative_errors_do_not_depend_on_the_magnitude_of_weights() {
    for (name, device, _) in devices() {
        for config in [Fp4Config::nvfp4(), Fp4Config::mxfp4()] {
            let report = |exponent: i32| {
                let factor = 2f32.powi(exponent);
                let values = normals(3, 64 * 32).into_iter().map(|value| value * factor);
                let mut layer = with_weights(values.collect(), [64, 32], DType::F32, &device);
                layer.quantize_fp4(&config).unwrap()
            };
            let expected = report(0).relative_error();
            assert!(expected > 0.08 && expected < 0.13, "{name} {expected}");
            for exponent in [-100, -80, -66, 60, 70, 100] {
                let found = report(exponent).relative_error();
                assert!((found - expected).abs() < 1e-6, "{name} 2^{exponent}: {found} {expected}");
            }
        }
    }
}

#[test]
fn values_that_overflow_their_dtype_are_reported() {
    // 65504 is nearer to 4 x 2^14 than to 6 x 2^13, and 4 x 2^14 is no f16 number.
    let values = vec![65504.0; 32 * 4];
    for (name, device, dtypes) in devices() {
        for (dtype, infinite) in [(DType::F16, true), (DType::F32, false)] {
            if !dtypes.contains(&dtype) {
                continue;
            }
            let mut layer = with_weights(values.clone(), [32, 4], dtype, &device);
            let config = Fp4Config::mxfp4().method(burn_fp4::Method::SSE);
            let report = layer.quantize_fp4(&config).unwrap();
            let is_infinite = floats(layer.weight.val()).iter().any(|value| value.is_infinite());
            assert_eq!(is_infinite, infinite, "{name} {dtype:?}");
            assert_eq!(report.relative_error().is_infinite(), infinite, "{name} {report}");
            let said = unwrapped(&report).contains("became infinite in f16");
            assert_eq!(said, infinite, "{name} {report}");
            let json = serde_json::to_string(&report).unwrap();
            assert_eq!(serde_json::from_str::<burn_fp4::Fp4Report>(&json).unwrap(), report);
        }
    }
    let device = Device::flex();
    // Only finite tensor scales of the 16 are tried.
    let mut layer = with_weights(vec![3.4e38; 32 * 4], [32, 4], DType::F32, &device);
    let config = Fp4Config::nvfp4().method(burn_fp4::Method::Sse(Sse::TensorScale));
    let report = layer.quantize_fp4(&config).unwrap();
    assert!(report.relative_error() < 0.1, "{report}");
    assert!(floats(layer.weight.val()).iter().all(|value| value.is_finite()));
}

#[test]
fn f64_weights_are_an_error_that_says_what_to_do() {
    let device = Device::flex();
    let mut layer = with_weights(normals(3, 32 * 4), [32, 4], DType::F64, &device);
    let error = layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap_err().to_string();
    assert!(error.contains("found F64; cast the module, or use `exclude`"), "{error}");
    assert_eq!(layer.weight.val().dtype(), DType::F64);
}
