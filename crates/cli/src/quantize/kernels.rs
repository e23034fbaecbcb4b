//! Matrices quantized by CubeCL kernels: values go to the device, codes and scales come back.

use std::marker::PhantomData;

use burn_fp4_cubecl::cubecl::bytes::Bytes;
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::device::DeviceUnavailable;
use burn_fp4_cubecl::cubecl::server::{Handle, ServerError};
use burn_fp4_cubecl::{
    Capability, Dtype, Hessians, Operation, PackedHandles, Problem, Refusal, amax, cubecl, plan,
    quantize_by_hessian, quantize_weighted,
};
use burn_fp4_search::formats::{Packed, TensorScale, bf16, f16};
use burn_fp4_search::host::{HostElement, View};
use burn_fp4_search::{Fp4Scheme, Importance, SearchError, Statistics};

use super::device::Device;
use crate::error::CliError;

/// A device with kernels.
pub(super) struct Kernels {
    device: Device,
    client: Client,
    capability: Capability,
}

/// A float type that kernels read.
pub(super) trait KernelElement: HostElement + bytemuck::Pod {
    /// Its name in kernels.
    const DTYPE: Dtype;
}

impl KernelElement for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

impl KernelElement for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

impl KernelElement for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

/// Values of matrices one after another, on the host and on the device.
pub(super) struct Uploaded<T> {
    bytes: Bytes,
    handle: Handle,
    values: PhantomData<T>,
}

/// Why a matrix is not quantized.
pub(super) enum Failure {
    /// Something is wrong with its values or statistics.
    Search(SearchError),
    /// Something is wrong with the device.
    Device(String),
}

impl Kernels {
    /// Opens a device.
    ///
    /// # Errors
    /// [`CliError::Device`] if this program is built without it, or the machine has none.
    pub(super) fn open(device: Device) -> Result<Self, CliError> {
        let found = match device {
            Device::Cuda => cubecl::Device::cuda(0),
            Device::Flex | Device::CpuRuntime | Device::Wgpu => cubecl::Device::cpu(),
        };
        let found = found.map_err(|unavailable| match unavailable {
            DeviceUnavailable::NotLinked(_) => device.not_built(),
            DeviceUnavailable::NoSuchDevice { .. } => {
                let problem =
                    "this machine has none, or no driver for it; leave --device out".to_owned();
                CliError::Device { device: device.name(), problem }
            }
        })?;
        let client = found.client();
        let capability = Capability::of(&client);
        Ok(Self { device, client, capability })
    }

    /// Checks that a method has kernels with the bits of the host, and that these take a matrix.
    ///
    /// # Errors
    /// [`CliError::Device`], which names the weight.
    pub(super) fn check(&self, how: &Fp4Scheme, weight: &str, view: View) -> Result<(), CliError> {
        let scheme = *how;
        let method = scheme.method;
        let refused = |problem| Err(CliError::Device { device: self.device.name(), problem });
        let on_host =
            || refused(format!("method `{method}` runs on the CPU only; leave --device out"));
        if method.sums_matrices() {
            return on_host();
        }
        let problem = Problem { view, dtype: Dtype::F32, scheme };
        match plan(operation(&scheme), &problem, &self.capability) {
            Ok(_) => Ok(()),
            Err(Refusal::Method { .. }) => on_host(),
            Err(refusal) => refused(format!("`{weight}`: {refusal}")),
        }
    }

    /// Sends values to the device.
    pub(super) fn upload<T: KernelElement>(&self, values: Vec<T>) -> Uploaded<T> {
        // Both hold the same memory.
        let bytes = Bytes::from_elems(values).shared();
        let handle = self.client.create(bytes.clone());
        Uploaded { bytes, handle, values: PhantomData }
    }

