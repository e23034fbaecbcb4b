//! GPTQ: compensates rounding errors with the weights that are still to be rounded.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn_fp4_search::formats::check_length;
use burn_fp4_search::{Fp4Scheme, Gptq, Gram, NonFinite, TensorScaling};

use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::hessian_factor::HessianFactor;
use crate::layout::Fp4Layout;
use crate::quantize::{checked_amax, transformed};
use crate::tensor::Fp4Tensor;

/// Quantizes with [`Gptq`]: compensates each rounding error with the weights that are still to be
/// rounded. Ignores the search of the scheme.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{Fp4Scheme, Gptq, gram, quantize_gptq};
///
/// let mut weight = [[0.7f32]; 32];
/// weight[0] = [6.0]; // the block scale is 1, and the nearest element to 0.7 is 0.5
/// let weight = Tensor::<2>::from_floats(weight, &Device::flex());
/// let gram = gram(Tensor::<2>::ones([8, 32], &Device::flex()))?;
/// let packed = quantize_gptq(weight, 0, &Fp4Scheme::mxfp4(), &Gptq::ORIGINAL, &gram)?;
/// // All inputs are the same, so only the sum matters: 27.7. Nearest elements sum to 21.5.
/// let sum = packed.dequantize().sum().into_scalar::<f32>();
/// assert!((sum - 27.7).abs() < 1.0, "{sum}");
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`quantize_with_hessian_factor`], with [`OpsError::NonFinite`] whatever the scheme says;
/// [`OpsError::Search`] if the Gram matrix is singular and not damped.
pub fn quantize_gptq<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    options: &Gptq,
    gram: &Gram,
) -> Result<Fp4Tensor<D>, OpsError> {
    scheme.with_method((*options).into()).validate()?;
    Fp4Layout::new(&values.shape(), axis, scheme)?;
    check_length("channels of the Gram matrix", values.dims()[axis], gram.channels())?;
    let transformed =
        scheme.hadamard.map(|hadamard| gram.clone().transformed(hadamard)).transpose()?;
    let gram = transformed.as_ref().unwrap_or(gram);
    let hessian_factor = HessianFactor::new(gram, options, scheme.block_size, &values.device())?;
    let scheme = scheme.with_non_finite(NonFinite::Reject);
    quantize_with_hessian_factor(values, axis, &scheme, &Arc::new(hessian_factor))
}

/// [`quantize_gptq`] for one of several tensors that are multiplied by the same activations.
///
/// Runs where the Hessian factor was computed. A device reads nothing back unless the scheme
/// rejects values that are not finite. Without that check the codes of such values mean nothing.
/// The host always rejects them. If the scheme has a Hadamard transform, the Hessian factor has to
/// be that of the transformed inputs: of [`Gram::transformed`].
///
/// ```
/// use std::sync::Arc;
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Fp4Scheme, Gptq, HessianFactor, gram, quantize_with_hessian_factor};
///
/// let device = Device::flex();
/// let gram = gram(Tensor::<2>::eye(32, &device))?;
/// let hessian_factor = Arc::new(HessianFactor::new(&gram, &Gptq::ORIGINAL, 32, &device)?);
/// for (value, nearest) in [(1.4, 1.5f32), (2.6, 3.0)] {
///     let weight = Tensor::<2>::full([32, 1], value, &device);
///     let packed = quantize_with_hessian_factor(weight, 0, &Fp4Scheme::mxfp4(), &hessian_factor)?;
///     // The inputs are uncorrelated, so errors cannot compensate each other.
///     assert_eq!(packed.dequantize().into_data(), TensorData::from([[nearest]; 32]));
/// }
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`quantize`](crate::quantize), and [`OpsError::NonFinite`]; [`OpsError::PartDevice`] if the
/// Hessian factor was made on another device, [`OpsError::Search`] if it is for another number of
/// channels or another block size, or if the scheme has tiles.
pub fn quantize_with_hessian_factor<const D: usize>(
    values: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    hessian_factor: &Arc<HessianFactor>,
) -> Result<Fp4Tensor<D>, OpsError> {
    Ok(Checked::new(values, axis, scheme, hessian_factor)?.quantize(hessian_factor))
}

