use std::collections::BTreeSet;
use std::str::FromStr;

use burn::module::{
    Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization,
};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_fp4_ops::{Fp4Format, Fp4Layout, Fp4Tensor};

/// The codes and scales of a weight, in the place of its values.
///
/// Attached to a parameter it makes `val()` dequantize, in the dtype of the parameter. Its three
/// tensors travel with records and devices like parameters, under a path that says what they are:
/// `<parameter>.fp4.nvfp4-block16-axis0.codes`, `.scales` and `.tensor_scale`. All three are integers,
/// so casting or training the floats of a module does not touch them and `num_params` does not
/// count them.
///
/// On `flex`, memory of one dense weight, the largest, stays allocated once a weight was dequantized, for the next one.
#[derive(Debug, Clone)]
pub struct PackedWeight {
    codes: Param<Tensor<2, Int>>,
    scales: Param<Tensor<2, Int>>,
    tensor_scale: Param<Tensor<1, Int>>,
    layout: Fp4Layout,
}

impl PackedWeight {
    pub(crate) fn new<const D: usize>(packed: &Fp4Tensor<D>) -> Self {
        Self {
            codes: Param::initialized(ParamId::new(), packed.codes()),
            scales: Param::initialized(ParamId::new(), packed.scales()),
            tensor_scale: Param::initialized(ParamId::new(), packed.tensor_scale_bits()),
            layout: packed.layout().clone(),
        }
    }

    /// The quantized tensor.
    ///
    /// # Panics
    /// If `D` is not the rank of the parameter, or a mapper changed the shape of codes or scales.
    pub fn tensor<const D: usize>(&self) -> Fp4Tensor<D> {
        let (codes, scales) = (self.codes.val(), self.scales.val());
        Fp4Tensor::from_parts(codes, scales, self.tensor_scale.val(), self.layout.clone())
            .expect("a packed weight keeps the shape it was made with")
    }

    /// Format, shape and axis.
    pub fn layout(&self) -> &Fp4Layout {
        &self.layout
    }

    /// The part of the record path that says how to read the tensors below it.
    fn layout_name(&self) -> String {
        let Fp4Layout { format, block_size, axis, .. } = &self.layout;
        format!("{format}-block{block_size}-axis{axis}")
    }

    /// The opposite of [`layout_name`](Self::layout_name).
    pub(crate) fn parse_layout(name: &str, shape: Vec<usize>) -> Option<Fp4Layout> {
        let (format, rest) = name.split_once("-block")?;
        let (block_size, axis) = rest.split_once("-axis")?;
        Some(Fp4Layout {
            format: Fp4Format::from_str(format).ok()?,
            block_size: block_size.parse().ok()?,
            shape,
            axis: axis.parse().ok()?,
        })
    }
}

impl Reparameterization for PackedWeight {
    const NAME: &'static str = "fp4";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        self.tensor::<D>().dequantize_to(FloatDType::from(base.dtype()))
    }
}

impl Module for PackedWeight {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        const CONTAINER: &str = "Struct:PackedWeight";
        let layout = self.layout_name();
        visitor.enter_module(&layout, CONTAINER);
        visitor.enter_module("codes", CONTAINER);
        visitor.visit_int(&self.codes);
        visitor.exit_module("codes", CONTAINER);
        visitor.enter_module("scales", CONTAINER);
        visitor.visit_int(&self.scales);
        visitor.exit_module("scales", CONTAINER);
        visitor.enter_module("tensor_scale", CONTAINER);
        visitor.visit_int(&self.tensor_scale);
        visitor.exit_module("tensor_scale", CONTAINER);
        visitor.exit_module(&layout, CONTAINER);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        const CONTAINER: &str = "Struct:PackedWeight";
        let layout = self.layout_name();
        mapper.enter_module(&layout, CONTAINER);
        mapper.enter_module("codes", CONTAINER);
        let codes = mapper.map_int(self.codes);
        mapper.exit_module("codes", CONTAINER);
        mapper.enter_module("scales", CONTAINER);
        let scales = mapper.map_int(self.scales);
        mapper.exit_module("scales", CONTAINER);
        mapper.enter_module("tensor_scale", CONTAINER);
        let tensor_scale = mapper.map_int(self.tensor_scale);
        mapper.exit_module("tensor_scale", CONTAINER);
        mapper.exit_module(&layout, CONTAINER);
        Self { codes, scales, tensor_scale, layout: self.layout }
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.tensor_scale
            .collect_devices(self.scales.collect_devices(self.codes.collect_devices(devices)))
    }

    fn to_device(self, device: &Device) -> Self {
        Self {
            codes: self.codes.to_device(device),
            scales: self.scales.to_device(device),
            tensor_scale: self.tensor_scale.to_device(device),
            layout: self.layout,
        }
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    // Codes are constants: they have no graph to leave or to join.

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }

    fn materialize(self) -> Self {
        self
    }
}

