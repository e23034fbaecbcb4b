//! [`PackedWeight`]: codes and scales in a parameter's place.

use std::cell::RefCell;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use burn::module::{
    Devices, LoraAdapter, Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization,
};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_fp4_ops::search::formats::Packed;
use burn_fp4_ops::{
    Activations, Fp4Format, Fp4Layout, Fp4Tensor, Fp8Path, Fp8Weight, Hadamard, OpsError,
    linear_in_fp8, linear_with, without_padding,
};

/// The codes and scales of a weight, in the place of its values.
///
/// Attached to a parameter it makes `val()` dequantize, in the dtype of the parameter. Its three
/// tensors travel with records and devices like parameters, under a path that says what they are:
/// `<parameter>.fp4.nvfp4-block16-axis0.codes`, `.scales` and `.tensor_scale`. All three are
/// integers, so casting or training the floats of a module does not touch them and `num_params`
/// does not count them.
///
/// An [adapter](Self::adapter) is trained over codes that stay as they are: `val()` is then
/// `dequantized + scale a b`. Its factors are float parameters, `<parameter>.fp4.lora-scale2.a` and
/// `.b` for a scale of 2.
///
/// On `flex`, memory of one dense weight, the largest, stays allocated once a weight was
/// dequantized, for the next one.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_fp4_modules::{Fp4Config, Fp4Module, PackedWeight};
///
/// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
/// layer.quantize_fp4(&Fp4Config::nvfp4())?;
/// let packed = layer.weight.reparameterization::<PackedWeight>().unwrap();
/// let dense = packed.tensor::<2>().dequantize();
/// assert_eq!(dense.into_data(), layer.weight.val().into_data());
/// assert_eq!(packed.bytes(), 64 * 32 / 2 + 64 * 32 / 16 + 4);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PackedWeight {
    codes: Param<Tensor<2, Int>>,
    scales: Param<Tensor<2, Int>>,
    tensor_scale: Param<Tensor<1, Int>>,
    layout: Fp4Layout,
    adapter: Option<LoraAdapter>,
    activations: Activations,
    /// Facts for products in FP8, once they were asked for.
    fp8: Arc<OnceLock<Fp8Weight>>,
    /// Returns true if `val()` equals the stored values while this is taken off the parameter.
    absent: bool,
}

impl<const D: usize> From<Fp4Tensor<D>> for PackedWeight {
    fn from(packed: Fp4Tensor<D>) -> Self {
        Self {
            codes: constant(packed.codes()),
            scales: constant(packed.scales()),
            tensor_scale: constant(packed.tensor_scale_bits()),
            layout: packed.layout().clone(),
            adapter: None,
            activations: Activations::F32,
            fp8: Arc::default(),
            absent: false,
        }
    }
}

/// Files hold matrices, and stacks of them.
fn other_rank(found: &[usize]) -> OpsError {
    OpsError::Shape { what: "packed weight", expected: vec![0; 2], found: found.to_vec() }
}

/// Codes have no graph, whatever device they were put together on.
fn constant<const D: usize>(tensor: Tensor<D, Int>) -> Param<Tensor<D, Int>> {
    Param::initialized(ParamId::new(), tensor.without_autodiff())
}

impl PackedWeight {
    /// A packed matrix in host memory, of values after a Hadamard transform or of the values
    /// themselves, as the weight of a shape with 2 to 4 axes.
    ///
    /// # Errors
    /// As [`Fp4Tensor::from_packed`] and [`Fp4Tensor::with_hadamard`]; [`OpsError::Shape`] for
    /// another rank.
    pub(crate) fn from_packed(
        packed: Packed,
        hadamard: Option<Hadamard>,
        shape: &[usize],
        axis: usize,
        device: &Device,
    ) -> Result<Self, OpsError> {
        fn of<const D: usize>(
            (packed, hadamard): (Packed, Option<Hadamard>),
            shape: [usize; D],
            axis: usize,
            device: &Device,
        ) -> Result<PackedWeight, OpsError> {
            let tensor = Fp4Tensor::from_packed(packed, shape, axis, device)?;
            Ok(tensor.with_hadamard(hadamard)?.into())
        }
        let packed = (packed, hadamard);
        match *shape {
            [a, b] => of(packed, [a, b], axis, device),
            [a, b, c] => of(packed, [a, b, c], axis, device),
            [a, b, c, d] => of(packed, [a, b, c, d], axis, device),
            _ => Err(other_rank(shape)),
        }
    }

