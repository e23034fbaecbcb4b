#!/usr/bin/env bash
# Builds examples/browser, opens it in a headless Chromium whose WebGPU runs on the CPU, and prints
# what the page found. Exits with 1 if the page failed.
#
# Needs Chromium, Python, wasm-bindgen (`cargo install wasm-bindgen-cli@0.2.130`) and Rust's target
# wasm32-unknown-unknown: `rustup target add` installs it. Where rustup cannot, Debian's packages
# rustc-web, rust-web-src and lld-22 do: the standard library is then compiled with the example.
set -euo pipefail
cd "$(dirname "$0")/../examples/browser"

for tool in chromium python3 wasm-bindgen; do
    command -v "$tool" > /dev/null || { echo "$tool is missing; see $0" >&2; exit 1; }
done
target=wasm32-unknown-unknown
build=(cargo build --release --target "$target")
if [[ ! -d $(rustc --print sysroot)/lib/rustlib/$target ]]; then
    if [[ ! -d $(/usr/bin/rustc --print sysroot)/lib/rustlib/src ]]; then
        echo "Rust's target $target is missing: rustup target add $target" >&2
        exit 1
    fi
    echo "Rust's target $target is missing: Debian's compiler builds the standard library"
    export RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1
    export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=wasm-ld-22
    build+=(-Zbuild-std=std,panic_abort)
fi
"${build[@]}"
wasm-bindgen --target web --out-dir pkg "${CARGO_TARGET_DIR:-target}/$target/release/browser.wasm"

profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
python3 - "$profile" <<'EOF'
import http.server
import subprocess
import sys
import threading
import time

SECONDS = 600


class Page(http.server.SimpleHTTPRequestHandler):
    """Serves the page; it posts what it found to /ok or /failed."""

    def do_POST(self):
        print(self.rfile.read(int(self.headers["Content-Length"])).decode(), flush=True)
        self.send_response(204)
        self.end_headers()
        self.server.found = self.path

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
server.found = None
browser = subprocess.Popen(
    [
        "chromium", "--headless", "--no-sandbox", "--no-first-run", "--disable-quic",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan",
        f"--user-data-dir={sys.argv[1]}", f"http://127.0.0.1:{server.server_port}/?test",
    ],
    stderr=subprocess.DEVNULL,
)
threading.Thread(target=server.serve_forever, daemon=True).start()
begin = time.monotonic()
while server.found is None and time.monotonic() < begin + SECONDS and browser.poll() is None:
    time.sleep(0.1)
browser.kill()
browser.wait()
if server.found is None:
    print(f"the page said nothing within {SECONDS} s, or Chromium ended")
sys.exit(server.found != "/ok")
EOF
