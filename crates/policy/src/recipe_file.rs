//! [`RecipeFile`]: a recipe in a file, whose errors name the file and the line.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;
use toml::Spanned;

use crate::error::RecipeError;
use crate::recipe::{Recipe, RecipeWeights};

/// Holds the text of a recipe and the path of its file.
///
/// ```
/// use burn_fp4_policy::{Policy, RecipeFile};
///
/// # let path = std::env::temp_dir().join(format!("burn-fp4-recipe-{}.toml", std::process::id()));
/// # let text = "format = \"mxfp4\"\nrule = \"te\"\nkeep = [\"lm_head\"]\n";
/// # std::fs::write(&path, text).expect("written");
/// let file = RecipeFile::read(&path)?; // lines: format = "mxfp4", rule = "te", keep = ["lm_head"]
/// assert_eq!((file.line_of_key("rule"), file.line_of_pattern("lm_head")), (Some(2), Some(3)));
/// let recipe = file.recipe()?;
/// let problem = Policy::new(recipe.clone()).expect_err("a rule of nvfp4");
/// let text = file.blame(problem, &recipe).to_string();
/// assert!(text.contains(".toml: line 2: the rule `te` is for nvfp4, not mxfp4; "), "{text}");
/// # std::fs::remove_file(path).expect("removed");
/// # Ok::<(), burn_fp4_policy::RecipeError>(())
/// ```
#[derive(Debug, Clone)]
pub struct RecipeFile {
    path: PathBuf,
    text: String,
}

/// The lists of patterns in a recipe.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Lists {
    keep: Vec<Spanned<String>>,
    only: Vec<Spanned<String>>,
    weights: Vec<WeightNames>,
}

/// The patterns of a table `[[weights]]`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct WeightNames {
    names: Vec<Spanned<String>>,
}

/// The values of a table, by their keys.
type Keys = BTreeMap<String, Spanned<IgnoredAny>>;

/// The tables `[[weights]]` of a recipe.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Tables {
    weights: Vec<Keys>,
}

impl RecipeFile {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// [`RecipeError::File`] if it cannot be read.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, RecipeError> {
        let path = path.as_ref().to_owned();
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Self { path, text }),
            Err(source) => Err(RecipeError::File { path, source }),
        }
    }

    /// Parses the recipe.
    ///
    /// # Errors
    /// [`RecipeError::In`] with the error of [`Recipe::parse`].
    pub fn recipe(&self) -> Result<Recipe, RecipeError> {
        Recipe::parse(&self.text).map_err(|problem| {
            let line = self.line_of(&problem);
            RecipeError::In { path: self.path.clone(), line, problem: Box::new(problem) }
        })
    }

    /// Returns the path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file and the line before a problem of its choices in a recipe. A problem of a
    /// choice that the recipe does not have from the file is returned unchanged.
    #[must_use]
    pub fn blame(&self, problem: RecipeError, recipe: &Recipe) -> RecipeError {
        match self.line_of(&problem) {
            Some(line) if !self.is_replaced(&problem, recipe) => RecipeError::In {
                path: self.path.clone(),
                line: Some(line),
                problem: Box::new(problem),
            },
            _ => problem,
        }
    }

    /// Returns true if a problem is about a choice for all weights for which a recipe has another
    /// value than the file.
    fn is_replaced(&self, problem: &RecipeError, recipe: &Recipe) -> bool {
        let Some((None, key)) = problem.place() else { return false };
        let value = |recipe: &Recipe| toml::Table::try_from(recipe).ok()?.remove(key);
        self.recipe().is_ok_and(|own| value(&own) != value(recipe))
    }

    /// Finds the first line with a pattern in a list.
    #[must_use]
    pub fn line_of_pattern(&self, pattern: &str) -> Option<usize> {
        let Lists { keep, only, weights } = toml::from_str(&self.text).ok()?;
        let tables = weights.iter().flat_map(|table| &table.names);
        let mut all = keep.iter().chain(&only).chain(tables);
        all.find(|text| text.get_ref() == pattern).map(|text| self.line(text.span()))
    }

    /// Finds the line of a choice for all weights.
    #[must_use]
    pub fn line_of_key(&self, key: &str) -> Option<usize> {
        let keys: Keys = toml::from_str(&self.text).ok()?;
        keys.get(key).map(|value| self.line(value.span()))
    }

    /// Finds the line that a problem is about.
    fn line_of(&self, problem: &RecipeError) -> Option<usize> {
        let (weights, key) = problem.place()?;
        let Some(weights) = weights else { return self.line_of_key(key) };
        let lists: Lists = toml::from_str(&self.text).ok()?;
        let tables: Tables = toml::from_str(&self.text).ok()?;
        let is_about = |(table, _): &(&WeightNames, &Keys)| {
            let names = table.names.iter().map(|name| name.get_ref().clone()).collect();
            RecipeWeights { names, ..RecipeWeights::default() }.to_string() == weights
        };
        let mut about: Vec<_> =
            lists.weights.iter().zip(&tables.weights).filter(is_about).collect();
        // Of tables with the same names it is one that has the key.
        about.sort_by_key(|(_, keys)| !keys.contains_key(key));
        let (_, keys) = about.first()?;
        keys.get(key).or_else(|| keys.get("names")).map(|value| self.line(value.span()))
    }

    fn line(&self, span: Range<usize>) -> usize {
        self.text[..span.start].matches('\n').count() + 1
    }
}

