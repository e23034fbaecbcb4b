//! MLX: `X.weight` as 32-bit words of eight codes with `X.scales`, no tensor scale.
//!
//! | tensor     | dtype | shape           | meaning                             |
//! |------------|-------|-----------------|-------------------------------------|
//! | `X.weight` | U32   | `[.., N, K/8]`  | codes, the first in the lowest bits |
//! | `X.scales` | U8    | `[.., N, K/16]` | block scales of NVFP4, E4M3         |
//! | `X.scales` | U8    | `[.., N, K/32]` | block scales of MXFP4, E8M0         |
//!
//! `config.json` says `quantization: {group_size, bits, mode}`, and the same for a module under
//! the module's name. A file alone has no config: there the mode is the one with as many scales for
//! each word of codes. A module without `X.scales` is not quantized. A tensor scale is folded into
//! the block scales before a weight is written: exactly, or only if the caller allows it.
//!
//! Sources: `mlx/python/src/ops.cpp` (quantize), `mlx_lm/utils.py`.

use burn_fp4_formats::Fp4Format;
use serde_json::json;

use super::parts::{self, Parts, Reader};
use super::readers::{Program, ReadBy, tested};
use super::scheme::{self, Scheme};
use super::traits::{Dialect, Envelope, ScaleConvention, ScaleSupport, Write};
use crate::container::{CONFIG, Container};
use crate::dtype::{DataType, Dtype};
use crate::error::CheckpointError;
use crate::fp4::Order;
use crate::fp8::{Fp8Weight, Granularity};
use crate::tensor::{NewTensor, Tensor};
use crate::weight::{Model, Quantization, Value, Weight};

/// MLX's converted Hugging Face checkpoints.
pub(super) struct Mlx;

impl Dialect for Mlx {
    fn name(&self) -> &'static str {
        "mlx"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        let quantization = container.config()?.get("quantization")?;
        let mlx = quantization.get("group_size").is_some() && quantization.get("bits").is_some();
        mlx.then_some("quantization of config.json")
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &[".scales"]
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let config = container.config().and_then(|config| config.get("quantization"));
        let weights = parts::read(container, &[".scales"], |reader, tensor| {
            read_weight(container, config, reader, tensor)
        })?;
        Ok((weights, Quantization { dialect: self.name(), ..Quantization::default() }))
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        Some(&Self)
    }
}

fn read_weight<'a>(
    container: &Container,
    config: Option<&serde_json::Value>,
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
) -> Result<Option<Weight<'a>>, CheckpointError> {
    let Some(module) = tensor.name.strip_suffix(".weight") else { return Ok(None) };
    let Some(scales) = reader.take(&format!("{module}.scales")) else { return Ok(None) };
    let own = config.and_then(|config| config.get(module)).filter(|own| own.is_object());
    let mode = own.or(config).and_then(|config| config["mode"].as_str());
    let mode = mode.or_else(|| mode_of(tensor, &scales).filter(|_| config.is_none()));
    let format = match mode {
        Some("nvfp4") => Fp4Format::NvFp4,
        Some("mxfp4") => Fp4Format::MxFp4,
        Some("mxfp8") => {
            let value = Value::Fp8(mxfp8(tensor, scales)?);
            return Ok(Some(Weight::new(&*tensor.name, 0, value)));
        }
        _ => {
            return Err(CheckpointError::Field {
                path: container.config_path(CONFIG),
                field: format!("quantization.mode of `{module}`"),
                expected: "nvfp4, mxfp4 or mxfp8",
                found: mode.unwrap_or("nothing, which is affine").to_owned(),
                remedy: CheckpointError::ANOTHER,
            });
        }
    };
    if !tensor.is(&[Dtype::U32]) {
        return Err(tensor.wrong_dtype("U32"));
    }
    if !scales.is(&[Dtype::U8]) {
        return Err(scales.wrong_dtype("U8"));
    }
    let codes = tensor.clone();
    let parts = Parts { codes, scales, tensor_scale: None, order: Order::default() };
    let value = Value::Fp4(parts.rows(format)?);
    Ok(Some(Weight::new(&*tensor.name, 0, value)))
}

/// The mode of a weight by its shapes: words of a row of codes for each of its scales.
fn mode_of(codes: &Tensor<'_>, scales: &Tensor<'_>) -> Option<&'static str> {
    let known = codes.is(&[Dtype::U32]) && scales.is(&[Dtype::U8]);
    let [words, blocks] = [codes, scales].map(|tensor| tensor.shape.last().copied());
    let (words, blocks) = (words?, blocks.filter(|&blocks| blocks > 0 && known)?);
    match (words / blocks, words % blocks) {
        (2, 0) => Some("nvfp4"),
        (4, 0) => Some("mxfp4"),
        (8, 0) => Some("mxfp8"),
        _ => None,
    }
}

