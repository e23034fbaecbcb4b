"""GGUF files that `fp4 quantize` makes, read by Python's gguf: quantized.py FP4 FOLDER

FP4 is the program. A file of f16 tensors and an imatrix are written by gguf, quantized by each
format and method, and dequantized by gguf and by `fp4 convert`; the values have to be the same.
Relative errors of each tensor, plain and weighted by the imatrix, are printed next to the
errors of gguf's own quantizer, which has the rule of llama.cpp, for the types that it has one for.
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


def errors(value, original, sums):
    """Relative error of a tensor in percent, and the same weighted by the imatrix."""
    original = original.astype(np.float32)
    weights = sums.reshape([-1] + [1] * (original.ndim - 2) + [original.shape[-1]])
    part = lambda w: 100 * float(((w * (value - original) ** 2).sum()
                                  / (w * original ** 2).sum()) ** 0.5)
    return f"{part(1):6.3f} {part(weights):6.3f}"


def by_llama_cpp(tensor, sums, form):
    """The errors of gguf's own quantizer, if it has one for the type."""
    kind = gguf.GGMLQuantizationType[form.upper()]
    try:
        codes = gguf.quants.quantize(tensor.astype(np.float32), kind)
    except NotImplementedError:
        return "no quantizer"
    return errors(gguf.quants.dequantize(codes, kind).reshape(tensor.shape), tensor, sums)


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
    methods = ["amax", "sse", "sse-weighted"]
    for form in ["nvfp4", "mxfp4"]:
        found = {}
        for method in methods:
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
            for name, (value, kind) in values(out).items():
                count += value.size
                differ += int((value != ours[name].astype(np.float32)).sum())
                if kind.upper() == form.upper():
                    quantized += 1
                    of_method = errors(value, model[name], sums[f"{name}.in_sum2"])
                    found.setdefault(name, []).append(of_method)
            print(f"{form} {method}: {quantized} tensors quantized, {count} values, "
                  f"{differ} differ")
            assert differ == 0 and quantized == 4
        row = lambda name, cells: print(f"  {name:26}" + "".join(f"{c:>18}" for c in cells))
        row(f"{form}: error %, weighted %", ["llama.cpp's rule", *methods])
        for name, ours in found.items():
            row(name, [by_llama_cpp(model[name], sums[f"{name}.in_sum2"], form), *ours])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
