//! GGUF: records of NVFP4 or MXFP4 with codes and block scales; a tensor scale has its own tensor.
//!
//! | tensor          | type           | shape          | meaning                              |
//! |-----------------|----------------|----------------|--------------------------------------|
//! | `X.weight`      | NVFP4 or MXFP4 | `[.., N, K]`   | records; NVFP4: K in multiples of 64 |
//! | `X.scale`       | F32            | `[1]` or `[E]` | tensor scale, a multiplier           |
//! | `X.input_scale` | F32            | `[1]` or `[E]` | of the input, a multiplier           |
//!
//! A written file keeps the source's names and numbers: a Hugging Face model's tensors are not
//! renamed, nor are the rows of its rotary attention permuted as llama.cpp's converter does, so
//! that llama.cpp runs only what came from GGUF.
//!
//! Sources: `gguf-py/gguf/quants.py`, `ggml-common.h` and `convert_hf_to_gguf.py` of llama.cpp.

use burn_fp4_formats::Fp4Format;

use super::parts::{self, Reader};
use super::readers::{Program, ReadBy, tested};
use super::traits::{Dialect, Envelope, Write};
use crate::architecture::stated;
use crate::container::gguf::Metadata as Pairs;
use crate::container::{Container, Metadata};
use crate::dtype::{DataType, Dtype, GGML_MXFP4, GGML_NVFP4, GgmlRow};
use crate::error::{CheckpointError, TensorProblem};
use crate::fp4::{Fp4Weight, Numbers, Order, TensorScale};
use crate::storage::{Storage, records};
use crate::tensor::{NewTensor, Tensor};
use crate::weight::{Model, Quantization, Value, Weight};

/// GGUF files.
pub(super) struct Gguf;

/// `GGML_MAX_DIMS`.
const MAX_AXES: usize = 4;

impl Dialect for Gguf {
    fn name(&self) -> &'static str {
        "gguf"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        matches!(container.metadata(), Some(Metadata::Gguf(_))).then_some("the file's format")
    }

    fn names_itself(&self) -> bool {
        true
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let weights = parts::read(container, &[], read_weight)?;
        Ok((weights, Quantization { dialect: self.name(), ..Quantization::default() }))
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        Some(&Self)
    }
}

fn read_weight<'a>(
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
) -> Result<Option<Weight<'a>>, CheckpointError> {
    let format = match tensor.dtype {
        DataType::Ggml(row) if row.id == GGML_NVFP4.id => Fp4Format::NvFp4,
        DataType::Ggml(row) if row.id == GGML_MXFP4.id => Fp4Format::MxFp4,
        DataType::Ggml(_) | DataType::Plain(_) => return Ok(None),
    };
    if tensor.shape.len() < 2 || tensor.shape.contains(&0) {
        return Err(tensor.wrong_shape("[.., rows, cols] without an axis of 0"));
    }
    let module = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
    let stated = reader.numbers(&format!("{module}.scale"))?;
    let stacked: usize = tensor.shape[..tensor.shape.len() - 2].iter().product();
    if let Some(found) = stated.as_ref().map(Numbers::len).filter(|n| *n != 1 && *n != stacked) {
        let (expected, what) = (stacked, "tensor scales");
        let problem = burn_fp4_formats::FormatError::Length { what, expected, found };
        return Err(tensor.error(TensorProblem::Format(problem)));
    }
    let fp4 = Fp4Weight {
        format,
        block_size: format.row().block_size,
        shape: tensor.shape.to_vec(),
        transposed: false,
        storage: Storage::Records,
        codes: tensor.bytes.clone(),
        scales: Vec::new().into(),
        tensor_scale: stated.map(TensorScale::Multiplier),
        hadamard: None,
        order: Order::ElementFirst,
    };
    let mut weight = Weight::new(&*tensor.name, 0, Value::Fp4(fp4));
    let input = reader.numbers(&format!("{module}.input_scale"))?;
    weight.input_scale = input.map(TensorScale::Multiplier);
    Ok(Some(weight))
}

/// Key of the [`file_type`].
const FILE_TYPE: &str = "general.file_type";
/// `GGML_QNT_VERSION`.
const QUANTIZATION_VERSION: u32 = 2;

/// `LlamaFileType` of gguf-py: `MOSTLY_NVFP4` if a matrix is NVFP4, else `MOSTLY_MXFP4_MOE` if one
/// is MXFP4. A model of floats is `MOSTLY_BF16`, `MOSTLY_F16` or `ALL_F32`, by the first of these
/// dtypes that a matrix has. None: there are other records of ggml and no FP4; their mixtures have
/// numbers that the types of tensors do not tell.
fn file_type(model: &Model<'_>) -> Option<u32> {
    /// Larger than the number of any float, and smaller than the numbers of FP4.
    const RECORDS: u32 = 37;
    let number = |weight: &Weight<'_>| match &weight.value {
        Value::Fp4(fp4) if fp4.format == Fp4Format::NvFp4 => Some(39),
        Value::Fp4(_) => Some(38),
        Value::Plain(tensor) => match tensor.plain() {
            None => Some(RECORDS),
            Some(Dtype::BF16) => Some(32),
            Some(Dtype::F16) => Some(1),
            Some(Dtype::F32) => Some(0),
            Some(_) => None,
        },
        Value::Fp8(_) => None,
    };
    let matrices = model.weights.iter().filter(|weight| weight.shape().len() >= 2);
    matrices.filter_map(number).max().filter(|&number| number != RECORDS)
}

