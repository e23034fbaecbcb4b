#!/usr/bin/env bash
# Quantizes onto a disk that is too small: needs root, to mount a small tmpfs.
#
#   tests/large/full_disk.sh FOLDER
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$1/small"
work="$(cd "$1" && pwd)"
fp4="${FP4:-fp4}"
[ -d "$work/model" ] || "${PYTHON:-python3}" "$here/generate.py" "$work/model" 1
mount -t tmpfs -o size=64m tmpfs "$work/small"
trap 'umount "$work/small"' EXIT
code=0
"$fp4" quantize "$work/model" --out "$work/small/out" || code=$?
echo "exit code $code"
ls -A "$work/small"
[ "$code" = 3 ] && [ ! -e "$work/small/out" ]
