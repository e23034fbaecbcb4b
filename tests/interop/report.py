"""Compares perplexities by `llama report`, of one model in three dialects, with transformers'.

report.py FP4 LLAMA WORK [TEXT]

FP4 is the program, LLAMA the release build of the example, WORK a folder to write to; TEXT is
Genesis by default. Both predict its first 3000 tokens. `fp4 quantize` quantizes SmolLM2-135M
(tests/large/smollm2.py) once a format, and `fp4 convert` converts the result. Transformers decodes
the file of compressed-tensors to f32. Fails if perplexities of the same weights, or of the dense
model, differ by more than 0.5 %.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

ROOT = Path(__file__).parents[2]
WINDOW, STRIDE, TOKENS = 512, 448, 3000


def run(*command):
    return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout


@torch.no_grad()
def by_transformers(folder, tokens, **options):
    """Perplexity in the windows of the example: a token is predicted once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    nats, predicted = 0.0, 1
    for start in range(0, len(tokens), STRIDE):
        window = torch.tensor([tokens[start:start + WINDOW]])
        logits = model(window).logits[0, predicted - start - 1:-1]
        expected = window[0, predicted - start:]
        nats += torch.nn.functional.cross_entropy(logits.double(), expected, reduction="sum").item()
        predicted = start + window.shape[1]
        if predicted == len(tokens):
            break
    return torch.tensor(nats / (len(tokens) - 1)).exp().item()


def main(fp4, llama, work, text=ROOT / "examples/data/genesis.txt"):
    work = Path(work)
    work.mkdir(parents=True, exist_ok=True)
    dense = work / "smollm2"
    if not dense.exists():
        run(sys.executable, ROOT / "tests/large/smollm2.py", dense)
    tokenizer = Tokenizer.from_file(str(dense / "tokenizer.json"))
    book = Path(text).read_text()
    end = tokenizer.encode(book[:8 * TOKENS]).offsets[TOKENS - 1][1]
    sample = work / "sample.txt"
    sample.write_text(book[:end])
    tokens = tokenizer.encode(book[:end]).ids

    def report(path):
        found = json.loads(run(llama, "report", path, "--reference", dense, "--text", sample,
                               "--window", WINDOW, "--stride", STRIDE, "--json"))
        found, = found["texts"]
        assert found["tokens"] == len(tokens) - 1, found
        return found

    theirs = by_transformers(dense, tokens)
    print("| weights | `llama report`: file | perplexity | transformers |\n|---|---|---|---|")
    failed = []

    def row(name, dialect, ours, theirs):
        print(f"| {name} | {dialect} | {ours:.4f} | {theirs:.4f} |", flush=True)
        if abs(ours / theirs - 1) > 0.005:
            failed.append(f"{name}, {dialect}")

    for name in ("nvfp4", "mxfp4"):
        folder = work / f"report-{name}"
        if not folder.exists():
            run(fp4, "quantize", dense, "--format", name, "--dialect", "compressed-tensors",
                "--out", folder)
        modelopt, gguf = work / f"report-{name}-modelopt", work / f"report-{name}.gguf"
        for path, dialect in ((modelopt, "modelopt"), (gguf, "gguf")):
            if not path.exists():
                run(fp4, "convert", folder, "--dialect", dialect, "--out", path)
        decoded = by_transformers(
            folder, tokens, quantization_config=CompressedTensorsConfig(dequantize=True))
        for path, dialect in ((folder, "compressed-tensors"), (modelopt, "modelopt"),
                              (gguf, "gguf")):
            found = report(path)
            if (name, dialect) == ("nvfp4", "compressed-tensors"):
                row("dense", "", found["reference_perplexity"], theirs)
            row(name.upper(), dialect, found["perplexity"], decoded)
    if failed:
        sys.exit(f"perplexities differ by more than 0.5 %: {'; '.join(failed)}")


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    main(*sys.argv[1:])
