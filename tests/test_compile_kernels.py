"""Every shipped kernel compiles for every chip, and fits on it. No GPU is needed.

A list of kernels is a generator in compile_worker.py, named in its LISTS and in LISTS here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LISTS = ("onehot", "polysketch", "slots", "tiles")
WORKER = Path(__file__).with_name("compile_worker.py")
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}  # bytes a program may have
STACK = 3_500  # bytes a thread may spill: none is the aim; float32, which is for tests, comes near
PRODUCTS = (
    "_read",
    "_dq",
    "_dkv",
    "_write",
    "_ask",
    "_weights_grad",
    "_pairs_grad",
    "_dx",
    "_forward",
    "_queries",
    "_keys",
    "_sinks",
    "_states",
    "_sketch",
)  # kernels that must use tensor cores in 16 bits


@pytest.mark.parametrize("arch", [90, *(pytest.param(a, marks=pytest.mark.slow) for a in (80, 86, 89, 100))])
@pytest.mark.parametrize("name", LISTS)
def test_every_kernel_compiles_and_fits(name, arch, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(WORKER), name, str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found
    for kernel in found:
        assert kernel["shared"] <= SHARED[arch], kernel
        assert kernel["stack"] <= STACK, kernel
        if kernel["name"].startswith(PRODUCTS) and "fp32" not in kernel["name"]:
            assert kernel["tensor_cores"] or name == "slots", kernel  # of slots, operands are float32
