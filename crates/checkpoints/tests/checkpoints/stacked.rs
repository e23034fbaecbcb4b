//! Stacked weights one by one, and weights stacked.

use std::fs;

use burn_fp4_checkpoints::{
    Checkpoint, CheckpointError, Fp4Weight, Storage, TensorProblem, TensorScale, Value,
    WriteOptions,
};
use burn_fp4_formats::{Fp4Format, ScaleLayout};

use super::models::{experts, raw_file};
use super::random::Random;
use super::{Dtype, folder, path_of};

fn fp4<'w>(weights: &'w [burn_fp4_checkpoints::Weight<'_>], name: &str) -> &'w Fp4Weight<'w> {
    let weight = weights.iter().find(|weight| weight.name == name).expect(name);
    let Value::Fp4(fp4) = &weight.value else { panic!("{name} is FP4") };
    fp4
}

/// As they lie in files of every dialect that has them.
#[test]
fn stacks_are_split_without_a_copy_and_joined_again() {
    let folder = folder("stacked");
    let (nv, mx) = (Fp4Format::NvFp4, Fp4Format::MxFp4);
    for (dialect, format) in [("modelopt", nv), ("modelopt", mx), ("gpt-oss", mx), ("gguf", nv)] {
        let path = path_of(&folder, &format!("{dialect}-{format}"));
        let path = if dialect == "gguf" { path.with_extension("gguf") } else { path };
        experts(format).write(&path, dialect, &WriteOptions::default()).expect(dialect);
        let checkpoint = Checkpoint::open(&path).expect(dialect);
        let weights = checkpoint.weights().expect(dialect);
        let stack = fp4(&weights, "model.layers.0.mlp.experts.gate_up_proj");
        let matrices = stack.split();
        assert_eq!(matrices.len(), 3);
        for (matrix, packed) in matrices.iter().zip(stack.to_packed()) {
            assert_eq!((matrix.storage, &matrix.shape[..]), (stack.storage, &[16, 64][..]));
            assert_eq!(matrix.to_packed(), [packed], "{dialect}");
            assert!(stack.codes.as_ptr_range().contains(&matrix.codes.as_ptr()), "a view");
        }
        let values: Vec<f32> = matrices.iter().flat_map(Fp4Weight::dequantize).collect();
        assert_eq!(values, stack.dequantize());
        let named: Vec<(&str, &Fp4Weight<'_>)> = matrices.iter().map(|m| ("x", m)).collect();
        let again = Fp4Weight::join("x", &named).expect("like each other");
        assert_eq!((&again.codes, &again.scales), (&stack.codes, &stack.scales), "{dialect}");
        assert_eq!((&again.shape, again.storage), (&stack.shape, stack.storage));
        assert_eq!((again.to_packed(), again.order), (stack.to_packed(), stack.order));
    }
    fs::remove_dir_all(&folder).expect("removed");
}

#[test]
fn matrices_that_lie_otherwise_are_joined_in_rows() {
    let folder = folder("joined");
    let random = &mut Random(23);
    let packed = [0.25, 0.017].map(|g| random.packed(Fp4Format::NvFp4, 128, 64, g));
    let mut tensors = Vec::new();
    for (names, packed) in [
        ["a.weight", "a.weight_scale", "a.weight_scale_2"],
        ["b.weight", "b.weight_scale", "b.weight_scale_2"],
    ]
    .iter()
    .zip(&packed)
    {
        let scales = ScaleLayout::Tiled128x4.arrange(&packed.scales, 128, 4).expect("scales");
        let codes = packed.codes.iter().map(|byte| byte.rotate_left(4)).collect();
        let g = packed.tensor_scale.as_slice()[0].to_le_bytes().to_vec();
        tensors.push((names[0], Dtype::U8, vec![128, 32], codes));
        tensors.push((names[1], Dtype::F8_E4M3, vec![128, 4], scales));
        tensors.push((names[2], Dtype::F32, vec![], g));
    }
    let path = folder.join("x.safetensors");
    raw_file(&path, &[("_quantization_metadata", "{}")], &tensors);
    let checkpoint = Checkpoint::open(&path).expect("comfyui");
    let weights = checkpoint.weights().expect("comfyui");
    let (a, b) = (fp4(&weights, "a.weight"), fp4(&weights, "b.weight"));
    let joined = Fp4Weight::join("ab", &[("a", a), ("b", b)]).expect("like each other");
    assert_eq!((joined.storage, &joined.shape[..]), (Storage::Rows, &[2, 128, 64][..]));
    assert_eq!(joined.to_packed(), packed);

    let mut other = Fp4Weight::stack("c", &packed[..1]).expect("valid");
    let wrong = |weight: &Fp4Weight<'_>| match Fp4Weight::join("ac", &[("a", a), ("c", weight)]) {
        Err(CheckpointError::Tensor { tensor, problem, .. }) => {
            assert_eq!(tensor, "c");
            problem
        }
        other => panic!("{other:?}"),
    };
    assert!(matches!(wrong(&other), TensorProblem::Unlike { what: "order of products", .. }));
    other.order = a.order;
    let divisor = |scale: TensorScale<'static>| TensorScale::Divisor(scale.stated().clone());
    other.tensor_scale = other.tensor_scale.map(divisor);
    assert!(matches!(wrong(&other), TensorProblem::Unlike { what: "tensor scale", .. }));
    let error = wrong(&Fp4Weight { shape: vec![64, 128], ..other }).to_string();
    let says = "matrices: expected [128, 64], as the matrix before it has, found [64, 128]; stack";
    assert!(error.starts_with(says), "{error}");
    assert!(Fp4Weight::join("none", &[]).is_err());
}
