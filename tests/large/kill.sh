#!/usr/bin/env bash
# Kills a conversion at random moments, goes on with it, and compares with one that was left alone.
#
#   tests/large/kill.sh FOLDER GIGABYTES KILLS
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$1"
work="$(cd "$1" && pwd)"
fp4="${FP4:-fp4}"
[ -d "$work/model" ] || "${PYTHON:-python3}" "$here/generate.py" "$work/model" "$2"
rm -rf "$work/whole" "$work/out" "$work/.out.partial"
begin="$(date +%s%N)"
"$fp4" quantize "$work/model" --out "$work/whole"
took=$((($(date +%s%N) - begin) / 1000000))
kills=0
while [ "$kills" -lt "$3" ]; do
    "$fp4" quantize "$work/model" --out "$work/out" --resume >"$work/log" 2>&1 &
    pid=$!
    wait="$((RANDOM * took / 32768))"
    sleep "$(awk -v ms="$wait" 'BEGIN { print ms / 1000 }')"
    if kill -9 "$pid" 2>/dev/null; then
        kills=$((kills + 1))
        wait "$pid" 2>/dev/null || true
        done_of="$(($(wc -l <"$work/.out.partial/journal" 2>/dev/null || echo 1) - 1))"
        echo "kill $kills after $wait ms: $done_of weights noted as done"
    else
        wait "$pid"
    fi
    if [ -d "$work/out" ]; then
        # It was done: compare, and begin again until there were enough kills.
        diff -r "$work/whole" "$work/out" && echo "same bytes after $kills kills"
        rm -rf "$work/out"
    fi
done
"$fp4" quantize "$work/model" --out "$work/out" --resume
diff -r "$work/whole" "$work/out"
echo "same bytes after $kills kills"
