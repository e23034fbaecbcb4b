#!/usr/bin/env bash
# Formats, host engine and files under the address sanitizer, with the instructions of each kind
# of processor in turn. Needs nightly Rust; x86-64.
set -euo pipefail
cd "$(dirname "$0")/.."
target=x86_64-unknown-linux-gnu
export RUSTFLAGS="-Zsanitizer=address" RUSTDOCFLAGS="-Zsanitizer=address"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/sanitize"
for simd in generic avx2 avx512; do
    echo "== BURN_FP4_SIMD=$simd"
    BURN_FP4_SIMD=$simd cargo +nightly test --locked --target "$target" --lib --tests \
        -p burn-fp4-formats -p burn-fp4-search -p burn-fp4-checkpoints
done
