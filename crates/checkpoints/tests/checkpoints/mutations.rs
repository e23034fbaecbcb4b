//! Mutated files, for every reader: no panic, an error that names the tensor if it is about one,
//! and no more memory than the files, which are small, and 16 MB.
//!
//! `BURN_FP4_MUTATIONS` is how many mutations each test tries, 300 if it is not set.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn_fp4_checkpoints::{CheckpointError, Container};

use super::drive::{Done, exercise};
use super::mutate::{self, Sheet};
use super::random::Random;
use super::samples::{GGUF, READERS, Sample, samples};

fn mutations() -> usize {
    let count = std::env::var("BURN_FP4_MUTATIONS");
    count.map_or(300, |count| count.parse().expect("BURN_FP4_MUTATIONS is a number"))
}

/// An empty folder, in memory where there is such a thing: every file that is written is flushed.
fn folder(reader: &str) -> PathBuf {
    let memory = Path::new("/dev/shm");
    let root = if memory.is_dir() { memory } else { Path::new(env!("CARGO_TARGET_TMPDIR")) };
    let path = root.join(format!("burn-fp4-mutations-{}", std::process::id())).join(reader);
    fs::create_dir_all(&path).expect("a folder");
    path
}

/// A sample in its folder, of which one file after another is mutated.
struct Mutants<'s> {
    sample: &'s Sample,
    /// What can be changed in its files of tensors.
    sheets: BTreeMap<&'s str, Sheet>,
    folder: PathBuf,
}

impl<'s> Mutants<'s> {
    fn new(sample: &'s Sample, folder: PathBuf) -> Self {
        fs::create_dir_all(folder.join("out")).expect("a folder");
        fs::create_dir_all(folder.join("in")).expect("a folder");
        let mut sheets = BTreeMap::new();
        for (name, bytes) in &sample.files {
            let path = folder.join("in").join(name);
            fs::write(&path, bytes).expect("written");
            if !name.ends_with(".json") {
                sheets.insert(name.as_str(), Sheet::of(&Container::open(&path).expect(name)));
            }
        }
        Self { sample, sheets, folder }
    }

    fn path(&self) -> PathBuf {
        let folder = self.folder.join("in");
        if self.sample.files.contains_key(GGUF) { folder.join(GGUF) } else { folder }
    }

    fn exercise(&self, turn: usize) -> Result<Done, CheckpointError> {
        exercise(&self.path(), self.sample.dialect, &self.folder.join("out"), turn)
    }

    /// One mutation, and what came of it.
    fn round(&self, random: &mut Random) -> Result<Done, CheckpointError> {
        let files: Vec<&String> = self.sample.files.keys().collect();
        let name = *random.choose(&files);
        let place = self.folder.join("in").join(name);
        let mut bytes = self.sample.files[name].clone();
        let mut tensors: Option<Sheet> = None;
        match self.sheets.get(name.as_str()) {
            Some(sheet) if !random.one_in(4) => {
                let mut sheet = sheet.clone();
                sheet.mutate(random);
                bytes = sheet.file();
                tensors = Some(sheet);
            }
            None if !random.one_in(4) => bytes = mutate::json(&bytes, random),
            Some(_) | None => mutate::bytes(&mut bytes, random),
        }
        fs::write(&place, &bytes).expect("written");
        let result = self.exercise(random.below(10));
        if let (Err(error), Some(sheet)) = (&result, &tensors) {
            assert_names_a_tensor(error, sheet);
        }
        fs::write(&place, &self.sample.files[name]).expect("written");
        result
    }
}

/// A header that is whole, and says something wrong of a tensor.
fn assert_names_a_tensor(error: &CheckpointError, sheet: &Sheet) {
    let text = error.to_string();
    let module = |name: &str| match name.rsplit_once('.') {
        Some((module, _)) => text.contains(module),
        None => text.contains(name),
    };
    let named = matches!(error, CheckpointError::Tensor { .. }) || sheet.names().any(module);
    // What is said of the whole: the dialect, the algorithm, that data is left over.
    let of_the_whole = matches!(
        error,
        CheckpointError::Refused { .. }
            | CheckpointError::Header { .. }
            | CheckpointError::Ambiguous { .. }
    );
    assert!(named || of_the_whole, "no tensor is named: {text}");
}