/// What a quantized parameter stores in the place of its values: one zero, seen in the shape of the
/// weight, which Burn shows and counts. It is made when it is first asked for.
///
/// The parameter is frozen. A record holds one zero for it, behind the save mapper that the
/// parameter had.
pub(crate) fn placeholder<const D: usize>(
    param: Param<Tensor<D>>,
    dtype: DType,
) -> Param<Tensor<D>> {
    let device = param.lazy_device();
    // To load zeros into a parameter that is not initialized keeps its mappers without running its
    // initializer.
    let param = if param.is_initialized() {
        param
    } else {
        let (id, shape) = (param.id, param.lazy_shape().dims());
        param.transform_for_load(zeros(shape, &device, dtype), id)
    };
    let shape = param.shape();
    let dims: [usize; D] = shape.dims();
    let (id, _, mapper) = param.consume();
    let init = move |device: &Device, _require_grad: bool| zeros(dims, device, dtype);
    Param::uninitialized(id, init, device, false, shape)
        .save_mapper(move |values| mapper.on_save(one_if_all_zero(values)))
}

/// Zeros that take no memory to speak of.
fn zeros<const D: usize>(dims: [usize; D], device: &Device, dtype: DType) -> Tensor<D> {
    if is_ndarray(device) {
        // It cannot broadcast without copying, but zeros that are never touched take no memory.
        Tensor::zeros(dims, (device, dtype))
    } else {
        Tensor::<D>::zeros([1; D], (device, dtype)).expand(dims)
    }
}

/// The first value alone if all are 0: what a placeholder is. A materialized weight stays whole.
fn one_if_all_zero<const D: usize>(values: Tensor<D>) -> Tensor<D> {
    let all_zero = values.clone().max_dim(0).max().into_scalar::<f32>() == 0.0
        && values.clone().min_dim(0).min().into_scalar::<f32>() == 0.0;
    if all_zero { values.slice(core::array::from_fn::<_, D, _>(|_| 0..1)) } else { values }
}

fn is_ndarray(device: &Device) -> bool {
    #[cfg(feature = "ndarray")]
    {
        matches!(device.as_dispatch(), burn::backend::DispatchDevice::NdArray(_))
    }
    #[cfg(not(feature = "ndarray"))]
    {
        let _ = device;
        false
    }
}

/// Gives every quantized parameter a fresh placeholder.
pub(crate) fn compact<M: Module>(module: &mut M) {
    struct Compact {
        packed: BTreeSet<u64>,
    }

    impl ModuleMapper for Compact {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if self.packed.contains(&param.id.val()) {
                let dtype = param.base().dtype();
                placeholder(param, dtype)
            } else {
                param
            }
        }
    }

    let packed = crate::select::Walk::over(module)
        .parameters
        .iter()
        .filter(|parameter| parameter.reparameterization.as_deref() == Some(PackedWeight::NAME))
        .map(|parameter| parameter.id.val())
        .collect();
    *module = module.clone().map(&mut Compact { packed });
}
