"""Texts to measure language models on: python3 texts.py FOLDER

Writes texts that are the same on every machine, and checks their digests:

genesis.txt   the last quarter of examples/data/genesis.txt
licences.txt  licences as Debian's base-files has them, in /usr/share/common-licenses
code.txt      sources of this project at a fixed commit, which needs the history of the repository

sample.txt    a piece of each, for quick runs

The first three have about 10 000 tokens of SmolLM2 or more. Pass texts whole: --text FILE
--held-out 1. `llama quantize` calibrates on the first 90 % of Genesis: measure a model on
genesis.txt only if it was calibrated with --held-out 0.25.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COMMIT = "a37ff62ce4927a8c3d9e2084229fd8c72f26424f"
SOURCES = ["crates/formats/src", "crates/search/src/reference"]
LICENCES = Path("/usr/share/common-licenses")
# Part of Genesis that is genesis.txt.
HELD_OUT = 0.25
DIGESTS = {
    "sample.txt": "6410e32182cd9bd44c3d736449d571f993d652f86306c9c548f7757cae8f6e03",
    "genesis.txt": "6e69f967235ce9629b99f00e5518f1cb0b58eaaee47bcff14b9d31fb82722dd8",
    "licences.txt": "8d394803248b0143d4f06dbf55c385b19ab23b25a8e1b565f2cedb4d083925aa",
    "code.txt": "4f8f2dbb140f4155816208ef274c4c5aa48e2930b7b845d00032620c21b83a4c",
}


def genesis():
    lines = (ROOT / "examples/data/genesis.txt").read_text().splitlines(keepends=True)
    return "".join(lines[round(len(lines) * (1 - HELD_OUT)):])


def licences():
    names = ["Artistic", "CC0-1.0", "GPL-2", "MPL-2.0"]
    return "\n\n".join((LICENCES / name).read_text() for name in names)


def git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def code():
    names = git("ls-tree", "-r", "--name-only", COMMIT, *SOURCES).split()
    return "\n".join(git("show", f"{COMMIT}:{name}") for name in names)


def sample():
    book, law, sources = (make().encode() for make in (genesis, licences, code))
    return (book[:7000] + law[2000:9000] + sources[14000:20000]).decode()


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for make in (genesis, licences, code, sample):
        name, text = f"{make.__name__}.txt", make().encode()
        digest = hashlib.sha256(text).hexdigest()
        if digest != DIGESTS[name]:
            sys.exit(f"{name}: found digest {digest}; restore its sources or update DIGESTS")
        (folder / name).write_bytes(text)
        print(f"{folder / name}: {len(text)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
