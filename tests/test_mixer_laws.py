"""The five laws of kernels/mixer.py, for every mixer in the registry; a new one is tested once it is listed.

The definition of a layer is the layer itself over its reference: in the layer's module, each function X is
replaced by X_reference of the reference.py beside it.
"""

import copy
import importlib
import inspect
from collections.abc import Callable
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from tolerance import assert_as_good_as
from unsoftmax.kernels.mixer import SOURCE_PROJECTIONS, AttentionShape, Mixer, Rotary
from unsoftmax.kernels.registry import MIXERS

SHAPES = {
    "grouped heads": AttentionShape(24, 4, 2, 8),
    "one key head, biases, own scale": AttentionShape(20, 3, 1, 6, qkv_bias=True, o_bias=True, scale=0.3),
    "as many key heads": AttentionShape(16, 2, 2, 4),
}
OPTIONS = {  # small, so that rows of 70 tokens cross every border; a mixer without a line has its defaults
    "gsa": {
        "ring": {"num_slots": 16, "sinks": 3},
        "ring, no sinks": {"num_slots": 7, "sinks": 0},
        "slots that keep what is worth it": {"num_slots": 16, "sinks": 2, "recent": 5},
        "one slot that does": {"num_slots": 9, "sinks": 2, "recent": 6},
        "paper": {"num_slots": 6, "start": "paper"},
    },
    "polysketch": {
        "learned": {"sketch_size": 8, "block": 16},
        "exact": {"sketch": "exact", "degree": 2, "block": 16},
        "gaussian": {"sketch": "gaussian", "sketch_size": 8, "block": 16},
        "power": {"local": "power", "sketch_size": 8, "block": 16},
        "hadamard": {"sketch": "hadamard", "sketch_size": 8, "block": 16},
    },
    "window": {
        "window and sinks": {"window": 9, "sinks": 3},
        "window": {"window": 16, "sinks": 0},
        "one token": {"window": 1, "sinks": 2},
    },
}
CASES = [
    pytest.param(name, options, id=f"{name}: {title}")
    for name in MIXERS
    for title, options in OPTIONS.get(name, {"defaults": {}}).items()
]
T = 70
every_mixer = pytest.mark.parametrize(("name", "options"), CASES)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def build(name: str, options: dict, shape: AttentionShape, device: torch.device) -> Mixer:
    cls = MIXERS[name]
    layer = cls(shape, cls.Options(**options)).to(device, torch.float64)
    with torch.no_grad():  # attention that tells tokens apart: a flat one has hardly a gradient to compare
        layer.q_proj.weight.mul_(3)
        layer.k_proj.weight.mul_(3)
        for i, p in enumerate(layer.new_tensors().values()):  # as after some training: no two slots alike
            p.add_(0.3 * noise(*p.shape, device=device, seed=100 + i))
    return layer


def rotary_at(position: torch.Tensor, size: int) -> Rotary:
    """Factors of integer positions [B, T], base 10,000."""
    angle = (
        position.double()[..., None]
        * 1e4 ** (-torch.arange(0, size, 2, device=position.device) / size).double()
    )
    angle = torch.cat((angle, angle), -1)
    return Rotary(angle.cos(), angle.sin())


def run(layer: Mixer, x: torch.Tensor, *, position: torch.Tensor | None = None, **more):
    """The layer on x, whose tokens are the first of their row unless positions [B, T] are given."""
    if position is None:
        position = torch.arange(x.shape[1], device=x.device)[None]
    rotary = rotary_at(position, layer.shape.head_dim)
    return layer(x, rotary=Rotary(*(f.to(x.dtype) for f in rotary)), **more)


def noise(*size: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*size, generator=generator, device=device, dtype=torch.float64)


def output_and_gradients(layer: Mixer, x: torch.Tensor, dy: torch.Tensor, **more) -> dict[str, torch.Tensor]:
    """y, and the gradients of x and of every parameter it depends on, as `d name`."""
    x = x.detach().clone().requires_grad_()
    y = run(layer, x, **more)[0]
    named = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(y, (x, *named.values()), dy.to(y.dtype), allow_unused=True)
    found = dict(zip(("x", *named), grads))
    return {"y": y.detach()} | {f"d {n}": g for n, g in found.items() if g is not None}


