#!/usr/bin/env bash
# Measures what README says about builds, on an idle machine: a new crate with the lines of README,
# in debug, in debug with optimized dependencies, and in release; then README's two commands. Every
# build begins with an empty target folder; dependencies are downloaded before. Takes most of an
# hour on two cores. Prints rows for docs/benchmarks: profiles.json, build.json.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export CARGO_TARGET_DIR=$folder/target CARGO_TERM_COLOR=never
unset CARGO_INCREMENTAL CARGO_PROFILE_DEV_DEBUG
TIMEFORMAT='%R %U %S'

# Runs a command quietly; sets `wall` and `processor` to the seconds that it took.
timed() {
    local times
    if ! times=$({ time "$@" > "$folder/log" 2>&1; } 2>&1); then
        cat "$folder/log" >&2
        exit 1
    fi
    read -r wall processor < <(awk '{printf "%.0f %.0f\n", $1, $2 + $3}' <<< "$times")
}

scripts/new-crate.sh "$folder/new"
cd "$folder/new"
# With the profile that optimizes dependencies, and without.
optimized=$(< Cargo.toml)
plain=${optimized%%\[profile*}
[[ $optimized == *opt-level* && $plain == *burn-fp4* ]]
cat > src/main.rs <<'EOF'
use std::time::Instant;

use burn::nn::LinearConfig;
use burn::tensor::{Device, Tensor};
use burn_fp4::prelude::*;

fn main() {
    let device = Device::flex();
    let mut layer = Fp4Linear::from(LinearConfig::new(2048, 2048).init(&device));
    let begun = Instant::now();
    layer.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let quantize = begun.elapsed().as_secs_f64();
    let input = Tensor::<2>::ones([1, 2048], &device);
    let mut times: Vec<f64> = (0..30)
        .map(|_| {
            let begun = Instant::now();
            layer.forward(input.clone()).into_data();
            begun.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{quantize:.3}, {:.2}", times[times.len() / 2]);
}
EOF

# Builds and runs the crate; prints a row.
profile() {
    local name=$1 manifest=$2 option=()
    shift 2
    option=("$@")
    printf '%s\n' "$manifest" > Cargo.toml
    cargo fetch --quiet
    rm -rf "$CARGO_TARGET_DIR"
    timed cargo build "${option[@]}"
    printf '["%s", %d, %d, %s]' "$name" "$processor" "$wall" \
        "$(cargo run --quiet "${option[@]}" 2> /dev/null)"
}

printf '{"profiles": [\n  '
profile "debug" "$plain"
printf ',\n  '
profile "debug, dependencies optimized" "$optimized"
printf ',\n  '
profile "release" "$plain" --release

cd burn-fp4
cargo fetch --quiet --locked
rm -rf "$CARGO_TARGET_DIR"
timed cargo build --locked --example quantize_model
printf '\n], "build": [\n  ["`cargo run --example quantize_model`, built", %d],\n' "$wall"
cargo run --quiet --locked --example quantize_model > "$folder/log"
timed cargo test --locked --no-run
printf '  ["`cargo test` after it, built", %d],\n' "$wall"
timed cargo test --locked
printf '  ["its tests, run", %d]\n]}\n' "$wall"
