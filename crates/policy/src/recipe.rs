//! [`Recipe`]: the choices for the weights of a model, as a TOML file.
//!
//! This file turns the entries of a recipe into schemes; `decide.rs` matches names with them.

use core::fmt;
use core::ops::Range;
use std::fs;
use std::path::{Path, PathBuf};

use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Fp4Scheme, Hadamard, Method, ScaleRule};
use serde::{Deserialize, Serialize};

use crate::error::RecipeError;
use crate::preset::Preset;

/// Holds the choices for the weights of a model: the TOML file of `fp4 quantize --recipe`, which
/// Burn modules can use too. Keys are the names of the fields, with dashes.
///
/// Weights have their names in a checkpoint, `model.layers.0.mlp.up_proj.weight`, or the names of
/// their modules, without `.weight`. Lists of names hold [patterns](crate#patterns).
///
/// ```
/// use burn_fp4_policy::Recipe;
/// use burn_fp4_policy::search::{Method, formats::Fp4Format};
///
/// let recipe = Recipe::parse(
///     r#"
///     method = "amax"
///
///     [[weights]]
///     names = ["*.down_proj", "*.layers.0.*"]
///     format = "mxfp4"
///
///     [[weights]]
///     names = ["*.o_proj"]
///     format = "dense"
///     "#,
/// )?;
/// let schemes = recipe.schemes()?;
/// let down = schemes[0].expect("not dense");
/// assert_eq!((down.format(), down.method), (Fp4Format::MxFp4, Method::Amax));
/// assert_eq!(schemes[1], None);
/// assert_eq!(Recipe::parse(&recipe.to_toml()?)?, recipe);
/// # Ok::<(), burn_fp4_policy::RecipeError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Recipe {
    /// Format of weights for which [`weights`](Self::weights) does not set another; by default that
    /// of [`Fp4Scheme::default`].
    pub format: Option<Fp4Format>,
    /// Number of elements that share a block scale; by default the format's own.
    pub block_size: Option<usize>,
    /// The dialect to write, by its name in `burn-fp4-checkpoints`.
    pub dialect: Option<String>,
    /// Method that chooses scales and codes; by default that of [`Fp4Scheme::recommended`].
    pub method: Option<Method>,
    /// Rule for the arithmetic of scales; by default the first rule of the format, or that of
    /// [`Fp4Scheme::recommended`] if there is no method either.
    pub rule: Option<ScaleRule>,
    /// Number of neighbouring inputs that a Hadamard transform mixes before weights are quantized:
    /// one of [`Hadamard::SIZES`], or 0 for no transform, as by default. Layers with such weights
    /// transform their inputs.
    pub hadamard: Option<usize>,
    /// Choice of weights by their roles.
    pub preset: Option<Preset>,
    /// Weights that always stay dense.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub keep: Vec<String>,
    /// Weights to quantize, instead of the selection of a preset.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub only: Vec<String>,
    /// Number of layers at the start that stay dense.
    pub first_layers_high_precision: Option<usize>,
    /// Number of layers at the end that stay dense.
    pub last_layers_high_precision: Option<usize>,
    /// True if layers that inference engines fuse (query, key and value; gate and up) have one
    /// format and tensor scale, or stay dense, together. By default true if such engines read the
    /// dialect.
    pub together: Option<bool>,
    /// Path of a file with statistics of the inputs of layers, as written in the recipe.
    /// `fp4` looks for a relative path in the folder of the recipe.
    pub calibration: Option<PathBuf>,
    /// Choices for some of the weights that a preset or [`only`](Self::only) selects. If several
    /// entries match a weight, the last one wins.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<RecipeWeights>,
}

/// An entry of a [`Recipe`] for some weights. Open choices are those for all weights. Another
/// format brings its own block size and rule, and its own method if the recipe names none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RecipeWeights {
    /// Names of the weights, at least one.
    pub names: Vec<String>,
    /// Format of the weights, or dense.
    pub format: Option<RecipeFormat>,
    /// Number of elements that share a block scale.
    pub block_size: Option<usize>,
    /// Method that chooses scales and codes.
    pub method: Option<Method>,
    /// Rule for the arithmetic of scales.
    pub rule: Option<ScaleRule>,
    /// Size of the Hadamard transform, or 0 for no transform.
    pub hadamard: Option<usize>,
}