def takes_what_it_knows(definition: Callable) -> Callable:
    """A definition may lack an argument of the fast form as long as that is None."""
    known = inspect.signature(definition).parameters
    return lambda *args, **more: definition(
        *args, **{k: v for k, v in more.items() if k in known or v is not None}
    )


@contextmanager
def the_definition(name: str):
    layer, reference = (
        importlib.import_module(f"unsoftmax.kernels.{name}.{part}") for part in ("layer", "reference")
    )
    ops = {
        n.removesuffix("_reference"): takes_what_it_knows(f)
        for n, f in vars(reference).items()
        if n.endswith("_reference")
    }
    assert ops, f"kernels/{name}/reference.py defines no X_reference"
    with patch.multiple(layer, **ops):
        yield


@every_shape
@every_mixer
def test_the_fast_form_equals_the_definition(name, options, shape, device):
    layer, x = build(name, options, shape, device), noise(2, T, shape.hidden_size, device=device)
    dy = noise(2, T, shape.hidden_size, device=device, seed=2)
    single = copy.deepcopy(layer).float()
    with the_definition(name):
        gold = output_and_gradients(layer, x, dy)
        plain = output_and_gradients(single, x.float(), dy)
    exact, ours = output_and_gradients(layer, x, dy), output_and_gradients(single, x.float(), dy)
    assert gold.keys() == exact.keys() == ours.keys()
    for key in gold:
        assert_as_good_as(key, exact[key], gold[key], gold[key])
        assert_as_good_as(key, ours[key], plain[key], gold[key])


@every_mixer
def test_packed_documents_equal_their_definition(name, options, device):
    shape = SHAPES["grouped heads"]
    layer, x = build(name, options, shape, device), noise(1, T, shape.hidden_size, device=device)
    dy, cu = (
        noise(1, T, shape.hidden_size, device=device, seed=2),
        torch.tensor([0, 1, 1, 30, 33, T], device=device),
    )
    with the_definition(name):
        gold = output_and_gradients(layer, x, dy, cu_seqlens=cu)
    ours = output_and_gradients(layer, x, dy, cu_seqlens=cu)
    for key in gold:
        assert_as_good_as(key, ours[key], gold[key], gold[key])


@every_mixer
def test_a_later_token_changes_no_earlier_output_and_no_gradient(name, options, device):
    shape, cut = SHAPES["grouped heads"], 41
    layer = build(name, options, shape, device).float()
    x, dy = (noise(2, T, shape.hidden_size, device=device, seed=s).float() for s in (1, 2))
    dy[:, cut:] = 0
    before = output_and_gradients(layer, x, dy)
    x[:, cut:] = 3 * noise(2, T - cut, shape.hidden_size, device=device, seed=3).float()
    after = output_and_gradients(layer, x, dy)
    assert torch.equal(before["y"][:, :cut], after["y"][:, :cut])
    assert not torch.equal(before["y"][:, cut:], after["y"][:, cut:])
    assert not after["d x"][:, cut:].any()
    for key in before.keys() - {"y"}:
        assert torch.equal(before[key], after[key]), key


