"""A folder of Hugging Face in the shapes of a known model, its weights random:

    python3 llama.py FOLDER 14b|8b|0.5b

8b has the shapes of Llama 3 8B, 14b of Qwen2.5 14B, 0.5b of Qwen2 0.5B. The tokenizer is that of
tests/models/genesis, whose tokens are bytes. Needs numpy.
"""

import json
import multiprocessing
import shutil
import sys
from pathlib import Path

from generate import pool, size, write

GENESIS = Path(__file__).parent.parent / "models" / "genesis"
COMMON = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
CONFIGS = {
    "14b": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
}


def shapes(config):
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    words = (config["vocab_size"], width)
    yield "model.embed_tokens.weight", words
    yield "model.norm.weight", (width,)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (width,)
        yield f"{name}.post_attention_layernorm.weight", (width,)
        for part, outputs in (("q", width), ("k", keys), ("v", keys)):
            yield f"{name}.self_attn.{part}_proj.weight", (outputs, width)
            if config["model_type"] == "qwen2":
                yield f"{name}.self_attn.{part}_proj.bias", (outputs,)
        yield f"{name}.self_attn.o_proj.weight", (width, width)
        yield f"{name}.mlp.gate_proj.weight", (inner, width)
        yield f"{name}.mlp.up_proj.weight", (inner, width)
        yield f"{name}.mlp.down_proj.weight", (width, inner)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", words


def main(folder, name):
    config = COMMON | CONFIGS[name]
    folder.mkdir(parents=True)
    tensors, values, shards = list(shapes(config)), pool(), {}
    for at, (key, _) in enumerate(tensors):
        shards.setdefault(at * 8 // len(tensors), []).append(tensors[at])
    files = {at: f"model-{at + 1:05}-of-{len(shards):05}.safetensors" for at in shards}
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=write, args=(folder / files[at], shard, 2 + at, values))
                 for at, shard in shards.items()]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
    weight_map = {key: files[at] for at, shard in shards.items() for key, _ in shard}
    index = {"metadata": {"total_size": size(tensors)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for sidecar in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GENESIS / sidecar, folder)
    print(f"{folder}: {size(tensors) / 2e9:.2f} G weights")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