    /// The bits in host memory.
    ///
    /// # Errors
    /// As [`Fp4Tensor::to_packed`]; [`OpsError::Shape`] for a rank other than 2 to 4.
    pub(crate) fn to_packed(&self) -> Result<Packed, OpsError> {
        match self.layout.shape.len() {
            2 => self.tensor::<2>().to_packed(),
            3 => self.tensor::<3>().to_packed(),
            4 => self.tensor::<4>().to_packed(),
            _ => Err(other_rank(&self.layout.shape)),
        }
    }

    /// The same codes and scales, which are in memory once, as the transposed matrix or as the same
    /// one.
    pub(crate) fn shared(&self, axis: usize) -> Self {
        self.along(axis).into()
    }

    /// Returns the matrix, or its transpose, with blocks along an axis.
    fn along(&self, axis: usize) -> Fp4Tensor<2> {
        let tensor = self.tensor::<2>();
        if axis == self.layout.axis { tensor } else { tensor.transpose() }
    }

    /// The quantized tensor, without the adapter.
    ///
    /// # Panics
    /// If `D` is not the rank of the parameter, or a mapper changed the shape of codes or scales.
    pub fn tensor<const D: usize>(&self) -> Fp4Tensor<D> {
        let (codes, scales) = (self.codes.val(), self.scales.val());
        // Checked at every use, in constant time: a mapper can replace each part by itself.
        Fp4Tensor::from_parts_unread(codes, scales, self.tensor_scale.val(), self.layout.clone())
            .expect("a packed weight keeps the shape it was made with")
    }

    /// Multiplies an input by the matrix without its adapter, along its blocks, and adds a bias. It
    /// reads the input as its [activations](Self::activations) say.
    ///
    /// # Errors
    /// As [`linear_with`].
    pub(crate) fn linear<const D: usize>(
        &self,
        input: Tensor<D>,
        bias: Option<Tensor<1>>,
    ) -> Result<Tensor<D>, OpsError> {
        let weight = self.along(0);
        match self.activations {
            Activations::Fp8 | Activations::Fp8Rounded => {
                linear_in_fp8(input, &weight, bias, || self.fp8(&weight))
            }
            other => linear_with(input, &weight, bias, other),
        }
    }

    /// Returns how [`linear`](Self::linear) runs with activations in FP8, for an input of some rows
    /// and a dtype.
    ///
    /// # Errors
    /// As [`Fp8Weight::of`].
    pub(crate) fn fp8_path(&self, rows: usize, dtype: DType) -> Result<Fp8Path, OpsError> {
        let weight = self.along(0);
        Ok(self.fp8(&weight)?.path(&weight, rows, dtype))
    }

    /// Returns the facts about the matrix for products in FP8. The first call finds them, and reads
    /// a number per row back.
    fn fp8(&self, weight: &Fp4Tensor<2>) -> Result<Fp8Weight, OpsError> {
        let facts = match self.fp8.get() {
            Some(known) => known.clone(),
            None => {
                let found = Fp8Weight::of(weight)?;
                self.fp8.get_or_init(|| found).clone()
            }
        };
        Ok(facts.with_rounding(self.activations == Activations::Fp8Rounded))
    }

    /// Returns the matrix of the last two axes that has this number over the leading ones.
    pub(crate) fn matrix(&self, slice: usize) -> Fp4Tensor<2> {
        let leading = self.layout.shape.len() - 2;
        if leading == 0 {
            return self.tensor();
        }
        let shape = self.layout.shape[leading..].to_vec();
        let layout = Fp4Layout { shape, axis: self.layout.axis - leading, ..self.layout.clone() };
        let rows = slice * layout.rows()..(slice + 1) * layout.rows();
        let part = |of: &Param<Tensor<2, Int>>| of.val().slice([rows.clone()]);
        let tensor_scale = match self.tensor_scale.dims() {
            [1] => self.tensor_scale.val(),
            _ => self.tensor_scale.val().slice([rows.clone()]),
        };
        Fp4Tensor::from_parts_unread(part(&self.codes), part(&self.scales), tensor_scale, layout)
            .expect("a packed weight keeps the shape it was made with")
    }

