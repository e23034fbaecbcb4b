#!/bin/sh
# Installs LLVM for the features `cpu` and `cuda` on Debian without access to GitHub.
#
# CubeCL 0.11 compiles its kernels with LLVM; its build script downloads a prebuilt bundle from
# GitHub. This script puts Debian's LLVM 22 where the build script looks for the bundle. Needs root.
# Does nothing if the bundle is installed.
set -eu

bundle="${XDG_DATA_HOME:-$HOME/.local/share}/tracel/tracel-llvm-23.1.0-4"
llvm=/usr/lib/llvm-22
if [ -e "$bundle/.tracel-llvm-installed" ]; then
    exit 0
fi
if [ ! -x "$llvm/bin/llvm-config" ]; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends \
        llvm-22-dev libz3-dev zlib1g-dev libzstd-dev libxml2-dev libffi-dev
fi

mkdir -p "$bundle/bin"
ln -sfn "$llvm/lib" "$bundle/lib"
ln -sfn "$llvm/include" "$bundle/include"
# Debian's llvm-config lists libz3 by its path, and archives of Polly that Debian does not ship.
cat > "$bundle/bin/llvm-config" <<EOF
#!/bin/sh
"$llvm/bin/llvm-config" "\$@" |
    sed -E 's#/usr/lib/[^ ]*/lib(z3)\\.so#-l\\1#g; s#-lPolly(ISL)?\\b##g'
EOF
chmod +x "$bundle/bin/llvm-config"
touch "$bundle/.tracel-llvm-installed"
