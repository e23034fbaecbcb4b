//! Speed of the kernels one by one.

use benches::{Row, weights};
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::*;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{
    Capability, Dtype, Problem, amax, cubecl, dequantize, fake_quantize, hadamard, quantize,
    quantize_by_hessian,
};
use burn_fp4_formats::bf16;
use burn_fp4_search::host::{DequantTarget, View};
use burn_fp4_search::{BlockHessians, Blocks, Draw, Fp4Scheme, Hadamard, Method, Rounding};

use crate::check::upload;
use crate::figures::Figures;
use crate::{Arguments, median_seconds};

/// Measures every operation on bf16, along either axis, at three sizes.
pub(crate) fn measure(client: &Client, arguments: &Arguments, figures: &mut Figures) {
    let device = Capability::of(client);
    for shape in [[1024, 1024], [4096, 11008], [8192, 8192]] {
        let count = shape[0] * shape[1];
        let dense: Vec<_> = weights(count).into_iter().map(bf16::from_f32).collect();
        let values = client.create_from_slice(bf16::as_bytes(&dense));
        let run = || drop(copied(client, values.clone(), 2 * count / 16));
        let copy = median_seconds(client, arguments, run);
        let mut bench = Bench {
            client,
            device,
            arguments,
            figures: &mut *figures,
            shape,
            values: values.clone(),
            copy,
        };
        bench.row("copy", 2 * bench.dense_bytes(), &run);
        for axis in [1, 0] {
            let amax = bench.amax(axis);
            bench.quantizers(axis, &amax);
            bench.searches_by_hessian(axis, &amax);
            bench.hadamard(axis);
            bench.values_of_codes(axis, &amax);
        }
    }
}

/// A matrix in device memory, and the results for it.
struct Bench<'a> {
    client: &'a Client,
    device: Capability,
    arguments: &'a Arguments,
    figures: &'a mut Figures,
    shape: [usize; 2],
    values: Handle,
    /// Seconds of a copy of the values.
    copy: f64,
}

