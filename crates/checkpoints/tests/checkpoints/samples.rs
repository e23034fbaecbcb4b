//! Small valid checkpoints for every reader: what their mutations are made of.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn_fp4_checkpoints::{
    Dtype, GgmlRow, Model, Numbers, Shards, TensorScale, Value, WriteOptions,
};
use burn_fp4_formats::{Fp4Format, Packed, ScaleLayout};

use super::models::{dense, experts, fp4, fp8, ggml, ggml_rows, raw_file, scalar, scale_inputs};
use super::random::Random;

/// The readers: dialects, and the index of a folder of several files.
pub(crate) const READERS: [&str; 13] = [
    "plain",
    "modelopt",
    "miles",
    "compressed-tensors",
    "gpt-oss",
    "gguf",
    "mlx",
    "deepseek",
    "quark",
    "torchao",
    "comfyui",
    "fp-quant",
    "index",
];

/// The name of a file that is a checkpoint of its own.
pub(crate) const GGUF: &str = "model.gguf";

/// A checkpoint: its files by name, and the dialect to be opened as if it does not say it.
pub(crate) struct Sample {
    pub dialect: Option<&'static str>,
    pub files: BTreeMap<String, Vec<u8>>,
}

/// The samples of a reader, made in an empty folder.
pub(crate) fn samples(reader: &str, folder: &Path) -> Vec<Sample> {
    let (nv, mx) = (Fp4Format::NvFp4, Fp4Format::MxFp4);
    let whole = WriteOptions::default();
    let small = WriteOptions { shards: Shards::Size(200), ..whole };
    let plain = WriteOptions { decode_fp4: Some(Dtype::BF16), ..whole };
    let write = |models: &[Model<'static>], dialect: &str, options: &WriteOptions| {
        let written = models.iter().enumerate().map(|(at, model)| {
            let path = folder.join(format!("{at}.gguf"));
            model.write(&path, dialect, options).expect(dialect);
            path
        });
        let dialect = (dialect == "miles").then_some("miles");
        written.map(|path| sample(&path, dialect)).collect()
    };
    match reader {
        "plain" => write(&[tiny(nv, 0.25)], reader, &plain),
        "modelopt" => write(&[tiny(nv, 0.017), mixed(), stack(nv), stack(mx)], reader, &whole),
        "miles" => write(&[tiny(nv, 0.017)], reader, &whole),
        "compressed-tensors" => write(&[tiny(nv, 0.017), tiny(mx, 1.0), mixed()], reader, &whole),
        "gpt-oss" => write(&[stack(mx)], reader, &whole),
        "gguf" => write(&[tiny(nv, 0.017), tiny(mx, 1.0), stack(nv), records()], reader, &whole),
        "mlx" => write(&[tiny(nv, 1.0), tiny(mx, 1.0)], reader, &whole),
        "index" => write(&[tiny(nv, 0.017)], "modelopt", &small),
        _ => {
            read_only(reader, folder);
            vec![sample(folder, None)]
        }
    }
}

fn sample(path: &Path, dialect: Option<&'static str>) -> Sample {
    let mut files = super::bytes_of(path);
    if let Some(bytes) = files.remove("file") {
        files.insert(GGUF.to_owned(), bytes);
    }
    Sample { dialect, files }
}

/// Two quantized layers, and what is not quantized, in few bytes.
fn tiny(format: Fp4Format, g: f32) -> Model<'static> {
    let random = &mut Random(13);
    let mut quantized =
        |name: &str, g: f32| fp4(&format!("l.0.{name}.weight"), &[random.packed(format, 4, 64, g)]);
    let mut weights = vec![quantized("k_proj", g), quantized("v_proj", 1.0)];
    let scaled = format.row().tensor_scale && g != 1.0;
    weights[0].input_scale = scaled.then(|| TensorScale::Multiplier(Numbers::new(&[0.03])));
    weights.push(dense("l.0.norm.weight", &[16], random));
    weights.push(dense("lm_head.weight", &[4, 16], random));
    weights.push(scalar("l.0.self_attn.k_proj.k_scale", 0.5));
    Model { weights, ..experts_config() }
}

/// FP8 of every granularity, and FP4.
fn mixed() -> Model<'static> {
    let mut mixed = tiny(Fp4Format::NvFp4, 0.25);
    let shapes: [(&str, &[usize], Dtype); 4] = [
        ("a.tensor.weight", &[], Dtype::F32),
        ("a.row.weight", &[6, 1], Dtype::F32),
        ("a.block.weight", &[1, 1], Dtype::F32),
        ("a.mx.weight", &[6, 2], Dtype::U8),
    ];
    let random = &mut Random(17);
    mixed
        .weights
        .extend(shapes.map(|(name, shape, dtype)| fp8(name, [6, 48], shape, dtype, random)));
    scale_inputs(&mut mixed);
    mixed
}

/// Stacked experts.
fn stack(format: Fp4Format) -> Model<'static> {
    let random = &mut Random(19);
    let g = if format.row().tensor_scale { 0.125 } else { 1.0 };
    let matrices: Vec<Packed> = (0..3).map(|_| random.packed(format, 2, 64, g)).collect();
    let mut stack = fp4("l.0.experts.up_proj", &matrices);
    if let Value::Fp4(fp4) = &mut stack.value {
        fp4.transposed = true;
    }
    let bias = dense("l.0.experts.up_proj_bias", &[3, 2], random);
    Model { weights: vec![stack, bias], ..experts_config() }
}

/// A matrix of every record of ggml other than FP4.
fn records() -> Model<'static> {
    let random = &mut Random(23);
    let weight = |row: &'static GgmlRow| {
        let shape = [2, row.block];
        let bytes: Vec<u8> = (0..2 * row.bytes).map(|_| random.next() as u8).collect();
        ggml(&format!("l.0.{}.weight", row.name), row, &shape, bytes)
    };
    Model { weights: ggml_rows().map(weight).collect(), ..experts_config() }
}

