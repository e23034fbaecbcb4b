//! Statistics in files, for calibrations that are interrupted.

use std::collections::HashMap;
use std::fs;
use std::hash::Hash;
use std::path::{Path, PathBuf};

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_fp4_ops::{Gram, GramLayout, OpsError};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::error::Fp4Error;
use crate::walk::parameters::{ModulePath, VisitParameters, visit_parameters};

/// A directory with one file for each input of layers, of one calibration.
pub(crate) struct Cache {
    directory: PathBuf,
    digest: String,
}

/// Shape of the statistics that a file must hold for one input of layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GramShape {
    pub(crate) slices: usize,
    pub(crate) channels: usize,
    /// Channels of the blocks along the diagonal; all of them if the matrices are whole.
    pub(crate) block_size: usize,
    /// Rows of each slice.
    pub(crate) rows: usize,
    /// True if their [drift](Gram::drift) is known.
    pub(crate) drifts: bool,
}

/// Version of what follows, and of what digests are made of.
const FORMAT: u32 = 3;

/// Tensors of a file: the tiles of [`Gram::layout`], `[slices, tiles, side, side]`,
const TILES: &str = "tiles";
/// by slice how many activations they are the sums of,
const ROWS: &str = "rows";
/// how many of these are not all zero,
const TOKENS: &str = "tokens";
/// and the largest magnitude;
const AMAX: &str = "amax";
/// and the drift, if it is known, `[slices, channels, channels]`.
const DRIFT: &str = "drift";

/// Name of what tells whether these are as they were written.
const CHECKSUM: &str = "checksum";

/// The header has no more bytes; it is checked before it is parsed.
const HEADER: usize = 4096;

impl GramShape {
    fn layout(&self) -> GramLayout {
        GramLayout::compact(self.channels, self.block_size)
    }

    /// `f64`s of one slice.
    fn tiles_len(&self) -> usize {
        let layout = self.layout();
        layout.count().saturating_mul(layout.tile_len())
    }

    /// Names, dtypes and shapes of the tensors.
    fn parts(&self) -> Vec<(&'static str, Dtype, Vec<usize>)> {
        let (slices, layout, channels) = (self.slices, self.layout(), self.channels);
        let drift = self.drifts.then(|| (DRIFT, Dtype::F32, vec![slices, channels, channels]));
        let squares = [
            (TILES, Dtype::F64, vec![slices, layout.count(), layout.side(), layout.side()]),
            (ROWS, Dtype::U64, vec![slices]),
            (TOKENS, Dtype::U64, vec![slices]),
            (AMAX, Dtype::F64, vec![slices]),
        ];
        squares.into_iter().chain(drift).collect()
    }

    /// `f32`s of the drift of one slice.
    fn drift_len(&self) -> usize {
        if self.drifts { self.channels.saturating_mul(self.channels) } else { 0 }
    }

    /// Their bytes.
    fn bytes(&self) -> usize {
        let squares = self.tiles_len().saturating_add(3).saturating_mul(8);
        squares.saturating_add(self.drift_len().saturating_mul(4)).saturating_mul(self.slices)
    }
}

impl Cache {
    /// A digest to which everything is to be added that the statistics depend on, for
    /// [`open`](Self::open).
    pub(crate) fn digest() -> Xxh3 {
        let mut hasher = Xxh3::new();
        FORMAT.hash(&mut hasher);
        hasher
    }

    /// A [digest](Self::digest) of the float parameters of a module, which are read one after the
    /// other.
    ///
    /// # Errors
    /// [`Fp4Error::Device`].
    pub(crate) fn digest_of<M: Module>(module: &M) -> Result<Xxh3, Fp4Error> {
        let mut parameters = DigestParameters { hasher: Self::digest(), error: None };
        visit_parameters(module, &mut parameters);
        match parameters.error {
            Some(error) => Err(error),
            None => Ok(parameters.hasher),
        }
    }

    /// Opens the part of a directory that belongs to a calibration.
    pub(crate) fn open(directory: &Path, digest: &Xxh3) -> Result<Self, Fp4Error> {
        let digest = format!("{:032x}", digest.digest128());
        let directory = directory.join(&digest);
        fs::create_dir_all(&directory).map_err(|error| failed(&directory, error))?;
        Ok(Self { directory, digest })
    }

