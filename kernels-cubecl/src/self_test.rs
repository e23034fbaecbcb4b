//! [`Capability::tested`]: trusts a driver of the wgpu runtime if kernels give the host's values.
//!
//! Every code is dequantized with block scales of both formats, to f32 and f16, and multiplied with
//! NVFP4's block scales in every dtype that the device holds, without a bias. Then a norm, an
//! argmax and the attention of a token run in f32. That takes a few small launches, so that callers
//! keep the result.

use burn_fp4_search::formats::{Fp4Format, Packed, TensorScale};
use burn_fp4_search::host::{AttentionShape, HostElement, View};
use burn_fp4_search::{Fp4Scheme, ScaleRule};
use cubecl::client::Client;
use cubecl::future::reader::read_sync;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::decoder::{AttentionHandles, argmax, attend, rms_norm};
use crate::dequantize::dequantize;
use crate::matmul::Matmul;
use crate::memory::PackedHandles;
use crate::plan::{Capability, Decoding, Dtype, Portable, Problem, Refusal};

/// Packed rows and their elements: two blocks each, and a block has every code.
const ROWS: usize = 8;
const COLS: usize = 32;
const BLOCK_SIZE: usize = 16;

/// Subnormals, normal numbers and the largest one.
const E4M3_SCALES: [u8; 16] =
    [1, 2, 7, 8, 9, 0x1F, 0x38, 0x39, 0x40, 0x57, 0x66, 0x70, 0x77, 0x7A, 0x7D, 0x7E];
/// Powers of two whose products with elements are finite and normal.
const E8M0_SCALES: [u8; 16] =
    [3, 40, 100, 110, 120, 124, 125, 126, 127, 128, 129, 130, 140, 150, 200, 240];

impl Capability {
    /// Reads the capability of a client's device, and tests the kernels if it is one of the wgpu
    /// runtime. Their [`Decoding`] is the fastest whose values equal the host's.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use burn_fp4_cubecl::Capability;
    /// use burn_fp4_cubecl::cubecl::Device;
    ///
    /// let client = Device::default().client();
    /// let device = Capability::tested(&client)?;
    /// assert_eq!(device, Capability::of(&client)); // only drivers of wgpu are tested
    /// # }
    /// # Ok::<(), burn_fp4_cubecl::Refusal>(())
    /// ```
    ///
    /// # Errors
    /// [`Refusal::Device`] if the device lacks what kernels need, [`Refusal::SelfTest`] if values
    /// are wrong, [`Refusal::Failed`] if the device fails.
    pub fn tested(client: &Client) -> Result<Self, Refusal> {
        read_sync(Self::tested_async(client))
    }

    /// Tests as [`tested`](Self::tested) does, without blocking, as a browser needs.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use burn_fp4_cubecl::Capability;
    /// use burn_fp4_cubecl::cubecl::Device;
    ///
    /// # burn_fp4_cubecl::cubecl::future::block_on(async {
    /// let client = Device::default().client();
    /// assert_eq!(Capability::tested_async(&client).await?, Capability::tested(&client)?);
    /// # Ok::<(), burn_fp4_cubecl::Refusal>(())
    /// # })?;
    /// # }
    /// # Ok::<(), burn_fp4_cubecl::Refusal>(())
    /// ```
    ///
    /// # Errors
    /// As [`tested`](Self::tested).
    pub async fn tested_async(client: &Client) -> Result<Self, Refusal> {
        let found = Self::of(client);
        let Some(portable) = found.portable else { return Ok(found) };
        found.check_portable(Dtype::F32)?;
        let plain = Portable { cmma_f16: false, cmma_bf16: false, ..portable };
        let mut result = Ok(found);
        // Without matrix instructions, or sums by planes, if these are what is wrong.
        let planes = [found.plane, 1].into_iter().take(if found.plane > 1 { 2 } else { 1 });
        for (plane, portable) in planes.flat_map(|plane| [(plane, portable), (plane, plain)]) {
            for decoding in [Decoding::HalfSubnormals, Decoding::Integers] {
                if decoding == Decoding::HalfSubnormals && !portable.f16 {
                    continue;
                }
                let device = Self { plane, decoding, portable: Some(portable), ..found };
                let mut tested = test_products(client, &device).await;
                if tested.is_ok() {
                    tested = test_values(client, &device).await;
                }
                if tested.is_ok() {
                    return Ok(device.with_tested_decoder(client).await);
                }
                result = tested.map(|()| device);
            }
        }
        result
    }