impl Recipe {
    /// Reads a recipe from a file.
    ///
    /// # Errors
    /// [`RecipeError::File`] if it cannot be read; [`RecipeError::In`] with the error of
    /// [`parse`](Self::parse).
    pub fn read(path: impl AsRef<Path>) -> Result<Self, RecipeError> {
        RecipeFile::read(path)?.recipe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> RecipeFile {
        RecipeFile { path: "r.toml".into(), text: text.to_owned() }
    }

    #[test]
    fn problems_of_a_recipe_have_its_file_and_their_line() {
        for (text, says) in [
            ("\nonly = [\"a\"]\npreset = \"miles\"\n", "r.toml: line 2: `only` does not go with"),
            ("\npreset = 1", "r.toml: line 2: `preset`: expected a text in quotes"),
            ("method = \"amax\"\nblock-size = 8\n", "r.toml: line 2: block size 8: expected 16"),
            (
                "method = \"four-over-six\"\nformat = \"mxfp4\"",
                "r.toml: line 1: method `four-over-six` is not defined for mxfp4",
            ),
            ("[[weights]]\nnames = [\"a\"]\nrule = \"even\"\n", "r.toml: line 3: weights `a`: the"),
            (
                "[[weights]]\nnames = [\"a\"]\nformat = \"mxfp4\"\n[[weights]]\nnames = [\n\
                 \"a\",\n\"b\"]\nmethod = \"sse\"\nformat = \"dense\"",
                "r.toml: line 9: weights `a, ..`: dense ones have no method",
            ),
            ("\n[[weights]]\n\nnames = [\"a\"]", "r.toml: line 4: weights `a`: names without a"),
            ("[[weights]]\nnames = []", "r.toml: line 2: `weights` without `names`"),
            // The method is that for all weights.
            (
                "method = \"four-over-six\"\n[[weights]]\nnames = [\"a\"]\nformat = \"mxfp4\"",
                "r.toml: line 3: weights `a`: method `four-over-six` is not defined",
            ),
        ] {
            let file = file(text);
            let checked = file.recipe().and_then(|recipe| {
                let schemes = recipe.base().and_then(|_| recipe.schemes());
                schemes.map_err(|problem| file.blame(problem, &recipe))
            });
            let error = checked.expect_err(text).to_string();
            assert!(error.starts_with(says), "{error}");
        }
    }

    #[test]
    fn a_problem_of_choices_that_are_not_in_the_file_is_not_blamed_on_it() {
        let recipe = Recipe { block_size: Some(8), ..Recipe::default() };
        // The file has none, or another.
        for text in ["format = \"nvfp4\"", "block-size = 16"] {
            let problem = recipe.base().expect_err("a wrong size");
            let problem = file(text).blame(problem, &recipe);
            assert!(problem.to_string().starts_with("block size 8: expected"), "{problem}");
        }
        let problem = recipe.base().expect_err("a wrong size");
        let problem = file("\nblock-size = 8").blame(problem, &recipe);
        assert!(problem.to_string().starts_with("r.toml: line 2: block size 8"), "{problem}");
    }

    #[test]
    fn a_pattern_has_the_line_of_its_own_text_in_a_list() {
        let text = "# a.b\nkeep = [\n  'x',\n  \"a.b\",\n]\n[[weights]]\nnames = ['y']\n";
        let file = file(text);
        let lines = ["x", "a.b", "y", "z"].map(|pattern| file.line_of_pattern(pattern));
        assert_eq!(lines, [Some(3), Some(4), Some(7), None]);
        assert_eq!((file.line_of_key("keep"), file.line_of_key("only")), (Some(2), None));
    }
}
