//! FP-Quant: GPTQ after a Hadamard transform of the inputs. Its layers transform their inputs by a
//! matrix that is part of the file.
//!
//! | tensor                      | dtype | shape       | meaning                                  |
//! |-----------------------------|-------|-------------|------------------------------------------|
//! | `X.qweight`                 | U8    | `[N, K/2]`  | codes, low nibble first                  |
//! | `X.scales`                  | U8    | `[N, K/32]` | E8M0 scales, of `forward_dtype` `mxfp4`  |
//! | `X.scales`                  | U8    | `[N, K/16]` | E4M3 scales, of `nvfp4`                  |
//! | `X.weight_global_scale`     | F32   | `[1]`       | tensor scale, a **divisor**              |
//! | `X.act_global_scale`        | F32   | `[1]`       | of the transformed input, a **divisor**  |
//! | `X.forward_hadamard_matrix` | BF16  | `[H, H]`    | the transform; H is 16, 32, 64 or 128    |
//!
//! `X.backward_hadamard_matrix` is for training: it is not used, and not written, because vLLM has
//! no place for it. MXFP4 has H of 32 or more. Without a scale of the transformed input,
//! `act_global_scale` is 1: blocks of inputs whose amax is below 0.01 then lose precision.
//!
//! Sources: `layers/quantization/fp_quant.py` of vLLM, `integrations/fp_quant.py` of transformers,
//! arXiv 2509.23202.

use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::Syntax;
use burn_fp4_policy::search::Hadamard;
use half::bf16;
use serde_json::json;

use super::parts::{self, Parts, Reader};
use super::readers::{Program, ReadBy, source};
use super::scheme::{configs_of_floats, ignore_list, patterns, torch_metadata, with_quantization};
use super::traits::{Dialect, Envelope, ScaleConvention, ScaleSupport, Write, quant_method};
use crate::container::{CONFIG, Container};
use crate::dtype::{DataType, Dtype};
use crate::error::{CheckpointError, TensorProblem};
use crate::fp4::{Fp4Weight, Numbers, Order, TensorScale};
use crate::tensor::{NewTensor, Tensor};
use crate::weight::{Model, Quantization, Value, Weight};

/// FP-Quant's checkpoints.
pub(super) struct FpQuant;

/// The last parts of the names of a layer's tensors, but for its codes.
const COMPANIONS: [&str; 5] = [
    ".scales",
    ".weight_global_scale",
    ".act_global_scale",
    ".forward_hadamard_matrix",
    ".backward_hadamard_matrix",
];

impl Dialect for FpQuant {
    fn name(&self) -> &'static str {
        "fp-quant"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        quant_method(container, self.quant_methods())
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &[".qweight"]
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &["fp_quant"]
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let config = container.quantization();
        let format = format_of(container, config)?;
        let weights = parts::read(container, &COMPANIONS, |reader, tensor| {
            read_weight(reader, tensor, format)
        })?;
        let ignore = config.and_then(|config| config.get("modules_to_not_convert"));
        let ignore = patterns(ignore, Syntax::Unmarked);
        let dialect = self.name();
        Ok((weights, Quantization { dialect, ignore, ..Quantization::default() }))
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        Some(&Self)
    }
}

/// Returns the format of all layers.
fn format_of(
    container: &Container,
    config: Option<&serde_json::Value>,
) -> Result<Fp4Format, CheckpointError> {
    let found = config.and_then(|config| config.get("forward_dtype"));
    let format = match found.and_then(serde_json::Value::as_str) {
        Some("mxfp4") => Ok(Fp4Format::MxFp4),
        Some("nvfp4") => Ok(Fp4Format::NvFp4),
        _ => Err(CheckpointError::Field {
            path: container.config_path(CONFIG),
            field: "quantization_config.forward_dtype".to_owned(),
            expected: "mxfp4 or nvfp4",
            found: found.map_or_else(|| "nothing".to_owned(), serde_json::Value::to_string),
            remedy: CheckpointError::CORRECT,
        }),
    }?;
    let flag = |name: &str| config.is_some_and(|config| config[name] == true);
    if flag("pseudoquantization") || flag("store_master_weights") {
        return Err(CheckpointError::Refused {
            path: container.config_path(CONFIG),
            what: "FP-Quant with dense weights (pseudoquantization or store_master_weights)"
                .to_owned(),
            because: "it has no codes",
            remedy: CheckpointError::WITHOUT,
        });
    }
    Ok(format)
}

