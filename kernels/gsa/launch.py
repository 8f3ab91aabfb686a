"""Launching Triton kernels again: a call like an earlier one goes straight to what was compiled for it.

Triton finds out at each launch which of a kernel's compiled forms fits its arguments, tens of microseconds
for kernels of many; a layer of a small model has little more to do. Here the caller says what is alike: `key`
stands for all that the compiled form depends on: dtypes, absent tensors, integers, constants, alignment and
device.
"""

from typing import Any

import torch

ALIGNED = 16  # bytes: Triton compiles another form for pointers that are not


class Compiled:
    """Compiled kernels by key: of one kind of call, so that its integers are all one."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}

    def launch(self, kernel: Any, grid: tuple[int, ...], key: Any, arguments: tuple, **options: int) -> None:
        """kernel[grid](*arguments, **options), arguments all its parameters; key None: as Triton does it."""
        found = None if key is None else self.found.get(key)
        if found is None:
            found = kernel[grid](*arguments, **options)
            if key is not None and hasattr(found, "packed_metadata"):  # the interpreter compiles nothing
                self.found[key] = found
            return
        found[grid](*arguments)


def alike(*tensors: torch.Tensor | None) -> tuple | None:
    """What compiled forms depend on in tensors: part of a key; None where one is not aligned."""
    for x in tensors:
        if x is not None and x.data_ptr() % ALIGNED:
            return None
    return (tensors[0].device, *[None if x is None else x.dtype for x in tensors])  # type: ignore[union-attr]
