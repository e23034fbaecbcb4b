//! Models and files that the tests write and read.

use std::fs;
use std::path::Path;

use burn_fp4_checkpoints::{
    DataType, Dtype, Fp4Weight, Fp8Weight, GgmlRow, Granularity, Model, Numbers, Pattern,
    Quantization, Syntax, Tensor, TensorScale, Value, Weight,
};
use burn_fp4_formats::TensorScale as Scale;
use burn_fp4_formats::{Fp4Format, Packed};
use serde_json::json;

use super::random::Random;

impl Random {
    pub(crate) fn packed(&mut self, format: Fp4Format, rows: usize, cols: usize, g: f32) -> Packed {
        let block_size = format.row().block_size;
        let scale = |random: &mut Self| match format {
            // Every finite, positive E4M3 code; powers of two that casts keep.
            Fp4Format::NvFp4 => random.below(0x7F) as u8,
            Fp4Format::MxFp4 => 120 + random.below(15) as u8,
        };
        Packed {
            format,
            block_size,
            rows,
            cols,
            codes: (0..rows * cols / 2).map(|_| self.next() as u8).collect(),
            scales: (0..rows * cols / block_size).map(|_| scale(self)).collect(),
            tensor_scale: Scale::One(g),
        }
    }
}

pub(crate) fn dense(name: &str, shape: &[usize], random: &mut Random) -> Weight<'static> {
    let bytes: Vec<u8> = (0..shape.iter().product())
        .flat_map(|_| (0x3F00 + random.below(256) as u16).to_le_bytes())
        .collect();
    let tensor = Tensor::new(name.to_owned(), Dtype::BF16, shape.to_vec(), bytes).expect("a shape");
    Weight::new(name, 0, Value::Plain(tensor))
}

pub(crate) fn scalar(name: &str, value: f32) -> Weight<'static> {
    let bytes = value.to_le_bytes().to_vec();
    let tensor = Tensor::new(name.to_owned(), Dtype::F32, vec![], bytes).expect("a scalar");
    Weight::new(name, 0, Value::Plain(tensor))
}

/// The records of ggml other than FP4.
pub(crate) fn ggml_rows() -> impl Iterator<Item = &'static GgmlRow> {
    let row = |id| match DataType::of_ggml(id)? {
        DataType::Ggml(row) => Some(row),
        DataType::Plain(_) => None,
    };
    (0..64).filter_map(row).filter(|row| !["MXFP4", "NVFP4"].contains(&row.name))
}

/// A weight of records, as a GGUF file has it.
pub(crate) fn ggml(
    name: &str,
    row: &'static GgmlRow,
    shape: &[usize],
    bytes: Vec<u8>,
) -> Weight<'static> {
    let (dtype, file) = (DataType::Ggml(row), Path::new(""));
    let (shape, bytes) = (shape.to_vec().into(), bytes.into());
    let tensor = Tensor { name: name.to_owned().into(), file, dtype, shape, bytes };
    Weight::new(name, 0, Value::Plain(tensor))
}

pub(crate) fn fp4(name: &str, matrices: &[Packed]) -> Weight<'static> {
    Weight::new(name, 0, Value::Fp4(Fp4Weight::stack(name, matrices).expect("valid matrices")))
}

/// A small language model: two quantized layers, and what is not quantized.
pub(crate) fn model(format: Fp4Format, scales: [f32; 2], input: Option<f32>) -> Model<'static> {
    let random = &mut Random(7);
    let mut weights = vec![
        dense("model.embed_tokens.weight", &[32, 64], random),
        dense("model.layers.0.input_layernorm.weight", &[64], random),
        dense("model.layers.0.mlp.gate.weight", &[2, 64], random),
    ];
    for (name, g) in [("k_proj", scales[0]), ("v_proj", scales[1])] {
        let g = if format.row().tensor_scale { g } else { 1.0 };
        let name = format!("model.layers.0.self_attn.{name}.weight");
        let mut weight = fp4(&name, &[random.packed(format, 24, 128, g)]);
        weight.input_scale = input.map(|scale| TensorScale::Multiplier(Numbers::new(&[scale])));
        weights.push(weight);
    }
    weights.push(dense("lm_head.weight", &[32, 64], random));
    let config = json!({"model_type": "toy", "odd_field": {"z": 1, "a": [1.5, null]}, "layers": 1});
    let ignore = ["lm_head", "model.layers.0.mlp.gate*"];
    Model {
        weights,
        config: Some(config),
        quantization: Quantization {
            ignore: ignore.map(|text| Pattern::parse(text, Syntax::Glob)).into(),
            ..Quantization::default()
        },
        ..Model::default()
    }
}

