#!/usr/bin/env bash
# Our checkpoints, read by others, and theirs by us: run it after a dialect changed.
#
#   tests/interop/run.sh [folder]      default: ${XDG_CACHE_HOME:-~/.cache}/burn-fp4-interop
#
# The folder gets a virtual environment with the packages of requirements.txt (4 GB, most of it
# torch) and the files. CARGO_ARGS chooses the package whose test target `checkpoints` is run.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="${1:-${XDG_CACHE_HOME:-$HOME/.cache}/burn-fp4-interop}"
mkdir -p "$work"
work="$(cd "$work" && pwd)"
if [ ! -x "$work/venv/bin/python" ]; then
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --requirement "$here/requirements.txt"
fi
rm -rf "$work/theirs" "$work/read" "$work/ours"
export CUDA_VISIBLE_DEVICES="" HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
"$work/venv/bin/python" "$here/theirs.py" "$work"
cd "$here/../.."
package="${CARGO_ARGS:---package burn-fp4-checkpoints}"
# shellcheck disable=SC2086
FP4_INTEROP="$work" cargo test $package --locked --test checkpoints -- \
    --ignored --exact interop --nocapture
"$work/venv/bin/python" "$here/compare.py" "$work"
# Types of ggml; the example `llama`, and what `fp4 quantize` makes of the model in
# tests/models/genesis and of a small model of every architecture.
cargo build --locked --bin fp4 --bin llama
target="${CARGO_TARGET_DIR:-target}/debug"
"$work/venv/bin/python" "$here/ggml.py" check "$target/fp4" "$work/ggml"
"$work/venv/bin/python" "$here/readers.py" "$target/fp4" "$work/readers"
"$work/venv/bin/python" "$here/calibration.py" check "$target/fp4" "$work/calibration"
"$work/venv/bin/python" "$here/llama.py" check "$target/fp4" "$work/llama" \
    "$target/llama"
"$work/venv/bin/python" "$here/architectures.py" check "$target/fp4" "$work/architectures"
