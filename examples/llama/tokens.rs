//! Tokens of a text, and a tokenizer of bytes.

use anyhow::{Result, anyhow, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use examples::random::Random;

/// Tokens of a text: a training part, and a held-out part at the end to measure on.
#[derive(Debug, Clone, Hash)]
pub struct Tokens {
    all: Vec<u32>,
    training: usize,
}

impl Tokens {
    /// Tokenizes a text and holds out a share of it at its end.
    ///
    /// # Errors
    /// The tokenizer refuses the text, or the share is not in 0 to 1.
    pub fn new(tokenizer: &Tokenizer, text: &str, held_out: f64) -> Result<Self> {
        ensure!((0.0..=1.0).contains(&held_out), "--held-out: expected 0 to 1, found {held_out}");
        let encoded = tokenizer.encode(text, true).map_err(|error| anyhow!(error))?;
        let all = encoded.get_ids().to_vec();
        let training = all.len() - (all.len() as f64 * held_out).round() as usize;
        Ok(Self { all, training })
    }

    /// Returns the held-out part.
    pub fn held_out(&self) -> &[u32] {
        &self.all[self.training..]
    }

    /// Draws random windows `[count, length]` of the training part.
    ///
    /// # Errors
    /// The training part is shorter than a window.
    pub fn windows(
        &self,
        count: usize,
        length: usize,
        random: &mut Random,
        device: &Device,
    ) -> Result<Tensor<2, Int>> {
        let training = &self.all[..self.training];
        let places = (training.len() + 1).saturating_sub(length);
        ensure!(
            places > 0,
            "the text: {} tokens to train or calibrate on, but a window has {length}; \
             pass a longer --text or a smaller --context",
            training.len()
        );
        let starts = (0..count).map(|_| random.below(places));
        let windows: Vec<u32> = starts.flat_map(|at| &training[at..at + length]).copied().collect();
        Ok(batch_of(&windows, length, device))
    }
}

/// Uploads tokens as a tensor `[tokens / length, length]`.
pub fn batch_of(tokens: &[u32], length: usize, device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let count = tokens.len() / length;
    Tensor::from_data(TensorData::new(tokens, [count, length]), device)
}

/// Returns a `tokenizer.json` whose 256 tokens are the bytes, in order.
pub fn byte_tokenizer() -> Value {
    // GPT-2's characters for bytes: printable bytes stand for themselves, the others start at 256.
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = 256..;
    let character = |byte: u8| match printable(&byte) {
        true => char::from(byte),
        false => others.next().and_then(char::from_u32).expect("256 to 511 are characters"),
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
