#!/usr/bin/env bash
# Quantizes a large model and copies it, one after the other, and prints seconds and peak memory.
#
#   tests/large/speed.sh FOLDER GIGABYTES [OPTION..]      FOLDER gets input, copy and output
#
# Takes the options of fp4 quantize, such as --device cuda. FP4 is the program (default: fp4),
# PYTHON has numpy (default: python3).
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$1"
work="$(cd "$1" && pwd)"
fp4="${FP4:-fp4}"
[ -d "$work/model" ] || "${PYTHON:-python3}" "$here/generate.py" "$work/model" "$2"
for round in 1 2 3; do
    rm -rf "$work/copy" "$work/out"
    sync
    begin="$(date +%s.%N)"
    cp -r "$work/model" "$work/copy"
    copied="$(date +%s.%N)"
    sync -f "$work/copy"
    synced="$(date +%s.%N)"
    rm -rf "$work/copy"
    sync
    quantizing="$(date +%s.%N)"
    "$here/peak.py" "$fp4" quantize "$work/model" --out "$work/out" --method sse "${@:3}"
    end="$(date +%s.%N)"
    # What is written is flushed by fp4, and not by cp.
    awk -v a="$begin" -v b="$copied" -v s="$synced" -v c="$quantizing" -v d="$end" -v r="$round" \
        'BEGIN { printf "round %d: cp %.1f s, with sync %.1f s, quantize %.1f s\n", r, b - a,
            s - a, d - c
        printf "  speed of cp: %.2f, of cp with sync: %.2f\n", (b - a) / (d - c),
            (s - a) / (d - c) }'
done
