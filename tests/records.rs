//! Corrupt records and calibration caches: typed errors that change nothing, with at most twice the
//! memory of the file.
//!
//! `BURN_FP4_MUTATIONS` sets the number of mutations of each test (default: 300).

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, DType, Device, Tensor};
use burn_fp4::{Calibration, CalibrationOptions, Fp4Config, Fp4Error, Fp4Module, PackedWeight};
use burn_pack::{Reader, Writer};
use peak_alloc::PeakAlloc;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use tests::inputs::Random;
use tests::modules::seeded;
use tests::tensors::{floats, random};
use xxhash_rust::xxh3::Xxh3;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Allowed allocations beyond twice the file: parsers reserve up to 1 MiB for each list from its
/// declared length, before they read it.
const SLACK: usize = 4 << 20;

/// Serializes the tests: memory is counted for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn mutations() -> usize {
    match std::env::var("BURN_FP4_MUTATIONS") {
        Ok(count) => count.parse().expect("BURN_FP4_MUTATIONS is a number"),
        Err(_) => 300,
    }
}

/// A folder that is removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("burn-fp4-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A failed test may leave files: an error here does not matter.
        let _ = fs::remove_dir_all(&self.0);
    }
}

const WIDTH: usize = 64;

/// Packed weights, dense parameters, and running statistics between them.
#[derive(Module, Debug)]
struct Net {
    body: Linear,
    norm: BatchNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            body: LinearConfig::new(WIDTH, WIDTH).init(device),
            norm: BatchNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, 24).init(device),
        };
        seeded(net, 1)
    }

    /// The same parameters, with running statistics of its own, which clones share.
    fn anew(&self, device: &Device) -> Self {
        Self { norm: BatchNormConfig::new(WIDTH).init(device), ..self.clone() }
    }

    /// A trained one, whose head stays dense.
    fn quantized(device: &Device) -> Self {
        let mut net = seeded(Self::new(device), 50);
        net.norm.running_mean.update(random(8, [WIDTH], device));
        net.norm.running_mean.value_sync();
        net.quantize_fp4(&Fp4Config::nvfp4().exclude("head.*")).unwrap();
        net
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.norm.forward(self.body.forward(x)).tanh())
    }

    fn is_packed(&self) -> bool {
        self.body.weight.reparameterization::<PackedWeight>().is_some()
    }

    /// Every value, as bits.
    fn bits(&self) -> Vec<u32> {
        let bias = |linear: &Linear| linear.bias.as_ref().expect("a bias").val();
        let values = [
            floats(self.body.weight.val()),
            floats(bias(&self.body)),
            floats(self.norm.gamma.val()),
            floats(self.norm.beta.val()),
            floats(self.norm.running_mean.value_sync()),
            floats(self.norm.running_var.value_sync()),
            floats(self.head.weight.val()),
            floats(bias(&self.head)),
        ];
        values.into_iter().flatten().map(f32::to_bits).collect()
    }
}

fn record(net: Net) -> Vec<u8> {
    net.into_record().into_bytes().unwrap().to_vec()
}

fn bytes(bytes: &[u8]) -> Bytes {
    Bytes::from_bytes_vec(bytes.to_vec())
}

/// Makes a record with changed tensors; `None` if it cannot be written.
fn edited(record: &[u8], edit: impl FnOnce(&mut Vec<burn_pack::Tensor>)) -> Option<Vec<u8>> {
    let mut tensors = Reader::from_bytes(bytes(record)).unwrap().into_tensors().unwrap();
    edit(&mut tensors);
    Some(Writer::new(tensors).into_bytes().ok()?.to_vec())
}

/// Changes the tensor of this name.
fn with_tensor(record: &[u8], name: &str, edit: impl FnOnce(&mut burn_pack::Tensor)) -> Vec<u8> {
    let edited = edited(record, |tensors| {
        let found = tensors.iter_mut().find(|tensor| tensor.name == name);
        edit(found.unwrap_or_else(|| panic!("no tensor `{name}`")));
    });
    edited.expect("it can be written")
}

/// Gives a tensor another dtype of the same size.
fn retyped(tensor: &mut burn_pack::Tensor, dtype: DType) {
    tensor.dtype = dtype;
}

/// Gives a tensor other bytes.
fn refilled(tensor: &mut burn_pack::Tensor, fill: impl FnOnce(&mut Vec<u8>)) {
    let mut values = tensor.to_bytes().unwrap().to_vec();
    fill(&mut values);
    let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
    *tensor = burn_pack::Tensor::new(name, tensor.dtype, shape, tensor.param_id, bytes(&values));
}

