"""What `fp4 quantize` makes of a model, run whole by the programs that it is for.

readers.py FP4 WORK

FP4 is the program, WORK a folder to write to. Each reader predicts the token that follows a text by
a model in FP4: that of tests/models/genesis, or random experts of gpt-oss. Transformers does so by
the same weights decoded to f32, and by the model before. A reader passes if its probabilities are
near to the former: one that reads a scale wrongly, or not all tensors, is far from it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import torch
import xllamacpp
from mlx_lm.utils import load_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM, CompressedTensorsConfig, GptOssConfig, GptOssForCausalLM, Mxfp4Config,
)

TESTS = Path(__file__).parents[1]
GENESIS = TESTS / "models/genesis"
BOOK = (TESTS.parent / "examples/data/genesis.txt").read_bytes()
PROMPTS = [list(BOOK[start:start + 48]) for start in range(9000, 9800, 50)]
CONFIG = json.loads((GENESIS / "config.json").read_text())
# A reader may multiply in bf16, or round its inputs to 8 bits: of the distance that quantizing
# moves probabilities, it may be off by so much.
ALLOWED = 0.25


@torch.no_grad()
def predict(model):
    """Probabilities of the token after each prompt, by a model of transformers."""
    logits = [model(torch.tensor([tokens])).logits[0, -1] for tokens in PROMPTS]
    return torch.stack(logits).double().softmax(-1).numpy()


def dense(folder, values):
    """By the model with these values instead of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = model.state_dict()
    own |= {name: value.float() for name, value in values.items()}
    model.load_state_dict(own)
    return predict(model)


def by_transformers(path):
    options = {"dtype": torch.float32}
    if path.suffix == ".gguf":
        path, options["gguf_file"] = path.parent, path.name
    elif json.loads((path / "config.json").read_text())["model_type"] == "gpt_oss":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    else:
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    return predict(AutoModelForCausalLM.from_pretrained(path, **options))


def by_mlx(folder):
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    logits = [model(mx.array([tokens]))[0, -1].astype(mx.float32) for tokens in PROMPTS]
    return torch.from_numpy(np.array(mx.stack(logits))).double().softmax(-1).numpy()


def by_llama_cpp(path):
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 0
    server = xllamacpp.Server(params)
    found = np.full((len(PROMPTS), CONFIG["vocab_size"]), np.nan)
    for row, tokens in zip(found, PROMPTS):
        said = server.handle_completions({"prompt": tokens, "max_tokens": 1, "logprobs": len(row)})
        for token in said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[token["id"]] = np.exp(token["logprob"])
    assert not np.isnan(found).any()
    return found


def heads(name):
    """In how many heads llama.cpp's converter reorders rows, halves of each becoming pairs."""
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    return CONFIG[counts[name.split(".")[-2]]] if name.split(".")[-2] in counts else None


def reordered(tensor, count, parts):
    rows = tensor.reshape(count, *parts, tensor.shape[1])
    return rows.transpose(1, 2).reshape(tensor.shape).contiguous()


def gguf_names():
    """Names in GGUF of the tensors of the model."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG["num_hidden_layers"])
    found = load_file(GENESIS / "model.safetensors")
    return {name: names.get_name(name, try_suffixes=(".weight",)) for name in found}


def write_gguf(path):
    """The model in f32, as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_rope_dimension_count(CONFIG["head_dim"])
    vocabulary = json.loads((GENESIS / "tokenizer.json").read_text())["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
    # It has none, and an empty list is not written.
    writer.add_token_merges(["t h"])
    values = load_file(GENESIS / "model.safetensors")
    for name, other in gguf_names().items():
        value, count = values[name].float(), heads(name)
        value = value if count is None else reordered(value, count, (2, -1))
        writer.add_tensor(other, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def from_gguf(values):
    """The other direction, of names and of rows."""
    found = {}
    for name, other in gguf_names().items():
        value, count = values[other], heads(name)
        found[name] = value if count is None else reordered(value, count, (-1, 2))
    return found


def write_gpt_oss(folder):
    """A small gpt-oss of random weights."""
    torch.manual_seed(2)
    config = GptOssConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=64,
        initializer_range=0.3,
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


CASES = [
    ("compressed-tensors", "nvfp4", by_transformers),
    ("compressed-tensors", "mxfp4", by_transformers),
    ("gpt-oss", "mxfp4", by_transformers),
    ("gguf", "nvfp4", by_llama_cpp),
    ("gguf", "mxfp4", by_transformers),
    ("gguf", "mxfp4", by_llama_cpp),
    ("mlx", "nvfp4", by_mlx),
    ("mlx", "mxfp4", by_mlx),
]


def main(fp4, work):
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_gguf(work / "genesis.gguf")
    write_gpt_oss(work / "experts")
    run = lambda *words: subprocess.run([fp4, *map(str, words)], check=True, capture_output=True)
    distance = lambda left, right: np.abs(left - right).sum(-1).mean() / 2
    failed = False
    print("| dialect | format | reader | from the decoded weights | from the model before | |")
    print("|---|---|---|---|---|---|")
    for dialect, form, read in CASES:
        model = work / "experts" if dialect == "gpt-oss" else GENESIS
        source = work / "genesis.gguf" if dialect == "gguf" else model
        out = work / f"{dialect}-{form}{'.gguf' if dialect == 'gguf' else ''}"
        plain = work / f"{dialect}-{form}.plain"
        if not out.exists():
            which = ["--preset", "experts-only"] if dialect == "gpt-oss" else []
            run("quantize", source, "--out", out, "--dialect", dialect, "--format", form,
                "--method", "sse", *which)
            run("convert", out, "--out", plain, "--dialect", "plain", "--decode-fp4", "f32")
        values = load_file(plain / "model.safetensors")
        decoded = dense(model, from_gguf(values) if dialect == "gguf" else values)
        found = read(out)
        off, moved = distance(found, decoded), distance(found, dense(model, {}))
        passed = off <= ALLOWED * moved and moved > 0.01
        failed |= not passed
        print(f"| {dialect} | {form} | {read.__name__.removeprefix('by_')} | {off:.4f} | "
              f"{moved:.4f} | {'ok' if passed else 'FAILED'} |")
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
