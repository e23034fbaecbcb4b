#!/usr/bin/env bash
# Formats, and the host engine whose memory accesses are unchecked, under Miri: generic instructions.
# Needs nightly Rust with the components `miri` and `rust-src`.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri"
# `crossbeam-epoch`, under `rayon`, breaks the stacked borrows rules and frees nothing at exit.
export MIRIFLAGS="-Zmiri-tree-borrows -Zmiri-ignore-leaks -Zmiri-disable-isolation"
cargo +nightly miri test --locked --lib -p burn-fp4-formats -p burn-fp4-search