    /// Tests the kernels of a decoder, also without sums by planes. A driver that fails keeps its
    /// products.
    async fn with_tested_decoder(self, client: &Client) -> Self {
        for device in [self, Self { plane: 1, ..self }] {
            if test_decoder(client, &device).await.is_ok() {
                return device;
            }
        }
        let without = self.portable.map(|portable| Portable { decoder: false, ..portable });
        Self { portable: without, ..self }
    }
}

/// Makes the weight of the test, whose blocks have every code.
fn weight(format: Fp4Format) -> Packed {
    let (scales, tensor_scale) = match format {
        Fp4Format::NvFp4 => (E4M3_SCALES, 0.75),
        Fp4Format::MxFp4 => (E8M0_SCALES, 1.0),
    };
    Packed {
        format,
        block_size: BLOCK_SIZE,
        rows: ROWS,
        cols: COLS,
        codes: (0..ROWS * COLS / 2).map(|byte| 0x10 + 0x22 * (byte % 8) as u8).collect(),
        scales: scales.to_vec(),
        tensor_scale: TensorScale::One(tensor_scale),
    }
}

fn upload(client: &Client, packed: &Packed) -> PackedHandles {
    let tensor_scale = packed.tensor_scale.as_slice();
    PackedHandles {
        codes: client.create_from_slice(&packed.codes),
        scales: client.create_from_slice(&packed.scales),
        tensor_scale: client.create_from_slice(f32::as_bytes(tensor_scale)),
        tensor_scales: tensor_scale.len(),
    }
}

/// Compares dequantized values, bit for bit.
async fn test_values(client: &Client, device: &Capability) -> Result<(), Refusal> {
    for format in Fp4Format::ALL {
        let packed = weight(format);
        let expected = packed.dequantize();
        let scheme = Fp4Scheme::of(ScaleRule::of_format(format)).with_block_size(BLOCK_SIZE);
        let dequantized = |dtype| {
            let problem = Problem { view: View::rows(ROWS, COLS), dtype, scheme };
            dequantize(client, device, upload(client, &packed), &problem)
        };
        let found = read::<f32>(client, dequantized(Dtype::F32)?).await?;
        let same = |(found, expected): (&f32, &f32)| found.to_bits() == expected.to_bits();
        check("dequantizing to f32", found.iter().zip(&expected).map(same))?;
        if device.check_portable(Dtype::F16).is_ok() {
            let found = read::<f16>(client, dequantized(Dtype::F16)?).await?;
            let same = |(found, &expected): (&f16, &f32)| {
                found.to_bits() == f16::from_f32(expected).to_bits()
            };
            check("dequantizing to f16", found.iter().zip(&expected).map(same))?;
        }
    }
    Ok(())
}

/// Compares products with sums in f64, in every dtype, for one row of the input and for several.
async fn test_products(client: &Client, device: &Capability) -> Result<(), Refusal> {
    let packed = weight(Fp4Format::NvFp4);
    let dense = packed.dequantize();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        if device.check_portable(dtype).is_err() {
            continue;
        }
        for m in [1, 9] {
            // Exact in every dtype.
            let input: Vec<_> = (0..m * COLS).map(|at| (at % 19) as f32 * 0.125 - 1.0).collect();
            let (values, rounding) = match dtype {
                Dtype::F32 => (client.create_from_slice(f32::as_bytes(&input)), 0.0),
                Dtype::F16 => (client.create_from_slice(f16::as_bytes(&halves(&input))), 1e-3),
                Dtype::Bf16 => (client.create_from_slice(bf16::as_bytes(&halves(&input))), 8e-3),
            };
            let matmul = Matmul {
                m,
                n: ROWS,
                k: COLS,
                format: packed.format,
                block_size: BLOCK_SIZE,
                dtype,
            };
            let Some(planned) = matmul.plan(device)? else {
                return Err(Refusal::Instructions { reason: "no kernel takes few rows" });
            };
            let output = planned.run(client, upload(client, &packed), values, None, None)?;
            let found: Vec<f32> = match dtype {
                Dtype::F32 => read(client, output).await?,
                Dtype::F16 => {
                    read::<f16>(client, output).await?.iter().map(|x| x.to_f32()).collect()
                }
                Dtype::Bf16 => {
                    read::<bf16>(client, output).await?.iter().map(|x| x.to_f32()).collect()
                }
            };
            let near = |(at, found): (usize, &f32)| {
                let terms = (0..COLS).map(|k| {
                    let weight = dense[at % ROWS * COLS + k];
                    f64::from(input[at / ROWS * COLS + k]) * f64::from(weight)
                });
                let (sum, size) = terms
                    .fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()));
                (f64::from(*found) - sum).abs() <= (1e-5 + rounding) * size
            };
            check("a product", found.iter().enumerate().map(near))?;
        }
    }
    Ok(())
}