/// Stacked experts, as gpt-oss has them.
pub(crate) fn experts(format: Fp4Format) -> Model<'static> {
    let random = &mut Random(11);
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let g = if format.row().tensor_scale { 0.125 } else { 1.0 };
    let matrices: Vec<Packed> = (0..3).map(|_| random.packed(format, 16, 64, g)).collect();
    let mut stacked = fp4(name, &matrices);
    if let Value::Fp4(fp4) = &mut stacked.value {
        fp4.transposed = true;
    }
    let bias = dense("model.layers.0.mlp.experts.gate_up_proj_bias", &[3, 16], random);
    let router = dense("model.layers.0.mlp.router.weight", &[3, 64], random);
    let config = json!({"model_type": "gpt_oss"});
    Model { weights: vec![router, stacked, bias], config: Some(config), ..Model::default() }
}

/// The models that each written dialect can hold.
pub(crate) fn writable() -> Vec<(&'static str, Model<'static>)> {
    let (nv, mx) = (Fp4Format::NvFp4, Fp4Format::MxFp4);
    let odd = [0.001_234_5, 0.017];
    vec![
        ("modelopt", model(nv, odd, Some(0.03))),
        ("modelopt", model(nv, odd, None)),
        ("modelopt", model(mx, odd, None)),
        ("modelopt", mixed()),
        ("modelopt", experts(mx)),
        ("modelopt", experts(nv)),
        ("miles", model(nv, odd, Some(1.0))),
        ("compressed-tensors", model(nv, odd, Some(0.03))),
        ("compressed-tensors", model(nv, odd, None)),
        ("compressed-tensors", model(mx, odd, None)),
        ("compressed-tensors", mixed()),
        ("gpt-oss", experts(mx)),
        ("gguf", model(nv, odd, Some(0.03))),
        ("gguf", model(mx, odd, None)),
        ("gguf", experts(nv)),
        ("mlx", model(nv, [1.0, 1.0], None)),
        ("mlx", model(mx, odd, None)),
    ]
}

/// NVFP4, MXFP4, and FP8 of every granularity side by side.
pub(crate) fn mixed() -> Model<'static> {
    let random = &mut Random(3);
    let mut mixed = model(Fp4Format::NvFp4, [0.25, 0.011], None);
    mixed.weights.push(fp4("a.up.weight", &[random.packed(Fp4Format::MxFp4, 8, 64, 1.0)]));
    let shapes: [(&str, &[usize], Dtype); 4] = [
        ("a.tensor.weight", &[], Dtype::F32),
        ("a.row.weight", &[130, 1], Dtype::F32),
        ("a.block.weight", &[2, 2], Dtype::F32),
        ("a.mx.weight", &[130, 5], Dtype::U8),
    ];
    let weight = |(name, shape, dtype)| fp8(name, [130, 160], shape, dtype, random);
    mixed.weights.extend(shapes.map(weight));
    scale_inputs(&mut mixed);
    mixed
}

/// Gives FP8 with one scale a scale of its inputs.
pub(crate) fn scale_inputs(model: &mut Model<'_>) {
    for weight in &mut model.weights {
        if let Value::Fp8(Fp8Weight { granularity: Granularity::Tensor, .. }) = &weight.value {
            weight.input_scale = Some(TensorScale::Multiplier(Numbers::new(&[0.25])));
        }
    }
}

/// FP8 whose scales have this shape and dtype.
pub(crate) fn fp8(
    name: &str,
    matrix: [usize; 2],
    shape: &[usize],
    dtype: Dtype,
    random: &mut Random,
) -> Weight<'static> {
    let values: Vec<u8> = (0..matrix[0] * matrix[1]).map(|_| random.below(0x7F) as u8).collect();
    let values = Tensor::new(name.to_owned(), Dtype::F8_E4M3, matrix.to_vec(), values);
    let count: usize = shape.iter().product();
    let scales: Vec<u8> = match dtype {
        Dtype::U8 => (0..count).map(|_| 120 + random.below(8) as u8).collect(),
        _ => (0..count).flat_map(|at| (0.5 + at as f32).to_le_bytes()).collect(),
    };
    let scales = Tensor::new("scale", dtype, shape.to_vec(), scales).expect("a shape");
    let fp8 = Fp8Weight::new(values.expect("a shape"), scales, [128, 128]).expect("FP8");
    Weight::new(name, 0, Value::Fp8(fp8))
}

/// A safetensors file of raw tensors.
pub(crate) fn raw_file(
    path: &Path,
    metadata: &[(&str, &str)],
    tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)],
) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes);
        ((*name).to_owned(), view.expect("a view"))
    });
    let metadata = metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let bytes = safetensors::serialize(views, Some(metadata)).expect("a file");
    fs::write(path, bytes).expect("written");
}