    /// One of the matrices that were sent, each of which lies like this.
    pub(super) fn quantize<T: KernelElement>(
        &self,
        uploaded: &Uploaded<T>,
        at: usize,
        view: View,
        scheme: &Fp4Scheme,
        statistics: Statistics<'_>,
    ) -> Result<Packed, Failure> {
        scheme.check_columns(view.axis)?;
        let bytes = (view.len() * T::DTYPE.size()) as u64;
        let (handle, begin) = (&uploaded.handle, at as u64 * bytes);
        let values = handle.clone().offset_start(begin).offset_end(handle.size() - begin - bytes);
        let (client, device) = (&self.client, &self.capability);
        let problem = Problem { view, dtype: T::DTYPE, scheme: *scheme };
        // Schemes of checkpoints have one tensor scale for all rows.
        let largest = amax(client, device, values.clone(), view, T::DTYPE, false)?;
        let upload = |values: &[f32]| client.create_from_slice(bytemuck::cast_slice(values));
        let (blocks, moments);
        let importance = match statistics {
            Statistics::None => Importance::Uniform,
            Statistics::SecondMoments(moments) => Importance::Channels(moments),
            Statistics::Gram(gram) if scheme.method.needs_hessians() => {
                blocks = gram.blocks(scheme.block_size)?;
                Importance::Blocks(&blocks)
            }
            Statistics::Gram(gram) => {
                moments = gram.diagonal().map(|value| value as f32).collect::<Vec<_>>();
                Importance::Channels(&moments)
            }
        };
        importance.check(scheme, view.axis)?;
        let amax = largest.clone();
        let packed = match importance {
            Importance::Uniform => quantize_weighted(client, device, values, amax, None, &problem),
            Importance::Channels(weights) => {
                let weights = Some(upload(weights));
                quantize_weighted(client, device, values, amax, weights, &problem)
            }
            Importance::Blocks(blocks) => {
                let [values_of, bounds] = [blocks.values(), blocks.bounds()].map(upload);
                let hessians = Hessians { values: values_of, bounds };
                quantize_by_hessian(client, device, values, amax, hessians, &problem)
            }
        }?;
        let (packed, amax) = self.fetch(packed, largest, &problem)?;
        if amax.is_finite() {
            return Ok(packed);
        }
        let mut values = uploaded.values()[at * view.len()..].iter().map(|value| value.to_f32());
        let found = values.find(|value| !value.is_finite()).unwrap_or(f32::NAN);
        Err(SearchError::NonFinite { found }.into())
    }

    /// Waits for codes and scales, and for the amax that they were made with.
    fn fetch(
        &self,
        packed: PackedHandles,
        amax: Handle,
        problem: &Problem,
    ) -> Result<(Packed, f32), Failure> {
        let handles = vec![packed.codes, packed.scales, packed.tensor_scale, amax];
        let failed = |error: ServerError| {
            Failure::Device(error.to_string().lines().next().unwrap_or_default().to_owned())
        };
        let read = self.client.read(handles).map_err(failed)?;
        // Only then it gives back host memory that it has copied from.
        cubecl::future::block_on(self.client.sync()).map_err(failed)?;
        let [codes, scales, tensor_scale, amax] = &read[..] else {
            return Err(Failure::Device("it answered with less than was asked for".to_owned()));
        };
        let float = |bytes: &[u8]| bytemuck::pod_read_unaligned::<f32>(bytes);
        let Problem { view, scheme, .. } = problem;
        let packed = Packed {
            format: scheme.format(),
            block_size: scheme.block_size,
            rows: view.packed_rows(),
            cols: view.axis,
            codes: codes.to_vec(),
            scales: scales.to_vec(),
            tensor_scale: TensorScale::One(float(tensor_scale)),
        };
        Ok((packed, float(amax)))
    }
}

/// Returns the operation of a scheme.
fn operation(scheme: &Fp4Scheme) -> Operation {
    match scheme.method.needs_hessians() {
        true => Operation::QuantizeByHessian,
        false => Operation::Quantize,
    }
}

impl<T: KernelElement> Uploaded<T> {
    /// The values on the host.
    pub(super) fn values(&self) -> &[T] {
        bytemuck::cast_slice(&self.bytes)
    }
}

impl From<SearchError> for Failure {
    fn from(error: SearchError) -> Self {
        Self::Search(error)
    }
}

impl From<Refusal> for Failure {
    /// The plan was checked before: what is refused now is the device's.
    fn from(refusal: Refusal) -> Self {
        Self::Device(refusal.to_string())
    }
}