    /// Statistics by slice that were stored under a number, if any were.
    ///
    /// # Errors
    /// [`Fp4Error::Cache`] for a file that is not whole, or that holds anything else.
    pub(crate) fn load(
        &self,
        number: usize,
        contents: &GramShape,
    ) -> Result<Option<Vec<Gram>>, Fp4Error> {
        let path = self.path(number);
        let length = match fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&path, error)),
        };
        let most = contents.bytes().saturating_add(8 + HEADER) as u64;
        if length > most {
            return Err(failed(&path, format!("expected at most {most} bytes, found {length}")));
        }
        let bytes = fs::read(&path).map_err(|error| failed(&path, error))?;
        self.parse(number, contents, bytes).map(Some).map_err(|problem| failed(&path, problem))
    }

    fn parse(
        &self,
        number: usize,
        contents: &GramShape,
        bytes: Vec<u8>,
    ) -> Result<Vec<Gram>, String> {
        let length = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
        if length.is_some_and(|length| length > HEADER as u64) {
            return Err(format!("a header of more than {HEADER} bytes"));
        }
        let (header, metadata) =
            SafeTensors::read_metadata(&bytes).map_err(|error| error.to_string())?;
        let data = &bytes[8 + header..];
        let check = |(name, expected): (&str, String)| {
            let found = metadata.metadata().as_ref().and_then(|metadata| metadata.get(name));
            if found == Some(&expected) {
                return Ok(());
            }
            let found = found.map_or("none", String::as_str);
            Err(format!("{name}: expected {expected}, found {found}"))
        };
        self.origin(number).into_iter().try_for_each(check)?;
        let parts = contents.parts().into_iter().map(|(name, dtype, shape)| {
            let info = metadata.info(name).ok_or_else(|| format!("no tensor `{name}`"))?;
            if (info.dtype, &info.shape) != (dtype, &shape) {
                let (found, of) = (info.dtype, &info.shape);
                return Err(format!(
                    "`{name}`: expected {dtype:?} {shape:?}, found {found:?} {of:?}"
                ));
            }
            // As long as dtype and shape say: that was checked with the header.
            Ok(&data[info.data_offsets.0..info.data_offsets.1])
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        check((CHECKSUM, checksum(parts.iter().copied())))?;
        let [tiles, rows, tokens, amaxes, ref drift @ ..] = parts[..] else {
            unreachable!("at least four of them")
        };
        let mut tiles = words(tiles).map(f64::from_le_bytes);
        let mut drift = drift.iter().copied().flat_map(words).map(f32::from_le_bytes);
        let count = |word| u64::from_le_bytes(word) as usize;
        let counts = words(rows).map(count).zip(words(tokens).map(count));
        let amaxes = words(amaxes).map(f64::from_le_bytes);
        let mut grams = Vec::with_capacity(contents.slices);
        for ((rows, tokens), amax) in counts.zip(amaxes) {
            if rows != contents.rows {
                return Err(format!("`{ROWS}`: expected {}, found {rows}", contents.rows));
            }
            let amax = amax as f32;
            if !(amax >= 0.0 && amax.is_finite()) {
                return Err(format!("`{AMAX}`: expected a magnitude, found {amax}"));
            }
            let mut values = Vec::with_capacity(contents.tiles_len());
            values.extend(tiles.by_ref().take(contents.tiles_len()));
            let GramShape { channels, block_size, .. } = *contents;
            let gram = Gram::from_own_tiles(values, channels, block_size, rows, amax)
                .and_then(|gram| gram.with_tokens(tokens));
            let gram = gram.and_then(|gram| match contents.drifts {
                true => gram.with_drift(drift.by_ref().take(contents.drift_len()).collect()),
                false => Ok(gram),
            });
            grams.push(gram.map_err(|error| error.to_string())?);
        }
        Ok(grams)
    }

    /// Stores statistics by slice, whole or not at all.
    pub(crate) fn store(
        &self,
        number: usize,
        contents: &GramShape,
        grams: &[Gram],
    ) -> Result<(), Fp4Error> {
        let path = self.path(number);
        let counts = |count: fn(&Gram) -> usize| -> Vec<u8> {
            grams.iter().flat_map(|gram| (count(gram) as u64).to_le_bytes()).collect()
        };
        let tiles = grams.iter().flat_map(Gram::values).flat_map(|value| value.to_le_bytes());
        let amaxes = grams.iter().flat_map(|gram| f64::from(gram.amax()).to_le_bytes());
        let mut parts: Vec<Vec<u8>> =
            vec![tiles.collect(), counts(Gram::rows), counts(Gram::tokens), amaxes.collect()];
        if contents.drifts {
            let drift = grams.iter().filter_map(Gram::drift).flatten();
            parts.push(drift.flat_map(|value| value.to_le_bytes()).collect());
        }
        let checksum = checksum(parts.iter().map(Vec::as_slice));
        let metadata = self.origin(number).into_iter().chain([(CHECKSUM, checksum)]);
        let metadata: HashMap<String, String> =
            metadata.map(|(name, value)| (name.to_owned(), value)).collect();
        let tensors =
            contents.parts().into_iter().zip(&parts).map(|((name, dtype, shape), part)| {
                (name, TensorView::new(dtype, shape, part).expect("whole tensors"))
            });
        let bytes = serialize(tensors, Some(metadata)).map_err(|error| failed(&path, error))?;
        drop(parts);
        let unfinished = path.with_extension("part");
        fs::write(&unfinished, bytes).map_err(|error| failed(&unfinished, error))?;
        fs::rename(&unfinished, &path).map_err(|error| failed(&path, error))
    }

    /// Which statistics of which calibration a file holds.
    fn origin(&self, number: usize) -> [(&'static str, String); 3] {
        [
            ("format", FORMAT.to_string()),
            ("digest", self.digest.clone()),
            ("input", number.to_string()),
        ]
    }

    fn path(&self, number: usize) -> PathBuf {
        self.directory.join(format!("{number:05}.safetensors"))
    }
}

/// Takes down the values of float parameters, one read after the other.
struct DigestParameters {
    hasher: Xxh3,
    error: Option<Fp4Error>,
}

impl VisitParameters for DigestParameters {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        let path = path.join();
        match param.val().without_autodiff().try_into_data() {
            Ok(data) => {
                (&path, data.dtype(), data.shape().as_slice()).hash(&mut self.hasher);
                self.hasher.update(data.as_bytes());
            }
            Err(error) => {
                self.error = Some(Fp4Error::at(path, OpsError::Device(format!("{error:?}"))));
            }
        }
    }
}

/// Words of N bytes.
fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.chunks_exact(N).map(|word| word.try_into().expect("N bytes"))
}

