//! The role of a weight in its model, by its name: linear layer, embedding, output layer, router.
//!
//! `table.rs` has a row for each architecture of Hugging Face models, which `config.json` names.
//! Where it names none of them, the names of Llama-like models are tried.

mod table;

use burn_fp4_policy::{Family, Matcher, Pattern, PolicyError, Role, Syntax, stem};

use crate::weight::Model;
pub use table::TransformersLoad;
use table::{ANY, KEPT, LINEAR, MODALITY, ROWS, Row};
pub(crate) use table::{CONVOLUTION, EMBEDDING};

/// The architecture of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Architecture<'c> {
    row: &'static Row,
    /// Its `model_type`, if that is in the table.
    name: Option<&'static str>,
    config: Option<&'c serde_json::Value>,
}

/// Ends of the class names of transformers, behind the name of the architecture.
const CLASS_ENDS: [&str; 4] = ["For", "Model", "LMHead", "EncoderModel"];

/// The field with the config of the language model in a model of several modalities.
const TEXT: &str = "text_config";

/// The `model_type` that a config states.
pub(crate) fn stated(config: Option<&serde_json::Value>) -> Option<&str> {
    config?["model_type"].as_str()
}

impl<'c> Architecture<'c> {
    /// The architecture that a config names: by its `model_type`, that of its `text_config`, or
    /// where there is no `model_type` by a class in `architectures`.
    pub(crate) fn of_config(config: Option<&'c serde_json::Value>) -> Self {
        let text = config.and_then(|config| config.get(TEXT));
        let same = |name: &str| find(|known| known == name);
        let by_type = [config, text].into_iter().filter_map(stated).find_map(same);
        let classes = config.filter(|_| stated(config).is_none());
        let classes = classes.and_then(|config| config["architectures"].as_array());
        let by_class = || classes?.iter().filter_map(|class| class.as_str()).find_map(of_class);
        let (row, name) = match by_type.or_else(by_class) {
            Some((row, name)) => (row, Some(name)),
            None => (&ANY, None),
        };
        Self { row, name, config }
    }

    /// The architecture of a model.
    pub(crate) fn of(model: &'c Model<'_>) -> Self {
        Self::of_config(model.config.as_ref())
    }

    /// Its `model_type`, if that is in the table.
    pub(crate) fn name(self) -> Option<&'static str> {
        self.name
    }

    /// Returns true if a module is known as a linear layer with a weight `[outputs, inputs]`.
    pub(crate) fn is_linear(self, module: &str) -> bool {
        match self.name {
            Some(_) => ends_with_any(module, self.row.linear),
            None => LINEAR.iter().any(|end| module.ends_with(end)),
        }
    }

    /// The names of output layers that may be tied to an embedding and so have no tensor. If the
    /// architecture is not known, the names of Llama-like models count where the config ties them.
    ///
    /// Configs of known architectures are not asked: transformers leaves out what is the default.
    pub(crate) fn tied_output_layers(self) -> &'static [&'static str] {
        let key = "tie_word_embeddings";
        let said = self.config.and_then(|config| config.get(key).or_else(|| config[TEXT].get(key)));
        match self.name.is_some() || said.is_some_and(|said| *said == true) {
            true => self.row.tied,
            false => &[],
        }
    }

    /// Returns the name of a module in transformers, if that differs from the one in files.
    pub(crate) fn renamed(self, module: &str) -> Option<String> {
        self.row.renamed.iter().find_map(|(file, transformers)| {
            module.strip_prefix(file).map(|rest| format!("{transformers}{rest}"))
        })
    }

    /// Returns true if the weight of a module, of this shape, is `[.., inputs, outputs]`.
    pub(crate) fn is_transposed(self, module: &str, shape: &[usize]) -> bool {
        let [.., rows, cols] = shape else { return false };
        let known = self.row.inputs.iter().find(|(end, _)| stem(module, end).is_some());
        let inputs = known.and_then(|(_, field)| self.size(field));
        let turned = inputs.is_some_and(|inputs| *cols == inputs && *rows != inputs);
        ends_with_any(module, self.row.transposed) && !turned
    }

    /// A number in the config.
    fn size(self, field: &str) -> Option<usize> {
        let config = self.config?;
        let size = config.get(field).or_else(|| config[TEXT].get(field))?;
        size.as_u64().map(|size| size as usize)
    }

    /// The family of a layer.
    pub(crate) fn family(self, module: &str) -> Option<Family<'_>> {
        Family::of(module, self.row.families)
    }

    /// Makes the names of modules ready to be matched.
    ///
    /// # Errors
    /// [`PolicyError::Pattern`] for a glob of the table that is none.
    pub(crate) fn roles(self) -> Result<Roles, PolicyError> {
        let ready = |glob| Pattern::parse(glob, Syntax::Glob).matcher();
        // A tower that is saved alone, such as a `siglip_vision_model`, is the whole model.
        let is_tower = stated(self.config).is_some_and(|kind| kind.ends_with("_vision_model"));
        let modalities = self.row.modalities.iter().filter(|_| !is_tower);
        let modalities = modalities.map(|glob| (*glob, MODALITY));
        let kept = self.row.kept.iter().chain(&KEPT).copied().chain(modalities);
        let kept = kept.map(|(glob, what)| Ok((ready(glob)?, what)));
        let feed_forward = self.row.feed_forward.iter().map(|glob| ready(glob));
        Ok(Roles {
            row: self.row,
            name: self.name,
            kept: kept.collect::<Result<_, PolicyError>>()?,
            feed_forward: feed_forward.collect::<Result<_, _>>()?,
        })
    }
}

