#!/usr/bin/env bash
# Tests formats, files, the host engine and memory that Burn is given with the address sanitizer.
# The engine runs with each instruction set that this processor has. For x86-64.
set -euo pipefail
cd "$(dirname "$0")/.."
target=x86_64-unknown-linux-gnu
# `RUSTC_BOOTSTRAP` allows the unstable option with stable Rust.
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address"
# Line numbers in the sanitizer's reports.
export CARGO_PROFILE_DEV_DEBUG=line-tables-only
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/sanitize"
test() { cargo test --locked --target "$target" "$@"; }

crates=(-p burn-fp4-formats -p burn-fp4-search -p burn-fp4-checkpoints)
# Neither writes the corpus of the fuzzers, nor needs other projects.
others=(--exact --skip mutations::seeds --skip interop)
test --lib --tests "${crates[@]}" -- --include-ignored "${others[@]}"
test --lib -p burn-fp4-ops
for simd in generic avx2 avx512; do
    if [[ $simd == generic ]] || grep -qw "${simd/avx512/avx512f}" /proc/cpuinfo; then
        echo "== BURN_FP4_SIMD=$simd"
        BURN_FP4_SIMD=$simd test --lib "${crates[@]}" -- host::
        BURN_FP4_SIMD=$simd test -p tests --test engines --test golden --test search -- \
            --include-ignored
    fi
done
