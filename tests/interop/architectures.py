"""What `fp4 quantize` does to every architecture that it knows

    architectures.py check FP4 FOLDER [MODEL_TYPE...]
    architectures.py names FOLDER > crates/checkpoints/tests/checkpoints/architectures.txt

FP4 is the program. A small random model of every `model_type` in
crates/checkpoints/src/architecture/table.rs is made by transformers, quantized, and read again:

- quantized are the weights of linear layers, by their classes in transformers, and nothing else,
  and the plan of `--dry-run` has these;
- blocks run along the inputs: values, decoded here by numpy, and products with random inputs are
  within the error of FP4;
- weights that share a tensor scale get one input in a forward pass;
- `fp4 compare` reads the result, and finds the same errors;
- where transformers loads the result, its outputs equal the decoded model's, and the call
  that `fp4` names in a note, or else the plain one in bfloat16, loads it too; a warning says where
  it does not.

`names` prints what a test needs of this without Python: names and shapes in the files, and which of
them are linear layers with one input.
"""

import collections
import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             vocab_size=96, max_position_embeddings=64)
# Queries share keys and values: these have fewer rows.
GROUPED = SIZES | dict(num_key_value_heads=2)
HEADS = GROUPED | dict(head_dim=16)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
MLA = SIZES | dict(num_key_value_heads=4, moe_intermediate_size=64, n_routed_experts=4,
                   num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=32,
                   kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
                   first_k_dense_replace=1)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
VISION = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
              image_size=32, patch_size=16)
T5 = dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96,
          decoder_start_token_id=0)
GATED = T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
STATES = dict(hidden_size=64, num_hidden_layers=2, vocab_size=96, state_size=16)
LLAMA4 = HEADS | LOCAL | dict(intermediate_size_mlp=128, num_experts_per_tok=1,
                              interleave_moe_layer_step=1, attention_chunk_size=64)
# Files have its experts in either order of axes, which no size but `hidden_size` tells apart.
QWEN3_VL = HEADS | MOE | dict(
    moe_intermediate_size=96,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2]))

# `model_type`, the class of the model, its configuration.
CASES = [
    ("llama", "LlamaForCausalLM", HEADS),
    ("mistral", "MistralForCausalLM", HEADS),
    ("qwen2", "Qwen2ForCausalLM", GROUPED),
    ("qwen3", "Qwen3ForCausalLM", HEADS),
    ("gemma", "GemmaForCausalLM", HEADS),
    ("gemma2", "Gemma2ForCausalLM", HEADS),
    ("gemma3_text", "Gemma3ForCausalLM", HEADS),
    ("gemma3", "Gemma3ForConditionalGeneration",
     dict(text_config=HEADS, vision_config=VISION, mm_tokens_per_image=4,
          image_token_index=95, boi_token_index=94, eoi_token_index=93)),
    ("granite", "GraniteForCausalLM", GROUPED),
    ("olmo2", "Olmo2ForCausalLM", GROUPED),
    ("smollm3", "SmolLM3ForCausalLM", GROUPED | dict(pad_token_id=0)),
    ("phi3", "Phi3ForCausalLM", GROUPED | dict(pad_token_id=0)),
    ("mixtral", "MixtralForCausalLM", HEADS | LOCAL),
    ("qwen2_moe", "Qwen2MoeForCausalLM",
     GROUPED | MOE | dict(shared_expert_intermediate_size=64)),
    ("qwen3_moe", "Qwen3MoeForCausalLM", HEADS | MOE),
    ("deepseek_v2", "DeepseekV2ForCausalLM", MLA | dict(topk_method="greedy")),
    ("deepseek_v3", "DeepseekV3ForCausalLM", MLA),
    ("gpt_oss", "GptOssForCausalLM", HEADS | LOCAL | dict(intermediate_size=64)),
    ("llama4_text", "Llama4ForCausalLM", LLAMA4),
    ("llama4", "Llama4ForConditionalGeneration",
     dict(text_config=LLAMA4, vision_config=VISION | dict(
         vision_output_dim=64, projector_input_dim=64, projector_output_dim=64))),
    ("qwen3_vl_moe_text", "Qwen3VLMoeTextModel", QWEN3_VL),
    ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
     dict(text_config=QWEN3_VL, vision_config=dict(
         hidden_size=64, intermediate_size=128, depth=2, num_heads=4, out_hidden_size=64,
         num_position_embeddings=64, deepstack_visual_indexes=[0]))),
    ("gpt2", "GPT2LMHeadModel",
     dict(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64)),
    ("openai-gpt", "OpenAIGPTLMHeadModel",
     dict(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64)),
    ("imagegpt", "ImageGPTForCausalImageModeling",
     dict(n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=64)),
    ("gpt_neox", "GPTNeoXForCausalLM", SIZES),
    ("falcon", "FalconForCausalLM",
     dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)),
    ("bloom", "BloomForCausalLM", dict(hidden_size=64, n_layer=2, n_head=4, vocab_size=96)),
    ("opt", "OPTForCausalLM", SIZES | dict(ffn_dim=128, word_embed_proj_dim=32)),
    ("whisper", "WhisperForConditionalGeneration",
     dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
          decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=96,
          num_mel_bins=16, max_source_positions=32, max_target_positions=32, pad_token_id=0,
          bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)),
    ("clip", "CLIPModel",
     dict(text_config=SIZES | dict(eos_token_id=2), vision_config=VISION, projection_dim=64)),
    ("bert", "BertForPreTraining", SIZES),
    ("roberta", "RobertaForSequenceClassification", SIZES),
    ("xlm-roberta", "XLMRobertaForTokenClassification", SIZES),
    ("distilbert", "DistilBertForMaskedLM",
     dict(dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=96,
          max_position_embeddings=64)),
    ("vit", "ViTForImageClassification", VISION | dict(num_labels=5)),
    ("t5", "T5ForConditionalGeneration", GATED),
    ("mt5", "MT5ForConditionalGeneration", GATED),
    ("umt5", "UMT5ForConditionalGeneration", T5),
    ("mamba", "MambaForCausalLM", STATES | dict(time_step_rank=16)),
    ("falcon_mamba", "FalconMambaForCausalLM", STATES | dict(time_step_rank=16)),
    ("mamba2", "Mamba2ForCausalLM", STATES | dict(num_heads=8, head_dim=16, n_groups=1)),
]

