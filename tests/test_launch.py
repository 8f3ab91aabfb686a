"""Launching again what Triton compiled: the same arguments, and only where nothing differs."""

import torch

from unsoftmax.kernels.gsa.launch import Compiled, alike


class Kernel:
    """A Triton kernel, or what was compiled for it: notes who was launched and with what."""

    packed_metadata = ()

    def __init__(self, seen: list, name: str = "triton") -> None:
        self.seen, self.name = seen, name

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.seen.append((self.name, grid, arguments, options))
            return Kernel(self.seen, "compiled")

        return run


def test_a_second_launch_goes_to_the_compiled_kernel_with_all_arguments():
    seen, calls = [], Compiled()
    for number in (1, 2):
        calls.launch(Kernel(seen), (number, 1, 1), "key", (number, "x"), num_warps=4)
    assert seen == [
        ("triton", (1, 1, 1), (1, "x"), {"num_warps": 4}),
        ("compiled", (2, 1, 1), (2, "x"), {}),
    ]


def test_another_key_and_none_go_through_triton():
    seen, calls = [], Compiled()
    for key in ("a", "b", None, None, "b"):
        calls.launch(Kernel(seen), (1, 1, 1), key, ())
    assert [name for name, *_ in seen] == ["triton"] * 4 + ["compiled"]


def test_tensors_are_alike_by_dtype_presence_and_alignment():
    x = torch.zeros(64)
    assert alike(x, None) == alike(x[16:], None)
    assert alike(x, None) != alike(x.double(), None)
    assert alike(x, None) != alike(x, x)
    assert alike(x, x[1:]) is None