    /// Format, shape and axis.
    #[must_use]
    pub fn layout(&self) -> &Fp4Layout {
        &self.layout
    }

    /// Where the codes are.
    #[must_use]
    pub fn device(&self) -> Device {
        self.codes.device()
    }

    /// Bytes of codes, block scales and tensor scale.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let elements = |dims: [usize; 2]| dims[0] * dims[1];
        let tensor_scales = self.tensor_scale.dims()[0];
        elements(self.codes.dims()) + elements(self.scales.dims()) + 4 * tensor_scales
    }

    /// Returns how products read their input; see
    /// [`set_fp4_activations`](crate::Fp4Module::set_fp4_activations). Not part of records.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Linear, Fp4Module, PackedWeight, ops::Activations};
    ///
    /// let mut layer = Fp4Linear::from(LinearConfig::new(64, 32).init(&Device::flex()));
    /// layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// layer.set_fp4_activations(Activations::Int8)?;
    /// let packed = layer.weight.reparameterization::<PackedWeight>().unwrap();
    /// assert_eq!(packed.activations(), Activations::Int8);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    #[must_use]
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Returns the adapter that is trained over the codes; see
    /// [`lora_fp4`](crate::Fp4Module::lora_fp4).
    #[must_use]
    pub fn adapter(&self) -> Option<&LoraAdapter> {
        self.adapter.as_ref()
    }

    pub(crate) fn is_adapted(&self) -> bool {
        self.adapter.is_some()
    }

    pub(crate) fn absent(self) -> Self {
        Self { absent: true, ..self }
    }

    pub(crate) fn with_activations(self, activations: Activations) -> Self {
        Self { activations, ..self }
    }

    pub(crate) fn with_adapter(self, adapter: Option<LoraAdapter>) -> Self {
        Self { adapter, ..self }
    }

    /// The part of the record path that says how to read the tensors below it.
    fn layout_name(&self) -> String {
        let Fp4Layout { format, block_size, axis, hadamard, .. } = &self.layout;
        let transform = match hadamard {
            Some(hadamard) if hadamard.signs() == 0 => format!("-hadamard{}", hadamard.size()),
            Some(hadamard) => format!("-hadamard{}x{:04x}", hadamard.size(), hadamard.signs()),
            None => String::new(),
        };
        format!("{format}-block{block_size}-axis{axis}{transform}")
    }

    /// The opposite of [`layout_name`](Self::layout_name).
    pub(crate) fn parse_layout(name: &str, shape: Vec<usize>) -> Option<Fp4Layout> {
        let (format, rest) = name.split_once("-block")?;
        let (block_size, rest) = rest.split_once("-axis")?;
        let (axis, hadamard) = match rest.split_once("-hadamard") {
            Some((axis, transform)) => (axis, Some(Self::parse_hadamard(transform)?)),
            None => (rest, None),
        };
        Some(Fp4Layout {
            format: Fp4Format::from_str(format).ok()?,
            block_size: block_size.parse().ok()?,
            shape,
            axis: axis.parse().ok()?,
            hadamard,
        })
    }

    /// Parses the size of a transform, and its signs if it has some.
    fn parse_hadamard(text: &str) -> Option<Hadamard> {
        match text.split_once('x') {
            Some(("16", signs)) => Some(Hadamard::with_signs(u16::from_str_radix(signs, 16).ok()?)),
            Some(_) => None,
            None => Hadamard::of_size(text.parse().ok()?).ok(),
        }
    }

    /// The part of the record path that says what the factors of an adapter are multiplied by. A
    /// path is divided by dots, so that the scale has none.
    fn adapter_name(adapter: &LoraAdapter) -> String {
        format!("{ADAPTER}{}", adapter.scale).replace('.', "_")
    }

    /// The opposite of [`adapter_name`](Self::adapter_name): the scale.
    pub(crate) fn parse_adapter(name: &str) -> Option<f64> {
        let scale: f64 = name.strip_prefix(ADAPTER)?.replace('_', ".").parse().ok()?;
        scale.is_finite().then_some(scale)
    }

    /// The parts of record paths that say how to read the tensors below them.
    pub(crate) fn names(&self) -> (String, Option<String>) {
        (self.layout_name(), self.adapter.as_ref().map(Self::adapter_name))
    }
}

