//! Types of ggml other than FP4: the values are the same as in Python's gguf, bit for bit.

use burn_fp4_checkpoints::selection::Selection;
use burn_fp4_checkpoints::{
    Checkpoint, CheckpointError, Container, Dtype, GgmlRow, Model, Reader, Tensor, TensorProblem,
    Value, Weight, WriteOptions,
};
use burn_fp4_policy::{Decision, Policy, Reason, Recipe};

use super::counting::peak;
use super::models::{ggml, ggml_rows};
use super::random::Random;

fn row(name: &str) -> &'static GgmlRow {
    ggml_rows().find(|row| row.name == name).expect(name)
}

fn tensor<'w>(weight: &'w mut Weight<'static>) -> &'w mut Tensor<'static> {
    match &mut weight.value {
        Value::Plain(tensor) => tensor,
        Value::Fp8(_) | Value::Fp4(_) => panic!("records of ggml are stored as they are"),
    }
}

/// Records whose scales are no NaN: the bytes of a golden file.
fn records(row: &'static GgmlRow, golden: &Container) -> Vec<u8> {
    golden.get(&format!("{}/records", row.name)).expect(row.name).bytes.into_owned()
}

fn golden() -> Container {
    Container::open(super::golden("ggml.safetensors")).expect("golden vectors")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn types_of_ggml_have_the_bits_of_python_s_gguf() {
    let golden = golden();
    let mut compared = Vec::new();
    for row in ggml_rows() {
        let Some(expected) = golden.get(&format!("{}/values", row.name)) else {
            let mut other = ggml("w", row, &[1, row.block], vec![0; row.bytes]);
            assert!(!tensor(&mut other).dtype.is_float(), "{} has no golden vector", row.name);
            continue;
        };
        let mut weight = ggml("w", row, &expected.shape, records(row, &golden));
        let found = tensor(&mut weight).to_f32().expect(row.name);
        assert_eq!(bits(&found), bits(&expected.to_f32().expect("F32")), "{}", row.name);
        compared.push(row.name);
    }
    let all = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS";
    assert_eq!(compared.join(" "), all);
}

#[test]
fn records_that_do_not_fit_the_shape_are_an_error() {
    for row in ggml_rows() {
        let of = |shape: &[usize], bytes: usize| {
            let mut weight = ggml("w", row, shape, vec![0; bytes]);
            match tensor(&mut weight).to_f32() {
                Err(CheckpointError::Tensor { problem, .. }) => problem,
                other => panic!("{}: {other:?}", row.name),
            }
        };
        let (expected, found) = (2 * row.bytes as u64, 2 * row.bytes as u64 - 1);
        let short = TensorProblem::Bytes { expected, found };
        assert_eq!(of(&[2, row.block], 2 * row.bytes - 1), short);
        let size = TensorProblem::Size { found: vec![1, row.block as u64 - 1] };
        assert_eq!(of(&[1, row.block - 1], row.bytes), size);
    }
}

#[test]
fn values_are_read_by_pieces_of_whole_records() {
    let path = super::folder("ggml-pieces").join("x.gguf");
    let random = &mut Random(29);
    let shapes = [("Q6_K", [3, 2560]), ("Q6_K", [1000, 2560]), ("Q5_0", [500, 4096])];
    let weight = |(at, (name, shape)): (usize, (&str, [usize; 2]))| {
        let row = row(name);
        let len = shape[0] * shape[1] / row.block * row.bytes;
        let bytes = (0..len).map(|_| random.next() as u8 & 0x3F).collect();
        ggml(&format!("{at}.weight"), row, &shape, bytes)
    };
    let model =
        Model { weights: shapes.into_iter().enumerate().map(weight).collect(), ..Model::default() };
    assert!(model.weights[1].bytes() > 2 * Reader::PIECE);
    assert!(!Reader::PIECE.is_multiple_of(row("Q6_K").bytes));
    model.write(&path, "gguf", &WriteOptions::default()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("gguf");
    let reader = Reader::new(checkpoint.container());
    for weight in checkpoint.weights().expect("weights") {
        let (values, bytes) = peak(|| reader.values(&weight).expect("values"));
        assert_eq!(bits(&values), bits(&weight.values().expect("values").1));
        assert!(bytes <= 4 * weight.len() + Reader::PIECE + (64 << 10), "{bytes}");
    }
}

/// A matrix of every type that is decoded, of 64 columns or more.
fn model(golden: &Container) -> Model<'static> {
    let decoded = ggml_rows().filter(|row| golden.get(&format!("{}/values", row.name)).is_some());
    let weight = |row: &'static GgmlRow| {
        let bytes = records(row, golden);
        let shape = [bytes.len() / row.bytes / 2, 2 * row.block];
        ggml(&format!("{}.up_proj.weight", row.name), row, &shape, bytes)
    };
    Model { weights: decoded.map(weight).collect(), ..Model::default() }
}