fn load(net: &mut Net, record: &[u8]) -> Result<(), Fp4Error> {
    let record = ModuleRecord::from_bytes(bytes(record));
    net.load_fp4_record(record.expect("the bytes of a record"))
}

const CODES: &str = "body.weight.fp4.nvfp4-block16-axis0.codes";
const SCALES: &str = "body.weight.fp4.nvfp4-block16-axis0.scales";
const TENSOR_SCALE: &str = "body.weight.fp4.nvfp4-block16-axis0.tensor_scale";

#[test]
fn invalid_packed_parts_are_errors_that_name_them() {
    let _alone = alone();
    for (name, device, _) in tests::engines::devices() {
        let good = record(Net::quantized(&device));
        let cases = [
            ("codes of i8", with_tensor(&good, CODES, |codes| retyped(codes, DType::I8))),
            ("scales of i8", with_tensor(&good, SCALES, |scales| retyped(scales, DType::I8))),
            (
                "a tensor scale of f32",
                with_tensor(&good, TENSOR_SCALE, |scale| {
                    retyped(scale, DType::F32);
                }),
            ),
            (
                "a scale that is NaN",
                with_tensor(&good, SCALES, |scales| {
                    refilled(scales, |values| values[5] = 0x7f);
                }),
            ),
            (
                "a tensor scale that is NaN",
                with_tensor(&good, TENSOR_SCALE, |scale| {
                    refilled(scale, |values| values.copy_from_slice(&f32::NAN.to_le_bytes()));
                }),
            ),
            (
                "a weight of integers",
                with_tensor(&good, "body.weight", |base| {
                    retyped(base, DType::I32);
                }),
            ),
            (
                "codes turned over",
                with_tensor(&good, CODES, |codes| {
                    let shape: Vec<_> = codes.shape.to_vec().into_iter().rev().collect();
                    codes.shape = shape.into();
                }),
            ),
        ];
        let dense = Net::new(&device);
        let mut packed = Net::new(&device);
        packed.quantize_fp4(&Fp4Config::nvfp4().exclude("head.*")).unwrap();
        for (case, record) in cases {
            for (target, module) in [("dense", &dense), ("packed", &packed)] {
                let mut net = module.anew(&device);
                let (before, was_packed) = (net.bits(), net.is_packed());
                let what = format!("{name}, {case}, into a {target} module");
                let error = load(&mut net, &record).expect_err(&what);
                assert!(error.to_string().contains("body.weight"), "{what}: {error}");
                assert_eq!(net.is_packed(), was_packed, "{what}");
                assert!(net.bits() == before, "{what}: it changed");
            }
        }
    }
}

#[test]
fn a_failed_load_changes_nothing_not_even_running_statistics() {
    let _alone = alone();
    let device = Device::flex();
    let good = record(Net::quantized(&device));
    let wrong_shape = with_tensor(&good, "head.weight", |weight| {
        weight.shape = vec![24, WIDTH].into();
    });
    let wrong_dtype = with_tensor(&good, "head.bias", |bias| retyped(bias, DType::I32));
    let wrong_mean = with_tensor(&good, "norm.running_mean", |mean| retyped(mean, DType::I32));
    let missing = edited(&good, |tensors| tensors.retain(|tensor| tensor.name != "head.bias"));
    let renamed = with_tensor(&good, "head.bias", |bias| bias.name = "head.bais".to_owned());
    for (case, record) in [
        ("a shape", wrong_shape),
        ("a dtype", wrong_dtype),
        ("a dtype of statistics", wrong_mean),
        ("a missing tensor", missing.unwrap()),
        ("a misspelt tensor", renamed),
    ] {
        for packed in [false, true] {
            let mut net = Net::new(&device);
            if packed {
                net.quantize_fp4(&Fp4Config::nvfp4().exclude("head.*")).unwrap();
            }
            let clone = net.clone();
            let before = net.bits();
            let error = load(&mut net, &record).expect_err(case);
            assert!(matches!(error, Fp4Error::Record { .. }), "{case}: {error:?}");
            assert!(net.bits() == before, "{case}");
            assert!(clone.bits() == before, "{case}: of a clone");
        }
    }
    // The record itself is good.
    let mut net = Net::new(&device);
    load(&mut net, &good).unwrap();
    assert_eq!(floats(net.norm.running_mean.value()), floats(random(8, [WIDTH], &device)));
}

/// Returns the length of the part before the data: a header of ten bytes, whose last four are the
/// length of a CBOR map of tensors, and the map.
fn end_of_metadata(record: &[u8]) -> usize {
    10 + u32::from_le_bytes(record[6..10].try_into().expect("four bytes")) as usize
}