const ADAPTER: &str = "lora-scale";

impl Reparameterization for PackedWeight {
    const NAME: &'static str = "fp4";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if self.absent {
            return base;
        }
        let (dtype, is_autodiff) = (FloatDType::from(base.dtype()), base.is_autodiff());
        // Before dequantization: see `into_dense`.
        drop(base);
        let dense = self.tensor::<D>().into_dense(dtype);
        // Codes are on the plain device, whatever the module trains on.
        let dense = if is_autodiff { Tensor::from_inner(dense) } else { dense };
        match &self.adapter {
            Some(adapter) => adapter.apply(dense),
            None => dense,
        }
    }
}

const CONTAINER: &str = "Struct:PackedWeight";

impl Module for PackedWeight {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
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
        if let Some(adapter) = &self.adapter {
            let name = Self::adapter_name(adapter);
            visitor.enter_module(&name, CONTAINER);
            adapter.visit(visitor);
            visitor.exit_module(&name, CONTAINER);
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let edit = EDIT.take();
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
        let adapter = self.adapter.map(|adapter| {
            let name = Self::adapter_name(&adapter);
            mapper.enter_module(&name, CONTAINER);
            let adapter = adapter.map(mapper);
            mapper.exit_module(&name, CONTAINER);
            adapter
        });
        // A mapper may change the dtype of integers, such as one that casts a whole module.
        let codes = with_dtype(codes, DType::U8);
        let scales = with_dtype(scales, DType::U8);
        let tensor_scale = with_dtype(tensor_scale, DType::I32);
        // An edit comes with a mapper that leaves the codes as they are.
        let fp8 = if edit.is_some() { self.fp8 } else { Arc::default() };
        let mapped = Self { codes, scales, tensor_scale, adapter, fp8, ..self };
        match edit {
            Some(edit) => edit(mapped),
            None => mapped,
        }
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        let devices = self.codes.collect_devices(devices);
        let devices = self.scales.collect_devices(devices);
        self.adapter.collect_devices(self.tensor_scale.collect_devices(devices))
    }

    fn to_device(self, device: &Device) -> Self {
        Self {
            codes: self.codes.to_device(device).map(without_padding),
            scales: self.scales.to_device(device).map(without_padding),
            tensor_scale: self.tensor_scale.to_device(device),
            adapter: self.adapter.to_device(device),
            fp8: Arc::default(),
            ..self
        }
    }

    fn fork(self, device: &Device) -> Self {
        let adapter = self.adapter.clone().fork(device);
        Self { adapter, ..self.with_adapter(None).to_device(device) }
    }

    // Codes are constants: they have no graph to leave or to join.

    fn valid(&self) -> Self {
        Self { adapter: self.adapter.valid(), ..self.clone() }
    }

    fn train(self) -> Self {
        Self { adapter: self.adapter.train(), ..self }
    }

    fn materialize(self) -> Self {
        self
    }
}

fn with_dtype<const D: usize>(param: Param<Tensor<D, Int>>, dtype: DType) -> Param<Tensor<D, Int>> {
    if param.dtype() == dtype { param } else { param.map(|tensor| tensor.cast(dtype)) }
}

/// A change of a packed weight.
pub(crate) type Edit = Box<dyn FnOnce(PackedWeight) -> PackedWeight>;

thread_local! {
    /// The change of the packed weight that this thread maps next. Burn hands mappers the
    /// parameters of an attachment, but not the attachment, and puts it back after them.
    static EDIT: RefCell<Option<Edit>> = const { RefCell::new(None) };
}

/// Has the packed weight that this thread maps next edited; only inside [`with_edits`].
pub(crate) fn edit_next(edit: Edit) {
    EDIT.set(Some(edit));
}

/// Runs a mapping of a module that [edits](edit_next) packed weights: what is attached to a
/// parameter is mapped right after it.
pub(crate) fn with_edits<R>(map: impl FnOnce() -> R) -> R {
    struct Clear;

    impl Drop for Clear {
        fn drop(&mut self) {
            EDIT.set(None);
        }
    }

    let _clear = Clear;
    map()
}