/// The format of weights in a recipe: `"dense"`, or the name of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum RecipeFormat {
    /// Weights stay dense.
    Dense,
    /// Weights are quantized.
    Fp4(Fp4Format),
}

/// The name of [`RecipeFormat::Dense`].
const DENSE: &str = "dense";

impl Recipe {
    /// Parses a recipe in TOML.
    ///
    /// # Errors
    /// [`RecipeError::Syntax`] with the line, and [`RecipeError::OnlyWithPreset`].
    /// [`base`](Self::base) and [`schemes`](Self::schemes) check that choices go together.
    pub fn parse(text: &str) -> Result<Self, RecipeError> {
        let recipe: Self = toml::from_str(text).map_err(|error| {
            let before = &text[..error.span().map_or(0, |span| span.start)];
            let line = before.matches('\n').count() + 1;
            let value = text[before.len()..].split(['\n', '#']).next().unwrap_or_default().trim();
            let problem = wrong_type(before, value, error.message());
            let problem = problem.unwrap_or_else(|| error.message().replace('\n', "; "));
            RecipeError::Syntax { line, problem }
        })?;
        recipe.check_selection()?;
        Ok(recipe)
    }

    /// Writes the recipe as text for [`parse`](Self::parse).
    ///
    /// # Errors
    /// [`RecipeError::NotToml`] for a calibration path that is not UTF-8, and for numbers beyond
    /// the range of TOML.
    pub fn to_toml(&self) -> Result<String, RecipeError> {
        toml::to_string_pretty(self).map_err(|error| RecipeError::NotToml(error.to_string()))
    }

    /// Writes a file for [`read`](Self::read).
    ///
    /// # Errors
    /// As [`to_toml`](Self::to_toml), and [`RecipeError::File`] if it cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), RecipeError> {
        let path = path.as_ref();
        let file = |source| RecipeError::File { path: path.to_owned(), source };
        fs::write(path, self.to_toml()?).map_err(file)
    }

    /// Returns the scheme of weights that match no entry of [`weights`](Self::weights).
    ///
    /// # Errors
    /// [`RecipeError`] for choices that do not go together.
    pub fn base(&self) -> Result<Fp4Scheme, RecipeError> {
        self.check_selection()?;
        let (format, block_size) = (self.base_format(), self.block_size);
        resolved(None, format, block_size, self.method, self.rule, self.hadamard)
    }

    /// Returns a scheme for every entry of [`weights`](Self::weights); `None` for dense weights.
    ///
    /// # Errors
    /// [`RecipeError`] for choices that do not go together, with the names of the weights.
    pub fn schemes(&self) -> Result<Vec<Option<Fp4Scheme>>, RecipeError> {
        self.weights.iter().map(|weights| self.scheme(weights)).collect()
    }

    fn scheme(&self, weights: &RecipeWeights) -> Result<Option<Fp4Scheme>, RecipeError> {
        let RecipeWeights { names, format, block_size, method, rule, hadamard } = weights;
        if names.is_empty() {
            return Err(RecipeError::Nameless);
        }
        let named = weights.to_string();
        let base = self.base_format();
        let said = block_size.is_some() || method.is_some() || rule.is_some() || hadamard.is_some();
        let format = match format {
            None if !said => return Err(RecipeError::NoChoice { weights: named }),
            None => base,
            Some(RecipeFormat::Fp4(format)) => *format,
            Some(RecipeFormat::Dense) => {
                return if said { Err(RecipeError::Dense { weights: named }) } else { Ok(None) };
            }
        };
        let same = format == base;
        let block_size = block_size.or(self.block_size.filter(|_| same));
        let rule = rule.or(self.rule.filter(|_| same));
        let (method, hadamard) = (method.or(self.method), hadamard.or(self.hadamard));
        resolved(Some(named), format, block_size, method, rule, hadamard).map(Some)
    }

    /// Checks that weights are not selected both with a preset and with a list.
    fn check_selection(&self) -> Result<(), RecipeError> {
        match self.preset.is_some() && !self.only.is_empty() {
            true => Err(RecipeError::OnlyWithPreset),
            false => Ok(()),
        }
    }

    /// Returns the layers at the start and at the end that stay dense, of a model with `count`. The
    /// first range may go on behind the last layer: files may have layers that no config counts.
    ///
    /// ```
    /// use burn_fp4_policy::Recipe;
    ///
    /// let recipe = Recipe::parse("last-layers-high-precision = 2")?;
    /// assert_eq!(recipe.dense_layers(32), [0..0, 30..32]);
    /// # Ok::<(), burn_fp4_policy::RecipeError>(())
    /// ```
    #[must_use]
    pub fn dense_layers(&self, count: usize) -> [Range<usize>; 2] {
        let first = self.first_layers_high_precision.unwrap_or(0);
        let last = self.last_layers_high_precision.unwrap_or(0);
        [0..first, count.saturating_sub(last).max(first)..count]
    }

    fn base_format(&self) -> Fp4Format {
        self.format.unwrap_or_else(|| Fp4Scheme::default().format())
    }
}

