//! What the numbers of a tensor are: a dtype of safetensors, or a record of ggml.

use std::fmt;

pub use safetensors::Dtype;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error, StrDeserializer};

/// What the numbers of a tensor are.
///
/// ```
/// use burn_fp4_checkpoints::{DataType, Dtype};
///
/// assert_eq!(DataType::named("BF16"), Some(DataType::Plain(Dtype::BF16)));
/// let mxfp4 = DataType::of_ggml(39).expect("records of 17 bytes for 32 numbers");
/// assert_eq!((mxfp4.to_string(), mxfp4.ggml()), ("MXFP4".to_owned(), Some(39)));
/// assert_eq!([mxfp4.bytes(&[2, 64]), mxfp4.bytes(&[2, 48])], [Some(68), None]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    /// Numbers one after another.
    Plain(Dtype),
    /// Records of a ggml type, each of which holds a run of the last axis.
    Ggml(&'static GgmlRow),
}

/// The facts of a ggml record type.
#[derive(Debug, PartialEq, Eq)]
pub struct GgmlRow {
    /// Its name in ggml.
    pub name: &'static str,
    /// Its number in a GGUF file (`enum ggml_type`, ggml.h).
    pub id: u32,
    /// Numbers of a record.
    pub block: usize,
    /// Bytes of a record.
    pub bytes: usize,
}

const fn row(name: &'static str, id: u32, block: usize, bytes: usize) -> GgmlRow {
    GgmlRow { name, id, block, bytes }
}

/// ggml's MXFP4: 17 bytes of 32 numbers, the scale first (`block_mxfp4`, ggml-common.h).
pub(crate) static GGML_MXFP4: GgmlRow = row("MXFP4", 39, 32, 17);
/// ggml's NVFP4: 36 bytes of 64 numbers, four scales first (`block_nvfp4`, ggml-common.h).
pub(crate) static GGML_NVFP4: GgmlRow = row("NVFP4", 40, 64, 36);

/// Records that are passed through as they are (`GGML_QUANT_SIZES`, gguf-py constants.py).
static GGML_OTHERS: [GgmlRow; 23] = [
    row("Q4_0", 2, 32, 18),
    row("Q4_1", 3, 32, 20),
    row("Q5_0", 6, 32, 22),
    row("Q5_1", 7, 32, 24),
    row("Q8_0", 8, 32, 34),
    row("Q8_1", 9, 32, 36),
    row("Q2_K", 10, 256, 84),
    row("Q3_K", 11, 256, 110),
    row("Q4_K", 12, 256, 144),
    row("Q5_K", 13, 256, 176),
    row("Q6_K", 14, 256, 210),
    row("Q8_K", 15, 256, 292),
    row("IQ2_XXS", 16, 256, 66),
    row("IQ2_XS", 17, 256, 74),
    row("IQ3_XXS", 18, 256, 98),
    row("IQ1_S", 19, 256, 50),
    row("IQ4_NL", 20, 32, 18),
    row("IQ3_S", 21, 256, 110),
    row("IQ2_S", 22, 256, 82),
    row("IQ4_XS", 23, 256, 136),
    row("IQ1_M", 29, 256, 56),
    row("TQ1_0", 34, 256, 54),
    row("TQ2_0", 35, 256, 66),
];

/// The numbers that GGUF gives to plain dtypes.
const GGML_PLAIN: [(u32, Dtype); 8] = [
    (0, Dtype::F32),
    (1, Dtype::F16),
    (24, Dtype::I8),
    (25, Dtype::I16),
    (26, Dtype::I32),
    (27, Dtype::I64),
    (28, Dtype::F64),
    (30, Dtype::BF16),
];

impl DataType {
    /// The dtype of a safetensors header.
    pub fn named(name: &str) -> Option<Self> {
        let name: StrDeserializer<'_, Error> = name.into_deserializer();
        Dtype::deserialize(name).ok().map(Self::Plain)
    }

    /// The type of a GGUF file.
    pub fn of_ggml(id: u32) -> Option<Self> {
        if let Some((_, dtype)) = GGML_PLAIN.iter().find(|(number, _)| *number == id) {
            return Some(Self::Plain(*dtype));
        }
        let mut records = [&GGML_MXFP4, &GGML_NVFP4].into_iter().chain(&GGML_OTHERS);
        records.find(|row| row.id == id).map(Self::Ggml)
    }

    /// Its number in a GGUF file, if it has one.
    pub fn ggml(self) -> Option<u32> {
        match self {
            Self::Ggml(row) => Some(row.id),
            Self::Plain(dtype) => {
                GGML_PLAIN.iter().find(|(_, plain)| *plain == dtype).map(|(id, _)| *id)
            }
        }
    }

    /// Bytes of a tensor of this shape, if they are a whole number that a machine can address.
    ///
    /// No product of some of the axes overflows either, whichever of them are 0.
    pub fn bytes(self, shape: &[usize]) -> Option<usize> {
        let nonzero = shape.iter().map(|&axis| axis.max(1));
        nonzero.clone().try_fold(64_usize, usize::checked_mul)?;
        let count: usize = shape.iter().product();
        match self {
            Self::Plain(dtype) => {
                let bits = count * dtype.bitsize();
                bits.is_multiple_of(8).then_some(bits / 8)
            }
            Self::Ggml(row) => {
                let last = shape.last().copied().unwrap_or(1);
                let records = last.is_multiple_of(row.block).then_some(count / row.block)?;
                records.checked_mul(row.bytes)
            }
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => dtype.fmt(f),
            Self::Ggml(row) => f.write_str(row.name),
        }
    }
}