/// Flips bits in a range.
fn flip(bytes: &mut [u8], range: std::ops::Range<usize>, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let at = range.start + random.below(range.len());
        bytes[at] ^= 1 << random.below(8);
    }
}

/// Corrupts a record in one of many ways.
fn mutated_record(good: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bad = good.to_vec();
    let metadata = end_of_metadata(good);
    match random.below(9) {
        0 => bad.truncate(random.below(good.len())),
        1 => flip(&mut bad, 0..good.len(), random),
        2 => flip(&mut bad, 0..metadata, random),
        // A huge length of the map, of text, of a list or of a number.
        3 => {
            let length = [u32::MAX, 100 << 20, random.bits() as u32][random.below(3)];
            bad[6..10].copy_from_slice(&length.to_le_bytes());
        }
        4 => {
            let at = 10 + random.below(metadata - 19);
            bad[at] = [0x1b, 0x5b, 0x7b, 0x9b, 0xbb][random.below(5)];
            let length = random.bits() >> random.below(64);
            bad[at + 1..at + 9].copy_from_slice(&length.to_be_bytes());
        }
        // Names of dtypes.
        5 => {
            let names: [&[u8]; 5] = [b"F32", b"I32", b"U32", b"F16", b"I64"];
            let from = names[random.below(2)];
            let places: Vec<_> =
                (10..metadata - 3).filter(|&at| good[at..at + 3] == *from).collect();
            if let Some(&at) = places.get(random.below(places.len().max(1))) {
                bad[at..at + 3].copy_from_slice(names[random.below(names.len())]);
            }
        }
        // Whole tensors, whose lengths go together.
        kind => {
            let spoilt = edited(good, |tensors| {
                let (at, other) = (random.below(tensors.len()), random.below(tensors.len()));
                let len = tensors[at].byte_len();
                match kind {
                    6 => {
                        let types = match tensors[at].dtype.size() {
                            1 => [DType::U8, DType::I8, DType::U8],
                            _ => [DType::F32, DType::I32, DType::U32],
                        };
                        retyped(&mut tensors[at], types[random.below(3)]);
                        let mut shape = tensors[at].shape.to_vec();
                        shape.reverse();
                        if random.below(2) == 0 {
                            shape.insert(random.below(shape.len() + 1), 1);
                        }
                        tensors[at].shape = shape.into();
                    }
                    7 => {
                        let name = tensors[at].name.clone();
                        tensors[at].name = tensors[other].name.clone();
                        tensors[other].name = name;
                    }
                    _ if random.below(2) == 0 => {
                        // No bytes at all, of a shape without end.
                        let huge = random.bits() as usize >> random.below(64);
                        let shape =
                            [vec![0, huge], vec![huge, 0], vec![0]][random.below(3)].clone();
                        let burn_pack::Tensor { name, dtype, param_id, .. } = tensors[at].clone();
                        let empty = bytes(&[]);
                        tensors[at] = burn_pack::Tensor::new(name, dtype, shape, param_id, empty);
                    }
                    _ if len > 0 => refilled(&mut tensors[at], |values| {
                        let at = random.below(values.len());
                        values[at] = [0x7f, 0xff, 0x80, 0x00][random.below(4)];
                    }),
                    _ => {}
                }
            });
            bad = spoilt.unwrap_or(bad);
        }
    }
    bad
}

/// Runs a closure that must not panic, nor allocate more than `usual` and twice the file.
fn within<T>(what: &str, file: usize, usual: usize, run: impl FnOnce() -> T) -> T {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let result = catch_unwind(AssertUnwindSafe(run));
    let allocated = ALLOCATOR.peak_usage().saturating_sub(before);
    let allowed = usual + 2 * file + SLACK;
    assert!(allocated <= allowed, "{what}: {allocated} bytes allocated, {allowed} allowed");
    result.unwrap_or_else(|_| panic!("{what}: it panicked"))
}

