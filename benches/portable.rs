//! Products of few and many rows on any device with kernels, such as a GPU through Vulkan:
//! `cargo bench -p benches --features vulkan --bench portable`. Compares products from the codes
//! with Burn's dense products in f16 and with a copy, after a check of the values.

use std::cell::Cell;
use std::time::Instant;

use benches::weights;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::TensorData;
use burn_cubecl::CubeBackend;
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::*;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::cubecl::{Device, future};
use burn_fp4_cubecl::{Capability, Dtype, Matmul, MatmulPlan, PackedHandles, cubecl};
use burn_fp4_formats::{Packed, TensorScale, f16};
use burn_fp4_search::host::{View, amax, quantize_packed};
use burn_fp4_search::{Fp4Scheme, Importance};
use clap::Parser;
use serde::Serialize;

/// Compares FP4 products with dense ones and a copy, on the default device.
#[derive(Parser)]
struct Arguments {
    /// Rows of the input.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 64, 512])]
    rows: Vec<usize>,
    /// Sides of square weights.
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 8192])]
    sides: Vec<usize>,
    /// Launches per measurement.
    #[arg(long, default_value_t = 100)]
    launches: usize,
    /// Measurements; the median counts.
    #[arg(long, default_value_t = 9)]
    runs: usize,
    /// Leave the dense products out: Mesa's lavapipe crashes on some of them.
    #[arg(long)]
    no_dense: bool,
    /// Measure the planned kernel alone; by default also all others that take the shape.
    #[arg(long)]
    planned: bool,
    /// Option that `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A line of the output, as JSON.
#[derive(Serialize)]
struct Line {
    operation: String,
    /// Time of a launch, by the device's clock; none if it has none.
    device_microseconds: Option<f64>,
    /// Time of a launch by the host's clock, launch overhead included.
    host_microseconds: f64,
    /// Bytes of the weight and the activations, per second of the device's clock, in 10^9.
    gigabytes_per_second: f64,
}

/// Bytes of weights that take turns: more than a cache holds.
const TURN: usize = 256 << 20;

fn main() {
    let arguments = Arguments::parse();
    let device = device();
    let client = device.client();
    let identity = &client.properties().identity;
    let capability = Capability::tested(&client).expect("a driver that passes the self-test");
    eprintln!("on {} ({}), {capability:?}", identity.name, client.name());
    let bench = Bench { client: &client, capability, arguments: &arguments };
    bench.copy();
    for &side in &arguments.sides {
        bench.products(side);
        if !arguments.no_dense {
            bench.dense(&device, side);
        }
    }
}

/// Burn's default device of the build: `Device::wgpu` where it has wgpu.
fn device() -> Device {
    #[cfg(feature = "wgpu")]
    return Device::Wgpu(Default::default());
    #[cfg(not(feature = "wgpu"))]
    Device::default()
}

struct Bench<'a> {
    client: &'a Client,
    capability: Capability,
    arguments: &'a Arguments,
}