impl Bench<'_> {
    /// Bytes of the values.
    fn dense_bytes(&self) -> usize {
        2 * self.shape[0] * self.shape[1]
    }

    /// Bytes that quantization reads and writes.
    fn bytes(&self, problem: &Problem) -> usize {
        self.dense_bytes() + problem.code_bytes() + problem.scale_bytes()
    }

    fn problem(&self, axis: usize, scheme: Fp4Scheme) -> Problem {
        Problem { view: View::along(&self.shape, axis), dtype: Dtype::Bf16, scheme }
    }

    fn full_name(&self, name: &str) -> String {
        format!("{name}, {} x {}", self.shape[0], self.shape[1])
    }

    /// Returns true if the filter matches an operation.
    fn wanted(&self, name: &str) -> bool {
        let name = self.full_name(name);
        self.arguments.filter.as_ref().is_none_or(|part| name.contains(part))
    }

    /// Measures an operation if the filter matches it.
    fn row(&mut self, name: &str, bytes: usize, launch: &dyn Fn()) {
        if self.wanted(name) {
            let seconds = median_seconds(self.client, self.arguments, launch);
            let count = self.shape[0] * self.shape[1];
            let name = self.full_name(name);
            self.figures.push(Row::new(&name, count, bytes, seconds, self.copy));
        }
    }

    /// Computes the amax; measured alone and before NVFP4.
    fn amax(&mut self, axis: usize) -> Handle {
        let (client, device, values) = (self.client, self.device, self.values.clone());
        let nvfp4 = self.problem(axis, Fp4Scheme::nvfp4());
        let measured = || {
            amax(client, &device, values.clone(), nvfp4.view, nvfp4.dtype, false).expect("a plan")
        };
        self.row(&format!("amax axis {axis}"), self.dense_bytes(), &|| drop(measured()));
        let bytes = self.dense_bytes() + self.bytes(&nvfp4);
        self.row(&format!("amax + nvfp4 axis {axis}"), bytes, &|| {
            drop(quantize(client, &device, values.clone(), measured(), &nvfp4));
        });
        measured()
    }

    fn quantizers(&mut self, axis: usize, amax: &Handle) {
        let (client, device, values) = (self.client, self.device, self.values.clone());
        let [nvfp4, mxfp4] = [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()];
        let tiles = nvfp4.with_blocks(Blocks::Tile16x16);
        let four_over_six =
            Method::FourOverSix { range: Default::default(), error: Default::default() };
        for (name, scheme) in [
            ("nvfp4", nvfp4),
            ("mxfp4", mxfp4),
            ("nvfp4 tiles", tiles),
            ("nvfp4 four over six", nvfp4.with_method(four_over_six)),
            ("nvfp4 sse", nvfp4.with_method(Method::SSE)),
            ("mxfp4 sse", mxfp4.with_method(Method::SSE)),
            ("nvfp4 tiles sse", tiles.with_method(Method::SSE)),
            ("nvfp4 drawn", nvfp4.with_rounding(Rounding::Stochastic(Draw::default()))),
        ] {
            let problem = self.problem(axis, scheme);
            self.row(&format!("{name} axis {axis}"), self.bytes(&problem), &|| {
                let packed = quantize(client, &device, values.clone(), amax.clone(), &problem);
                drop(packed.expect("a plan"));
            });
        }
    }

    fn searches_by_hessian(&mut self, axis: usize, amax: &Handle) {
        let (client, device, values) = (self.client, self.device, self.values.clone());
        for scheme in [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()] {
            let channels = self.shape[axis];
            let x: Vec<_> = weights(256 * channels).iter().map(|x| x * 50.0).collect();
            let blocks = BlockHessians::of(&x, channels, scheme.block_size);
            let hessians = upload(client, &blocks.expect("finite"));
            for search in [Method::Hessian, Method::CoordinateDescent] {
                let problem = self.problem(axis, scheme.with_method(search));
                let name = format!("{} {search:?} axis {axis}", scheme.format());
                self.row(&name, self.bytes(&problem), &|| {
                    let (values, amax, hessians) = (values.clone(), amax.clone(), hessians.clone());
                    drop(quantize_by_hessian(client, &device, values, amax, hessians, &problem));
                });
            }
        }
    }

    fn hadamard(&mut self, axis: usize) {
        let (client, device, values) = (self.client, self.device, self.values.clone());
        let (view, transform) = (View::along(&self.shape, axis), Hadamard::default());
        self.row(&format!("hadamard axis {axis}"), 2 * self.dense_bytes(), &|| {
            let values = values.clone();
            drop(hadamard(client, &device, values, view, Dtype::Bf16, transform, false));
        });
    }

    /// Measures dequantization and fake quantization.
    fn values_of_codes(&mut self, axis: usize, amax: &Handle) {
        let (client, device, values) = (self.client, self.device, self.values.clone());
        for (name, scheme) in [("nvfp4", Fp4Scheme::nvfp4()), ("mxfp4", Fp4Scheme::mxfp4())] {
            let problem = self.problem(axis, scheme);
            let dequantized = format!("dequantize {name} axis {axis}");
            if self.wanted(&dequantized) {
                let packed = quantize(client, &device, values.clone(), amax.clone(), &problem);
                let packed = packed.expect("a plan");
                self.row(&dequantized, self.bytes(&problem), &|| {
                    drop(dequantize(client, &device, packed.clone(), &problem));
                });
            }
            self.row(&format!("fake {name} axis {axis}"), 2 * self.dense_bytes(), &|| {
                let (values, amax) = (values.clone(), amax.clone());
                drop(fake_quantize(client, &device, values, amax, &problem, DequantTarget::Full));
            });
        }
    }
}

/// Copies a buffer, 16 bytes per thread.
fn copied(client: &Client, source: Handle, vectors: usize) -> Handle {
    let target = client.empty(vectors * 16);
    // SAFETY: both buffers hold `vectors` times four words.
    unsafe {
        copy_kernel::launch_unchecked(
            client,
            CubeCount::Static(vectors.div_ceil(256) as u32, 1, 1),
            CubeDim::new_1d(256),
            4,
            BufferArg::from_raw_parts(source, vectors),
            BufferArg::from_raw_parts(target.clone(), vectors),
            vectors as u32,
        );
    }
    target
}

#[cube(launch_unchecked)]
fn copy_kernel<N: Size>(source: &[Vector<u32, N>], target: &mut [Vector<u32, N>], count: u32) {
    if (ABSOLUTE_POS as u32) < count {
        target[ABSOLUTE_POS] = source[ABSOLUTE_POS];
    }
}