#[test]
fn corrupt_records_load_or_fail_with_a_typed_error_in_bounded_memory() {
    let _alone = alone();
    let device = Device::flex();
    let folder = Folder::new("records");
    let path = folder.0.join("spoilt.bpk");
    let good = record(Net::quantized(&device));
    let dense = Net::new(&device);
    let mut packed = Net::new(&device);
    packed.quantize_fp4(&Fp4Config::nvfp4().exclude("head.*")).unwrap();
    let x = random(3, [2, WIDTH], &device);
    let (mut loaded, mut refused) = (0, 0);
    for number in 0..mutations() {
        let mut random = Random::new(number as u64);
        let bad = mutated_record(&good, &mut random);
        let what = format!("mutation {number}");
        let target = if number % 2 == 0 { &dense } else { &packed };
        let mut net = target.anew(&device);
        let before = net.bits();
        let from_file = random.below(2) == 0;
        if from_file {
            fs::write(&path, &bad).unwrap();
        }
        let result = within(&what, bad.len(), 0, || {
            if from_file {
                return net.load_fp4_file(&path);
            }
            match ModuleRecord::from_bytes(bytes(&bad)) {
                Ok(record) => net.load_fp4_record(record),
                // Burn's own error.
                Err(error) => Err(Fp4Error::Record { problem: error.to_string(), names: vec![] }),
            }
        });
        match result {
            Ok(()) => {
                loaded += 1;
                let output = within(&what, bad.len(), 0, || net.forward(x.clone()).dims());
                assert_eq!(output, [2, 24], "{what}");
            }
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().is_empty(), "{what}");
                assert!(net.bits() == before, "{what}: {error}, and the module changed");
            }
        }
    }
    println!("{loaded} loaded, {refused} refused");
    assert!(refused > 0, "nothing was refused");
}

/// A module to calibrate.
#[derive(Module, Debug)]
struct Layers {
    layers: Vec<Linear>,
}

impl Layers {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x).tanh())
    }
}

fn calibrated(layers: &Layers, cache: &Path) -> Result<Calibration, Fp4Error> {
    let batches = [random(3, [40, WIDTH], &Device::flex())];
    Calibration::of(layers)
        .options(CalibrationOptions::default().cache(cache))
        .run(batches, |layers: &Layers, x| layers.forward(x))
}

/// Lists the files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> =
        entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect();
    found.sort();
    found
}

/// Updates the checksum of a cache file, if it can be read: the checks after the checksum are then
/// reached.
fn with_its_checksum(good: &[u8], mut bad: Vec<u8>) -> Vec<u8> {
    let checksum = |file: &[u8]| {
        let file = SafeTensors::deserialize(file).ok()?;
        let mut hasher = Xxh3::new();
        for name in ["tiles", "rows", "tokens", "amax"] {
            hasher.update(file.tensor(name).ok()?.data());
        }
        Some(format!("{:032x}", hasher.digest128()))
    };
    let before = checksum(good).expect("a file as it was stored");
    if let Some(after) = checksum(&bad)
        && let Some(at) = bad.windows(before.len()).position(|part| part == before.as_bytes())
    {
        bad[at..at + after.len()].copy_from_slice(after.as_bytes());
    }
    bad
}

