//! Texts as tokens, and tokens as tensors.

use anyhow::{Result, anyhow, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use examples::random::Random;

/// The tokens of a text, the last part of it to be measured on, the rest to learn from.
#[derive(Debug, Clone)]
pub struct Tokens {
    all: Vec<u32>,
    learned: usize,
}

impl Tokens {
    /// Of a text, of which a share at the end is held out.
    ///
    /// # Errors
    /// If the tokenizer refuses the text, or the share is none.
    pub fn new(tokenizer: &Tokenizer, text: &str, held_out: f64) -> Result<Self> {
        ensure!((0.0..=1.0).contains(&held_out), "{held_out} held out: expected 0 to 1");
        let encoded = tokenizer.encode(text, true).map_err(|error| anyhow!(error))?;
        let all = encoded.get_ids().to_vec();
        let learned = all.len() - (all.len() as f64 * held_out).round() as usize;
        Ok(Self { all, learned })
    }

    /// What is measured on.
    pub fn held_out(&self) -> &[u32] {
        &self.all[self.learned..]
    }

    /// Windows `[count, length]` that begin anywhere in the text to learn from.
    ///
    /// # Errors
    /// If there is no window.
    pub fn windows(
        &self,
        count: usize,
        length: usize,
        random: &mut Random,
        device: &Device,
    ) -> Result<Tensor<2, Int>> {
        let learned = &self.all[..self.learned];
        let places = (learned.len() + 1).saturating_sub(length);
        ensure!(places > 0, "{} tokens to learn from: expected {length}", learned.len());
        let starts = (0..count).map(|_| random.below(places));
        let windows: Vec<u32> = starts.flat_map(|at| &learned[at..at + length]).copied().collect();
        Ok(tensor(&windows, length, device))
    }
}

/// Tokens `[count, length]`.
pub(super) fn tensor(tokens: &[u32], length: usize, device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let count = tokens.len() / length;
    Tensor::from_data(TensorData::new(tokens, [count, length]), device)
}

/// A `tokenizer.json` whose tokens are the 256 bytes, in their order.
pub fn byte_tokenizer() -> Value {
    // The characters that GPT-2 has for bytes: printable ones for themselves, others from 256 on.
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = 256..;
    let character = |byte: u8| match printable(&byte) {
        true => char::from(byte),
        false => others.next().and_then(char::from_u32).expect("a character"),
    };
    let names = (0..=u8::MAX).map(character).zip(0_u32..);
    let vocabulary: Map<_, _> = names.map(|(name, id)| (name.to_string(), id.into())).collect();
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": null,
        "decoder": bytes,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocabulary,
            "merges": [],
        },
    })
}