#[test]
fn dialects_without_records_get_them_decoded_or_refuse_them() {
    let (golden, folder) = (golden(), super::folder("ggml-decoded"));
    let source = model(&golden);
    let plain = WriteOptions::default();
    for dialect in ["plain", "modelopt", "compressed-tensors", "mlx"] {
        let Err(CheckpointError::CannotHold { what, .. }) = source.plan(dialect, &plain) else {
            panic!("{dialect} has no records");
        };
        assert_eq!(what, CheckpointError::GGML_TO_DECODE);
    }
    for (dtype, dialect, name) in [(Dtype::F32, "plain", "f32"), (Dtype::BF16, "gguf", "x.gguf")] {
        let options = WriteOptions { decode_ggml: Some(dtype), ..plain };
        let planned = source.plan(dialect, &options).expect("a plan");
        assert!(!planned.copies(0) && planned.pieces(0).is_err(), "it is made, not copied");
        let path = folder.join(name);
        let report = source.write(&path, dialect, &options).expect("decoded");
        assert_eq!(report.decoded as usize, source.weights.len());
        let checkpoint = Checkpoint::open(&path).expect(dialect);
        let written = checkpoint.weights().expect("weights");
        assert_eq!(written.len(), source.weights.len());
        for weight in &source.weights {
            let found = written.iter().find(|found| found.name == weight.name).expect("its name");
            assert_eq!(found.kind(), dtype.to_string());
            let (shape, mut values) = weight.values().expect("values");
            if dtype == Dtype::BF16 {
                values.iter_mut().for_each(|value| *value = half::bf16::from_f32(*value).to_f32());
            }
            let (found_shape, found) = found.values().expect("floats");
            assert_eq!((found_shape, bits(&found)), (shape, bits(&values)), "{}", weight.name);
        }
    }
    // MOSTLY_BF16, whatever the source was.
    let bytes = std::fs::read(folder.join("x.gguf")).expect("a file");
    let pair = [b"general.file_type".as_slice(), &[4, 0, 0, 0, 32, 0, 0, 0]].concat();
    assert!(bytes.windows(pair.len()).any(|part| part == pair));
    // Types that are not decoded are refused by name, and have no such remedy.
    let other = ggml("w", row("IQ2_XXS"), &[1, 256], vec![0; 66]);
    let other = Model { weights: vec![other], ..Model::default() };
    let error = other.plan("plain", &plain).expect_err("records").to_string();
    assert!(error.ends_with("cannot hold records of ggml"), "{error}");
    let decode = WriteOptions { decode_ggml: Some(Dtype::F32), ..plain };
    for dialect in ["plain", "gguf"] {
        let error = other.plan(dialect, &decode).expect_err("not decoded").to_string();
        assert!(error.contains("`w`") && error.contains("found IQ2_XXS; "), "{error}");
    }
}

#[test]
fn records_that_are_decoded_can_be_quantized() {
    let mut model = model(&golden());
    let last = ggml("iq.up_proj.weight", row("IQ2_XXS"), &[2, 256], vec![0; 132]);
    model.weights.push(last);
    let recipe = Recipe { dialect: Some("gguf".to_owned()), ..Recipe::default() };
    let policy = Policy::new(recipe).expect("choices that go together");
    let selection = Selection::of(&model, &policy).expect("a selection");
    let (kept, chosen) = selection.decisions.split_last().expect("decisions");
    assert_eq!(*kept, Decision::Keep(Reason::Dtype("IQ2_XXS".into())));
    assert!(chosen.iter().all(|decision| matches!(decision, Decision::Quantize { .. })));
    assert_eq!(chosen.len(), 12);
}
