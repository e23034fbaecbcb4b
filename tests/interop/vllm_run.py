"""What vLLM computes from files of `fp4 quantize`. Needs an NVIDIA GPU, and the package vllm.

    vllm_run.py FP4 MODEL WORK

FP4 is the program, MODEL a dense folder of a language model that vLLM knows, with a
`tokenizer.json`. It is quantized in each dialect and format of CASES. vLLM predicts 4088 tokens of
Genesis from the result, from the decoded weights in bfloat16, and from the model before. Fails if
the perplexity of a result is more than 1 % from that of its decoded weights.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

CASES = [("compressed-tensors", "nvfp4"), ("modelopt", "nvfp4"), ("compressed-tensors", "mxfp4")]
BOOK = Path(__file__).parents[2] / "examples/data/genesis.txt"
WINDOWS, WINDOW = 8, 512
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
               "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
               "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def decode(codes, scales, divisor):
    """The values of a weight of compressed-tensors; MXFP4 has no divisor."""
    codes = codes.numpy()
    both = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    values = E2M1[both & 7] * np.where(both & 8, -1, 1).astype(np.float32)
    if divisor is None:
        blocks = np.exp2(scales.view(torch.uint8).numpy().astype(np.float32) - 127)
    else:
        blocks = scales.view(torch.float8_e4m3fn).float().numpy() / float(divisor)
    return torch.from_numpy(values * np.repeat(blocks, values.shape[-1] // blocks.shape[-1], -1))


def decoded(quantized, dense, out):
    """Writes the decoded weights of a folder of compressed-tensors, in bfloat16."""
    tensors, values = load_file(quantized / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            name = name.removesuffix("_packed")
            divisor = tensors.get(f"{name}_global_scale")
            values[name] = decode(tensor, tensors[f"{name}_scale"], divisor)
        elif not name.endswith("_scale"):
            values[name] = tensor
    out.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (out / name).write_bytes((dense / name).read_bytes())
    values = {name: value.to(torch.bfloat16).contiguous() for name, value in values.items()}
    save_file(values, out / "model.safetensors", {"format": "pt"})


def predict(folder, tokens):
    """The logarithms of the probabilities of all tokens but the first of each window."""
    from vllm import LLM, SamplingParams

    model = LLM(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
                max_model_len=2 * WINDOW, gpu_memory_utilization=0.25)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = model.generate([{"prompt_token_ids": window} for window in tokens], asked)
    return [at[token].logprob for one, window in zip(found, tokens)
            for at, token in zip(one.prompt_logprobs[1:], window[1:])]


def predicted(folder, tokens, work):
    """The same in a process of its own, which frees the memory of the GPU."""
    asked, found = work / "tokens.json", work / "found.json"
    asked.write_text(json.dumps(tokens))
    found.unlink(missing_ok=True)
    command = [sys.executable, __file__, "predict", folder, asked, found]
    ran = subprocess.run([str(one) for one in command], env=os.environ | ENVIRONMENT,
                         capture_output=True, text=True)
    if not found.exists():
        sys.exit(f"vLLM does not run {folder}:\n{ran.stderr[-2000:]}")
    return np.array(json.loads(found.read_text()))


def main(fp4, model, work):
    from tokenizers import Tokenizer

    work.mkdir(parents=True)
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(BOOK.read_text()).ids
    tokens = [tokens[at * WINDOW:(at + 1) * WINDOW] for at in range(WINDOWS)]
    perplexity = lambda found: math.exp(-found.mean())
    dense, of_format, failed = predicted(model, tokens, work), {}, False
    print(f"dense: perplexity {perplexity(dense):.3f}\n")
    print("| dialect | format | perplexity | of the decoded weights | mean difference of log "
          "probabilities | from the model before |\n|---|---|---|---|---|---|")
    for dialect, name in CASES:
        out = work / f"{dialect}-{name}"
        subprocess.run([fp4, "quantize", model, "--out", out, "--dialect", dialect, "--format",
                        name], check=True, capture_output=True)
        if name not in of_format:
            plain = work / f"decoded-{name}"
            decoded(out, model, plain)
            of_format[name] = predicted(plain, tokens, work)
        found, expected = predicted(out, tokens, work), of_format[name]
        failed |= abs(perplexity(found) / perplexity(expected) - 1) > 0.01
        print(f"| {dialect} | {name} | {perplexity(found):.3f} | {perplexity(expected):.3f} "
              f"| {np.abs(found - expected).mean():.3f} | {np.abs(found - dense).mean():.3f} |",
              flush=True)
    sys.exit(failed)


if sys.argv[1] == "predict":
    folder, asked, found = map(Path, sys.argv[2:])
    found.write_text(json.dumps(predict(folder, json.loads(asked.read_text()))))
else:
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), Path(sys.argv[3]))
