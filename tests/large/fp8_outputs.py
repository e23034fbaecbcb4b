"""Errors of the outputs of a model's layers by inputs in f32 and in FP8, on real inputs.

python3 fp8_outputs.py DENSE PACKED TEXT [WINDOWS]

DENSE is a Hugging Face folder of a Llama in f32, PACKED the same model by `fp4 quantize`, in NVFP4
or MXFP4. Each linear layer gets the inputs that it has in the dense model, for the last windows of
512 tokens of a text. The error of a layer is |output - dense output| / |dense output|: with the
packed weight alone, and by `Activations::Fp8Rounded`, where the input is rounded to E4M3 by rows
and the products `element x block scale` too. Prints the means over layers, then both errors over
the outputs of all layers together. Needs the packages ml_dtypes, numpy and tokenizers.
"""

import json
import sys
from pathlib import Path

import numpy as np
from ml_dtypes import float8_e4m3fn
from tokenizers import Tokenizer

WINDOW = 512
DTYPES = {"F32": np.float32, "U8": np.uint8, "F8_E4M3": float8_e4m3fn}
ELEMENTS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def load(file):
    """The tensors of a safetensors file. The package safetensors has no float8 for numpy."""
    length = int(np.fromfile(file, np.uint64, 1)[0])
    values = np.memmap(file, np.uint8, "r", 8)
    header = json.loads(bytes(values[:length]))
    header.pop("__metadata__", None)

    def tensor(entry):
        start, end = (length + at for at in entry["data_offsets"])
        return values[start:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])

    return {name: tensor(entry) for name, entry in header.items()}


def e4m3(values):
    return values.astype(float8_e4m3fn).astype(np.float32)


def weights(tensors, name):
    """The packed weight `[outputs, inputs]`, and the one that products in FP8 read."""
    packed, scales = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    elements = np.where(codes & 8, -1, 1) * ELEMENTS[codes & 7]
    blocks = elements.reshape(*scales.shape, -1)
    if scales.dtype == np.uint8:
        scales, unit = np.exp2(scales.astype(np.float32) - 127)[..., None], 1
        # The largest scale of a row is 2^6 then; blocks of zeros do not count.
        largest = np.where(blocks.any(-1, keepdims=True), scales, 0).max(axis=1, keepdims=True)
        shift = 64 / np.where(largest == 0, 1, largest)
    else:
        scales, shift = scales.astype(np.float32)[..., None], 1 / 8
        unit = 1 / tensors[f"{name}.weight_global_scale"]
    products = blocks * scales
    rounded = e4m3(products * shift) / shift
    found = [unit * values for values in (products, rounded)]
    return [values.reshape(codes.shape).astype(np.float32) for values in found]


def rounded_rows(values):
    largest = np.abs(values).max(axis=1, keepdims=True)
    scale = np.where(largest == 0, 1, largest / 448)
    return e4m3(values / scale) * scale


def norm(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def rotate(x, theta):
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(np.float32)


def attention(q, k, v):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", shares, v).reshape(len(q), -1)


def main(dense, packed, text, windows):
    config = json.loads((dense / "config.json").read_text())
    theta, epsilon = config["rope_theta"], config["rms_norm_eps"]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    ids = Tokenizer.from_file(str(dense / "tokenizer.json")).encode(text.read_text()).ids
    model, tensors = (load(folder / "model.safetensors") for folder in (dense, packed))
    xs = [model["model.embed_tokens.weight"][ids[-at * WINDOW:][:WINDOW]]
          for at in range(windows, 0, -1)]
    # For each layer: squares of both errors, and of the dense outputs.
    squares = {}

    def outputs(name, inputs):
        own = np.zeros(3)
        weight, (packed_weight, fp8_weight) = model[f"{name}.weight"], weights(tensors, name)
        found = []
        for x in inputs:
            y = x @ weight.T
            errors = [x @ packed_weight.T - y, rounded_rows(x) @ fp8_weight.T - y, y]
            own += [(error.astype(np.float64) ** 2).sum() for error in errors]
            found.append(y)
        squares[name] = own
        return found

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        inputs = [norm(x, model[f"{at}.input_layernorm.weight"], epsilon) for x in xs]
        q, k, v = (outputs(f"{at}.self_attn.{part}_proj", inputs) for part in "qkv")
        mixed = []
        for q, k, v in zip(q, k, v):
            q, k, v = (x.reshape(WINDOW, -1, head_dim) for x in (q, k, v))
            mixed.append(attention(rotate(q, theta), rotate(k, theta), v))
        xs = [x + y for x, y in zip(xs, outputs(f"{at}.self_attn.o_proj", mixed))]
        inputs = [norm(x, model[f"{at}.post_attention_layernorm.weight"], epsilon) for x in xs]
        gate, up = (outputs(f"{at}.mlp.{part}_proj", inputs) for part in ("gate", "up"))
        inputs = [g / (1 + np.exp(-g)) * u for g, u in zip(gate, up)]
        xs = [x + y for x, y in zip(xs, outputs(f"{at}.mlp.down_proj", inputs))]
    found = np.array(list(squares.values()))
    errors = np.sqrt(found[:, :2] / found[:, 2:])
    quotients = errors[:, 1] / errors[:, 0]
    f32, fp8 = 100 * errors.mean(axis=0)
    print(f"by layer: {f32:.2f} %, in FP8 {fp8:.2f} %, mean quotient {quotients.mean():.3f}; "
          f"{(quotients > 1.1).sum()} of {len(quotients)} layers above 1.1, the most "
          f"{quotients.max():.3f} in {list(squares)[quotients.argmax()]}")
    f32, fp8 = 100 * np.sqrt(found[:, :2].sum(axis=0) / found[:, 2].sum())
    print(f"together: {f32:.2f} %, in FP8 {fp8:.2f} %, quotient {fp8 / f32:.3f}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), int(sys.argv[4]) if len(sys.argv) > 4 else 8)
