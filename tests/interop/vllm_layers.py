"""What `fp4 quantize` makes of a model, taken by the linear layers of vLLM 0.33.0 without a GPU.

vllm_layers.py FP4 WORK

FP4 is the program, WORK a folder to write to. vLLM's config classes read `config.json`, its layers
of queries, keys and values make their parameters, and its loaders fill these; the kernels, which
need a GPU, are replaced by one that does nothing. What the parameters then mean has to be what
`fp4 convert` decodes. `pip install --no-deps vllm==0.33.0` into the environment of run.sh, and what
`import vllm.model_executor.layers.quantization.modelopt` then asks for.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_mxfp4 as mxfp4, compressed_tensors_w4a4_nvfp4 as nvfp4,
)

GENESIS = Path(__file__).parents[1] / "models/genesis"
CONFIG = json.loads((GENESIS / "config.json").read_text())
NAMES = ["compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"]
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CASES = [
    ("compressed-tensors", "nvfp4", True), ("compressed-tensors", "mxfp4", True),
    ("modelopt", "nvfp4", True), ("modelopt", "mxfp4", False),
]


class Nothing:
    """Instead of a kernel."""

    def process_weights_after_loading(self, layer):
        pass


def layer(quantization, prefix):
    """vLLM's layer of queries, keys and values, by the config class that claims the config."""
    claims = [get_quantization_config(name) for name in NAMES[1:]]
    claimed = [c for c in claims if c.override_quantization_method(quantization, None)]
    kind = claimed[0] if claimed else get_quantization_config(NAMES[0])
    config = kind.from_config(dict(quantization))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    sizes = [CONFIG[key] for key in ["hidden_size", "head_dim", "num_attention_heads",
                                     "num_key_value_heads"]]
    return QKVParallelLinear(*sizes, bias=False, quant_config=config, prefix=prefix + "qkv_proj",
                             params_dtype=torch.bfloat16)


def loaded(folder):
    """What the parameters of the layer mean, once vLLM has loaded them."""
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    made = layer(quantization, prefix)
    parameters = dict(made.named_parameters())
    for shard in "qkv":
        own = {n.removeprefix(f"{prefix}{shard}_proj."): t for n, t in tensors.items()
               if n.startswith(f"{prefix}{shard}_proj.")}
        for name, tensor in own.items():
            parameters[name].weight_loader(parameters[name], tensor, shard)
        # Of weights alone ModelOpt once wrote it; vLLM drops it.
        weights_only = quantization.get("quant_algo") == "W4A16_NVFP4"
        needed = set(parameters) - ({"input_scale"} if weights_only else set())
        assert own.keys() >= needed, (own.keys(), needed)
    made.quant_method.process_weights_after_loading(made)
    codes = made.weight.data
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    scales = made.weight_scale.data
    scales = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    size = pairs.shape[1] // scales.shape[1]
    values = CODES[pairs.long()] * scales.repeat_interleave(size, 1)
    return values * getattr(made, "weight_global_scale", torch.tensor(1.0)).float()


def main(fp4, work):
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    modelopt.select_linear_kernel = lambda *_, **__: Nothing()
    nvfp4.init_nvfp4_linear_kernel = lambda *_, **__: Nothing()
    mxfp4.init_mxfp4_linear_kernel = lambda *_, **__: Nothing()
    for module in [modelopt, nvfp4]:
        module.expose_input_quant_key = lambda *_: None
    run = lambda *words: subprocess.run([fp4, *map(str, words)], check=True, capture_output=True)
    init_distributed_environment(1, 0, f"file://{work}/rendezvous", 0, "gloo")
    initialize_model_parallel(1, 1)
    failed = False
    for dialect, form, reads in CASES:
        out, plain = work / f"{dialect}-{form}", work / f"{dialect}-{form}.plain"
        run("quantize", GENESIS, "--out", out, "--dialect", dialect, "--format", form)
        run("convert", out, "--out", plain, "--dialect", "plain", "--decode-fp4", "f32")
        values = load_file(plain / "model.safetensors")
        ours = torch.cat([values[f"model.layers.0.self_attn.{s}_proj.weight"] for s in "qkv"])
        try:
            theirs = loaded(out)
            most = float(((theirs - ours).abs() / ours.abs().clamp(min=1e-9)).max())
            passed, said = reads and most < 1e-6, f"{ours.numel()} values, {most:.1e}"
        except ValueError as error:
            passed, said = not reads and "currently only supports" in str(error), "refused"
        failed |= not passed
        print(f"| {dialect} | {form} | {said} | {'ok' if passed else 'FAILED'} |")
    sys.exit(failed)


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        main(sys.argv[1], Path(sys.argv[2]))
