#!/usr/bin/env bash
# Makes a language model of random weights, quantizes it by GPTQ, and prints seconds and peak
# memory.
#
#   tests/large/gptq.sh FOLDER SHAPES [OPTION..]      FOLDER gets input and output
#
# SHAPES is 0.5b, 1.5b or 14b, of Qwen2, 8b, of Llama 3, or a config.json. The weights are bf16: of
# 14b they are 30 GB. Takes the options of llama quantize, such as --device cuda --dtype bf16. LLAMA
# is the release build of the example (default: llama).
set -euo pipefail
llama="${LLAMA:-llama}"
mkdir -p "$1"
work="$(cd "$1" && pwd)"

# Prints a config: layers, hidden size, intermediate size, heads, their keys, vocabulary, tied.
config() {
    cat <<END
{
  "model_type": "$1", "num_hidden_layers": $2, "hidden_size": $3, "intermediate_size": $4,
  "num_attention_heads": $5, "num_key_value_heads": $6, "vocab_size": $7,
  "tie_word_embeddings": $8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
  "rope_theta": 1000000.0, "dtype": "bfloat16"
}
END
}

case "$2" in
0.5b) config qwen2 24 896 4864 14 2 151936 true >"$work/config.json" ;;
1.5b) config qwen2 28 1536 8960 12 2 151936 true >"$work/config.json" ;;
8b) config llama 32 4096 14336 32 8 128256 false >"$work/config.json" ;;
14b) config qwen2 48 5120 13824 40 8 152064 false >"$work/config.json" ;;
*) cp "$2" "$work/config.json" ;;
esac

# Runs a command, and prints its seconds and the peak of its memory, with pages of mapped files.
measured() {
    local begin peak=0 pid now code=0
    begin="$(date +%s.%N)"
    "$@" &
    pid=$!
    while now="$(awk '/^VmHWM/ { print $2 }' "/proc/$pid/status" 2>/dev/null)" && [ -n "$now" ]; do
        peak="$now"
        sleep 0.2
    done
    wait "$pid" || code=$?
    awk -v a="$begin" -v b="$(date +%s.%N)" -v peak="$peak" -v what="$2" \
        'BEGIN { printf "%s: %.1f s, peak %.2f GB\n", what, b - a, peak * 1024 / 1e9 }'
    return "$code"
}

[ -d "$work/model" ] ||
    measured "$llama" train "$work/model" --steps 0 --config "$work/config.json"
rm -rf "$work/out"
measured "$llama" quantize "$work/model" "$work/out" --method gptq "${@:3}"
du -shL "$work/model" "$work/out"
