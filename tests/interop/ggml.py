"""Quantized types of ggml other than FP4, as Python's gguf reads them.

ggml.py make               makes tests/golden/ggml.safetensors, which the tests compare with
ggml.py check FP4 WORK [GGUF]
                           decodes a GGUF file by `fp4 convert` and by gguf, and compares the bits;
                           without GGUF, one of the records of `make`

FP4 is the command line, WORK a folder to write to.
"""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden/ggml.safetensors"
# Where the f16 of a record lie.
FLOATS = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0],
          "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
          "IQ4_XS": [0]}
# Ordinary, subnormal, negative, the largest: what a scale can be, and an offset.
SCALES = np.array([[0.0123, -0.5], [-3e-6, 6e-8], [6e-8, 0.02], [-65504, 0.0]], np.float16)


def records(kind, random):
    """Records with random codes and block scales, behind some that gguf has quantized."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    found = random.integers(0, 256, (len(SCALES), size), dtype=np.uint8)
    for column, at in enumerate(FLOATS[kind.name]):
        found[:, at:at + 2] = SCALES[:, column:column + 1].view(np.uint8)
    try:
        floats = random.normal(0, 0.03, (8, block)).astype(np.float32)
        return np.concatenate([gguf.quants.quantize(floats, kind), found])
    except NotImplementedError:
        return found


def make():
    random = np.random.default_rng(11)
    tensors = {}
    for kind in map(Type.__getitem__, FLOATS):
        tensors[f"{kind.name}/records"] = found = records(kind, random)
        tensors[f"{kind.name}/values"] = values = gguf.quants.dequantize(found, kind)
        assert values.dtype == np.float32 and np.isfinite(values).all(), kind
    return tensors


def write(path):
    writer = gguf.GGUFWriter(path, "llama")
    for name, found in make().items():
        kind, part = name.split("/")
        if part == "records":
            # Rows of two records each.
            rows = found.reshape(len(found) // 2, -1)
            writer.add_tensor(f"{kind}.weight", rows, raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(fp4, work, path):
    dense = work / "dense"
    subprocess.run(["rm", "-rf", dense], check=True)
    subprocess.run([fp4, "convert", path, "--out", dense, "--dialect", "plain",
                    "--decode-ggml", "f32"], check=True)
    ours, kinds = load_file(dense / "model.safetensors"), {}
    for tensor in gguf.GGUFReader(path).tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        value = value.reshape([int(axis) for axis in reversed(tensor.shape)])
        mine = ours.pop(tensor.name)
        assert mine.shape == value.shape, tensor.name
        differ = int((mine.astype(np.float32).view(np.uint32) != value.view(np.uint32)).sum())
        count = kinds.setdefault(tensor.tensor_type.name, [0, 0, 0])
        kinds[tensor.tensor_type.name] = [a + b for a, b in zip(count, [1, value.size, differ])]
    assert not ours, list(ours)
    for name, (tensors, values, differ) in kinds.items():
        print(f"{name}: {tensors} tensors, {values} values, {differ} differ")
    sys.exit(any(differ for _, _, differ in kinds.values()))


def main(command, *arguments):
    if command == "make":
        return save_file(make(), GOLDEN)
    fp4, work = arguments[0], Path(arguments[1])
    work.mkdir(parents=True, exist_ok=True)
    path = Path(arguments[2]) if arguments[2:] else work / "records.gguf"
    if not arguments[2:]:
        write(path)
    check(fp4, work, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