PIECES = {
    "token by token": [1] * T,
    "a prompt, then tokens": [37] + [1] * (T - 37),
    "pieces of all sizes": [1, 2, 16, 3, 17, 1, 15, 15],
    "two halves": [35, 35],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@every_mixer
def test_pieces_equal_the_whole_and_leave_the_given_state_alone(name, options, pieces, device):
    shape = SHAPES["grouped heads"]
    layer, x = build(name, options, shape, device), noise(2, T, shape.hidden_size, device=device)
    with torch.no_grad():
        whole, end = run(layer, x, keep_state=True)
        state, out, at = None, [], 0
        for n in pieces:
            given = [] if state is None else [t.clone() for t in state]
            position = torch.arange(at, at + n, device=device)[None]
            y, new = run(layer, x[:, at : at + n], position=position, state=state, keep_state=True)
            if state is not None:
                assert len(given) == len(state)
                assert all(torch.equal(a, b) for a, b in zip(given, state)), "the given state was changed"
                again, _ = run(layer, x[:, at : at + n], position=position, state=state)
                assert torch.equal(again, y), "the same state gave another answer"
            state, at = new, at + n
            out.append(y)
    assert at == T
    assert_as_good_as("y", torch.cat(out, 1), whole, whole)
    for key, ours, gold in zip(type(end)._fields, state, end):
        assert ours.dtype == gold.dtype, key
        assert_as_good_as(key, ours.double(), gold.double(), gold.double())


@every_mixer
def test_rows_of_a_state_can_be_reordered_as_beams_do(name, options, device):
    shape, order = SHAPES["grouped heads"], torch.tensor([2, 0, 0], device=device)
    layer, x = build(name, options, shape, device), noise(3, T, shape.hidden_size, device=device)
    later, position = (
        noise(3, 5, shape.hidden_size, device=device, seed=4),
        torch.arange(T, T + 5, device=device)[None],
    )
    with torch.no_grad():
        state = run(layer, x, keep_state=True)[1]
        assert all(t.shape[0] == 3 for t in state)
        ours, _ = run(layer, later, position=position, state=type(state)(*(t[order] for t in state)))
        gold = run(layer, torch.cat((x[order], later), 1))[0][:, T:]
    assert_as_good_as("y", ours, gold, gold)


@every_shape
@every_mixer
def test_the_size_of_a_state_is_known_before_it_is_made(name, options, shape, device):
    layer = build(name, options, shape, device).float()
    _, state = run(layer, torch.ones(1, 1, shape.hidden_size, device=device), keep_state=True)
    sizes = {key: t.numel() * t.element_size() for key, t in state._asdict().items() if key != "seen"}
    assert 4 * layer.options.state_numbers(shape) == sum(sizes.values()), sizes


@every_mixer
def test_a_document_start_forgets_everything_before_it(name, options, device):
    shape, lengths = SHAPES["grouped heads"], [1, 0, 29, 3, 1, 36]
    layer, x = build(name, options, shape, device), noise(1, T, shape.hidden_size, device=device)
    dy = noise(1, T, shape.hidden_size, device=device, seed=2)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    position = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    ours = output_and_gradients(layer, x, dy, position=position, cu_seqlens=cu)
    parts = [
        output_and_gradients(layer, a, b)
        for a, b in zip(x.split(lengths, 1), dy.split(lengths, 1))
        if a.numel()
    ]
    for key in ours:
        alone = [p[key] for p in parts if key in p]
        gold = torch.cat(alone, 1) if key in ("y", "d x") else torch.stack(alone).sum(0)
        assert_as_good_as(key, ours[key], gold, gold)

    other = x.clone()
    other[:, :30] = 5.0
    changed = output_and_gradients(layer, other, dy, position=position, cu_seqlens=cu)
    assert torch.equal(changed["y"][:, 30:], ours["y"][:, 30:])
    assert torch.equal(changed["d x"][:, 30:], ours["d x"][:, 30:])


def paddings(device: torch.device) -> dict[str, torch.Tensor]:
    t = torch.arange(T, device=device)
    inside = (t % 3 != 1) & ((t < 20) | (t > 45))
    return {
        "left": torch.stack((t >= 0, t >= 23)),
        "right": torch.stack((t < T - 1, t < 31)),
        "inside": torch.stack((inside, ~inside)),
        "nothing real in one row": torch.stack((t >= 5, t < 0)),
    }


@pytest.mark.parametrize("where", paddings(torch.device("cpu")))
@every_mixer
def test_padding_leaves_no_trace(name, options, where, device):
    shape, mask = SHAPES["grouped heads"], paddings(device)[where]
    layer, x = build(name, options, shape, device), noise(2, T, shape.hidden_size, device=device)
    x = torch.where(mask[..., None], x, 7.0)
    later = noise(2, 6, shape.hidden_size, device=device, seed=4)
    later_mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0]], dtype=torch.bool, device=device)
    position = (torch.cat((mask, later_mask), 1).cumsum(1) - 1).clamp_min(0)

    x.requires_grad_()
    y, state = run(layer, x, position=position[:, :T], mask=mask, keep_state=True)
    assert y.isfinite().all()
    (dx,) = torch.autograd.grad(y[mask].square().sum(), x, retain_graph=True)
    assert not dx[~mask].any()
    z, end = run(layer, later, position=position[:, T:], mask=later_mask, state=state, keep_state=True)
    for b in range(2):
        real = torch.cat((x[b : b + 1, mask[b]], later[b : b + 1, later_mask[b]]), 1)
        gold, gold_state = run(layer, real, keep_state=True)
        ours = torch.cat((y[b : b + 1, mask[b]], z[b : b + 1, later_mask[b]]), 1)
        assert_as_good_as("y", ours, gold, gold)
        for key, mine, theirs in zip(type(end)._fields, end, gold_state):
            mine, theirs = mine[b : b + 1].double(), theirs.double()
            assert_as_good_as(key, mine, theirs, theirs)