/// [`quantize_with_hessian_factor`] for several matrices that are multiplied by the same
/// activations, such as query, key and value, each with a scheme of its own. The codes are the
/// same, and a device with kernels needs less time.
///
/// There most steps wait for the step before, however few the rows. So neighbours of one dtype are
/// quantized as one, up to 2^27 values, if their schemes differ only in the tensor scale. A matrix
/// with a given multiplier is quantized alone.
///
/// The results may share memory, which is free only after all of them are dropped.
///
/// ```
/// use std::sync::Arc;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp4_ops::{
///     Fp4Scheme, Gptq, HessianFactor, gram, quantize_family, quantize_with_hessian_factor,
/// };
///
/// let (device, normal) = (Device::flex(), Distribution::Normal(0.0, 1.0));
/// let gram = gram(Tensor::<2>::random([200, 64], normal, &device))?;
/// let hessian_factor = Arc::new(HessianFactor::new(&gram, &Gptq::default(), 16, &device)?);
/// let query = Tensor::<2>::random([64, 32], normal, &device);
/// let key = Tensor::<2>::random([64, 8], normal, &device);
/// let scheme = Fp4Scheme::nvfp4();
/// let family = vec![(query, scheme), (key.clone(), scheme)];
/// let packed = quantize_family(family, 0, &hessian_factor)?;
/// let alone = quantize_with_hessian_factor(key, 0, &scheme, &hessian_factor)?;
/// assert_eq!(packed[1].codes().into_data(), alone.codes().into_data());
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`quantize_with_hessian_factor`], for the first matrix that fails.
pub fn quantize_family(
    family: Vec<(Tensor<2>, Fp4Scheme)>,
    axis: usize,
    hessian_factor: &Arc<HessianFactor>,
) -> Result<Vec<Fp4Tensor<2>>, OpsError> {
    let mut stacks: Vec<Vec<Checked<2>>> = Vec::new();
    for (values, scheme) in family {
        let next = Checked::new(values, axis, &scheme, hessian_factor)?;
        // Hosts take one row after the other: a stack gains nothing.
        let on_device = hessian_factor.factorization().on_host().is_none();
        match stacks.last_mut().filter(|stack| on_device && next.fits(stack)) {
            Some(stack) => stack.push(next),
            None => stacks.push(vec![next]),
        }
    }
    let packed = stacks.into_iter().map(|stack| quantize_stack(stack, hessian_factor));
    Ok(packed.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

/// Most values that are quantized as one. More keep a device busy anyway, and each takes about 24
/// bytes of its memory meanwhile.
const MOST_STACKED: usize = 1 << 27;

/// A tensor with its scheme, checked.
struct Checked<const D: usize> {
    values: Tensor<D>,
    layout: Fp4Layout,
    /// Chooses blocks anew.
    scheme: Fp4Scheme,
    /// One for every tensor scale.
    amax: Tensor<1>,
}

impl<const D: usize> Checked<D> {
    /// # Errors
    /// As [`quantize_with_hessian_factor`].
    fn new(
        values: Tensor<D>,
        axis: usize,
        scheme: &Fp4Scheme,
        hessian_factor: &HessianFactor,
    ) -> Result<Self, OpsError> {
        let (values, layout, scheme) = transformed(values.without_autodiff(), axis, scheme)?;
        let mut scheme = hessian_factor.scheme(&scheme)?;
        let device = values.device().inner();
        if hessian_factor.factorization().on_host().is_some() {
            scheme = scheme.with_non_finite(NonFinite::Reject);
        } else if *hessian_factor.device() != device {
            let (expected, found) = (device.into(), hessian_factor.device().clone().into());
            return Err(OpsError::PartDevice { what: "Hessian factor", expected, found });
        }
        let channels = hessian_factor.channels();
        check_length("channels of the Gram matrix", layout.shape[axis], channels)?;
        let values = hessian_factor.corrected(values, axis);
        let amax = checked_amax(&values, axis, &scheme)?;
        Ok(Self { values, layout, scheme, amax })
    }

    fn quantize(self, hessian_factor: &Arc<HessianFactor>) -> Fp4Tensor<D> {
        let Self { values, layout, scheme, amax } = self;
        let packed = Dispatch::fp4_quantize_gptq(
            values.into_dispatch(),
            amax.into_dispatch(),
            layout.axis,
            scheme,
            hessian_factor.factorization().clone(),
        );
        Fp4Tensor::from_primitive(packed, layout)
    }

    fn elements(&self) -> usize {
        self.layout.shape.iter().product()
    }

    /// Returns true if it can be quantized as one with a stack: the rows have a tensor scale each,
    /// or none, but not a given multiplier.
    fn fits(&self, stack: &[Self]) -> bool {
        let first = &stack[0];
        let given = |one: &Self| matches!(one.scheme.tensor_scale, TensorScaling::Multiplier(_));
        let rest = |one: &Self| {
            let scheme = one.scheme.with_tensor_scale(TensorScaling::Tensor);
            (scheme.with_non_finite(NonFinite::Reject), one.values.dtype())
        };
        let elements = stack.iter().map(Self::elements).sum::<usize>() + self.elements();
        elements <= MOST_STACKED
            && [self, first].iter().all(|one| one.elements() > 0 && !given(one))
            && rest(self) == rest(first)
    }
}

/// Quantizes matrices that fit each other as one, by concatenating their packed rows.
fn quantize_stack(
    stack: Vec<Checked<2>>,
    hessian_factor: &Arc<HessianFactor>,
) -> Result<Vec<Fp4Tensor<2>>, OpsError> {
    if stack.len() < 2 {
        return Ok(stack.into_iter().map(|alone| alone.quantize(hessian_factor)).collect());
    }
    let first = &stack[0];
    let (axis, scheme) = (first.layout.axis, first.scheme);
    let scaled = scheme.rule.row().tensor_scale;
    let (scheme, amax) = if scaled {
        // A row has the amax, and so the tensor scale, of its matrix.
        let of_rows = |one: &Checked<2>| one.amax.clone().expand([one.layout.rows()]);
        let amax = Tensor::cat(stack.iter().map(of_rows).collect(), 0);
        (scheme.with_tensor_scale(TensorScaling::Row), amax)
    } else {
        (scheme, first.amax.clone())
    };
    let values = Tensor::cat(stack.iter().map(|one| one.values.clone()).collect(), 1 - axis);
    let layout = Fp4Layout::new(&values.shape(), axis, &scheme)?;
    let whole = Checked { values, layout, scheme, amax }.quantize(hessian_factor);
    let mut end = 0;
    let part = |Checked { layout, scheme, .. }: Checked<2>| {
        let rows = end..end + layout.rows();
        end = rows.end;
        let tensor_scale = whole.tensor_scale_bits();
        let tensor_scale = match scheme.tensor_scale {
            _ if !scaled => tensor_scale,
            TensorScaling::Row => tensor_scale.slice_dim(0, rows.clone()),
            _ => tensor_scale.slice_dim(0, rows.start..rows.start + 1),
        };
        let codes = whole.codes().slice_dim(0, rows.clone());
        let scales = whole.scales().slice_dim(0, rows);
        Fp4Tensor::from_parts_unread(codes, scales, tensor_scale, layout)
    };
    stack.into_iter().map(part).collect()
}
