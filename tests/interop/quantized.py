"""GGUF files that `fp4 quantize` makes, read by Python's gguf: quantized.py FP4 FOLDER

FP4 is the program. A file of f16 tensors and an imatrix are written by gguf, quantized by each
format and method, and dequantized by gguf and by `fp4 convert`; the values have to be the same.
"""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

SHAPES = {"token_embd.weight": (64, 256), "blk.0.attn_norm.weight": (256,),
          "blk.0.attn_q.weight": (256, 256), "blk.0.ffn_up.weight": (320, 256),
          "blk.0.ffn_down.weight": (256, 320), "blk.0.ffn_gate_exps.weight": (4, 64, 256)}


def write(path, tensors, kind):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(kind)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def values(path):
    """Every tensor of a file as gguf reads it, times its tensor scale."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight"):
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            value = value.reshape([int(n) for n in reversed(tensor.shape)])
            scale = tensors.get(name.removesuffix("weight") + "scale")
            if scale is not None:
                numbers = np.array(scale.data, np.float32).reshape(-1)
                value = value * numbers.reshape([-1] + [1] * (value.ndim - 1))
            found[name] = value, tensor.tensor_type.name
    return found


def main(program, folder):
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(3)
    model = {name: random.normal(0, 0.03, shape).astype(np.float16 if shape[1:] else np.float32)
             for name, shape in SHAPES.items()}
    write(folder / "f16.gguf", model, "small")
    sums = {}
    for name, shape in SHAPES.items():
        if shape[1:]:
            stacked = shape[0] if shape[2:] else 1
            squares = random.chisquare(1, (stacked, shape[-1])).astype(np.float32)
            sums[f"{name}.in_sum2"] = squares
            sums[f"{name}.counts"] = np.full((stacked, 1), 7, np.float32)
    write(folder / "imatrix.gguf", sums, "imatrix")
    run = lambda *arguments: subprocess.run([program, *map(str, arguments)], check=True)
    for form in ["nvfp4", "mxfp4"]:
        for method in ["amax", "sse", "sse-weighted"]:
            out = folder / f"{form}-{method}.gguf"
            dense = folder / f"{form}-{method}"
            out.unlink(missing_ok=True)
            if dense.exists():
                subprocess.run(["rm", "-r", dense], check=True)
            run("quantize", folder / "f16.gguf", "--out", out, "--format", form, "--method",
                method, *(["--calibration", folder / "imatrix.gguf"] if "-" in method else []))
            run("convert", out, "--out", dense, "--dialect", "plain", "--decode-fp4", "f32")
            ours = load_file(dense / "model.safetensors")
            count = differ = quantized = 0
            error = energy = 0.0
            for name, (value, kind) in values(out).items():
                quantized += kind.upper() == form.upper()
                count += value.size
                differ += int((value != ours[name].astype(np.float32)).sum())
                error += float(((value - model[name].astype(np.float32)) ** 2).sum())
                energy += float((model[name].astype(np.float32) ** 2).sum())
            print(f"{form} {method}: {quantized} tensors quantized, {count} values, {differ} "
                  f"differ, error {100 * (error / energy) ** 0.5:.3f} %")
            assert differ == 0 and quantized == 4


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
