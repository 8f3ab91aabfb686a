"""Whether Triton is there, and what the GPU at hand asks of a launch."""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported; without it every mixer takes its PyTorch form."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def registers(major: int | None = None) -> int | None:
    """Triton's maxnreg for kernels that need many registers; None leaves it to the assembler.

    Before Hopper the assembler of triton 3.9 gives some kernels 32 registers and spills up to 11 KB a thread
    unless it is told that there are more.

    Args:
        major: of the chip's compute capability; None asks the GPU.
    """
    if major is None:
        major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    return 255 if major < 9 else None