impl Model<'_> {
    /// The `model_type` of the architecture that the config names, if its layers are known.
    ///
    /// ```
    /// use burn_fp4_checkpoints::{Model, TransformersLoad};
    ///
    /// let config = Some(serde_json::json!({"architectures": ["LlamaForCausalLM"]}));
    /// let model = Model { config, ..Model::default() };
    /// assert_eq!(model.architecture(), Some("llama"));
    /// assert_eq!(model.transformers_load(), Some(TransformersLoad::Packed));
    /// assert_eq!(Model::default().architecture(), None);
    /// ```
    #[must_use]
    pub fn architecture(&self) -> Option<&'static str> {
        Architecture::of(self).name()
    }

    /// Returns how transformers loads FP4 weights of compressed-tensors into the architecture, if
    /// its layers are known.
    #[must_use]
    pub fn transformers_load(&self) -> Option<TransformersLoad> {
        let Architecture { row, name, .. } = Architecture::of(self);
        name.map(|_| row.transformers)
    }
}

/// The names of modules, ready to be matched.
pub(crate) struct Roles {
    row: &'static Row,
    name: Option<&'static str>,
    /// Names of modules that stay, each with a description.
    kept: Vec<(Matcher, &'static str)>,
    feed_forward: Vec<Matcher>,
}

impl Roles {
    /// Returns the role of a matrix, or of a tensor with more axes.
    pub(crate) fn role(&self, module: &str, axes: usize) -> Role {
        // Three axes are a stack of matrices by their number alone.
        if axes > 2 && module.split('.').any(|part| part.contains("conv")) {
            return Role::Other(CONVOLUTION);
        }
        if let Some((_, what)) = self.kept.iter().find(|(m, _)| m.matches(module)) {
            return Role::Other(what);
        }
        let known = [self.row.linear, self.row.transposed];
        let linear = known.iter().any(|ends| ends_with_any(module, ends));
        self.name.filter(|_| !linear).map_or(Role::Linear, Role::Unlisted)
    }