fn experts_config() -> Model<'static> {
    Model { weights: Vec::new(), ..experts(Fp4Format::MxFp4) }
}

type Raw = (&'static str, Dtype, Vec<usize>, Vec<u8>);

/// A quantized matrix, codes and scales as tensors of these names, dtypes and shapes.
fn parts(names: [&'static str; 2], dtypes: [Dtype; 2], packed: &Packed) -> [Raw; 2] {
    let (rows, blocks) = (packed.rows, packed.blocks());
    let cols = if dtypes[0] == Dtype::F4 { packed.cols } else { packed.cols / 2 };
    [
        (names[0], dtypes[0], vec![rows, cols], packed.codes.clone()),
        (names[1], dtypes[1], vec![rows, blocks], packed.scales.clone()),
    ]
}

/// FP8 with a scale for all.
fn fp8_parts(names: [&'static str; 2], scale: &[usize]) -> [Raw; 2] {
    let one = 1.0_f32.to_le_bytes().to_vec();
    let scales = one.repeat(scale.iter().product());
    [
        (names[0], Dtype::F8_E4M3, vec![4, 32], vec![0x38; 128]),
        (names[1], Dtype::F32, scale.into(), scales),
    ]
}

/// The checkpoints that no writer of ours makes.
fn read_only(reader: &str, folder: &Path) {
    let random = &mut Random(5);
    let nv = random.packed(Fp4Format::NvFp4, 4, 64, 0.017);
    let mx = random.packed(Fp4Format::MxFp4, 4, 64, 1.0);
    let g = |name| (name, Dtype::F32, vec![], 0.017_f32.to_le_bytes().to_vec());
    let (u8, e4m3, e8m0) = (Dtype::U8, Dtype::F8_E4M3, Dtype::F8_E8M0);
    let tiles = |name| {
        let tiles = ScaleLayout::Tiled128x4.arrange(&nv.scales, 4, nv.blocks()).expect("scales");
        (name, e4m3, vec![128, 4], tiles)
    };
    let mut metadata = Vec::new();
    let mut tensors: Vec<Raw> = Vec::new();
    let config = match reader {
        "deepseek" => {
            tensors.extend(parts(["e.weight", "e.scale"], [Dtype::I8, e8m0], &mx));
            tensors.extend(fp8_parts(["d.weight", "d.weight_scale_inv"], &[1, 1]));
            r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 32],
                "modules_to_not_convert": ["lm_head", "a.*"]}, "expert_dtype": "fp4"}"#
        }
        "quark" => {
            tensors.extend(parts(["x.weight", "x.weight_scale"], [u8, u8], &mx));
            tensors.extend(parts(["y.weight", "y.weight_scale"], [Dtype::F4, e4m3], &nv));
            tensors.extend([g("y.weight_scale_2"), g("y.input_scale_2")]);
            tensors.extend(fp8_parts(["z.weight", "z.weight_scale"], &[1]));
            r#"{"quantization_config": {"quant_method": "quark", "exclude": ["re:a.*", "*head"],
                "algo_config": [{"name": "awq"}]}}"#
        }
        "torchao" => {
            let nvfp4 = r#"{"_type": "NVFP4Tensor", "_data": {"is_swizzled_scales": true}}"#;
            let mxfp4 = r#"{"_type": "MXTensor", "_data": {"is_swizzled_scales": false,
                "elem_dtype": {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}}}"#;
            metadata.push(("tensor_names", r#"["x.weight", "y.weight", "z.weight"]"#));
            metadata.extend([("x.weight", nvfp4), ("y.weight", mxfp4)]);
            metadata.push(("z.weight", r#"{"_type": "Float8Tensor"}"#));
            tensors.push(parts(["x._weight_qdata", ""], [u8, e4m3], &nv)[0].clone());
            tensors.extend([tiles("x._weight_scale"), g("x._weight_per_tensor_scale")]);
            tensors.extend(parts(["y._weight_qdata", "y._weight_scale"], [u8, e8m0], &mx));
            tensors.extend(fp8_parts(["z._weight_qdata", "z._weight_scale"], &[4]));
            r#"{"quantization_config": {"quant_method": "torchao"}}"#
        }
        "comfyui" => {
            metadata.push((
                "_quantization_metadata",
                r#"{"layers": {"x": {"format": "nvfp4"}, "z": {"format": "float8_e4m3fn"}}}"#,
            ));
            tensors.push(parts(["x.weight", ""], [u8, e4m3], &nv)[0].clone());
            tensors.extend([tiles("x.weight_scale"), g("x.weight_scale_2"), g("x.input_scale")]);
            tensors.extend(fp8_parts(["z.weight", "z.weight_scale"], &[1]));
            "{}"
        }
        _ => {
            tensors.extend(parts(["x.qweight", "x.scales"], [u8, e4m3], &nv));
            tensors.extend([g("x.weight_global_scale"), g("x.act_global_scale")]);
            let element = |at: usize| match ((at / 16) & (at % 16)).count_ones() % 2 {
                0 => [0x80, 0x3E], // a quarter
                _ => [0x80, 0xBE],
            };
            let matrix = (0..256).flat_map(element).collect();
            tensors.push(("x.forward_hadamard_matrix", Dtype::BF16, vec![16, 16], matrix));
            r#"{"quantization_config": {"quant_method": "fp_quant", "forward_dtype": "nvfp4"}}"#
        }
    };
    raw_file(&folder.join("model.safetensors"), &metadata, &tensors);
    fs::write(folder.join("config.json"), config).expect("a config");
}
