//! Layers that inference engines run as one product, because they have the same input.

use std::collections::BTreeMap;

use crate::weight::Model;

/// The last words of the names of layers that are run as one, in files of transformers and in GGUF
/// files.
const FAMILIES: [(&str, &[&str]); 7] = [
    ("qkv", &["q_proj", "k_proj", "v_proj"]),
    ("qkv", &["attn_q", "attn_k", "attn_v"]),
    ("gate_up", &["gate_proj", "up_proj"]),
    ("gate_up", &["w1", "w3"]),
    ("gate_up", &["ffn_gate", "ffn_up"]),
    ("gate_up", &["ffn_gate_exps", "ffn_up_exps"]),
    // The latent attention of DeepSeek.
    ("qkv_a", &["q_a_proj", "kv_a_proj_with_mqa"]),
];

/// The family of a weight: the name that its members share.
fn family(name: &str) -> Option<String> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
    let (kind, _) = FAMILIES.iter().find(|(_, members)| members.contains(&last))?;
    Some(format!("{parent}.{kind}"))
}

/// The families of a model that have more than one member, by name.
pub(crate) fn families(model: &Model<'_>) -> BTreeMap<String, Vec<usize>> {
    let mut families: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (at, weight) in model.weights.iter().enumerate() {
        if weight.shape().len() >= 2
            && let Some(family) = family(&weight.name)
        {
            families.entry(family).or_default().push(at);
        }
    }
    families.retain(|_, members| members.len() > 1);
    families
}
