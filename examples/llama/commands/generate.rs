//! `llama generate`: generates text from a prompt.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use burn_fp4::Fp4Linear;
use examples::OnDevice;
use llama::{Bandwidth, Folder, Generated, Projection, Sampling, generate};
use serde::Serialize;

use super::{CacheOptions, CacheReport, DeviceOptions, ProductFormats, ProductOptions, print};

/// Generate text from a prompt.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Hugging Face folder: dense, FP8, or FP4 in any dialect.
    folder: PathBuf,
    /// Prompt to continue.
    #[arg(long, default_value = "In the beginning ")]
    prompt: String,
    /// Maximum number of tokens to generate.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    products: ProductOptions,
    #[command(flatten)]
    cache: CacheOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Generated texts, and the time they took.
#[derive(Serialize)]
struct Report {
    texts: Vec<String>,
    #[serde(flatten)]
    products: ProductFormats,
    #[serde(flatten)]
    cache: CacheReport,
    #[serde(flatten)]
    generated: Generated,
    prompt_tokens_per_second: f64,
    /// On a device with graphs, if decode steps were timed.
    bandwidth: Option<Bandwidth>,
    /// Time to open the folder and load the weights.
    load_seconds: f64,
    /// Peak memory of the host over the whole run.
    peak_memory_mb: f64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    // On CPU backends Burn's `Linear` would dequantize its whole weight for each token, and it has
    // no choice of activations.
    let report = match arguments.device.device {
        _ if arguments.products.in_fp8() => report::<Fp4Linear>(arguments),
        OnDevice::Flex => report::<Fp4Linear>(arguments),
        #[cfg(feature = "ndarray")]
        OnDevice::Ndarray => report::<Fp4Linear>(arguments),
        #[cfg(any(feature = "cuda", feature = "cpu", feature = "wgpu"))]
        _ => report::<burn::nn::Linear>(arguments),
    }?;
    print(&report, arguments.json, || lines(&arguments.prompt, &report))
}

fn lines(prompt: &str, report: &Report) -> String {
    let generated = &report.generated;
    let texts = report.texts.iter().map(|text| format!("{prompt}{text}\n\n"));
    let (tokens, rate) = (generated.prompt_tokens, report.prompt_tokens_per_second);
    let count = generated.sequences.iter().map(Vec::len).sum::<usize>();
    let decode_rate = generated.tokens_per_second;
    let decode_rate = decode_rate.map_or(String::new(), |rate| format!(", {rate:.1} tokens/s"));
    let graph = if generated.replayed { ", as a captured graph" } else { "" };
    let bytes = report.cache.kv_bytes_per_token;
    let (load, peak) = (report.load_seconds, report.peak_memory_mb);
    let bandwidth = report.bandwidth.as_ref().map_or(String::new(), |bandwidth| {
        let Bandwidth { gb_per_step, gb_per_second, copy_gb_per_second, share_of_copy } = bandwidth;
        format!(
            "memory: {gb_per_step:.2} GB a step at {gb_per_second:.0} GB/s, {:.0} % of a copy's \
             {copy_gb_per_second:.0} GB/s\n",
            100.0 * share_of_copy,
        )
    });
    format!(
        "{}prompt: {tokens} tokens, {rate:.1} tokens/s\n\
         decode: {count} tokens{decode_rate}{graph}\n\
         {}\n\
         KV cache: {bytes} bytes a token of a sequence\n\
         {bandwidth}\
         load: {load:.1} s, peak memory {peak:.0} MB",
        texts.collect::<String>(),
        report.products.line(),
    )
}

fn report<L: Projection>(arguments: &Arguments) -> Result<Report> {
    let start = std::time::Instant::now();
    let device = arguments.device.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (mut model, products) =
        arguments.products.load::<L>(&folder, &device, Some(arguments.sampling.sequences))?;
    arguments.cache.check(arguments.device.device)?;
    let cache = arguments.cache.set(&mut model)?;
    let load_seconds = start.elapsed().as_secs_f64();
    let tokenizer = folder.tokenizer()?;
    let prompt = tokenizer.encode(arguments.prompt.as_str(), true);
    let prompt = prompt.map_err(|error| anyhow!(error))?;
    let (count, sampling) = (arguments.tokens, arguments.sampling);
    let generated = generate(&model, &folder.config, prompt.get_ids(), count, sampling, &device)?;
    let text = |tokens: &Vec<u32>| tokenizer.decode(tokens, true).map_err(|error| anyhow!(error));
    // Hosts share their bandwidth with whatever else runs.
    let bandwidth = match generated.replayed {
        true => Bandwidth::of(&model, &generated, &device),
        false => Ok(None),
    };
    // The text is worth more than its speed.
    let bandwidth = bandwidth.unwrap_or_else(|error| {
        eprintln!("warning: the bandwidth of memory was not measured: {error:#}");
        None
    });
    Ok(Report {
        bandwidth,
        texts: generated.sequences.iter().map(text).collect::<Result<_>>()?,
        products,
        cache,
        prompt_tokens_per_second: generated.prompt_tokens as f64 / generated.prompt_seconds,
        generated,
        load_seconds,
        peak_memory_mb: crate::peak_memory_mb(),
    })
}