/// Returns the checksum of the tensors of a file, one after the other.
fn checksum<'a>(parts: impl Iterator<Item = &'a [u8]>) -> String {
    let mut hasher = Xxh3::new();
    parts.for_each(|part| hasher.update(part));
    format!("{:032x}", hasher.digest128())
}

fn failed(path: &Path, error: impl std::fmt::Display) -> Fp4Error {
    Fp4Error::Cache { path: path.to_owned(), problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Statistics of two slices, with their drift, and the cache that they are stored in.
    fn stored(name: &str) -> (Cache, GramShape, Vec<Gram>, PathBuf) {
        let directory =
            std::env::temp_dir().join(format!("burn-fp4-{name}-{}", std::process::id()));
        let cache = Cache::open(&directory, &Cache::digest()).unwrap();
        let x = [[1.0, 2.0, 3.0, 0.0, 0.0, 0.0], [-1.0, 0.5, 0.0, 2.0, 2.0, 8.0]];
        let drift = |at: usize| (0..9).map(|value| (value * 2 + at) as f32 - 7.5).collect();
        let gram = |at: usize| Gram::of(&x[at], 3).unwrap().with_drift(drift(at)).unwrap();
        let grams = vec![gram(0), gram(1)];
        let contents = GramShape { slices: 2, channels: 3, block_size: 3, rows: 2, drifts: true };
        cache.store(7, &contents, &grams).unwrap();
        (cache, contents, grams, directory)
    }

    #[test]
    fn a_file_that_was_changed_is_an_error() {
        let (cache, contents, grams, directory) = stored("changed");
        assert_eq!(cache.load(7, &contents).unwrap().as_ref(), Some(&grams));
        assert_eq!(cache.load(8, &contents).unwrap(), None);
        let path = cache.path(7);
        let bytes = fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            for changed in [bytes[at] ^ 1, bytes[at] ^ 0x80, 0xFF] {
                let mut file = bytes.clone();
                file[at] = changed;
                fs::write(&path, file).unwrap();
                match cache.load(7, &contents) {
                    // White space of the header, or a byte that is what it was.
                    Ok(found) => assert_eq!(found.as_ref(), Some(&grams), "byte {at}"),
                    Err(error) => assert!(matches!(error, Fp4Error::Cache { .. }), "{error}"),
                }
            }
            fs::write(&path, &bytes[..at]).unwrap();
            assert!(matches!(cache.load(7, &contents), Err(Fp4Error::Cache { .. })), "{at}");
        }
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_file_of_something_else_is_an_error() {
        let (cache, contents, _, directory) = stored("foreign");
        let problem = |cache: &Cache, number, contents| match cache.load(number, &contents) {
            Err(Fp4Error::Cache { problem, .. }) => problem,
            other => panic!("{other:?}"),
        };
        for (contents, said) in [
            (GramShape { rows: 3, ..contents }, "`rows`: expected 3, found 2"),
            (GramShape { channels: 4, block_size: 4, ..contents }, "`tiles`: expected F64"),
            (GramShape { slices: 1, ..contents }, "`tiles`: expected F64"),
            (GramShape { block_size: 1, drifts: false, ..contents }, "`tiles`: expected F64"),
            (GramShape { drifts: false, ..contents }, "checksum: expected"),
        ] {
            let found = problem(&cache, 7, contents);
            assert!(found.contains(said), "{found}");
        }
        fs::copy(cache.path(7), cache.path(1)).unwrap();
        assert_eq!(problem(&cache, 1, contents), "input: expected 1, found 7");
        let mut other = Cache::digest();
        other.update(b"other");
        let other = Cache::open(&directory, &other).unwrap();
        fs::copy(cache.path(7), other.path(7)).unwrap();
        assert!(problem(&other, 7, contents).starts_with("digest: expected"));
        fs::write(cache.path(7), vec![0; 10_000]).unwrap();
        assert!(problem(&cache, 7, contents).starts_with("expected at most"));
        fs::remove_dir_all(directory).unwrap();
    }
}
