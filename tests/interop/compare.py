"""Compares what we read with what others read.

theirs/<case>.values    by the producer            read/<case>/              by us, as float32
ours/<case>/<dialect>   written by us              ours/<case>/<dialect>.read    by us, as float32
"""

import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM, CompressedTensorsConfig, GptOssForCausalLM, Mxfp4Config,
)

rows, failed = [], False


def ulps(left, right):
    """The largest distance in units in the last place of float32 or bfloat16."""
    kind = {4: torch.int32, 2: torch.int16}[left.element_size()]
    both = [t.contiguous().view(kind).to(torch.int64) for t in (left, right)]
    least = -(1 << (8 * left.element_size() - 1))
    both = [torch.where(t < 0, least - t, t) for t in both]
    return int((both[0] - both[1]).abs().max())


def compare(what, reader, theirs, ours, allowed=0):
    global failed
    missing = sorted(set(theirs) - set(ours))
    count = differ = most = 0
    for key, value in theirs.items():
        if key in missing:
            continue
        mine = ours[key]
        if mine.shape != value.shape:
            missing.append(f"{key} {tuple(mine.shape)} for {tuple(value.shape)}")
            continue
        mine = mine.to(value.dtype)
        count += value.numel()
        differ += int((mine != value).sum())
        most = max(most, ulps(mine, value))
    bad = bool(missing) or count == 0 or most > allowed
    failed |= bad
    rows.append((what, reader, count, differ, most, "FAILED" if bad else "ok"))
    for key in missing[:3]:
        print("missing:", what, key)


def by_compressed_tensors(tensors):
    values = {}
    for key in [k for k in tensors if k.endswith(".weight_packed")]:
        module = key.removesuffix(".weight_packed")
        mx = tensors[f"{module}.weight_scale"].dtype == torch.uint8
        compressor = MXFP4PackedCompressor if mx else NVFP4PackedCompressor
        preset = PRESET_SCHEMES["MXFP4A16" if mx else "NVFP4A16"]
        scheme = QuantizationScheme(targets=["Linear"], **preset)
        names = ["weight_packed", "weight_scale", "weight_global_scale"]
        parts = {n: tensors[f"{module}.{n}"] for n in names if f"{module}.{n}" in tensors}
        values[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"]
    return values


def by_modelopt(tensors):
    values = {}
    for key in [k for k in tensors if k.endswith("weight_scale")]:
        name = key.removesuffix("_scale")
        if name not in tensors:
            name = name.removesuffix("_weight")
        packed, scale = tensors[name], tensors[key]
        if packed.ndim == 3 and packed.shape[2] == scale.shape[2]:
            # Stacked experts are stored transposed.
            packed, scale = packed.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
        shape = torch.Size([*packed.shape[:-1], 2 * packed.shape[-1]])
        if scale.dtype == torch.uint8:
            packed = MXFP4QTensor(shape, torch.float32, packed)
            value = packed.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
        else:
            double = tensors[f"{key}_2"].reshape(-1, *[1] * (len(shape) - 1))
            packed = NVFP4QTensor(shape, torch.float32, packed)
            value = packed.dequantize(torch.float32, scale=scale, double_scale=double,
                                      block_sizes={-1: 16})
        value = value.reshape(shape)
        values[name] = value if name.endswith(".weight") else value.transpose(-1, -2).contiguous()
    return values


def by_gguf(path):
    values, scales, reader = {}, {}, gguf.GGUFReader(path)
    for tensor in reader.tensors:
        if tensor.name.endswith(".scale"):
            scales[tensor.name] = torch.from_numpy(tensor.data.copy())
    for tensor in reader.tensors:
        if tensor.tensor_type.name in ("NVFP4", "MXFP4"):
            value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            scale = scales.get(tensor.name.removesuffix(".weight") + ".scale")
            if scale is not None:
                value = value * scale.reshape(-1, *[1] * (value.ndim - 1))
            values[tensor.name] = value
    return values


def by_mlx(tensors):
    values = {}
    for key in [k for k in tensors if k.endswith(".scales")]:
        module = key.removesuffix(".scales")
        codes, scales = tensors[f"{module}.weight"], tensors[key]
        size = 8 * codes.shape[-1] // scales.shape[-1]
        mode = {16: "nvfp4", 32: "mxfp4"}[size]
        parts = [mx.array(t.numpy()) for t in (codes, scales)]
        value = mx.dequantize(*parts, None, size, 4, mode, dtype=mx.float32)
        values[f"{module}.weight"] = torch.from_numpy(np.array(value))
    return values


def by_transformers(folder, kind, config):
    model = kind.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    return model.state_dict()


def ours(folder, case, dialect):
    path = folder / ("gguf.gguf" if dialect == "gguf" else dialect)
    mine = load_file(folder / f"{dialect}.read" / "model.safetensors")
    what = f"{case} -> {dialect}"
    quantized = {k for k in mine if k.endswith("proj.weight") or "ffn_" in k or "experts." in k}
    fp4 = {k: v for k, v in mine.items() if k in quantized and not k.endswith(("bias", "scale"))}
    if dialect == "gguf":
        compare(what, "gguf 0.19.0", by_gguf(path), fp4)
    elif dialect == "modelopt":
        theirs = by_modelopt(load_file(path / "model.safetensors"))
        compare(what, "nvidia-modelopt 0.47.0", theirs, fp4, allowed=1)
    elif dialect == "compressed-tensors":
        theirs = by_compressed_tensors(load_file(path / "model.safetensors"))
        compare(what, "compressed-tensors 0.20.0", theirs, fp4)
        if "gguf" not in case:
            config = CompressedTensorsConfig(run_compressed=False)
            state = by_transformers(path, AutoModelForCausalLM, config)
            compare(what, "transformers 5.23.0", {k: state[k] for k in fp4}, fp4)
    elif dialect == "mlx":
        theirs = by_mlx(load_file(path / "model.safetensors"))
        compare(what, "mlx 0.32.4", theirs, fp4)
    elif dialect == "gpt-oss":
        state = by_transformers(path, GptOssForCausalLM, Mxfp4Config(dequantize=True))
        compare(what, "transformers 5.23.0", {k: state[k] for k in fp4}, fp4)


def main():
    root = Path(sys.argv[1])
    for values in sorted((root / "theirs").glob("*.values")):
        case = values.stem
        read = load_file(root / "read" / case / "model.safetensors")
        allowed = 1 if case.startswith(("modelopt", "torchao", "comfyui")) else 0
        theirs = load_file(values)
        # compressed-tensors and gpt-oss give bfloat16.
        if case.startswith(("compressed-tensors", "gpt-oss")):
            theirs = {k: v.to(torch.bfloat16) for k, v in theirs.items()}
        compare(f"{case}, written by others", "ours", theirs, read, allowed)
    for folder in sorted((root / "ours").iterdir()):
        for read in sorted(folder.glob("*.read")):
            ours(folder, folder.name, read.stem)
    print(f"\n| {'file':40} | {'reader':25} | values | differ | ulp | |")
    print("|---|---|---|---|---|---|")
    for what, reader, count, differ, most, verdict in rows:
        print(f"| {what:40} | {reader:25} | {count} | {differ} | {most} | {verdict} |")
    sys.exit(failed)


main()