fn record(format: Fp4Format) -> &'static GgmlRow {
    match format {
        Fp4Format::NvFp4 => &GGML_NVFP4,
        Fp4Format::MxFp4 => &GGML_MXFP4,
    }
}

impl Write for Gguf {
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
        let cannot = |what| CheckpointError::cannot_hold(self.name(), &weight.name, what);
        let fp4 = match &weight.value {
            Value::Plain(tensor) => {
                if tensor.dtype.is_fp8() {
                    return Err(cannot(CheckpointError::FP8_TO_DECODE));
                }
                if tensor.dtype.ggml().is_none() {
                    return Err(cannot("a dtype that ggml does not have"));
                }
                if tensor.shape.len() > MAX_AXES {
                    return Err(cannot("more than four axes"));
                }
                let mut copy = NewTensor::copy(&weight.name, tensor);
                if copy.shape.is_empty() {
                    copy.shape = vec![1];
                }
                return Ok(vec![copy]);
            }
            Value::Fp8(_) => return Err(cannot(CheckpointError::FP8_TO_DECODE)),
            Value::Fp4(fp4) => fp4,
        };
        if weight.pre_quant_scale.is_some() {
            return Err(cannot("a scale before quantization"));
        }
        if fp4.block_size != fp4.format.row().block_size || fp4.shape.len() > MAX_AXES {
            return Err(cannot("blocks of another size, or more than four axes"));
        }
        let row = record(fp4.format);
        if !fp4.cols().is_multiple_of(row.block) {
            return Err(cannot("NVFP4 whose columns are not a multiple of 64"));
        }
        let name = weight.name.clone();
        let make = move || {
            if fp4.storage == Storage::Records {
                return Ok((&*fp4.codes).into());
            }
            let scales = fp4.plain_scales();
            // ggml strips the sign and reads NaN as 0.
            if fp4.format == Fp4Format::NvFp4 && scales.iter().any(|&scale| scale >= 0x7F) {
                let what = "a block scale that is NaN or negative";
                return Err(CheckpointError::cannot_hold("gguf", &name, what));
            }
            Ok(records(fp4.format, &fp4.plain_codes(), &scales).into())
        };
        let module = weight.module();
        let mut tensors =
            vec![NewTensor::made(&weight.name, DataType::Ggml(row), fp4.shape.clone(), make)];
        let scales = [("scale", &fp4.tensor_scale), ("input_scale", &weight.input_scale)];
        for (end, scale) in scales {
            if let Some(numbers) = scale.as_ref().map(TensorScale::multipliers) {
                // Every expert has a number. What came from GGUF keeps what it has.
                let shared = numbers.len() == 1 && fp4.storage != Storage::Records;
                let count = if shared { fp4.stacked() } else { 1 };
                let (shape, bytes) = ([count * numbers.len()], numbers.bytes().repeat(count));
                tensors.push(NewTensor::bytes(format!("{module}.{end}"), Dtype::F32, shape, bytes));
            }
        }
        Ok(tensors)
    }

    fn readers(&self, format: Fp4Format) -> &'static [ReadBy] {
        const LLAMA_CPP: ReadBy = tested(Program::LlamaCpp);
        match format {
            // Transformers does not know the tensor scale.
            Fp4Format::NvFp4 => &[LLAMA_CPP],
            Fp4Format::MxFp4 => const { &[tested(Program::Transformers), LLAMA_CPP] },
        }
    }

    fn columns(&self, format: Fp4Format, _: usize) -> usize {
        record(format).block
    }

    fn envelope(&self, model: &Model<'_>) -> Result<Envelope, CheckpointError> {
        let kind = stated(model.config.as_ref()).unwrap_or("unknown");
        let mut pairs = model.gguf.clone().unwrap_or_else(|| Pairs::new(kind));
        // A file that is copied says it as it did.
        if model.quantization.dialect != self.name() {
            match file_type(model) {
                Some(number) => {
                    pairs.set_u32(FILE_TYPE, number);
                    pairs.set_u32("general.quantization_version", QUANTIZATION_VERSION);
                }
                // Without it llama.cpp looks at the tensors.
                None => pairs.remove(FILE_TYPE),
            }
        }
        Ok(Envelope::Gguf(pairs))
    }
}
