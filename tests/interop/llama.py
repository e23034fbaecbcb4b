"""The model that ships, and small relatives of it, as transformers computes them.

llama.py make FP4 WORK           makes the files that tests/llama.rs compares with
llama.py check FP4 WORK LLAMA    compares with these, and what the example makes of the model

FP4 is the command line, LLAMA the example, WORK a folder to write to.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM,
    Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM,
)

PROMPT = "And God said unto Noah, "
TOKENS = 200
TESTS = Path(__file__).parents[1]
BOOK = TESTS.parent / "examples/data/genesis.txt"
GENESIS = TESTS / "models/genesis"
GOLDEN = TESTS / "golden/llama.safetensors"


def load(folder, **options):
    """In f32, and by the plainest attention."""
    options |= {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def logits(model, tokens):
    return model(torch.from_numpy(tokens.astype(np.int64))).logits.float().numpy()


@torch.no_grad()
def greedy(model, prompt):
    """The tokens that follow a prompt."""
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS,
                           min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return found[0, len(prompt):].numpy().astype(np.int32)


@torch.no_grad()
def nats(model, tokens, window, stride):
    """Mean of -ln p of each token but the first, in windows that overlap."""
    total, known = 0.0, 1
    for start in range(0, len(tokens), stride):
        end = min(start + window, len(tokens))
        ids = torch.tensor([tokens[start:end]])
        p = model(ids).logits[0].double().log_softmax(-1)
        targets = ids[0, known - start:]
        total -= p[known - start - 1:-1].gather(1, targets[:, None]).sum().item()
        known = end
        if end == len(tokens):
            return total / (len(tokens) - 1)


def relatives():
    """Small models of random weights, each with something that the model that ships has not."""
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "max_position_embeddings": 64}
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    yield "llama3", LlamaForCausalLM(LlamaConfig(
        **small, num_key_value_heads=1, rope_parameters=scaled, attention_bias=True, mlp_bias=True))
    yield "qwen2", Qwen2ForCausalLM(Qwen2Config(
        **small, num_key_value_heads=2, tie_word_embeddings=True))
    yield "qwen3", Qwen3ForCausalLM(Qwen3Config(**small, num_key_value_heads=4, head_dim=16))


def dense(models):
    """Of the model that ships, and of its relatives, which are made in a folder."""
    torch.manual_seed(1)
    found = {}
    for name, model in relatives():
        for parameter in model.parameters():
            # Biases and norms too, and large enough that positions and gates matter.
            noise = torch.randn_like(parameter) * 0.3
            parameter.data = (noise if parameter.ndim > 1 else 1 + noise).to(torch.bfloat16)
        model.to(torch.bfloat16).save_pretrained(models / name)
        (models / name / "generation_config.json").unlink()
        tokens = np.random.default_rng(2).integers(0, 40, (2, 24)).astype(np.int32)
        found[f"{name}.tokens"] = tokens
        found[f"{name}.logits"] = logits(load(models / name), tokens)
    book = BOOK.read_bytes()
    model, tokenizer = load(GENESIS), AutoTokenizer.from_pretrained(GENESIS)
    held_out = tokenizer(BOOK.read_text())["input_ids"][-4000:]
    assert bytes(held_out) == book[-4000:], "a token is a byte"
    assert tokenizer.decode(held_out) == book[-4000:].decode()
    tokens = np.array([list(book[:48]), list(book[9000:9048])], np.int32)
    found |= {"genesis.tokens": tokens, "genesis.logits": logits(model, tokens)}
    prompt = tokenizer(PROMPT)["input_ids"]
    found["genesis.prompt"] = np.array(prompt, np.int32)
    found["genesis.greedy"] = greedy(model, prompt)
    found["genesis.nats"] = np.array([nats(model, held_out, 256, 128)], np.float64)
    return found


def run(*arguments):
    ran = subprocess.run([str(one) for one in arguments], check=True, stdout=subprocess.PIPE)
    return ran.stdout


def quantized(fp4, work):
    """What the model that ships says once fp4 has quantized it."""
    prompt = AutoTokenizer.from_pretrained(GENESIS)(PROMPT)["input_ids"]
    found = {}
    for form in ["nvfp4", "mxfp4"]:
        for dialect in ["compressed-tensors", "modelopt"]:
            out = work / f"{form}-{dialect}"
            run(fp4, "quantize", GENESIS, "--out", out, "--format", form, "--dialect", dialect,
                "--method", "sse")
        config = CompressedTensorsConfig(run_compressed=False)
        model = load(work / f"{form}-compressed-tensors", quantization_config=config)
        found[f"{form}.greedy"] = greedy(model, prompt)
    return found


def codes(folder):
    """Codes and block scales by the names of weights, whatever the dialect calls them."""
    tensors = load_tensors(folder / "model.safetensors")
    bytes_ = {n: t.view(torch.uint8) for n, t in tensors.items() if t.element_size() == 1}
    return {n.removesuffix("_packed"): t for n, t in bytes_.items()}


def check(fp4, work, llama):
    failed = False

    def row(what, value, passed):
        nonlocal failed
        failed |= not passed
        print(f"| {what:56} | {value:>12} | {'ok' if passed else 'FAILED'} |")

    stored = load_file(GOLDEN)
    found = dense(work) | quantized(fp4, work)
    print(f"\n| {'transformers, and tests/golden/llama.safetensors':56} | {'differ by':12} | |")
    print("|---|---|---|")
    for name, value in found.items():
        most = float(np.abs(stored[name].astype(np.float64) - value).max())
        row(name, f"{most:.1e}", most <= 1e-5)
    for form in ["nvfp4", "mxfp4"]:
        folders = [work / f"{form}-{dialect}" for dialect in ["compressed-tensors", "modelopt"]]
        folders.append(work / f"{form}-burn")
        run(llama, "quantize", GENESIS, folders[2], "--format", form)
        first, *others = [codes(folder) for folder in folders]
        for folder, other in zip(folders[1:], others):
            assert first.keys() == other.keys() and len(first) == 56, (len(first), len(other))
            differ = sum(int((first[n] != other[n]).sum()) for n in first)
            row(f"{folder.name}: codes and scales that differ", differ, differ == 0)
        for folder in folders:
            said = json.loads(run(llama, "generate", folder, "--prompt", PROMPT, "--tokens",
                                  TOKENS, "--activations", "f32", "--lm-head", "as-loaded",
                                  "--json"))["sequences"][0]
            same = int((np.array(said) == found[f"{form}.greedy"]).sum())
            row(f"{folder.name}: greedy tokens as transformers", same, same == TOKENS)
    sys.exit(failed)


def main(command, fp4, work, *rest):
    work = Path(work)
    run("rm", "-rf", work)
    work.mkdir(parents=True)
    if command == "check":
        check(fp4, work, *rest)
    save_file(dense(GENESIS.parent) | quantized(fp4, work), GOLDEN)


if __name__ == "__main__":
    main(*sys.argv[1:])
