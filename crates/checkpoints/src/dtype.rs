//! The type of a tensor's numbers: a dtype of safetensors, or a record of ggml.

use std::fmt;

use burn_fp4_formats::E4M3_VALUES;
use half::{bf16, f16};
pub use safetensors::Dtype;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error, StrDeserializer};

use crate::ggml::{self, Decode};

/// The type of a tensor's numbers.
///
/// ```
/// use burn_fp4_checkpoints::{DataType, Dtype};
///
/// assert_eq!(DataType::named("BF16"), Some(DataType::Plain(Dtype::BF16)));
/// assert!(DataType::Plain(Dtype::F8_E4M3).is_fp8() && !DataType::Plain(Dtype::BF16).is_fp8());
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
#[derive(Debug)]
#[non_exhaustive]
pub struct GgmlRow {
    /// Its name in ggml.
    pub name: &'static str,
    /// Its number in a GGUF file (`enum ggml_type`, ggml.h).
    pub id: u32,
    /// Numbers of a record.
    pub block: usize,
    /// Bytes of a record.
    pub bytes: usize,
    /// Decoder of records to f32, if there is one.
    decode: Option<Decode>,
}

impl PartialEq for GgmlRow {
    /// A type has one row.
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for GgmlRow {}

/// A type whose records are not read as floats.
const fn row(name: &'static str, id: u32, block: usize, bytes: usize) -> GgmlRow {
    GgmlRow { name, id, block, bytes, decode: None }
}

/// A type whose records are read as floats.
const fn read(name: &'static str, id: u32, block: usize, bytes: usize, decode: Decode) -> GgmlRow {
    GgmlRow { name, id, block, bytes, decode: Some(decode) }
}

/// ggml's MXFP4: 17 bytes of 32 numbers, the scale first (`block_mxfp4`, ggml-common.h).
pub(crate) static GGML_MXFP4: GgmlRow = row("MXFP4", 39, 32, 17);
/// ggml's NVFP4: 36 bytes of 64 numbers, four scales first (`block_nvfp4`, ggml-common.h).
pub(crate) static GGML_NVFP4: GgmlRow = row("NVFP4", 40, 64, 36);

/// All other records, which a copy passes through as they are (`GGML_QUANT_SIZES`, gguf-py
/// constants.py).
static GGML_OTHERS: [GgmlRow; 23] = [
    read("Q4_0", 2, 32, 18, ggml::Q4_0),
    read("Q4_1", 3, 32, 20, ggml::Q4_1),
    read("Q5_0", 6, 32, 22, ggml::Q5_0),
    read("Q5_1", 7, 32, 24, ggml::Q5_1),
    read("Q8_0", 8, 32, 34, ggml::Q8_0),
    row("Q8_1", 9, 32, 36),
    read("Q2_K", 10, 256, 84, ggml::Q2_K),
    read("Q3_K", 11, 256, 110, ggml::Q3_K),
    read("Q4_K", 12, 256, 144, ggml::Q4_K),
    read("Q5_K", 13, 256, 176, ggml::Q5_K),
    read("Q6_K", 14, 256, 210, ggml::Q6_K),
    row("Q8_K", 15, 256, 292),
    row("IQ2_XXS", 16, 256, 66),
    row("IQ2_XS", 17, 256, 74),
    row("IQ3_XXS", 18, 256, 98),
    row("IQ1_S", 19, 256, 50),
    read("IQ4_NL", 20, 32, 18, ggml::IQ4_NL),
    row("IQ3_S", 21, 256, 110),
    row("IQ2_S", 22, 256, 82),
    read("IQ4_XS", 23, 256, 136, ggml::IQ4_XS),
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
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let name: StrDeserializer<'_, Error> = name.into_deserializer();
        Dtype::deserialize(name).ok().map(Self::Plain)
    }

    /// The type of a GGUF file.
    #[must_use]
    pub fn of_ggml(id: u32) -> Option<Self> {
        if let Some((_, dtype)) = GGML_PLAIN.iter().find(|(number, _)| *number == id) {
            return Some(Self::Plain(*dtype));
        }
        let mut records = [&GGML_MXFP4, &GGML_NVFP4].into_iter().chain(&GGML_OTHERS);
        records.find(|row| row.id == id).map(Self::Ggml)
    }