/// Corrupts a file of a cache in one of many ways.
fn mutated_cache(good: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bad = good.to_vec();
    let header = 8 + u64::from_le_bytes(good[..8].try_into().expect("eight bytes")) as usize;
    match random.below(7) {
        0 => bad.truncate(random.below(good.len())),
        1 => flip(&mut bad, 0..good.len(), random),
        2 => flip(&mut bad, 8..header, random),
        3 => {
            let length = random.bits() >> random.below(64);
            bad[..8].copy_from_slice(&length.to_le_bytes());
        }
        // Digits of shapes and offsets.
        4 => {
            let digits: Vec<_> = (8..header).filter(|&at| good[at].is_ascii_digit()).collect();
            bad[digits[random.below(digits.len())]] = b'0' + random.below(10) as u8;
        }
        5 => {
            let names: [&[u8]; 5] = [b"F64", b"U64", b"I64", b"F32", b"U32"];
            let from = names[random.below(2)];
            let places: Vec<_> = (8..header - 3).filter(|&at| good[at..at + 3] == *from).collect();
            if let Some(&at) = places.get(random.below(places.len().max(1))) {
                bad[at..at + 3].copy_from_slice(names[random.below(names.len())]);
            }
        }
        // Whole tensors: huge counts, values that are not finite, other shapes.
        _ => {
            let file = SafeTensors::deserialize(good).unwrap();
            let (_, metadata) = SafeTensors::read_metadata(good).unwrap();
            let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
                .tensors()
                .into_iter()
                .map(|(name, view)| {
                    (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
                })
                .collect();
            let at = random.below(tensors.len());
            let (_, dtype, shape, data) = &mut tensors[at];
            let words = (data.len() / 8).max(1);
            let word = 8 * random.below(words);
            match (random.below(3), *dtype) {
                (0, _) => shape.reverse(),
                (_, Dtype::F64) if data.len() >= 8 => {
                    let bad = [f64::NAN, f64::INFINITY, -1e300][random.below(3)];
                    data[word..word + 8].copy_from_slice(&bad.to_le_bytes());
                }
                (_, Dtype::U64) if data.len() >= 8 => {
                    let bad = random.bits() >> random.below(64);
                    data[word..word + 8].copy_from_slice(&bad.to_le_bytes());
                }
                _ => shape.push(1),
            }
            let views = tensors.iter().map(|(name, dtype, shape, data)| {
                (name, TensorView::new(*dtype, shape.clone(), data).expect("as long as before"))
            });
            bad = serialize(views, metadata.metadata().clone()).unwrap();
        }
    }
    bad
}

#[test]
fn corrupt_calibration_caches_load_or_fail_with_a_typed_error_in_bounded_memory() {
    let _alone = alone();
    let device = Device::flex();
    let folder = Folder::new("caches");
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
    let layers = seeded(Layers { layers: vec![linear(), linear()] }, 4);
    let expected = calibrated(&layers, &folder.0).unwrap();
    let files = files(&folder.0);
    assert_eq!(files.len(), 2, "one file for the input of each layer: {files:?}");
    let good: Vec<_> = files.iter().map(|path| fs::read(path).unwrap()).collect();
    // Memory of a calibration whose files are intact.
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    assert_eq!(calibrated(&layers, &folder.0).unwrap(), expected);
    let usual = ALLOCATOR.peak_usage() - before;
    let (mut loaded, mut refused) = (0, 0);
    for number in 0..mutations() {
        let mut random = Random::new(number as u64);
        let at = random.below(files.len());
        let mut bad = mutated_cache(&good[at], &mut random);
        if random.below(2) == 0 {
            bad = with_its_checksum(&good[at], bad);
        }
        fs::write(&files[at], &bad).unwrap();
        let what = format!("mutation {number}");
        match within(&what, bad.len(), usual, || calibrated(&layers, &folder.0)) {
            Ok(found) => {
                loaded += 1;
                assert_eq!(found.iter().count(), 2, "{what}");
                for (path, _, _, gram) in found.iter() {
                    let finite = gram.values().iter().all(|value| value.is_finite());
                    assert!(finite, "{what}: {path}");
                    assert_eq!(gram.channels(), WIDTH, "{what}: {path}");
                }
            }
            Err(Fp4Error::Cache { path, .. }) => {
                refused += 1;
                assert_eq!(path, files[at], "{what}");
            }
            Err(error) => panic!("{what}: {error:?}"),
        }
        fs::write(&files[at], &good[at]).unwrap();
    }
    println!("{loaded} loaded, {refused} refused");
    assert!(refused > 0, "nothing was refused");
    assert!(loaded > 0, "nothing was loaded");
    assert_eq!(calibrated(&layers, &folder.0).unwrap(), expected);
}

#[test]
fn a_cache_tells_modules_apart_by_sign_and_position() {
    let _alone = alone();
    let device = Device::flex();
    let folder = Folder::new("digests");
    let layer = seeded(LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device), 4);
    let second = seeded(LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device), 5);
    let of = |weight: Tensor<2>| {
        let first = Linear { weight: layer.weight.clone().map(|_| weight), bias: None };
        Layers { layers: vec![first, second.clone()] }
    };
    let weight = layer.weight.val();
    // The same magnitudes.
    let others = [-weight.clone(), weight.clone().transpose(), weight.clone().flip([0])];
    calibrated(&of(weight), &folder.0).unwrap();
    for other in others {
        let layers = of(other);
        let found = calibrated(&layers, &folder.0).unwrap();
        let plain = Calibration::of(&layers)
            .run([random(3, [40, WIDTH], &device)], |layers: &Layers, x| layers.forward(x))
            .unwrap();
        assert_eq!(found, plain, "it is not that of another module");
    }
    let folders = fs::read_dir(&folder.0).unwrap().count();
    assert_eq!(folders, 4, "one folder for each");
}

#[test]
fn a_file_of_another_calibration_is_refused() {
    let _alone = alone();
    let device = Device::flex();
    let folder = Folder::new("foreign");
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
    let layers = |seed| seeded(Layers { layers: vec![linear(), linear()] }, seed);
    calibrated(&layers(1), &folder.0).unwrap();
    let first = files(&folder.0);
    calibrated(&layers(2), &folder.0).unwrap();
    let second: Vec<_> =
        files(&folder.0).into_iter().filter(|path| !first.contains(path)).collect();
    fs::copy(&first[0], &second[0]).unwrap();
    let error = calibrated(&layers(2), &folder.0).unwrap_err();
    assert!(matches!(&error, Fp4Error::Cache { path, .. } if *path == second[0]), "{error:?}");
}
