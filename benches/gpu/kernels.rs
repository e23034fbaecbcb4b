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
use burn_fp4_search::host::{Restore, View};
use burn_fp4_search::{BlockHessians, Blocks, Draw, Fp4Scheme, Hadamard, Rounding, ScaleSearch};

use crate::check::upload;
use crate::figures::Figures;
use crate::{Arguments, median_seconds};

/// Every operation on bf16, along either axis, at three sizes.
pub(crate) fn measure(client: &Client, arguments: &Arguments, figures: &mut Figures) {
    let device = Capability::of(client);
    let time = |launch: &dyn Fn()| median_seconds(client, arguments, launch);
    for shape in [[1024, 1024], [4096, 11008], [8192, 8192]] {
        let count = shape[0] * shape[1];
        let dense: Vec<_> = weights(count).into_iter().map(bf16::from_f32).collect();
        let values = client.create_from_slice(bf16::as_bytes(&dense));
        let dense_bytes = 2 * count;
        let copy = time(&|| drop(copied(client, values.clone(), dense_bytes / 16)));
        let full = |name: &str| format!("{name}, {} x {}", shape[0], shape[1]);
        let wanted =
            |name: &str| arguments.filter.as_ref().is_none_or(|part| full(name).contains(part));
        let mut row = |name: &str, bytes, launch: &dyn Fn()| {
            if wanted(name) {
                figures.push(Row::new(&full(name), count, bytes, time(launch), copy));
            }
        };
        row("copy", 2 * dense_bytes, &|| drop(copied(client, values.clone(), dense_bytes / 16)));
        for axis in [1, 0] {
            let view = View::along(&shape, axis);
            let along = |scheme| Problem { view, dtype: Dtype::Bf16, scheme };
            let name = |name: &str| format!("{name} axis {axis}");
            let measured = |problem: &Problem| {
                amax(client, &device, values.clone(), problem.view, Dtype::Bf16, false)
            };
            let nvfp4 = along(Fp4Scheme::nvfp4());
            let mxfp4 = along(Fp4Scheme::mxfp4());
            let tiles = along(Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16));
            let search =
                ScaleSearch::FourOverSix { range: Default::default(), error: Default::default() };
            let searched = along(Fp4Scheme::nvfp4().with_search(search));
            let sse = |problem: &Problem| along(problem.scheme.with_search(ScaleSearch::Sse));
            let (nvfp4_sse, mxfp4_sse, tiles_sse) = (sse(&nvfp4), sse(&mxfp4), sse(&tiles));
            let drawn =
                along(Fp4Scheme::nvfp4().with_rounding(Rounding::Stochastic(Draw::default())));
            let largest = measured(&nvfp4).expect("a plan");
            let packed = |problem: &Problem| {
                quantize(client, &device, values.clone(), largest.clone(), problem).expect("a plan")
            };
            let bytes =
                |problem: &Problem| dense_bytes + problem.code_bytes() + problem.scale_bytes();

            row(&name("amax"), dense_bytes, &|| drop(measured(&nvfp4)));
            row(&name("amax + nvfp4"), dense_bytes + bytes(&nvfp4), &|| {
                let largest = measured(&nvfp4).expect("a plan");
                drop(quantize(client, &device, values.clone(), largest, &nvfp4));
            });
            for (scheme, problem) in [
                ("nvfp4", &nvfp4),
                ("mxfp4", &mxfp4),
                ("nvfp4 tiles", &tiles),
                ("nvfp4 four over six", &searched),
                ("nvfp4 sse", &nvfp4_sse),
                ("mxfp4 sse", &mxfp4_sse),
                ("nvfp4 tiles sse", &tiles_sse),
                ("nvfp4 drawn", &drawn),
            ] {
                row(&name(scheme), bytes(problem), &|| drop(packed(problem)));
            }
            for problem in [&nvfp4, &mxfp4] {
                let x: Vec<_> = weights(256 * view.axis).iter().map(|x| x * 50.0).collect();
                let blocks = BlockHessians::of(&x, view.axis, problem.scheme.block_size);
                let hessians = upload(client, &blocks.expect("finite"));
                for search in [ScaleSearch::Hessian, ScaleSearch::CoordinateDescent] {
                    let problem = along(problem.scheme.with_search(search));
                    let label = format!("{} {search:?}", problem.scheme.format());
                    row(&name(&label), bytes(&problem), &|| {
                        let (values, largest) = (values.clone(), largest.clone());
                        let hessians = hessians.clone();
                        drop(quantize_by_hessian(
                            client, &device, values, largest, hessians, &problem,
                        ));
                    });
                }
            }
            row(&name("hadamard"), 2 * dense_bytes, &|| {
                let (values, transform) = (values.clone(), Hadamard::default());
                drop(hadamard(client, &device, values, view, Dtype::Bf16, transform, false));
            });
            for (scheme, problem) in [("nvfp4", &nvfp4), ("mxfp4", &mxfp4)] {
                let dequantized = name(&format!("dequantize {scheme}"));
                if wanted(&dequantized) {
                    let packed = packed(problem);
                    row(&dequantized, bytes(problem), &|| {
                        drop(dequantize(client, &device, packed.clone(), problem));
                    });
                }
                row(&name(&format!("fake {scheme}")), 2 * dense_bytes, &|| {
                    let (values, amax) = (values.clone(), largest.clone());
                    drop(fake_quantize(client, &device, values, amax, problem, Restore::Values));
                });
            }
        }
    }
}

/// A copy, 16 bytes a unit.
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
