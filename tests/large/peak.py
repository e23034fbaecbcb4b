#!/usr/bin/env python3
"""Runs a command and prints the most memory that was resident: peak.py COMMAND..."""

import resource
import subprocess
import sys

code = subprocess.run(sys.argv[1:], check=False).returncode
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(f"peak resident memory: {peak / 1024:.0f} MiB")
sys.exit(code)
