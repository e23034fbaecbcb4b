"""Files that other projects write, and the values that they read from them.

theirs/<case>/          a checkpoint (a folder, or model.gguf in it)
theirs/<case>.values    its FP4 weights as float32, by the producer's own code
"""

import json
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import torch
from comfy_kitchen.backends.eager import quantization as comfy
from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from modelopt.torch.quantization.qtensor import MXFP4QTensor, NVFP4QTensor
from safetensors.torch import save_file
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

FLAGS = {"format": "pt"}


def save(root, case, tensors, config, metadata=FLAGS):
    folder = root / case
    folder.mkdir(parents=True)
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def save_values(root, case, values):
    values = {k: v.to(torch.float32).contiguous() for k, v in values.items()}
    save_file(values, root / f"{case}.values")


def llama():
    """A tiny Llama whose rows are multiples of 64, in bfloat16."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )
    return config, LlamaForCausalLM(config).to(torch.bfloat16).state_dict()


def linears(state):
    return [k for k in state if k.endswith("proj.weight")]


def compressed_tensors(root, name, compressor, group_size):
    config, state = llama()
    scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[name])
    values = {}
    for key in linears(state):
        module = key.removesuffix(".weight")
        weight = state.pop(key)
        amax = weight.float().reshape(weight.shape[0], -1, group_size).abs().amax(-1)
        parts = {"weight": weight}
        if group_size == 16:
            parts["weight_global_scale"] = (2688 / amax.max()).reshape(1)
            scale = (parts["weight_global_scale"] * amax / 6).to(torch.float8_e4m3fn).float()
        else:
            scale = torch.exp2(torch.floor(torch.log2(amax)) - 2)
        parts["weight_scale"] = scale
        parts = compressor.compress(parts, scheme)
        state |= {f"{module}.{k}": v for k, v in parts.items()}
        values[key] = compressor.decompress(parts, scheme)["weight"]
    weights = json.loads(scheme.weights.model_dump_json())
    form = {16: "nvfp4-pack-quantized", 32: "mxfp4-pack-quantized"}[group_size]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None,
             "output_activations": None, "format": form}
    config = config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": {
            "config_groups": {"group_0": group}, "format": form, "ignore": ["lm_head"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
    }
    case = f"compressed-tensors-{name.lower()}"
    save(root, case, state, json.loads(json.dumps(config, default=str)))
    save_values(root, case, values)


def modelopt(root, mx):
    config, state = llama()
    values = {}
    for key in linears(state):
        module = key.removesuffix(".weight")
        weight = state[key].float()
        if mx:
            packed, scale = MXFP4QTensor.quantize(weight, 32)
            scale = scale.reshape(weight.shape[0], -1)
            parts = {"weight": packed._quantized_data.reshape(weight.shape[0], -1),
                     "weight_scale": scale}
            value = packed.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
        else:
            packed, scale, double = NVFP4QTensor.quantize(weight, 16)
            parts = {"weight": packed._quantized_data, "weight_scale": scale,
                     "weight_scale_2": double.reshape(())}
            value = packed.dequantize(torch.float32, scale=scale, double_scale=double,
                                      block_sizes={-1: 16})
        state |= {f"{module}.{k}": v for k, v in parts.items()}
        values[key] = value.reshape(weight.shape)
    algorithm = "mxfp4" if mx else "W4A16_NVFP4"
    quantization = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
    config = config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm,
                                "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
    }
    case = "modelopt-mxfp4" if mx else "modelopt-nvfp4"
    folder = save(root, case, state, json.loads(json.dumps(config, default=str)))
    export = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(export, indent=4))
    save_values(root, case, values)


def gpt_oss(root):
    torch.manual_seed(2)
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["full_attention"], max_position_embeddings=64,
    )
    state = GptOssForCausalLM(config).to(torch.bfloat16).state_dict()
    for key in [k for k in state if k.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(key).shape
        shape = (experts, outputs, inputs // 32)
        state[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        state[f"{key}_scales"] = torch.randint(115, 125, shape, dtype=torch.uint8)
    config = config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                       "model.embed_tokens", "lm_head"],
        },
    }
    folder = save(root, "gpt-oss", state, json.loads(json.dumps(config, default=str)))
    read = GptOssForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    keys = [k for k in read if k.endswith(("gate_up_proj", "down_proj"))]
    save_values(root, "gpt-oss", {k: read[k] for k in keys})


def mlx(root, mode, group_size):
    config, state = llama()
    values = {}
    for key in linears(state):
        module = key.removesuffix(".weight")
        weight = mx.array(state[key].float().numpy())
        codes, scales = mx.quantize(weight, group_size, 4, mode)
        value = mx.dequantize(codes, scales, None, group_size, 4, mode, dtype=mx.float32)
        state[key] = torch.from_numpy(np.array(codes))
        state[f"{module}.scales"] = torch.from_numpy(np.array(scales))
        values[key] = torch.from_numpy(np.array(value))
    quantization = {"group_size": group_size, "bits": 4, "mode": mode}
    config = config.to_dict() | {"architectures": ["LlamaForCausalLM"],
                                 "quantization": quantization,
                                 "quantization_config": quantization}
    save(root, f"mlx-{mode}", state, json.loads(json.dumps(config, default=str)))
    save_values(root, f"mlx-{mode}", values)


def torchao(root, mx):
    config, state = llama()
    values = {}
    for key in linears(state):
        weight = state[key].float()
        if mx:
            state[key] = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32)
        else:
            scale = per_tensor_amax_to_scale(weight.abs().max())
            # The layers in turn with scales in rows and in tiles.
            tiles = len(values) % 2 == 1
            state[key] = NVFP4Tensor.to_nvfp4(weight, 16, scale, is_swizzled_scales=tiles)
        values[key] = state[key].dequantize(torch.float32)
    tensors, metadata = flatten_tensor_state_dict(state)
    config = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    case = "torchao-mxfp4" if mx else "torchao-nvfp4"
    save(root, case, tensors, json.loads(json.dumps(config, default=str)), metadata)
    save_values(root, case, values)


def comfyui(root):
    config, state = llama()
    values, layers = {}, {}
    for key in linears(state):
        module = key.removesuffix(".weight")
        weight = state[key].float()
        scale = (weight.abs().max() / 2688).reshape(())
        codes, scales = comfy.quantize_nvfp4(weight, scale)
        state |= {key: codes, f"{module}.weight_scale": scales, f"{module}.weight_scale_2": scale}
        values[key] = comfy.dequantize_nvfp4(codes, scale, scales, torch.float32)
        layers[module] = {"format": "nvfp4"}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    config = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    save(root, "comfyui", state, json.loads(json.dumps(config, default=str)), metadata)
    save_values(root, "comfyui", values)


def gguf_file(root):
    (root / "gguf").mkdir(parents=True)
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(root / "gguf" / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_array("toy.words", ["a", "bc", ""])
    values = {}
    NVFP4, MXFP4 = gguf.GGMLQuantizationType.NVFP4, gguf.GGMLQuantizationType.MXFP4
    records = random.integers(0, 256, (48, 2, 36), dtype=np.uint8)
    records[..., :4] = random.integers(0, 0x7F, (48, 2, 4), dtype=np.uint8)
    scale = np.array([0.0123], dtype=np.float32)
    writer.add_tensor("blk.0.ffn_up.weight", records.reshape(48, 72), raw_dtype=NVFP4)
    writer.add_tensor("blk.0.ffn_up.scale", scale)
    dense = gguf.quants.dequantize(records.reshape(48, 72), NVFP4) * scale
    values["blk.0.ffn_up.weight"] = torch.from_numpy(dense)
    floats = random.normal(size=(32, 96)).astype(np.float32)
    records = gguf.quants.quantize(floats, MXFP4)
    writer.add_tensor("blk.0.ffn_down.weight", records, raw_dtype=MXFP4)
    values["blk.0.ffn_down.weight"] = torch.from_numpy(gguf.quants.dequantize(records, MXFP4))
    writer.add_tensor("blk.0.attn_norm.weight", random.normal(size=96).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_values(root, "gguf", values)


def main():
    root = Path(sys.argv[1]) / "theirs"
    root.mkdir(parents=True)
    compressed_tensors(root, "NVFP4A16", NVFP4PackedCompressor, 16)
    compressed_tensors(root, "MXFP4A16", MXFP4PackedCompressor, 32)
    modelopt(root, mx=False)
    modelopt(root, mx=True)
    gpt_oss(root)
    gguf_file(root)
    mlx(root, "nvfp4", 16)
    mlx(root, "mxfp4", 32)
    torchao(root, mx=False)
    torchao(root, mx=True)
    comfyui(root)


main()
