//! The CubeCL kernels on a GPU. Checks their bits against the reference quantizer, then measures
//! their speed relative to a device copy: `cargo bench -p benches --features cuda --bench gpu`.

mod attention;
#[cfg(feature = "cuda")]
mod calibrate;
mod check;
#[cfg(feature = "cuda")]
mod decoder;
mod figures;
#[cfg(feature = "cuda")]
mod forward;
mod kernels;
#[cfg(feature = "cuda")]
mod model;
mod products;
#[cfg(feature = "cuda")]
mod soak;
#[cfg(feature = "cuda")]
mod train;

use std::time::Instant;

use burn_fp4_cubecl::cubecl::client::{Client, Graph};
use burn_fp4_cubecl::cubecl::server::ServerError;
use burn_fp4_cubecl::cubecl::{Device, future};
use clap::Parser;
use figures::Figures;

/// Checks the CubeCL kernels against the reference quantizer, then measures them relative to a
/// device copy.
#[derive(Parser)]
struct Arguments {
    /// Measure only operations whose name contains this.
    filter: Option<String>,
    /// Random values to check every rule and dtype with, half of them along each axis; 0 skips the
    /// check.
    #[arg(long, default_value_t = 1 << 22)]
    check: usize,
    /// Launches per measurement.
    #[arg(long, default_value_t = 50)]
    launches: usize,
    /// Measurements; the median counts.
    #[arg(long, default_value_t = 9)]
    runs: usize,
    /// Measure matmuls with this kernel only; by default, with the planned one.
    #[arg(long, value_parser = ["planned", "gemv", "small-m", "mma", "wgmma", "fp8"])]
    products: Option<String>,
    #[cfg(feature = "cuda")]
    /// Weights of the model to quantize in place, in units of 2^20; 0 skips it.
    #[arg(long, default_value_t = 1024)]
    model: usize,
    #[cfg(feature = "cuda")]
    /// Also measure single layers and a stack, dense and quantized in place.
    #[arg(long)]
    forward: bool,
    #[cfg(feature = "cuda")]
    /// Also measure a decode step of an 8B model.
    #[arg(long)]
    decoder: bool,
    #[cfg(feature = "cuda")]
    /// Number of replays on eight threads to compare with forward passes.
    #[arg(long, default_value_t = 0)]
    soak: usize,
    #[cfg(feature = "cuda")]
    /// Also measure training steps.
    #[arg(long)]
    train: bool,
    #[cfg(feature = "cuda")]
    /// Number of decoder layers to calibrate and quantize.
    #[arg(long, default_value_t = 0)]
    calibrate: usize,
    #[cfg(feature = "cuda")]
    /// Number of GPUs for a second calibration run.
    #[arg(long, default_value_t = 1)]
    devices: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Option that `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() {
    let arguments = Arguments::parse();
    #[cfg(feature = "cuda")]
    burn_fp4::init().expect("before any operation");
    let client = Device::default().client();
    eprintln!("on {:?}", client.properties().identity);
    if arguments.check > 0 {
        check::every_rule(&client, arguments.check);
        check::by_hessian(&client, arguments.check);
        check::in_fp8(&client);
    }
    let mut figures = Figures::new(arguments.json);
    kernels::measure(&client, &arguments, &mut figures);
    products::measure(&client, &arguments, &mut figures);
    attention::measure(&client, &arguments, &mut figures);
    #[cfg(feature = "cuda")]
    if arguments.forward {
        forward::measure(&client, &arguments, &mut figures);
    }
    #[cfg(feature = "cuda")]
    if arguments.decoder {
        decoder::measure(&arguments, &mut figures);
    }
    #[cfg(feature = "cuda")]
    if arguments.soak > 0 {
        soak::soak(arguments.soak);
    }
    #[cfg(feature = "cuda")]
    if arguments.model > 0 {
        model::measure(&arguments, &mut figures);
    }
    #[cfg(feature = "cuda")]
    if arguments.train {
        train::measure(&arguments, &mut figures);
    }
    #[cfg(feature = "cuda")]
    if arguments.calibrate > 0 {
        calibrate::measure(arguments.calibrate, arguments.devices, &mut figures);
    }
    figures.finish();
}

/// Waits for all launches.
fn wait(client: &Client) {
    future::block_on(client.sync()).expect("the device answers");
}

/// Measures the median seconds of a launch, averaged over many. On a device with graphs, launches
/// are captured once and replayed: launch overhead of the host does not count.
fn median_seconds(client: &Client, arguments: &Arguments, launch: impl Fn()) -> f64 {
    let launch_all = || (0..arguments.launches).for_each(|_| launch());
    launch();
    let graph = recorded(client, launch_all);
    // The first run compiles.
    let mut times: Vec<f64> = (0..=arguments.runs)
        .map(|_| {
            wait(client);
            let start = Instant::now();
            match &graph {
                // SAFETY: the inputs live as long as `launch`, and CubeCL keeps the memory of the
                // outputs for the graph.
                Ok(graph) => unsafe { graph.replay() }.expect("what was recorded"),
                Err(_) => launch_all(),
            }
            wait(client);
            start.elapsed().as_secs_f64() / arguments.launches as f64
        })
        .skip(1)
        .collect();
    if let Err(error) = graph {
        eprintln!("the next row counts the host's time: {error}");
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Captures a graph of all launches.
fn recorded(client: &Client, launch_all: impl Fn()) -> Result<Graph, ServerError> {
    client.graph_prepare()?;
    // The capture takes the memory that they free.
    launch_all();
    wait(client);
    if let Err(error) = client.start_capture() {
        // A failed capture ends the preparation too.
        let _ = client.stop_capture();
        return Err(error);
    }
    launch_all();
    client.stop_capture()
}