    /// Returns true if a module is in a feed-forward network. None: the table does not say.
    pub(crate) fn feed_forward(&self, module: &str) -> Option<bool> {
        let known = !self.feed_forward.is_empty();
        known.then(|| self.feed_forward.iter().any(|matcher| matcher.matches(module)))
    }
}

fn find(is: impl Fn(&str) -> bool) -> Option<(&'static Row, &'static str)> {
    ROWS.iter().find_map(|row| Some((row, row.types.iter().copied().find(|name| is(name))?)))
}

/// The architecture of a class of transformers: `gpt_neox` of `GPTNeoXForCausalLM`.
fn of_class(class: &str) -> Option<(&'static Row, &'static str)> {
    find(|name| {
        let letters: String = name.chars().filter(|c| c.is_ascii_alphanumeric()).collect();
        let (head, rest) = class.split_at_checked(letters.len()).unwrap_or(("", class));
        head.eq_ignore_ascii_case(&letters) && CLASS_ENDS.iter().any(|end| rest.starts_with(end))
    })
}

fn ends_with_any(module: &str, ends: &[&str]) -> bool {
    ends.iter().any(|end| stem(module, end).is_some())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use serde_json::json;

    use super::*;

    #[test]
    fn axes_that_files_have_in_either_order_are_told_by_the_size_of_the_inputs() {
        let text = json!({"hidden_size": 64, "moe_intermediate_size": 48});
        let config = json!({"model_type": "qwen3_vl_moe", "text_config": text});
        let of = Architecture::of_config(Some(&config));
        let module = |name| format!("model.language_model.layers.0.mlp.experts.{name}");
        for (name, shape, transposed) in [
            ("gate_up_proj", [4, 64, 96], true),
            ("gate_up_proj", [4, 96, 64], false),
            ("down_proj", [4, 48, 64], true),
            ("down_proj", [4, 64, 48], false),
            ("down_proj", [4, 48, 48], true),
        ] {
            assert_eq!(of.is_transposed(&module(name), &shape), transposed, "{name} {shape:?}");
        }
    }

    fn named(config: serde_json::Value) -> Option<&'static str> {
        Architecture::of_config(Some(&config)).name()
    }

    #[test]
    fn an_architecture_is_that_of_the_type_of_the_text_or_of_the_class() {
        let kind = |kind: &str| json!({"model_type": kind});
        let class = |class: &str| json!({"architectures": [class]});
        assert_eq!(named(kind("gpt_neox")), Some("gpt_neox"));
        assert_eq!(named(kind("unheard_of")), None);
        assert_eq!(named(class("GPTNeoXForCausalLM")), Some("gpt_neox"));
        assert_eq!(named(class("XLMRobertaModel")), Some("xlm-roberta"));
        assert_eq!(named(class("Qwen3MoeForCausalLM")), Some("qwen3_moe"));
        assert_eq!(named(class("T5EncoderModel")), Some("t5"));
        assert_eq!(named(class("Qwen3NextForCausalLM")), None);
        let mut wrapped = kind("unheard_of");
        wrapped["text_config"] = kind("llama");
        assert_eq!(named(wrapped), Some("llama"));
        let mut other = class("LlamaForCausalLM");
        other["model_type"] = json!("unheard_of");
        assert_eq!(named(other), None, "its type counts, not its class");
        assert_eq!(Architecture::of_config(None).name(), None);
    }

    #[test]
    fn names_end_at_dots() {
        assert_eq!(stem("layers.0.attn.c_proj", "c_proj"), Some("layers.0.attn."));
        assert_eq!(stem("c_proj", "c_proj"), Some(""));
        assert_eq!(stem("layers.0.abc_proj", "c_proj"), None);
    }

    #[test]
    fn a_type_is_in_one_row_whose_families_are_linear_layers() {
        let mut types = BTreeSet::new();
        for row in &ROWS {
            for name in row.types {
                assert!(types.insert(name), "{name} is in two rows");
            }
            for name in row.families.iter().copied().flatten() {
                let known = |list| ends_with_any(name, list);
                assert!(known(row.linear) || known(row.transposed), "{name} of {:?}", row.types);
            }
        }
    }

    #[test]
    fn every_row_is_compared_with_transformers_and_in_the_list_of_the_docs() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let read = |path: &str| std::fs::read_to_string(root.join(path)).expect("a text");
        let script = read("tests/interop/architectures.py");
        let truth = read("crates/checkpoints/tests/checkpoints/architectures.txt");
        let page = read("docs/quantize-a-folder.md");
        let (_, list) = page.split_once("| architecture | `model_type` |").expect("the list");
        let (list, _) = list.split_once("\n\n").expect("an end");
        let listed: BTreeSet<&str> = list.split([' ', ',', '|', '\n']).collect();
        for name in ROWS.iter().flat_map(|row| row.types) {
            assert!(script.contains(&format!("\"{name}\"")), "{name} is not in the script");
            assert!(truth.contains(&format!("# {name} {{")), "{name} has no weights to test");
            assert!(listed.contains(name), "{name} is not in docs/quantize-a-folder.md");
        }
    }
}
