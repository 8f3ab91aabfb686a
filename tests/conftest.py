"""Every test is seeded, and torch.empty is full of NaN, so that reading what nobody wrote shows."""

import os

import pytest
import torch

if not torch.cuda.is_available():  # before triton is imported: its kernels then run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or deterministic matmuls are refused on a GPU
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that asks a hub for something is wrong


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # also what fills torch.empty with NaN


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
