"""The Triton kernels of gated slot attention: on a GPU in every dtype, elsewhere in Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch

from test_gsa import GATES, everything, in_dtype, inputs
from tolerance import assert_all_as_good_as
from unsoftmax.kernels.gsa import chunked, triton_chunk, triton_op, triton_tiles
from unsoftmax.kernels.gsa.chunked import gsa
from unsoftmax.kernels.gsa.reference import GSAState, gsa_reference


def triton(*args, **more):
    return gsa(*args, backend="triton", **more)


@pytest.fixture
def short_segments(monkeypatch):
    """So that few tokens make many segments, and these more than are loaded at once."""
    monkeypatch.setattr(triton_chunk, "SEGMENT", 16)
    monkeypatch.setattr(triton_tiles, "CHUNK", 32)
    monkeypatch.setitem(triton_chunk.SCAN, "AHEAD", 2)


@pytest.fixture(params=["exact pairs", "factored pairs"])
def pairs(request, monkeypatch) -> str:
    """Both ways to hold e^{G_i - G_j}, in float32: the kernels of triton_chunk.py and of triton_tiles.py."""
    monkeypatch.setattr(triton_op, "tiled", lambda dtype: request.param == "factored pairs")
    return request.param


def close(name: str, ours: torch.Tensor, gold: torch.Tensor, allowed: float) -> None:
    assert ours.isfinite().all(), name
    error = ((ours.double() - gold).norm() / gold.norm().clamp_min(1e-30)).item()
    assert error <= allowed, f"{name}: {error:.1e}, allowed {allowed:.1e}"


@pytest.mark.parametrize("mass", [False, True], ids=["published read", "mass"])
def test_output_state_and_gradients_equal_the_definition(mass, device, pairs, short_segments):
    HQ = 2 if pairs == "exact pairs" else 3  # heads that are read together are padded to 4
    tensors = inputs((1, 35, HQ, 1, 12, 20, 5), "soft", device, torch.float32)
    gold = everything(gsa_reference, tensors, mass=mass)
    ours, plain = (
        everything(op, in_dtype(tensors, torch.float32), mass=mass) for op in (triton, gsa_reference)
    )
    if pairs == "exact pairs":
        assert_all_as_good_as(ours, plain, gold, torch.float32)
    for name in gold:  # factors are powers of long sums, whose rounding is far below bfloat16's
        close(name, ours[name], gold[name], 1e-5)


@pytest.mark.parametrize(
    "gates", ["kept, -1e-6, -5, -50 and -1e4 in one chunk", "one slot overwritten a token"]
)
def test_saturated_gates_lose_no_more_than_a_factor_of_e_to_the_minus_10(
    gates, device, monkeypatch, short_segments
):
    monkeypatch.setattr(triton_op, "tiled", lambda dtype: True)
    tensors = inputs((1, 40, 2, 1, 16, 16, 16), gates, device, torch.float32)
    gold = everything(gsa_reference, tensors, mass=True)
    ours = everything(triton, in_dtype(tensors, torch.float32), mass=True)
    for name in gold:
        close(name, ours[name], gold[name], 1e-4)


def test_a_gate_between_closed_ones_reads_across_blocks(device, monkeypatch, short_segments):
    """Between the anchors of such blocks lie 16 closed gates, e^-144: no float32."""
    monkeypatch.setattr(triton_op, "tiled", lambda dtype: True)
    tensors = inputs((1, 40, 2, 1, 16, 16, 4), "soft", device, torch.float32)
    tensors[3][..., :2] = torch.where(torch.arange(40, device=device).view(-1, 1, 1) % 16 == 0, 0.0, -20.0)
    gold = everything(gsa_reference, tensors, mass=True)
    ours = everything(triton, in_dtype(tensors, torch.float32), mass=True)
    for name in gold:
        close(name, ours[name], gold[name], 1e-3)


def test_the_gradient_of_a_saturated_gate_is_relatively_exact(device, monkeypatch, short_segments):
    """Tiny beside the others, so an error of the whole gradient would hide one of these entries."""
    monkeypatch.setattr(triton_op, "tiled", lambda dtype: True)
    tensors = inputs((1, 40, 2, 1, 16, 16, 16), "one slot overwritten a token", device, torch.float32)
    gold = everything(gsa_reference, tensors, mass=True)["dlog_gate"]
    ours = everything(triton, in_dtype(tensors, torch.float32), mass=True)["dlog_gate"]
    closed = tensors[3] == -9
    close("dlog_gate", ours[closed], gold[closed], 1e-2)


def test_packed_documents_with_states_equal_the_definition(device, monkeypatch, short_segments):
    monkeypatch.setattr(triton_op, "tiled", lambda dtype: True)
    tensors = inputs((1, 61, 4, 2, 8, 8, 6), "soft", device, torch.float32)
    cu = torch.tensor([0, 1, 34, 34, 61], device=device)
    state = GSAState(
        torch.randn(4, 2, 6, 8, device=device),
        torch.randn(4, 2, 6, 8, device=device),
        -torch.rand(4, 2, 6, device=device),
    )
    gold = everything(
        gsa_reference, tensors, mass=True, state=GSAState(*(x.double() for x in state)), cu_seqlens=cu
    )
    kept = [x.clone() for x in state]
    ours = everything(triton, in_dtype(tensors, torch.float32), mass=True, state=state, cu_seqlens=cu)
    for name in gold:
        close(name, ours[name], gold[name], 1e-5)
    assert all(a.equal(b) for a, b in zip(kept, state))


@pytest.mark.parametrize("mass", [False, True], ids=["published read", "mass"])
def test_one_token_after_a_state_equals_the_definition(mass, device):
    tensors = inputs((2, 1, 3, 1, 12, 20, 5), "soft", device, torch.float32)
    sizes = (2, 1, 5, 12), (2, 1, 5, 20)
    slots = (torch.randn(size, device=device) for size in sizes)
    state = GSAState(*slots, -torch.rand(2, 1, 5, device=device))
    gold = everything(gsa_reference, tensors, mass=mass, state=GSAState(*(x.double() for x in state)))
    kept = [x.clone() for x in state]
    ours, plain = (
        everything(op, in_dtype(tensors, torch.float32), mass=mass, state=state)
        for op in (triton, gsa_reference)
    )
    assert_all_as_good_as(ours, plain, gold, torch.float32)
    assert all(a.equal(b) for a, b in zip(kept, state))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_one_token_after_slots_in_16_bits_leaves_slots_in_16_bits(backend, device):
    tensors = in_dtype(inputs((2, 1, 6, 2, 12, 20, 5), "soft", device, torch.float32), torch.float32)
    slots = (torch.randn(2, 2, 5, size, device=device).half() for size in (12, 20))
    state = GSAState(*slots, -torch.rand(2, 2, 5, device=device))
    o, after = gsa(*tensors, mass=True, state=state, backend=backend)
    gold, wanted = gsa_reference(*tensors, mass=True, state=GSAState(*(x.float() for x in state)))
    assert (after.k.dtype, after.v.dtype, after.log_kept.dtype) == (torch.half, torch.half, torch.float32)
    close("o", o, gold.double(), 1e-6)
    close("K", after.k, wanted.k.double(), 1e-3)
    close("V", after.v, wanted.v.double(), 1e-3)


def test_gradients_are_the_same_bits_where_forward_keeps_no_weights(device, monkeypatch, short_segments):
    monkeypatch.setattr(triton_op, "tiled", lambda dtype: True)
    tensors = in_dtype(inputs((1, 40, 3, 1, 12, 20, 5), "soft", device, torch.float32), torch.float32)
    kept = everything(triton, tensors, mass=True)
    monkeypatch.setattr(triton_op, "keeps", lambda *tensors: False)
    again = everything(triton, tensors, mass=True)
    assert all(kept[name].equal(again[name]) for name in kept)


def test_a_later_token_changes_no_earlier_output(device, monkeypatch, short_segments):
    monkeypatch.setattr(triton_op, "tiled", lambda dtype: True)
    tensors = in_dtype(inputs((1, 70, 2, 1, 16, 16, 16), "soft", device, torch.float32), torch.float32)
    whole, _ = triton(*tensors, mass=True)
    for n in (1, 17, 64, 69):
        part, _ = triton(*(x[:, :n] for x in tensors), mass=True)
        assert part.equal(whole[:, :n])


def test_a_backend_that_cannot_says_so(device):
    tensors = [x.double() for x in inputs((1, 3, 2, 1, 4, 4, 4), "soft", device)]
    with pytest.raises(ValueError, match=r"does not take torch\.float64"):
        triton(*tensors)
    with pytest.raises(ValueError, match="must be 'triton'"):
        gsa(*tensors, backend="cuda")


class OnCuda(torch.Tensor):
    device = torch.device("cuda")


CHIPS = {  # torch.version.hip, compute capability: whether the kernels run there
    "NVIDIA's, Hopper": (None, 9, True),
    "NVIDIA's, Ampere": (None, 8, True),
    "NVIDIA's, before Ampere": (None, 7, False),
    "AMD's": ("7.0", 9, False),
}


def pretend(monkeypatch, chip: str) -> bool:
    hip, major, runs = CHIPS[chip]
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    return runs


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_triton_is_chosen_unasked_only_in_bfloat16_on_a_gpu_of_nvidia(dtype, chip, monkeypatch):
    tensors = in_dtype(inputs((1, 3, 2, 1, 4, 4, 4), "soft", torch.device("cpu"), dtype), dtype)
    assert not chunked._use_triton(None, *tensors)
    assert chunked._use_triton("triton", *tensors)
    runs = pretend(monkeypatch, chip)
    tensors[0] = tensors[0].as_subclass(OnCuda)
    assert chunked._use_triton(None, *tensors) == (runs and dtype == torch.bfloat16)
    assert not chunked._use_triton("torch", *tensors)


@pytest.mark.parametrize(("D", "M"), [(4, 65), (129, 4)], ids=["many slots", "wide heads"])
@pytest.mark.parametrize("chip", CHIPS)
def test_large_calls_are_for_triton_unasked_only_where_shared_memory_is_large(chip, D, M, monkeypatch):
    tensors = in_dtype(inputs((1, 3, 2, 1, D, 4, M), "soft", torch.device("cpu")), torch.bfloat16)
    pretend(monkeypatch, chip)
    tensors[0] = tensors[0].as_subclass(OnCuda)
    assert chunked._use_triton(None, *tensors) == (chip == "NVIDIA's, Hopper")


@pytest.mark.parametrize("chip", CHIPS)
def test_triton_that_is_asked_for_on_another_chip_says_what_it_needs(chip, monkeypatch):
    tensors = in_dtype(inputs((1, 3, 2, 1, 4, 4, 4), "soft", torch.device("cpu")), torch.bfloat16)
    tensors[0] = tensors[0].as_subclass(OnCuda)
    if pretend(monkeypatch, chip):
        assert chunked._use_triton("triton", *tensors)
    else:
        with pytest.raises(ValueError, match=r"needs an NVIDIA GPU of compute capability 8\.0 or later"):
            chunked._use_triton("triton", *tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mass", [False, True], ids=["published read", "mass"])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("T", [1, 16, 17, 63, 64, 127, 129, 300])
def test_every_dtype_and_gate_equals_the_definition(T, gates, mass, dtype, device):
    tensors = inputs((2, T, 4, 2, 32, 48, 20), gates, device, dtype)
    gold = everything(gsa_reference, tensors, mass=mass)
    ours, plain = (
        everything(gsa, in_dtype(tensors, dtype), mass=mass, backend=name) for name in ("triton", "torch")
    )
    assert_all_as_good_as(ours, plain, gold, dtype)


@pytest.fixture
def fenced(monkeypatch):
    """Every byte that a kernel touches must lie in one of the tensors it was given (Triton's interpreter)."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, tensors = interpreter.interpreter_builder, []
    load, store = builder.create_masked_load, builder.create_masked_store
    arguments = interpreter.GridExecutor._init_args_hst

    def launch(self, args, more):
        host = arguments(self, args, more)
        tensors[:] = [x for x in (*host[0], *host[1].values()) if isinstance(x, torch.Tensor)]
        return host

    def check(pointers, mask) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        at = torch.from_numpy(pointers.data[mask.data].astype("int64"))
        inside = torch.zeros(at.shape, dtype=torch.bool)
        for x in tensors:
            inside |= (at >= x.data_ptr()) & (at + size <= x.data_ptr() + x.numel() * x.element_size())
        assert inside.all(), "outside of every tensor"

    def fenced_load(pointers, mask, *rest):
        check(pointers, mask)
        return load(pointers, mask, *rest)

    def fenced_store(pointers, value, mask, *rest):
        check(pointers, mask)
        return store(pointers, value, mask, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", launch)
    monkeypatch.setattr(builder, "create_masked_load", fenced_load)
    monkeypatch.setattr(builder, "create_masked_store", fenced_store)


FENCED = {  # pairs in factors, tokens, query heads, key and value heads, D, E, slots; documents
    "one token": (True, (1, 4, 1, 20, 24, 12), None),
    "a block and a token": (True, (17, 4, 1, 20, 24, 12), None),
    "a segment and a token": (True, (129, 4, 1, 20, 24, 12), None),
    "few slots, a head of its own for each query": (True, (17, 2, 2, 64, 64, 16), None),
    "documents": (True, (61, 4, 1, 20, 24, 12), [0, 1, 34, 34, 61]),
    "documents, exact pairs": (False, (18, 1, 1, 20, 24, 12), [0, 1, 1, 18]),  # slow, the same for each head
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="compute-sanitizer's work on a GPU")
@pytest.mark.parametrize(("factored", "shape", "cuts"), FENCED.values(), ids=FENCED)
def test_kernels_touch_no_byte_outside_their_tensors(factored, shape, cuts, device, monkeypatch, fenced):
    monkeypatch.setattr(triton_op, "tiled", lambda dtype: factored)
    tensors = in_dtype(inputs((1, *shape), "soft", device, torch.float32), torch.float32)
    cu = None if cuts is None else torch.tensor(cuts)
    found = everything(triton, tensors, mass=True, cu_seqlens=cu)
    if shape[0] == 1:
        after = triton(*tensors, mass=True, state=GSAState(*(found[name] for name in ("K", "V", "log_kept"))))
        found = {"o": after[0]} | found
    assert all(x.isfinite().all() for x in found.values())
