#!/usr/bin/env bash
# Makes a new crate with the lines of README, as a reader would: dependencies and profile, and the
# first block of Rust in `main`. The last commit of this repository is its `burn-fp4`.
# scripts/new-crate.sh FOLDER
set -euo pipefail
folder=$(realpath -m "$1")
cd "$(dirname "$0")/.."
mkdir -p "$folder/src"
git archive --prefix=burn-fp4/ HEAD | tar -x -C "$folder"

# Prints the first block of README in a language.
block() {
    awk -v begin="\`\`\`$1" '$0 == begin { on = 1; next } on && /^```$/ { exit } on' README.md
}

{
    printf '[package]\nname = "new"\nversion = "0.1.0"\nedition = "2024"\n\n'
    block toml
} > "$folder/Cargo.toml"
{
    echo 'fn main() {'
    block rust
    echo '}'
} > "$folder/src/main.rs"
grep -q '^burn-fp4 = ' "$folder/Cargo.toml"
grep -q quantize_fp4 "$folder/src/main.rs"