# Linear layers by their class that stay: heads, by what they compute; routers that are one row;
# the layers of a scan that takes their weights (`mamba_inner_fn`, `self.dt_proj.weight`).
HEADS_OF_TASKS = ("classifier", "classifier.out_proj", "qa_outputs", "cls.seq_relationship")
ROUTERS = ("shared_expert_gate", "router")
OF_THE_SCAN = ("x_proj", "dt_proj")
STAY = HEADS_OF_TASKS + ROUTERS + OF_THE_SCAN
# Modules of another modality than the language model's, which stay as they are.
OTHER_MODALITIES = ("vision", "visual", "multi_modal_projector")
# Dialects that hold stacked experts; the default one does not.
STACKED = ("gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text")

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Relative errors of the values of a weight, and of products with it.
LEAST, MOST = 0.06, 0.13
# What FP4 changes the outputs of a random model by, what readers may differ by, and what bfloat16
# may change.
SEEN, SAME, BF16 = (1e-3, 1.0), 1e-4, 0.1
DECODES = "CompressedTensorsConfig(run_compressed=False)"


def build(name, kind, sizes):
    torch.manual_seed(1)
    model_class = getattr(hf, kind)
    config = model_class.config_class(**sizes)
    assert config.model_type == name, (config.model_type, name)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.05)
    return model


def kind_of(model):
    return model.config.model_type


