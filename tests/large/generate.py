"""A sharded bf16 model of a given size: python3 generate.py FOLDER GIGABYTES [SHARDS]

Names and proportions are as in a Llama with 4096 channels; the numbers are normal. Each
shard is written by a process of its own. Needs numpy.
"""

import json
import multiprocessing
import sys
from pathlib import Path

import numpy as np

HIDDEN, INNER, VOCABULARY = 4096, 14336, 32000


def shapes(layers):
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (HIDDEN,)
        yield f"{name}.mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"{name}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{name}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{name}.self_attn.k_proj.weight", (HIDDEN // 4, HIDDEN)
        yield f"{name}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{name}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{name}.self_attn.v_proj.weight", (HIDDEN // 4, HIDDEN)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def size(tensors):
    return sum(2 * int(np.prod(shape)) for _, shape in tensors)


def pool():
    """As random as anyone needs: tensors are pieces of these, from a random place on."""
    values = np.random.default_rng(1).normal(0, 0.03, 1 << 25).astype(np.float32)
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def write(path, shard, seed, values):
    header, offset = {}, 0
    for key, shape in shard:
        end = offset + size([(key, shape)])
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in shard:
            left = int(np.prod(shape))
            while left:
                begin = int(random.integers(len(values)))
                piece = values[begin : begin + left]
                file.write(piece.data)
                left -= len(piece)


def main(folder, gigabytes, count):
    layer = size(shapes(1)) - size(shapes(0))
    layers = max(1, round((gigabytes * 1e9 - size(shapes(0))) / layer))
    tensors = list(shapes(layers))
    folder.mkdir(parents=True)
    limit, shards, filled = size(tensors) / count, [[]], 0
    for tensor in tensors:
        if filled > limit * len(shards):
            shards.append([])
        shards[-1].append(tensor)
        filled += size([tensor])
    names = [f"model-{at + 1:05}-of-{len(shards):05}.safetensors" for at in range(len(shards))]
    values = pool()
    processes = []
    for at, (name, shard) in enumerate(zip(names, shards)):
        arguments = (folder / name, shard, 2 + at, values)
        processes.append(multiprocessing.get_context("fork").Process(target=write, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
    weight_map = {key: name for name, shard in zip(names, shards) for key, _ in shard}
    index = {"metadata": {"total_size": size(tensors)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    print(f"{folder}: {layers} layers, {size(tensors) / 1e9:.2f} GB in {len(shards)} shards")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(Path(arguments[0]), float(arguments[1]), int(arguments[2]) if arguments[2:] else 4)