/// The kind of an error.
fn kind(error: &CheckpointError) -> String {
    let text = format!("{error:?}");
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

fn check(reader: &str) {
    let root = folder(reader);
    fs::create_dir(root.join("samples")).expect("a folder");
    let samples = samples(reader, &root.join("samples"));
    let start = Instant::now();
    let mut errors: BTreeMap<String, usize> = BTreeMap::new();
    let mut sum = Done::default();
    let mut opened = 0;
    let all: Vec<Mutants<'_>> = samples
        .iter()
        .enumerate()
        .map(|(at, sample)| Mutants::new(sample, root.join(at.to_string())))
        .collect();
    for mutants in &all {
        let result = mutants.exercise(0);
        assert!(result.is_ok(), "{reader}: {:?}", result.err());
    }
    for round in 0..mutations() {
        let mutants = &all[round % all.len()];
        let random = &mut Random(round as u64);
        let result = catch_unwind(AssertUnwindSafe(|| mutants.round(random)));
        let result = result.unwrap_or_else(|_| {
            panic!("{reader}, round {round}: see above; the files are in {:?}", mutants.folder)
        });
        match result {
            Ok(done) => {
                opened += 1;
                sum.written += done.written;
                sum.refused += done.refused;
            }
            Err(error) => *errors.entry(kind(&error)).or_default() += 1,
        }
    }
    let (rounds, seconds) = (mutations(), start.elapsed().as_secs_f64());
    println!(
        "| {reader} | {rounds} | {opened} | {} | {} | {} | {seconds:.0} s | {errors:?} |",
        rounds - opened,
        sum.written,
        sum.refused,
    );
    fs::remove_dir_all(&root).expect("removed");
    // The last one takes the folder of all.
    let _ = fs::remove_dir(root.parent().expect("a folder of all"));
}

macro_rules! readers {
    ($($test:ident $reader:literal),*) => {
        $(
            #[test]
            fn $test() {
                check($reader);
            }
        )*

        #[test]
        fn every_reader_has_its_mutations() {
            assert_eq!(READERS, [$($reader),*]);
            let mut names: Vec<&str> = super::DIALECTS.iter().map(|d| d.name()).collect();
            names.push("index");
            assert!(names.iter().all(|name| READERS.contains(name)));
        }
    };
}

readers! {
    plain "plain",
    modelopt "modelopt",
    miles "miles",
    compressed_tensors "compressed-tensors",
    gpt_oss "gpt-oss",
    gguf "gguf",
    mlx "mlx",
    deepseek "deepseek",
    quark "quark",
    torchao "torchao",
    comfyui "comfyui",
    fp_quant "fp-quant",
    index "index"
}

/// Where the targets of `fuzz/` begin: one file each, behind what chooses its dialect.
#[test]
#[ignore = "writes to the folder BURN_FP4_CORPUS; see fuzz/README.md"]
fn seeds() {
    let corpus = std::env::var_os("BURN_FP4_CORPUS").expect("the folder of the seeds");
    let corpus = Path::new(&corpus);
    for target in ["safetensors", "gguf", "folder"] {
        fs::create_dir_all(corpus.join(target)).expect("a folder");
    }
    for (reader, name) in READERS.iter().enumerate() {
        let root = folder(name);
        for (at, sample) in samples(name, &root).into_iter().enumerate() {
            let seed = format!("{name}-{at}");
            if let Some(bytes) = sample.files.get(GGUF) {
                fs::write(corpus.join("gguf").join(seed), [&[0], &bytes[..]].concat())
                    .expect("written");
                continue;
            }
            let file = |name: &str| sample.files.get(name).map_or(&[][..], Vec::as_slice);
            let (config, index) = (file("config.json"), file("model.safetensors.index.json"));
            let shard = sample.files.iter().find(|(name, _)| name.ends_with(".safetensors"));
            let (_, shard) = shard.expect("tensors");
            let dialect = super::DIALECTS.iter().position(|dialect| dialect.name() == *name);
            let choice = [dialect.unwrap_or(15) as u8 + 16 * (reader % 10) as u8];
            fs::write(corpus.join("safetensors").join(&seed), [&choice[..], shard].concat())
                .expect("written");
            let lengths = [config, index].map(|text| (text.len() as u16).to_le_bytes());
            let detected = [0x0F | choice[0]];
            let whole = [&detected[..], &lengths.concat(), config, index, shard].concat();
            fs::write(corpus.join("folder").join(&seed), whole).expect("written");
        }
        fs::remove_dir_all(&root).expect("removed");
        let _ = fs::remove_dir(root.parent().expect("a folder of all"));
    }
}