def roles(model):
    """By parameter: its module, itself, and whether it is a layer's weight that becomes FP4."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    found = {}
    for path, module in model.named_modules():
        other = any(part.startswith(OTHER_MODALITIES) for part in path.split("."))
        stays = path.endswith(STAY) or (other and kind_of(model) != "clip")
        for name, parameter in module.named_parameters(recurse=False):
            experts = type(module).__name__.endswith("Experts") and parameter.ndim == 3
            linear = isinstance(module, (nn.Linear, Conv1D)) and name == "weight"
            layer = (linear or experts) and not stays and parameter is not head
            found[f"{path}.{name}" if path else name] = (module, parameter, layer)
    return found


def owners(model, files):
    """By name in the files: the module that multiplies with it, and whether it is to be FP4.

    Names differ from those in memory, and experts are stacked there: what has another name is found
    by its values.
    """
    known = roles(model)
    found = {}
    for name, tensor in files.items():
        if tensor.ndim < 2:
            continue
        if name in known and known[name][1].shape == tensor.shape:
            found[name] = (*known[name], "")
            continue
        hits = []
        for module, parameter, layer in known.values():
            if parameter.shape == tensor.shape and torch.equal(parameter, tensor):
                hits.append((module, parameter, layer, ""))
            elif parameter.ndim == 3 and tensor.ndim == 2:
                for expert in parameter:
                    for part in (expert, *expert.chunk(2)):
                        if part.shape == tensor.shape and torch.equal(part, tensor):
                            hits.append((module, parameter, layer, "expert"))
        # Several, if it is tied.
        assert len({layer for _, _, layer, _ in hits}) == 1, (name, tensor.shape, len(hits))
        found[name] = hits[0]
    return found


def inputs_of(module, tensor, part):
    """Whether the axis of the inputs is the first of a matrix."""
    if isinstance(module, Conv1D):
        return True
    if part == "expert" or isinstance(module, nn.Linear) or tensor.ndim == 2:
        return False
    # Stacked experts are multiplied as `x @ w` where they are `[experts, inputs, outputs]`.
    return type(module).__name__ in ("GptOssExperts", "Llama4TextExperts")


def decode(codes, scales, scale):
    codes = codes.numpy()
    both = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    values = E2M1[both & 7] * np.where(both & 8, -1, 1).astype(np.float32)
    blocks = scales.to(torch.float32).numpy()
    return values * np.repeat(blocks, values.shape[-1] // blocks.shape[-1], -1) * scale


def decoded(out):
    """Values of what is FP4, `[.., outputs, inputs]`, and the bits of its tensor scale."""
    values, scales = {}, {}
    for name, tensor in out.items():
        if name.endswith(".weight_packed"):
            module = name.removesuffix("_packed")
            scale = out[f"{module}_global_scale"].numpy()
            values[module] = decode(tensor, out[f"{module}_scale"], 1 / scale)
            scales[module] = scale.tobytes()
        elif tensor.dtype == torch.uint8 and f"{name}_scale" in out:
            scale = out[f"{name}_scale_2"].numpy().reshape(-1, *[1] * (tensor.ndim - 1))
            values[name] = decode(tensor, out[f"{name}_scale"], scale)
            scales[name] = scale.tobytes()
        elif tensor.dtype == torch.uint8 and f"{name}_weight_scale" in out:
            scale = out[f"{name}_weight_scale_2"].numpy().reshape(-1, 1, 1)
            parts = [out[n] for n in (name, f"{name}_weight_scale")]
            if parts[0].shape[-1] == parts[1].shape[-1]:
                # Along the columns: eight codes to a byte of scales lie along the other axis.
                parts = [part.transpose(1, 2).contiguous() for part in parts]
            values[name] = decode(*parts, scale)
            scales[name] = scale.tobytes()
    return values, scales


def example(model):
    """Keyword arguments of a forward pass."""
    torch.manual_seed(2)
    name = kind_of(model)
    tokens = torch.randint(3, 90, (2, 8))
    if name == "vit":
        return dict(pixel_values=torch.randn(2, 3, 32, 32))
    if name == "clip":
        return dict(input_ids=tokens, pixel_values=torch.randn(2, 3, 32, 32))
    if name == "whisper":
        return dict(input_features=torch.randn(2, 16, 64), decoder_input_ids=tokens)
    if model.config.is_encoder_decoder:
        return dict(input_ids=tokens, decoder_input_ids=tokens.flip(1))
    return dict(input_ids=tokens)


def outputs(model):
    cast = lambda x: x.to(model.dtype) if x.is_floating_point() else x
    with torch.no_grad():
        result = model(**{key: cast(value) for key, value in example(model).items()})
    for key in ("logits", "prediction_logits", "logits_per_image", "last_hidden_state"):
        if key in result:
            return result[key].float()
    raise KeyError(list(result))


def inputs_by_layer(model, layers):
    """The input of every linear layer in a forward pass, by the identity of its module."""
    seen, hooks = {}, []
    for module in {id(m): m for m, *_ in layers.values() if isinstance(m, nn.Linear)}.values():
        hook = lambda module, args: seen.setdefault(id(module), args[0].detach().clone())
        hooks.append(module.register_forward_pre_hook(hook))
    outputs(model)
    for hook in hooks:
        hook.remove()
    return seen


def one_input(layers, seen, first, other):
    """Whether two weights are multiplied with the same numbers."""
    (a, one, *_), (b, two, *_) = layers[first], layers[other]
    if not isinstance(a, nn.Linear) or not isinstance(b, nn.Linear):
        # Parts of stacked experts: of one parameter, `gate_up_proj`.
        return a is b and one is two
    a, b = seen.get(id(a)), seen.get(id(b))
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)


def share_inputs(model, scales, layers):
    """How many groups share a tensor scale, after checking that each of them has one input."""
    seen = inputs_by_layer(model, layers)
    groups = collections.defaultdict(list)
    for name, bits in scales.items():
        groups[bits].append(name)
    groups = [names for names in groups.values() if len(names) > 1]
    for names in groups:
        for name in names[1:]:
            assert one_input(layers, seen, names[0], name), f"one scale, other inputs: {names}"
    return len(groups)


def print_names(folder):
    """A line for each weight of the first layer of every model: its name and shape, `-` if it
    stays, `+` if it is that of a linear layer, `t` where inputs are its first axis, and the number
    of a family."""
    for name, kind, sizes in CASES:
        model = build(name, kind, sizes)
        model.save_pretrained(folder / name)
        files = load_file(folder / name / "model.safetensors")
        layers = owners(model, files)
        seen = inputs_by_layer(model, layers)
        config = json.loads((folder / name / "config.json").read_text())
        text = config.get("text_config", config)
        sizes = {k: text[k] for k in ("hidden_size", "moe_intermediate_size") if k in text}
        print(f"# {name} {json.dumps(sizes)}")
        families = []
        # Layer 0 of DeepSeek has no experts.
        first = "1" if name.startswith("deepseek") else "0"
        for key in sorted(key for key, tensor in files.items() if tensor.ndim >= 2):
            numbers = re.findall(r"\.(\d+)\.", key)
            if numbers and (numbers[0] != first or numbers[-1:] != ["0"] and "experts" in key):
                continue
            tensor = files[key]
            module, _, layer, part = layers[key]
            how = "+" if layer else "-"
            if layer and inputs_of(module, tensor, part):
                how += "t"
            if layer and tensor.ndim == 2:
                parent = key.removesuffix(".weight").rpartition(".")[0]
                same = lambda known: (known[0] == parent
                                      and one_input(layers, seen, known[1], key))
                at = next((i for i, known in enumerate(families) if same(known)), None)
                if at is None:
                    at = len(families)
                    families.append((parent, key))
                how += str(at)
            print(key, ",".join(map(str, tensor.shape)), how)


def loaded(model, folder, files, values, layers, said):
    """Relative changes of outputs: by FP4, where transformers computes with the decoded values; and
    between these and what it computes from the result, or why it loads no such file."""
    kind, name = type(model), kind_of(model)
    state = dict(files)
    for key, value in values.items():
        module, _, _, part = layers[key]
        if inputs_of(module, files[key], part):
            value = np.swapaxes(value, -1, -2)
        # compressed-tensors decodes to bfloat16.
        value = torch.from_numpy(np.ascontiguousarray(value)).to(torch.bfloat16)
        state[key] = value.to(files[key].dtype)
    shutil.copytree(folder / "model", folder / "decoded")
    save_file({k: v.contiguous() for k, v in state.items()},
              folder / "decoded" / "model.safetensors", {"format": "pt"})
    apart = lambda a, b: float((a - b).norm() / b.norm())
    expected = outputs(kind.from_pretrained(folder / "decoded").eval())
    changed = apart(expected, outputs(model))
    if name in STACKED:
        return changed, "not ModelOpt's"
    if any(part == "expert" for *_, part in layers.values()):
        assert "do not load the result" in said, said
        return changed, "no: experts are stacked there"
    if any(isinstance(module, Conv1D) for module, *_ in layers.values()):
        assert "transformers fills such layers with random values" in said, said
        return changed, "no: Conv1D stays"
    config = hf.CompressedTensorsConfig(run_compressed=False)
    theirs = kind.from_pretrained(folder / "out", quantization_config=config).eval().float()
    noted = dict(quantization_config=config) if DECODES in said else {}
    noted = kind.from_pretrained(folder / "out", dtype=torch.bfloat16, **noted).eval()
    rounded = apart(outputs(noted), expected)
    assert rounded < BF16, f"by the noted call outputs differ by {rounded}: {said}"
    there = noted.state_dict()
    for path, (_, parameter, layer) in roles(model).items():
        kept = layer or torch.equal(there[path], parameter.to(torch.bfloat16))
        assert kept, f"{path}: another one after the noted call"
    return changed, apart(outputs(theirs), expected)


def run(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)


def check(program, folder, name, kind, sizes):
    shutil.rmtree(folder, ignore_errors=True)
    model = build(name, kind, sizes)
    model.save_pretrained(folder / "model")
    files = load_file(folder / "model" / "model.safetensors")
    layers = owners(model, files)
    dialect = "modelopt" if name in STACKED else "compressed-tensors"
    command = [program, "quantize", folder / "model", "--dialect", dialect]
    plan = run(*command, "--dry-run", "--json")
    assert plan.returncode == 0, plan.stderr
    planned = {w["name"] for w in json.loads(plan.stdout)["weights"] if "nvfp4" in w["to"]}
    done = run(*command, "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning")]
    assert all("do not load the result" in line for line in warned), warned
    values, scales = decoded(load_file(folder / "out" / "model.safetensors"))
    wanted = {n for n, (_, _, layer, _) in layers.items() if layer}
    missing, more = sorted(wanted - set(values)), sorted(set(values) - wanted)
    assert not missing and not more, f"not quantized: {missing}; quantized: {more}"
    assert planned == wanted, f"the plan has others: {sorted(planned ^ wanted)}"
    compared = run(program, "compare", folder / "model", folder / "out", "--json")
    read = {w["name"]: w["error_percent"] for w in json.loads(compared.stdout)["weights"]
            if w["quantized"]}
    assert set(read) == wanted, f"read are others: {sorted(set(read) ^ wanted)}"
    errors, products = [], []
    random = np.random.default_rng(3)
    for key, value in values.items():
        module, _, _, part = layers[key]
        original = files[key].float().numpy()
        if inputs_of(module, files[key], part):
            original = np.swapaxes(original, -1, -2)
        assert value.shape == original.shape, (key, value.shape, original.shape)
        errors.append(np.linalg.norm(value - original) / np.linalg.norm(original))
        assert abs(read[key] - 100 * errors[-1]) < 1e-3, (key, read[key], errors[-1])
        x = random.normal(size=(256, value.shape[-1])).astype(np.float32)
        y = x @ np.swapaxes(original, -1, -2)
        products.append(np.linalg.norm(x @ np.swapaxes(value, -1, -2) - y) / np.linalg.norm(y))
    for found in (errors, products):
        assert LEAST < min(found) and max(found) < MOST, (min(found), max(found))
    groups = share_inputs(model, scales, layers)
    said = " ".join(done.stderr.split())
    changed, again = loaded(model, folder, files, values, layers, said)
    assert SEEN[0] < changed < SEEN[1], f"FP4 changes outputs by {changed}"
    if isinstance(again, float):
        assert again < SAME, f"outputs differ by {again}"
        again = f"{100 * again:.4f}"
    kept = sum(t.ndim >= 2 for t in files.values()) - len(values)
    percent = lambda found: f"{100 * min(found):.1f} to {100 * max(found):.1f}"
    return [name, str(len(values)), str(kept), str(groups), percent(errors), percent(products),
            f"{100 * changed:.1f}", again]


def main():
    logging.disable(logging.WARNING)
    if sys.argv[1] == "names":
        return print_names(Path(sys.argv[2]))
    program, folder = Path(sys.argv[2]).resolve(), Path(sys.argv[3])
    only = sys.argv[4:]
    print("| `model_type` | FP4 | kept | shared scales | error, % | of products, % | of outputs, % "
          "| loaded by transformers: differs by, % |")
    print("|---|---|---|---|---|---|---|---|")
    failed = []
    for name, kind, sizes in CASES:
        if only and name not in only:
            continue
        try:
            print(f"| {' | '.join(check(program, folder / name, name, kind, sizes))} |", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"| {name} | FAILED: {type(error).__name__}: {error} |", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


main()