/// Describes a value of another type, in words of TOML, behind the key that it is of. `before` is
/// the text up to the value. None: the message is about something else.
fn wrong_type(before: &str, value: &str, message: &str) -> Option<String> {
    let prefixes = ["invalid type: ", "invalid value: ", "unknown variant "];
    let of_type = prefixes.into_iter().find_map(|prefix| message.strip_prefix(prefix));
    let of_name = (message == "wanted string or table").then_some((value, "a string"));
    let (found, expected) =
        of_name.or_else(|| of_type.and_then(|message| message.split_once(", expected ")))?;
    let key = before[..last_equals(before)?].trim_end().trim_end_matches(['"', '\'']);
    let key = key.rsplit(|c: char| !(c.is_alphanumeric() || c == '-' || c == '_')).next()?;
    let expected = match expected {
        "a sequence" => "a list, such as [\"a\", \"b\"]",
        "a string" | "path string" => "a text in quotes",
        "usize" => "a whole number, 0 or more",
        "a boolean" => "true or false",
        "f64" => "a number",
        "struct RecipeWeights" => "a table `[[weights]]`",
        other => other,
    };
    let found = match found.split_once(' ') {
        Some(("string", text)) => format!("the text {text}"),
        Some(("floating", point)) => point.replace("point ", "the number "),
        Some((kind, value)) => format!("the {kind} {value}"),
        None => found.replace("sequence", "a list").replace("map", "a table"),
    };
    Some(format!("`{key}`: expected {expected}, found {found}; correct it"))
}

/// Finds the last `=` behind a key: not one of a text in quotes or of a comment.
fn last_equals(text: &str) -> Option<usize> {
    let (mut last, mut quote, mut escaped, mut comment) = (None, None, false, false);
    for (at, c) in text.char_indices() {
        let escapes = quote == Some('"') && c == '\\' && !escaped;
        match quote {
            _ if comment => comment = c != '\n',
            Some(open) if c == open && !escaped => quote = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => quote = Some(c),
            None if c == '#' => comment = true,
            None if c == '=' => last = Some(at),
            None => {}
        }
        escaped = escapes;
    }
    last
}

/// Fills in open choices, and checks that all go together.
fn resolved(
    weights: Option<String>,
    format: Fp4Format,
    block_size: Option<usize>,
    method: Option<Method>,
    rule: Option<ScaleRule>,
    hadamard: Option<usize>,
) -> Result<Fp4Scheme, RecipeError> {
    let recommended = Fp4Scheme::recommended(format);
    let rule = rule.unwrap_or_else(|| match method {
        Some(_) => ScaleRule::of_format(format),
        None => recommended.rule,
    });
    if rule.row().format != format {
        return Err(RecipeError::Rule { weights, rule, format });
    }
    let (own, expected) = (format.row().block_size, format.row().block_sizes);
    let block_size = block_size.unwrap_or(own);
    if !expected.contains(&block_size) {
        return Err(RecipeError::BlockSize { weights, expected, found: block_size });
    }
    let method = method.unwrap_or(recommended.method);
    if !method.row().formats.contains(&format) {
        return Err(RecipeError::Method { weights, method, format });
    }
    let scheme = Fp4Scheme::of(rule).with_block_size(block_size).with_method(method);
    let hadamard = hadamard.filter(|&size| size > 0).map(Hadamard::of_size).transpose();
    let scheme = hadamard.map(|hadamard| scheme.with_hadamard(hadamard));
    match scheme.and_then(|scheme| scheme.validate().map(|()| scheme)) {
        Ok(scheme) => Ok(scheme),
        Err(problem) => Err(RecipeError::Scheme { weights, problem }),
    }
}

