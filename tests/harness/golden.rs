//! Golden files of other projects.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn_fp4_formats::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

use crate::inputs::{Dense, Values};

/// Returns the folder of golden files: `FP4_GOLDEN`, or the project's own.
pub fn folder() -> PathBuf {
    match std::env::var_os("FP4_GOLDEN") {
        Some(folder) => folder.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("golden"),
    }
}

/// A golden file in memory.
pub struct Golden {
    tensors: BTreeMap<String, Tensor>,
}

struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Golden {
    /// Reads `<name>.safetensors`. Panics if the file is missing or empty.
    pub fn read(name: &str) -> Self {
        let path = folder().join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let tensors: BTreeMap<_, _> = file
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                let (dtype, shape) = (view.dtype(), view.shape().to_vec());
                (name, Tensor { dtype, shape, bytes: view.data().to_vec() })
            })
            .collect();
        assert!(!tensors.is_empty(), "{path:?} holds no tensor");
        Self { tensors }
    }

    /// Returns the prefixes of all tensors named `<prefix>/<suffix>`.
    pub fn cases(&self, suffix: &str) -> Vec<String> {
        let suffix = format!("/{suffix}");
        self.tensors
            .keys()
            .filter_map(|name| name.strip_suffix(&suffix))
            .map(str::to_owned)
            .collect()
    }

    /// Returns true if the file has the tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn get(&self, name: &str, dtype: Dtype) -> &Tensor {
        let tensor = self.tensors.get(name).unwrap_or_else(|| panic!("no tensor `{name}`"));
        assert_eq!(tensor.dtype, dtype, "{name}");
        tensor
    }

    /// Reads a tensor of bytes.
    pub fn bytes(&self, name: &str) -> &[u8] {
        &self.get(name, Dtype::U8).bytes
    }

    /// Reads a tensor of f32.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        read_f32(&self.get(name, Dtype::F32).bytes)
    }

    /// Returns the shape of a tensor.
    pub fn shape(&self, name: &str) -> &[usize] {
        &self.tensors[name].shape
    }

    /// Reads a matrix in its own dtype; leading dimensions of a tensor of higher rank are folded.
    pub fn dense(&self, name: &str) -> Dense {
        let tensor = &self.tensors[name];
        let cols = *tensor.shape.last().expect("a matrix");
        let words = || tensor.bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        let values = match tensor.dtype {
            Dtype::F32 => Values::F32(read_f32(&tensor.bytes)),
            Dtype::F16 => Values::F16(words().map(f16::from_bits).collect()),
            Dtype::BF16 => Values::Bf16(words().map(bf16::from_bits).collect()),
            other => panic!("{name}: {other:?} is not a float"),
        };
        Dense { rows: tensor.shape.iter().product::<usize>() / cols, cols, values }
    }
}

fn read_f32(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