/// Words of four values, which are bytes of one.
fn mxfp8<'a>(tensor: &Tensor<'a>, scales: Tensor<'a>) -> Result<Fp8Weight<'a>, CheckpointError> {
    if !tensor.is(&[Dtype::U32]) {
        return Err(tensor.wrong_dtype("U32"));
    }
    let mut values = tensor.clone();
    values.dtype = DataType::Plain(Dtype::F8_E4M3);
    if let Some(last) = values.shape.to_mut().last_mut() {
        *last *= 4;
    }
    Fp8Weight::new(values, scales, [1, 32])
}

impl Write for Mlx {
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
        let cannot = |what| CheckpointError::cannot_hold(self.name(), &weight.name, what);
        if weight.pre_quant_scale.is_some() {
            return Err(cannot("a scale before quantization"));
        }
        let words = |shape: &[usize], values: usize| {
            let mut shape = shape.to_vec();
            let last = shape.last_mut().filter(|last| last.is_multiple_of(values))?;
            *last /= values;
            Some(shape)
        };
        let module = weight.name.strip_suffix(".weight");
        let module =
            module.ok_or_else(|| cannot("a parameter that is not the `weight` of a module"));
        match &weight.value {
            // MLX has no such dtype, and would read bytes.
            Value::Plain(tensor) if tensor.dtype.is_fp8() => {
                Err(cannot(CheckpointError::FP8_TO_DECODE))
            }
            Value::Plain(tensor) => Ok(vec![NewTensor::copy(&weight.name, tensor)]),
            Value::Fp8(fp8) => {
                let mx = fp8.granularity == Granularity::Block { rows: 1, cols: 32 }
                    && fp8.scales.is(&[Dtype::U8, Dtype::F8_E8M0])
                    && fp8.values.is(&[Dtype::F8_E4M3]);
                let shape = words(&fp8.values.shape, 4).filter(|_| mx);
                let shape = shape.ok_or_else(|| cannot("FP8 other than MXFP8"))?;
                let mut values = NewTensor::copy(&weight.name, &fp8.values);
                (values.dtype, values.shape) = (DataType::Plain(Dtype::U32), shape);
                let mut scales = NewTensor::copy(format!("{}.scales", module?), &fp8.scales);
                scales.dtype = DataType::Plain(Dtype::U8);
                Ok(vec![values, scales])
            }
            Value::Fp4(fp4) => {
                if fp4.tensor_scale.is_some() {
                    return Err(cannot("a tensor scale"));
                }
                if fp4.block_size != fp4.format.row().block_size {
                    return Err(cannot("blocks of another size"));
                }
                let shape =
                    words(&fp4.shape, 8).ok_or_else(|| cannot("such a number of columns"))?;
                let (name, scales) = (format!("{}.scales", module?), fp4.scales_shape());
                let (word, byte) = (DataType::Plain(Dtype::U32), DataType::Plain(Dtype::U8));
                Ok(vec![
                    NewTensor::made(&weight.name, word, shape, move || Ok(fp4.plain_codes())),
                    NewTensor::made(name, byte, scales, move || Ok(fp4.plain_scales())),
                ])
            }
        }
    }

    fn readers(&self, _: Fp4Format) -> &'static [ReadBy] {
        const { &[tested(Program::Mlx)] }
    }

    fn scale_support(&self) -> ScaleSupport {
        ScaleSupport { tensor_scale: ScaleConvention::Folded, input_scale: false }
    }

    fn quantizes_input(&self, _: &Weight<'_>) -> bool {
        false
    }

    fn envelope(&self, model: &Model<'_>) -> Result<Envelope, CheckpointError> {
        let metadata = vec![("format".to_owned(), "mlx".to_owned())];
        let own = model.quantization.dialect == self.name();
        let configs = match (&model.config, scheme::configs_of_floats(model)) {
            (Some(config), _) if own => vec![(CONFIG, config.clone())],
            (_, Some(configs)) => configs,
            (_, None) => {
                let quantization = quantization(model);
                let mut config = scheme::with_quantization(model, quantization.clone());
                config["quantization"] = quantization;
                vec![(CONFIG, config)]
            }
        };
        Ok(Envelope::Folder { metadata, configs })
    }
}

/// `quantization`: the first scheme for all, the modules of the others by name.
fn quantization(model: &Model<'_>) -> serde_json::Value {
    let fields = |scheme: &Scheme| {
        let (group_size, bits, mode) = match scheme {
            Scheme::Fp4 { format: Fp4Format::NvFp4, .. } => (16, 4, "nvfp4"),
            Scheme::Fp4 { format: Fp4Format::MxFp4, .. } => (32, 4, "mxfp4"),
            Scheme::Fp8 { .. } | Scheme::MxFp8 => (32, 8, "mxfp8"),
        };
        json!({"group_size": group_size, "bits": bits, "mode": mode})
    };
    let schemes = scheme::schemes(model);
    let mut config = schemes.first().map_or_else(|| json!({}), |(scheme, _)| fields(scheme));
    for (scheme, modules) in schemes.iter().skip(1) {
        for module in modules {
            config[*module] = fields(scheme);
        }
    }
    config
}