@every_shape
@every_mixer
def test_the_state_dict_is_the_sources_and_what_is_declared_new(name, options, shape, device):
    layer = build(name, options, shape, device)
    tensors = layer.state_dict()
    source = {n: t for n, t in tensors.items() if n.split(".")[0] in SOURCE_PROJECTIONS}
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    want = {f"{n}_proj.weight": (w, shape.hidden_size) for n, w in (("q", q), ("k", kv), ("v", kv))}
    want["o_proj.weight"] = (shape.hidden_size, q)
    if shape.qkv_bias:
        want |= {f"{n}_proj.bias": (w,) for n, w in (("q", q), ("k", kv), ("v", kv))}
    if shape.o_bias:
        want["o_proj.bias"] = (shape.hidden_size,)
    assert {n: tuple(t.shape) for n, t in source.items()} == want
    assert tensors.keys() - source.keys() == layer.new_tensors().keys()
    buffers = {n for n, _ in layer.named_buffers()}
    assert layer.new_tensors().keys() - buffers == layer.new_parameters().keys()


@every_mixer
def test_new_parameters_have_a_start_that_needs_only_the_seed(name, options, device):
    layer = build(name, options, SHAPES["grouped heads"], device)
    kept = {n: t.clone() for n, t in layer.state_dict().items()}
    starts = []
    for _ in range(2):
        for t in layer.new_tensors().values():
            torch.nn.init.constant_(t, torch.nan)
        torch.manual_seed(5)
        layer.reset_new_parameters()
        starts.append({n: t.clone() for n, t in layer.state_dict().items()})
    for n, t in starts[0].items():
        assert torch.equal(t, starts[1][n]) and t.isfinite().all(), n
        if n.split(".")[0] in SOURCE_PROJECTIONS:
            assert torch.equal(t, kept[n]), n


@every_mixer
def test_fitting_is_repeatable_and_touches_only_what_is_new(name, options, device):
    layer = build(name, options, SHAPES["grouped heads"], device).float()
    rotary = Rotary(*(f.float() for f in rotary_at(torch.arange(T, device=device)[None], 8)))
    batches = [(noise(2, T, 24, device=device, seed=s).float(), rotary) for s in (5, 6)]
    kept = {n: t.clone() for n, t in layer.state_dict().items()}
    found = []
    for _ in range(2):
        layer.load_state_dict(kept)
        torch.manual_seed(7)
        report = layer.fit(batches)
        assert all(isinstance(value, float) for value in report.values())
        found.append((report, {n: t.clone() for n, t in layer.state_dict().items()}))
    assert found[0][0] == found[1][0]
    for n, t in found[0][1].items():
        assert torch.equal(t, found[1][1][n]) and t.isfinite().all(), n
        if n.split(".")[0] in SOURCE_PROJECTIONS:
            assert torch.equal(t, kept[n]), n


@every_mixer
def test_bfloat16_under_autocast_is_as_good_as_the_definition_there(name, options, device):
    shape = SHAPES["grouped heads"]
    layer, x = build(name, options, shape, device), noise(2, T, shape.hidden_size, device=device)
    x = x.bfloat16().double()
    with torch.no_grad(), the_definition(name):
        gold = run(layer, x)[0]
        with torch.autocast(device.type, torch.bfloat16):
            plain = run(layer.float(), x.bfloat16())[0]
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        ours = run(layer, x.bfloat16())[0]
    assert ours.dtype == torch.bfloat16
    assert_as_good_as("y", ours, plain, gold)