fn read_weight<'a>(
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
    format: Fp4Format,
) -> Result<Option<Weight<'a>>, CheckpointError> {
    let Some(module) = tensor.name.strip_suffix(".qweight") else { return Ok(None) };
    let scales = reader.need(tensor, &format!("{module}.scales"))?;
    let matrix = reader.need(tensor, &format!("{module}.forward_hadamard_matrix"))?;
    reader.take(&format!("{module}.backward_hadamard_matrix"));
    let global = reader.numbers(&format!("{module}.weight_global_scale"))?;
    let input = reader.numbers(&format!("{module}.act_global_scale"))?;
    let stated = |numbers: &Numbers<'a>| {
        format.row().tensor_scale || numbers.to_vec().iter().any(|&number| number != 1.0)
    };
    let tensor_scale = global.filter(stated).map(TensorScale::Divisor);
    let parts = Parts { codes: tensor.clone(), scales, tensor_scale, order: Order::ScalesFirst };
    let mut fp4 = parts.rows(format)?;
    fp4.hadamard = transform(&matrix, fp4.cols())?;
    let mut weight = Weight::new(format!("{module}.weight"), 0, Value::Fp4(fp4));
    let input = input.filter(|_| format.row().tensor_scale);
    weight.input_scale = input.map(TensorScale::Divisor);
    Ok(Some(weight))
}

/// Returns the transform that a matrix stands for; none for the identity.
fn transform(matrix: &Tensor<'_>, cols: usize) -> Result<Option<Hadamard>, CheckpointError> {
    let values = matrix.to_f32()?;
    let size = match matrix.shape[..] {
        [rows, columns] if rows == columns => rows,
        _ => return Err(matrix.wrong_shape("[H, H]")),
    };
    let is = |expected: &dyn Fn(usize, usize) -> f32| {
        let near =
            |(at, value): (usize, &f32)| (value - expected(at / size, at % size)).abs() < 1e-3;
        values.iter().enumerate().all(near)
    };
    let divides = size > 0 && cols.is_multiple_of(size);
    if divides && is(&|row, col| if row == col { 1.0 } else { 0.0 }) {
        return Ok(None);
    }
    let hadamard = Hadamard::of_size(size)
        .ok()
        .filter(|hadamard| divides && is(&|row, col| hadamard.factor(row, col)));
    hadamard.map(Some).ok_or_else(|| {
        let expected = "the identity, or a Hadamard matrix of 16, 32, 64 or 128 in Sylvester's \
                        order that divides the columns";
        let expected = expected.into();
        matrix.error(TensorProblem::Shape { expected, found: matrix.shape.to_vec() })
    })
}

/// Both quantize the transformed inputs too.
const READERS: [ReadBy; 1] =
    [source(Program::Vllm, "vllm/model_executor/layers/quantization/fp_quant.py at 055e47c2")
        .rounding("rounds inputs to FP4; Blackwell only")];