impl fmt::Display for RecipeWeights {
    /// Writes the first of its names.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.names[..] {
            [] => Ok(()),
            [one] => f.write_str(one),
            [first, ..] => write!(f, "{first}, .."),
        }
    }
}

impl fmt::Display for RecipeFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense => f.pad(DENSE),
            Self::Fp4(format) => f.pad(format.row().name),
        }
    }
}

impl From<RecipeFormat> for String {
    fn from(format: RecipeFormat) -> Self {
        format.to_string()
    }
}

impl TryFrom<String> for RecipeFormat {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if name == DENSE {
            return Ok(Self::Dense);
        }
        name.parse().map(Self::Fp4).map_err(|_| {
            let names = Fp4Format::ALL.map(|format| format.row().name).join(", ");
            format!("format `{name}`: unknown; choose one of {DENSE}, {names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(text: &str) -> Result<Option<Fp4Scheme>, RecipeError> {
        Ok(Recipe::parse(text)?.schemes()?[0])
    }

    #[test]
    fn what_is_not_said_of_some_weights_is_as_for_all_if_it_can_be() {
        let all = "block-size = 32\nrule = \"te-division\"\nmethod = \"amax\"\n\n[[weights]]\n\
                   names = [\"a\"]\n";
        let found = first(&format!("{all}method = \"amax\"\n")).unwrap().unwrap();
        assert_eq!(found, Recipe::parse(all).unwrap().base().unwrap());
        assert_eq!((found.block_size, found.rule), (32, ScaleRule::TeDivision));
        // Another format brings its own block size and rule.
        let found = first(&format!("{all}format = \"mxfp4\"\n")).unwrap().unwrap();
        assert_eq!(found, Fp4Scheme::mxfp4());
        assert_eq!(found.method, Method::Amax);
        let found =
            first(&format!("{all}block-size = 16\nmethod = \"hessian\"\n")).unwrap().unwrap();
        assert_eq!((found.block_size, found.method), (16, Method::Hessian));
        let found = first(&format!("{all}format = \"mxfp4\"\nblock-size = 16\n"));
        assert_eq!(found.unwrap().unwrap(), Fp4Scheme::mxfp4().with_block_size(16));
    }

    #[test]
    fn layers_are_counted_from_both_ends_whatever_a_file_says_of_their_number() {
        let ends = |first, last| Recipe {
            first_layers_high_precision: Some(first),
            last_layers_high_precision: Some(last),
            ..Recipe::default()
        };
        assert_eq!(ends(1, 2).dense_layers(4), [0..1, 2..4]);
        assert_eq!(ends(3, 2).dense_layers(4), [0..3, 3..4]);
        let [first, last] = ends(9, 9).dense_layers(4);
        assert!(first == (0..9) && last.is_empty(), "{first:?} {last:?}");
        // A layer beyond the number that a config states.
        let keeps = |first, last| ends(first, last).dense_layers(2).iter().any(|l| l.contains(&2));
        assert!(keeps(3, 0) && !keeps(2, 9));
        assert_eq!(Recipe::default().dense_layers(4), [0..0, 4..4]);
        let all = usize::MAX;
        assert_eq!(ends(1, 1).dense_layers(all), [0..1, all - 1..all]);
        assert_eq!(ends(0, all).dense_layers(6), [0..0, 0..6]);
    }

    #[test]
    fn a_rule_is_read_by_its_former_name() {
        let recipe = Recipe::parse("rule = \"gist\"").unwrap();
        assert_eq!(recipe.rule, Some(ScaleRule::TorchRecipe));
        assert_eq!(recipe.to_toml().unwrap(), "rule = \"torch-recipe\"\n");
        assert_eq!("gist".parse(), Ok(ScaleRule::TorchRecipe));
    }

    #[test]
    fn recipes_come_back_from_their_text() {
        let entry = |names: &[&str], format, method| RecipeWeights {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            format,
            method,
            ..RecipeWeights::default()
        };
        let formats = Fp4Format::ALL.map(RecipeFormat::Fp4);
        let mut weights = vec![entry(&["*"], Some(RecipeFormat::Dense), None)];
        weights.extend(formats.map(|format| entry(&["a.\"b\"", "c"], Some(format), None)));
        weights.extend(Method::NAMED.map(|row| entry(&["re:a\\.b$"], None, Some(row.method))));
        let recipe = Recipe {
            format: Some(Fp4Format::ALL[1]),
            block_size: Some(16),
            dialect: Some("modelopt".to_owned()),
            method: Some(Method::SSE),
            rule: Some(ScaleRule::Even),
            hadamard: Some(64),
            preset: None,
            keep: vec!["a".to_owned()],
            only: vec!["*".to_owned()],
            first_layers_high_precision: Some(1),
            last_layers_high_precision: Some(0),
            together: Some(false),
            calibration: Some("x/y.safetensors".into()),
            weights,
        };
        let text = recipe.to_toml().unwrap();
        assert_eq!(Recipe::parse(&text).unwrap(), recipe, "{text}");
        assert_eq!(Recipe::parse("").unwrap(), Recipe::default());
        assert_eq!(Recipe::default().to_toml().unwrap(), "");
    }

    #[test]
    fn a_transform_is_a_size_and_tables_may_have_none() {
        let weights = |text: &str| {
            let recipe = Recipe::parse(text).unwrap();
            let sizes = |scheme: &Fp4Scheme| scheme.hadamard.map(Hadamard::size);
            let base = recipe.base().map(|scheme| sizes(&scheme));
            let tables = recipe.schemes().map(|all| all[0].as_ref().and_then(sizes));
            (base, tables)
        };
        let of = |entry: &str| {
            let text = format!("hadamard = 64\n[[weights]]\nnames = ['*']\n{entry}");
            let (base, table) = weights(&text);
            (base.unwrap(), table.unwrap())
        };
        assert_eq!(of("format = 'mxfp4'"), (Some(64), Some(64)));
        assert_eq!(of("hadamard = 32"), (Some(64), Some(32)));
        assert_eq!(of("hadamard = 0"), (Some(64), None));
        let (base, _) = weights("hadamard = 48\n[[weights]]\nnames = ['*']\nmethod = 'sse'");
        let error = base.unwrap_err().to_string();
        assert!(error.contains("48") && error.contains("16, 32, 64, 128"), "{error}");
    }

    #[test]
    fn open_choices_are_those_of_the_recommended_scheme() {
        let chosen = |scheme: Fp4Scheme| (scheme.method, scheme.rule);
        let base = |text: &str| chosen(Recipe::parse(text).unwrap().base().unwrap());
        assert_eq!(base(""), (Method::SSE, ScaleRule::Te));
        assert_eq!(base("rule = 'te-division'"), (Method::SSE, ScaleRule::TeDivision));
        assert_eq!(base("format = 'mxfp4'"), (Method::Amax, ScaleRule::Even));
        // A method alone has the first rule of the format.
        assert_eq!(base("format = 'mxfp4'\nmethod = 'amax'"), (Method::Amax, ScaleRule::Floor));
        assert_eq!(base("format = 'mxfp4'\nrule = 'ceil'"), (Method::Amax, ScaleRule::Ceil));
        let table = Recipe::parse("[[weights]]\nnames = ['a']\nformat = 'mxfp4'").unwrap();
        let schemes = table.schemes().unwrap();
        assert_eq!(schemes[0].map(chosen), Some((Method::Amax, ScaleRule::Even)));
    }

    #[test]
    fn wrong_recipes_are_told_with_their_line_or_their_weights() {
        let line = |text: &str| match Recipe::parse(text).unwrap_err() {
            RecipeError::Syntax { line, problem } => (line, problem),
            error => panic!("{error}"),
        };
        let (at, problem) = line("[[weights]]\nnames = [\"a\"]\nformat = \"int4\"\n");
        assert_eq!(at, 3);
        assert!(
            problem.contains("`int4`: unknown; choose one of dense, nvfp4, mxfp4"),
            "{problem}"
        );
        let (at, problem) = line("method = \"amax\"\npreset = \"all\"\n");
        assert_eq!(at, 2);
        assert!(problem.contains("preset `all`: unknown; choose one of all-linear, "), "{problem}");
        let (at, problem) = line("\n[[weights]]\nname = [\"a\"]\n");
        assert!(at == 3 && problem.contains("`name`"), "{at} {problem}");
        assert!(line("[[weights]]\nformat = \"dense\"\n").1.contains("`names`"));
        for (text, at, says) in [
            (
                "\nkeep = \"*.o_proj\"",
                2,
                "`keep`: expected a list, such as [\"a\", \"b\"], found the text \"*.o_proj\"; \
                 correct it",
            ),
            (
                "block-size = \"16\"",
                1,
                "`block-size`: expected a whole number, 0 or more, found the",
            ),
            ("first-layers-high-precision = -1", 1, "found the integer `-1`"),
            ("last-layers-high-precision = 0.5", 1, "found the number `0.5`"),
            ("together = 1", 1, "`together`: expected true or false, found the integer `1`"),
            ("keep = [\n  \"a\",\n  5,\n]", 3, "`keep`: expected a text in quotes, found the"),
            ("calibration = []", 1, "`calibration`: expected a text in quotes, found a list"),
            ("method = { gptq = { damping = \"x\" } }", 1, "`damping`: expected a number, found"),
            ("preset = 1", 1, "`preset`: expected a text in quotes, found the integer `1`"),
            // Signs in a text or a comment are not a key's.
            ("keep = [\"a=\\\"b=\", 5]", 1, "`keep`: expected a text in quotes, found the"),
            ("keep = ['=', # x=\n 5]", 2, "`keep`: expected a text in quotes, found the"),
            ("format = 4", 1, "`format`: expected a text in quotes, found 4; correct it"),
            ("weights = 4", 1, "`weights`: expected a list"),
            ("weights = [\"a\"]", 1, "`weights`: expected a table `[[weights]]`, found the text"),
            (
                "format = \"nvfp5\"",
                1,
                "`format`: expected `nvfp4` or `mxfp4`, found `nvfp5`; correct",
            ),
        ] {
            let (found, problem) = line(text);
            assert!(found == at && problem.contains(says), "{text}: {found} {problem}");
        }

        let wrong = |text: &str| first(&format!("[[weights]]\n{text}")).unwrap_err().to_string();
        assert_eq!(wrong("names = []"), "`weights` without `names`; add the names of weights");
        let says = "weights `a`: names without a choice; add a format, block size, method or rule, \
                    or remove the table";
        assert_eq!(wrong("names = [\"a\"]"), says);
        let dense = "names = [\"a\", \"b\"]\nformat = \"dense\"\nmethod = \"sse\"";
        let says = "weights `a, ..`: dense ones have no method, rule or block size; remove these, \
                    or the format";
        assert_eq!(wrong(dense), says);
        for (text, says) in [
            ("rule = \"even\"", "weights `a`: the rule `even` is for mxfp4, not nvfp4"),
            ("block-size = 48", "weights `a`: block size 48: expected 16 or 32"),
            (
                "format = \"mxfp4\"\nmethod = \"four-over-six\"",
                "weights `a`: method `four-over-six` is not defined for mxfp4; choose another \
                 method or format",
            ),
            (
                "rule = \"torch-recipe\"\nmethod = \"four-over-six\"",
                "weights `a`: method `four-over-six` does not go with rule `torch-recipe`",
            ),
        ] {
            let found = wrong(&format!("names = [\"a\"]\n{text}"));
            assert!(found.starts_with(says), "{found}");
        }
        assert!(matches!(Recipe::read("/nowhere.toml"), Err(RecipeError::File { .. })));
        let both = Recipe::parse("only = [\"a\"]\npreset = \"miles\"\n").unwrap_err();
        assert!(matches!(both, RecipeError::OnlyWithPreset), "{both}");
        let (only, preset) = (vec!["a".to_owned()], Some(Preset::Miles));
        let both = Recipe { only, preset, ..Recipe::default() }.base().unwrap_err();
        assert!(matches!(both, RecipeError::OnlyWithPreset), "{both}");
    }
}
