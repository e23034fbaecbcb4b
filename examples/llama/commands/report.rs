//! `llama report`: reports how good a finished model is, on one page.

use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{Calibration, CalibrationOptions, Fp4Linear};
use burn_fp4_cli::report::{Output, Report, Text};
use llama::{Fidelity, Folder, Llama, Tokens, Windows, batch_of, fidelity};

use super::{BOOK, DeviceOptions, HELD_OUT};

/// Report how good a finished model is, on one page: perplexity and divergence on texts against the
/// original, errors of weights and outputs by layer, bits, saturation, and readers.
///
/// The model may be in any dialect. It needs no config.json and no tokenizer: the reference's are
/// used. `fp4 report` prints the page without a forward pass.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Finished model: a Hugging Face folder, or a safetensors or GGUF file with its names.
    model: PathBuf,
    /// Hugging Face folder of the original model.
    #[arg(long, value_name = "DENSE")]
    reference: PathBuf,
    /// Text file to predict; may be repeated. Defaults to the end of Genesis.
    #[arg(long = "text", value_name = "FILE")]
    texts: Vec<PathBuf>,
    /// Share of each text to predict, at its end: what `llama quantize` held out. Defaults to all
    /// of a --text, and to a tenth of Genesis.
    #[arg(long, value_name = "SHARE")]
    held_out: Option<f64>,
    /// Windows of the texts on which the errors of outputs are measured, spread evenly.
    #[arg(long, default_value = "32")]
    output_windows: NonZeroUsize,
    #[command(flatten)]
    windows: Windows,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    output: Output,
}

/// Name of a text, and its tokens.
type Named = (String, Vec<u32>);

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    arguments.output.check()?;
    let device = arguments.device.device()?;
    let reference_folder = Folder::open(&arguments.reference)?;
    let folder = Folder::open_with_config_of(&arguments.model, &reference_folder)?;
    folder.check_vocabulary(&reference_folder)?;
    let texts = texts(arguments, &reference_folder)?;
    let windows = output_windows(arguments, &texts)?;
    let (reference, _) = reference_folder.load::<Linear>(&device)?;
    let (model, _) = folder.load::<Fp4Linear>(&device)?;
    let measured = texts.iter().map(|(name, tokens)| {
        let mut found = fidelity(&[&model], &reference, tokens, arguments.windows, &device)?;
        Ok(text(name.clone(), &found.remove(0)))
    });
    let measured = measured.collect::<Result<Vec<Text>>>()?;
    drop(model);
    let inputs = inputs(arguments, &windows, &reference, &device)?;
    let gram = |name: &str| {
        let path = name.strip_prefix("model.").unwrap_or(name);
        // A tied embedding multiplies as `lm_head` along its second axis.
        inputs.get(path, 0).or_else(|| inputs.get(path, 1))
    };
    let report = Report::new(folder.checkpoint(), reference_folder.checkpoint(), gram)?;
    Ok(arguments.output.write(&report.with_texts(measured))?)
}

/// Reads and tokenizes the texts.
fn texts(
    Arguments { texts: paths, held_out, .. }: &Arguments,
    folder: &Folder,
) -> Result<Vec<Named>> {
    let tokenizer = folder.tokenizer()?;
    if paths.is_empty() {
        let tokens = Tokens::new(&tokenizer, BOOK, held_out.unwrap_or(HELD_OUT))?;
        return Ok(vec![("end of Genesis".to_owned(), tokens.held_out().to_vec())]);
    }
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let tokens = Tokens::new(&tokenizer, &text, held_out.unwrap_or(1.0))?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok((name, tokens.held_out().to_vec()))
    };
    paths.iter().map(read).collect()
}

/// Chooses windows of the texts, spread evenly.
fn output_windows<'t>(arguments: &Arguments, texts: &'t [Named]) -> Result<Vec<&'t [u32]>> {
    let length = arguments.windows.window;
    ensure!(length > 1, "--window {length}: expected at least 2; pass a larger one");
    let all: Vec<&[u32]> =
        texts.iter().flat_map(|(_, tokens)| tokens.chunks_exact(length)).collect();
    ensure!(
        !all.is_empty(),
        "the texts: no window of {length} tokens; pass a longer --text or a smaller --window"
    );
    let wanted = arguments.output_windows.get().min(all.len());
    Ok((0..wanted).map(|at| all[at * all.len() / wanted]).collect())
}

/// Sums up the inputs of each layer of the reference over windows.
fn inputs(
    arguments: &Arguments,
    windows: &[&[u32]],
    reference: &Llama<Linear>,
    device: &Device,
) -> Result<Calibration> {
    let length = arguments.windows.window;
    let batch = |windows: &[&[u32]]| batch_of(&windows.concat(), length, device);
    let batches: Vec<_> = windows.chunks(arguments.windows.batch).map(batch).collect();
    let calibration = Calibration::of(reference).options(CalibrationOptions::default());
    Ok(calibration.run(batches, Llama::forward)?)
}

fn text(name: String, found: &Fidelity) -> Text {
    Text {
        name,
        tokens: found.perplexity.tokens,
        perplexity: found.perplexity.perplexity,
        reference_perplexity: found.reference.perplexity,
        difference: found.difference.nats,
        standard_error: found.difference.standard_error,
        divergence: found.divergence.mean,
        divergence_percentile_99: found.divergence.percentile_99,
        top1_agreement_percent: found.top1_agreement_percent,
    }
}