    /// Its number in a GGUF file, if it has one.
    #[must_use]
    pub fn ggml(self) -> Option<u32> {
        match self {
            Self::Ggml(row) => Some(row.id),
            Self::Plain(dtype) => {
                GGML_PLAIN.iter().find(|(_, plain)| *plain == dtype).map(|(id, _)| *id)
            }
        }
    }

    /// Returns true if the numbers are read as floats: F32, F16, BF16, F64 rounded to f32, FP8
    /// without scales, and the [records of ggml that are decoded](Self::decoded_ggml), of which FP4
    /// is none.
    ///
    /// ```
    /// use burn_fp4_checkpoints::DataType;
    ///
    /// let [q4_k, iq2_xxs, mxfp4] = [12, 16, 39].map(|id| DataType::of_ggml(id).expect("a type"));
    /// assert_eq!([q4_k, iq2_xxs, mxfp4].map(DataType::is_float), [true, false, false]);
    /// ```
    #[must_use]
    pub fn is_float(self) -> bool {
        match self {
            Self::Plain(dtype) => {
                [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64].contains(&dtype) || self.is_fp8()
            }
            Self::Ggml(row) => row.decode.is_some(),
        }
    }

    /// Returns true for the two dtypes of FP8 that hold floats.
    #[must_use]
    pub fn is_fp8(self) -> bool {
        matches!(self, Self::Plain(Dtype::F8_E4M3 | Dtype::F8_E5M2))
    }

    /// The records of ggml other than FP4 that are read as floats.
    ///
    /// ```
    /// use burn_fp4_checkpoints::DataType;
    ///
    /// let names: Vec<_> = DataType::decoded_ggml().map(|row| row.name).collect();
    /// assert!(names.contains(&"Q4_K") && !names.contains(&"IQ2_XXS"));
    /// ```
    pub fn decoded_ggml() -> impl Iterator<Item = &'static GgmlRow> {
        GGML_OTHERS.iter().filter(|row| row.decode.is_some())
    }

    /// Bytes of the smallest run of numbers that is read by itself: a number's or a record's.
    pub(crate) fn step(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.bitsize().div_ceil(8),
            Self::Ggml(row) => row.bytes,
        }
    }

    /// Appends the values of whole numbers or records, if they are [floats](Self::is_float).
    pub(crate) fn decode(self, bytes: &[u8], values: &mut Vec<f32>) -> Option<()> {
        let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self {
            Self::Plain(Dtype::F32) => {
                let numbers = bytes.chunks_exact(4);
                values.extend(numbers.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            }
            Self::Plain(Dtype::F16) => {
                values.extend(pairs().map(|b| f16::from_le_bytes(b).to_f32()))
            }
            Self::Plain(Dtype::BF16) => {
                values.extend(pairs().map(|b| bf16::from_le_bytes(b).to_f32()));
            }
            Self::Plain(Dtype::F64) => {
                let numbers = bytes.as_chunks().0;
                values.extend(numbers.iter().map(|&number| f64::from_le_bytes(number) as f32));
            }
            Self::Plain(dtype @ (Dtype::F8_E4M3 | Dtype::F8_E5M2)) => {
                values.extend(bytes.iter().map(|&byte| fp8(dtype, byte)));
            }
            Self::Plain(_) => return None,
            Self::Ggml(row) => {
                let (decode, begin) = (row.decode?, values.len());
                values.resize(begin + bytes.len() / row.bytes * row.block, 0.0);
                decode(bytes, &mut values[begin..]);
            }
        }
        Some(())
    }

    /// Bytes of a tensor of this shape, if they are a whole number that a machine can address.
    ///
    /// No product of some of the axes overflows either, whichever of them are 0.
    #[must_use]
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

/// The value of a byte of FP8: of E5M2 unless the dtype is F8_E4M3.
pub(crate) fn fp8(dtype: Dtype, byte: u8) -> f32 {
    match dtype {
        Dtype::F8_E4M3 => E4M3_VALUES[usize::from(byte)],
        // E5M2 is the upper half of an f16.
        _ => f16::from_bits(u16::from(byte) << 8).to_f32(),
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