impl Write for FpQuant {
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
        let cannot = |what| Err(CheckpointError::cannot_hold(self.name(), &weight.name, what));
        let fp4 = match &weight.value {
            Value::Plain(tensor) if matches!(tensor.dtype, DataType::Ggml(_)) => {
                return cannot(CheckpointError::GGML_TO_DECODE);
            }
            Value::Plain(tensor) => return Ok(vec![NewTensor::copy(&weight.name, tensor)]),
            Value::Fp8(_) => return cannot(CheckpointError::FP8_TO_DECODE),
            Value::Fp4(fp4) => fp4,
        };
        let Some(hadamard) = fp4.hadamard else {
            return cannot("FP4 weights without a Hadamard transform");
        };
        if hadamard.signs() != 0 {
            return cannot("a Hadamard transform with signs");
        }
        if hadamard.size() < fp4.block_size {
            return cannot("a Hadamard transform of 16 in MXFP4; choose 32, 64 or 128");
        }
        if fp4.shape.len() != 2 || fp4.transposed {
            return cannot("stacked or transposed matrices");
        }
        if fp4.block_size != fp4.format.row().block_size {
            return cannot("blocks of another size");
        }
        if weight.pre_quant_scale.is_some() {
            return cannot("a scale before quantization");
        }
        let Some(module) = weight.name.strip_suffix(".weight") else {
            return cannot("a quantized parameter that is not called `weight`");
        };
        Ok(tensors(module, fp4, weight.input_scale.as_ref(), hadamard))
    }

    fn transforms(&self) -> bool {
        true
    }

    fn readers(&self, _: Fp4Format) -> &'static [ReadBy] {
        &READERS
    }

    fn scale_support(&self) -> ScaleSupport {
        ScaleSupport { tensor_scale: ScaleConvention::Divisor, input_scale: true }
    }

    fn fuses(&self) -> bool {
        true
    }

    fn envelope(&self, model: &Model<'_>) -> Result<Envelope, CheckpointError> {
        let own = model.quantization.dialect == self.name();
        let configs = match (&model.config, configs_of_floats(model)) {
            (Some(config), _) if own => vec![(CONFIG, config.clone())],
            (_, Some(configs)) => configs,
            (_, None) => vec![(CONFIG, with_quantization(model, self.config(model)?))],
        };
        Ok(Envelope::Folder { metadata: torch_metadata(), configs })
    }
}

impl FpQuant {
    /// The config, which has one format and one transform for all layers.
    fn config(&self, model: &Model<'_>) -> Result<serde_json::Value, CheckpointError> {
        let facts = |weight: &'_ Weight<'_>| match &weight.value {
            Value::Fp4(fp4) => Some((fp4.format, fp4.hadamard)),
            Value::Plain(_) | Value::Fp8(_) => None,
        };
        let mut quantized = model.weights.iter().filter_map(|one| Some((one, facts(one)?)));
        let first = quantized.next().map(|(_, facts)| facts);
        if let Some((other, _)) = quantized.find(|(_, facts)| Some(*facts) != first) {
            let what = "layers of several formats or Hadamard transforms";
            return Err(CheckpointError::cannot_hold(self.name(), &other.name, what));
        }
        let (format, hadamard) = first.unwrap_or((Fp4Format::MxFp4, None));
        Ok(json!({
            "backward_dtype": "bf16",
            "forward_dtype": format.row().name,
            "forward_method": "abs_max",
            "hadamard_group_size": hadamard.map_or(format.row().block_size, Hadamard::size),
            "modules_to_not_convert": ignore_list(model, Syntax::Unmarked)?,
            "pseudoquantization": false,
            "quant_method": "fp_quant",
            "store_master_weights": false,
            "transform_init": "hadamard",
        }))
    }
}

/// The tensors of a layer.
fn tensors<'w>(
    module: &str,
    fp4: &'w Fp4Weight<'_>,
    input_scale: Option<&TensorScale<'_>>,
    hadamard: Hadamard,
) -> Vec<NewTensor<'w>> {
    let name = |part: &str| format!("{module}.{part}");
    let number = |part: &str, scale: Option<&TensorScale<'_>>| {
        let one = TensorScale::Divisor(Numbers::new(&[1.0]));
        let bytes = scale.unwrap_or(&one).divisors().bytes().to_vec();
        NewTensor::bytes(name(part), Dtype::F32, [1], bytes)
    };
    let (codes, scales) = (fp4.codes_shape(), fp4.scales_shape());
    let bytes = DataType::Plain(Dtype::U8);
    let size = hadamard.size();
    let factor = |at: usize| bf16::from_f32(hadamard.factor(at / size, at % size));
    let matrix: Vec<u8> = (0..size * size).flat_map(|at| factor(at).to_le_bytes()).collect();
    vec![
        NewTensor::made(name("qweight"), bytes, codes, move || Ok(fp4.plain_codes())),
        NewTensor::made(name("scales"), bytes, scales, move || Ok(fp4.plain_scales())),
        number("weight_global_scale", fp4.tensor_scale.as_ref()),
        number("act_global_scale", input_scale),
        NewTensor::bytes(name("forward_hadamard_matrix"), Dtype::BF16, [size, size], matrix),
    ]
}
