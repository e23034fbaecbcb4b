#!/usr/bin/env bash
# The search crate, whose matrices are read without checks, under Miri. Needs nightly Rust with the
# components `miri` and `rust-src`.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri"
# `crossbeam-epoch`, under `rayon`, breaks the stacked borrows rules and frees nothing at exit.
export MIRIFLAGS="-Zmiri-tree-borrows -Zmiri-ignore-leaks -Zmiri-disable-isolation"
cargo +nightly miri test --locked --lib -p burn-fp4-search