impl Bench<'_> {
    /// Measures launches, and prints a line.
    fn line(&self, operation: String, bytes: usize, launch: impl Fn()) {
        let Self { client, arguments, .. } = self;
        let launches = arguments.launches;
        let run = || (0..launches).for_each(|_| launch());
        let wait = || future::block_on(client.sync()).expect("the device answers");
        // The first run compiles and tunes.
        run();
        wait();
        let mut host: Vec<_> = (0..arguments.runs)
            .map(|_| {
                let start = Instant::now();
                run();
                wait();
                start.elapsed().as_secs_f64()
            })
            .collect();
        let measured = (0..arguments.runs).map(|_| {
            let window = client.profile_start().ok()?;
            run();
            let duration = client.profile_end(window).ok()?;
            Some(future::block_on(duration.resolve())?.duration().as_secs_f64())
        });
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2] / launches as f64
        };
        let on_device = measured.collect::<Option<Vec<_>>>().map(|mut times| median(&mut times));
        let on_host = median(&mut host);
        let line = Line {
            operation,
            device_microseconds: on_device.map(|seconds| seconds * 1e6),
            host_microseconds: on_host * 1e6,
            gigabytes_per_second: bytes as f64 / on_device.unwrap_or(on_host) / 1e9,
        };
        println!("{}", serde_json::to_string(&line).expect("plain numbers"));
    }

    /// Measures copies, whose bytes count twice: of much memory, and of as much as a product of one
    /// row reads.
    fn copy(&self) {
        let weights = self.arguments.sides.iter().map(|side| side * side * 9 / 32);
        for bytes in weights.chain([TURN / 8, TURN]) {
            // Sources take turns, as weights do.
            let count = (TURN / bytes).max(1);
            let sources: Vec<_> = (0..count).map(|_| self.client.empty(bytes)).collect();
            let turn = Cell::new(0);
            let name = format!("copy of {:.1} MB", bytes as f64 / 1e6);
            self.line(name, 2 * bytes, || {
                let source = &sources[turn.replace((turn.get() + 1) % count)];
                copied(self.client, source.clone(), bytes / 16);
            });
        }
    }

    /// Measures products from the codes in f16 and f32.
    fn products(&self, side: usize) {
        let scheme = Fp4Scheme::nvfp4();
        let dense = weights(side * side);
        let view = View::rows(side, side);
        let largest = amax(&dense, view, &scheme);
        let packed = quantize_packed(&dense, view, &scheme, &largest, Importance::Uniform);
        let packed = packed.expect("a valid problem");
        let bytes = packed.codes.len() + packed.scales.len();
        let turn: Vec<_> =
            (0..TURN.div_ceil(bytes)).map(|_| upload(self.client, &packed)).collect();
        let next = Cell::new(0);
        for dtype in [Dtype::F16, Dtype::F32] {
            for &m in &self.arguments.rows {
                let values: Vec<f32> = weights(m * side).iter().map(|x| x * 50.0).collect();
                let input = match dtype {
                    Dtype::F32 => self.client.create_from_slice(f32::as_bytes(&values)),
                    _ => {
                        let values: Vec<_> = values.iter().map(|&x| f16::from_f32(x)).collect();
                        self.client.create_from_slice(f16::as_bytes(&values))
                    }
                };
                let (format, block_size) = (scheme.format(), scheme.block_size);
                let matmul = Matmul { m, n: side, k: side, format, block_size, dtype };
                for (kernel, planned) in self.kernels(&matmul) {
                    let name = format!("{kernel}, {dtype:?}, {m} x {side} x {side}");
                    let run = |weight: &PackedHandles| {
                        planned.run(self.client, weight.clone(), input.clone(), None, None)
                    };
                    let output = run(&turn[0]).expect("memory of these lengths");
                    self.check(&name, &packed, &values, output, &matmul);
                    let moved = bytes + m * 2 * side * dtype.size();
                    self.line(name, moved, || {
                        next.set((next.get() + 1) % turn.len());
                        drop(run(&turn[next.get()]));
                    });
                }
            }
        }
    }

    /// Plans every kernel for a product.
    fn kernels(&self, matmul: &Matmul) -> Vec<(&'static str, MatmulPlan)> {
        let device = &self.capability;
        let mut kernels = vec![("planned", matmul.plan(device).ok().flatten())];
        if !self.arguments.planned {
            kernels.extend([
                ("gemv", matmul.portable_gemv(device).ok().filter(|_| matmul.m <= 16)),
                ("gemm", matmul.portable_gemm(device).ok().filter(|_| matmul.m > 8)),
                ("cmma", matmul.portable_cmma(device).ok().filter(|_| matmul.m > 8)),
            ]);
        }
        kernels.into_iter().filter_map(|(name, planned)| Some((name, planned?))).collect()
    }

    /// Compares some outputs of the first and the last row with sums in f64.
    fn check(&self, name: &str, packed: &Packed, input: &[f32], output: Handle, matmul: &Matmul) {
        let &Matmul { m, n, k, dtype, .. } = matmul;
        let bytes = self.client.read_one(output).expect("the device answers");
        let found: Vec<f32> = match dtype {
            Dtype::F32 => f32::from_bytes(&bytes).to_vec(),
            _ => f16::from_bytes(&bytes).iter().map(|value| value.to_f32()).collect(),
        };
        for output in (0..n).step_by(61) {
            let rows = Packed {
                rows: 1,
                codes: packed.codes[output * k / 2..][..k / 2].to_vec(),
                scales: packed.scales[output * k / 16..][..k / 16].to_vec(),
                tensor_scale: packed.tensor_scale.clone(),
                ..*packed
            };
            let weight = rows.dequantize();
            for row in [0, m - 1] {
                let terms = (0..k).map(|at| {
                    let value = input[row * k + at];
                    let value =
                        if dtype == Dtype::F32 { value } else { f16::from_f32(value).to_f32() };
                    f64::from(value) * f64::from(weight[at])
                });
                let (sum, size) = terms
                    .fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()));
                let found = f64::from(found[row * n + output]);
                let near = (found - sum).abs() <= 5e-6 * size + 1e-3 * sum.abs();
                assert!(near, "{name}, row {row}, output {output}: {found}, not {sum}");
            }
        }
    }

    /// Measures Burn's dense products in f16, with the kernel that it chooses.
    fn dense(&self, device: &Device, side: usize) {
        let bytes = 2 * side * side;
        let floats = |rows: usize, cols: usize| {
            let values: Vec<_> = weights(rows * cols).into_iter().map(f16::from_f32).collect();
            CubeBackend::float_from_data(TensorData::new(values, [rows, cols]), device)
        };
        let turn: Vec<_> = (0..TURN.div_ceil(bytes)).map(|_| floats(side, side)).collect();
        let next = Cell::new(0);
        for &m in &self.arguments.rows {
            let input = floats(m, side);
            self.line(format!("dense F16, {m} x {side} x {side}"), bytes + 4 * m * side, || {
                next.set((next.get() + 1) % turn.len());
                drop(CubeBackend::float_matmul(input.clone(), turn[next.get()].clone()));
            });
        }
    }
}

fn upload(client: &Client, packed: &Packed) -> PackedHandles {
    let TensorScale::One(tensor_scale) = packed.tensor_scale else { panic!("one tensor scale") };
    PackedHandles {
        codes: client.create_from_slice(&packed.codes),
        scales: client.create_from_slice(&packed.scales),
        tensor_scale: client.create_from_slice(f32::as_bytes(&[tensor_scale])),
        tensor_scales: 1,
    }
}

/// Copies a buffer, 16 bytes per unit.
fn copied(client: &Client, source: Handle, vectors: usize) {
    let target = client.empty(vectors * 16);
    let (cubes, most) = (vectors.div_ceil(256) as u32, 1 << 15);
    // SAFETY: both buffers hold `vectors` times four words.
    unsafe {
        copy_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes.min(most), cubes.div_ceil(most), 1),
            CubeDim::new_1d(256),
            4,
            BufferArg::from_raw_parts(source, vectors),
            BufferArg::from_raw_parts(target, vectors),
            vectors as u32,
        );
    }
}

#[cube(launch_unchecked)]
fn copy_kernel<N: Size>(source: &[Vector<u32, N>], target: &mut [Vector<u32, N>], count: u32) {
    if (ABSOLUTE_POS as u32) < count {
        target[ABSOLUTE_POS] = source[ABSOLUTE_POS];
    }
}
