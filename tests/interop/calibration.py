"""Statistics of the inputs of linear layers, which `fp4 quantize --calibration` reads.

calibration.py MODEL TEXT OUT.safetensors   runs the model on a text
calibration.py check FP4 WORK               does so with tests/models/genesis, and quantizes it

MODEL is a folder of transformers, FP4 the command line, WORK a folder to write to.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 512


@torch.no_grad()
def statistics(folder, text, tokens=TOKENS):
    """X^T X of the inputs X of every linear layer: [in, in], under the name of its weight."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums = {}

    def watch(name, layer):
        def add(_, inputs):
            x = inputs[0].reshape(-1, layer.in_features).double()
            sums[name] = sums.get(name, 0) + x.T @ x
        layer.register_forward_pre_hook(add)

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            watch(f"{name}.weight", layer)
    ids = tokenizer(text, return_tensors="pt").input_ids
    for window in ids.split(tokens, dim=1):
        model(window)
    return {name: total.float().contiguous() for name, total in sums.items()}


def check(fp4, work):
    tests = Path(__file__).parents[1]
    model = tests / "models/genesis"
    work.mkdir(parents=True, exist_ok=True)
    text = (tests.parent / "examples/data/genesis.txt").read_text()[:20_000]
    saved = work / "statistics.safetensors"
    save_file(statistics(model, text, 128), saved)
    weights = load_file(model / "model.safetensors")
    for name, total in load_file(saved).items():
        assert total.shape == (weights[name].shape[1],) * 2, name
        assert torch.equal(total, total.T) and (total.diagonal() >= 0).all(), name
    errors = {}
    for method in ["sse", "sse-weighted", "hessian", "gptq"]:
        out = work / method
        subprocess.run(["rm", "-rf", out], check=True)
        command = [fp4, "quantize", model, "--out", out, "--method", method, "--json"]
        made = subprocess.run([*command, "--calibration", saved], check=True, capture_output=True)
        found = json.loads(made.stdout)["errors"]
        errors[method] = found.get("mean_output_percent"), found["mean_percent"]
        assert found["not_measured"] == 0
    outputs, values = errors["gptq"]
    print(f"calibration.py: gptq {values:.2f} % of weights, {outputs:.2f} % of outputs")
    # GPTQ trades errors of weights for errors of outputs.
    assert outputs < values and values > errors["sse"][1]


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check(sys.argv[2], Path(sys.argv[3]))
    else:
        save_file(statistics(sys.argv[1], Path(sys.argv[2]).read_text()), sys.argv[3])