/// Compares the operations of a decoder with sums in f64. Nothing runs without shared memory.
async fn test_decoder(client: &Client, device: &Capability) -> Result<(), Refusal> {
    // A vector more than a cube has units.
    const CHANNELS: usize = 4 * 257;
    if device.check_decoder(Dtype::F32).is_err() {
        return Ok(());
    }
    let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
    let near = |(found, expected): (&f32, f64)| (f64::from(*found) - expected).abs() <= 1e-4;
    let values = |count: usize, period: usize| -> Vec<f32> {
        (0..count).map(|at| (at % period) as f32 * 0.125 - 1.0).collect()
    };

    let mut row = values(CHANNELS, 19);
    row[777] = 9.0;
    let ones = upload(&[1.0; CHANNELS]);
    let form = [1, CHANNELS];
    let normalized =
        rms_norm(client, device, upload(&row), None, ones, form, Dtype::F32, 0.0)?.normalized;
    let squares: f64 = row.iter().map(|&value| f64::from(value).powi(2)).sum();
    let root = (squares / CHANNELS as f64).sqrt();
    let expected = row.iter().map(|&value| f64::from(value) / root);
    check("a norm", read::<f32>(client, normalized).await?.iter().zip(expected).map(near))?;
    let index = argmax(client, device, upload(&row), form, Dtype::F32)?;
    check("an argmax", read::<i32>(client, index).await?.iter().map(|&index| index == 777))?;

    // The token is in the second tile. RoPE turns by 0.
    let shape =
        AttentionShape { batch: 1, tokens: 1, heads: 2, kv_heads: 1, head_dim: 8, capacity: 70 };
    let (head_dim, position) = (shape.head_dim, 66);
    let (queries, cached) = (values(2 * head_dim, 5), values(shape.capacity * head_dim, 19));
    let place = position * head_dim..(position + 1) * head_dim;
    let new = &cached[place.clone()];
    // The kernel writes the token's own key and value.
    let mut before = cached.clone();
    before[place.clone()].fill(50.0);
    let operands = AttentionHandles {
        queries: upload(&queries),
        keys: upload(new),
        values: upload(new),
        key_cache: upload(&before),
        value_cache: upload(&before),
        packed: None,
        cos: upload(&vec![1.0; shape.capacity * head_dim / 2]),
        sin: upload(&vec![0.0; shape.capacity * head_dim / 2]),
        position: client.create_from_slice(i32::as_bytes(&[position as i32])),
    };
    let output = attend(client, device, operands, shape, shape.capacity, Dtype::F32, None)?;
    let keys: Vec<_> = cached.chunks(head_dim).take(position + 1).collect();
    let expected = queries.chunks(head_dim).flat_map(|query| {
        let dot = |key: &&[f32]| -> f64 {
            key.iter().zip(query).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum()
        };
        let weights: Vec<_> =
            keys.iter().map(|key| (dot(key) / (head_dim as f64).sqrt()).exp()).collect();
        let total: f64 = weights.iter().sum();
        let channel = |at: usize| {
            let weighted = keys.iter().zip(&weights).map(|(key, w)| w * f64::from(key[at]));
            weighted.sum::<f64>() / total
        };
        (0..head_dim).map(channel).collect::<Vec<_>>()
    });
    check("attention", read::<f32>(client, output).await?.iter().zip(expected).map(near))
}

/// Converts values to a dtype of 16 bits.
fn halves<T: HostElement>(values: &[f32]) -> Vec<T> {
    let mut halves = vec![T::default(); values.len()];
    T::write(values, &mut halves);
    halves
}

async fn read<T: CubeElement + Clone>(client: &Client, handle: Handle) -> Result<Vec<T>, Refusal> {
    match client.read_async(vec![handle]).await {
        Ok(bytes) => Ok(T::from_bytes(&bytes[0]).to_vec()),
        Err(error) => Err(Refusal::Failed { error: error.to_string() }),
    }
}

/// Counts values that are wrong.
fn check(operation: &'static str, right: impl Iterator<Item = bool>) -> Result<(), Refusal> {
    let (mut wrong, mut values) = (0, 0);
    for right in right {
        values += 1;
        wrong += usize::from(!right);
    }
    if wrong == 0 { Ok(()) } else { Err(Refusal::SelfTest { operation, wrong, values }) }
}
