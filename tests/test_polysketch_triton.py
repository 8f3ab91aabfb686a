"""PolySketch's Triton kernels against the definition: in Triton's interpreter here, wider on a GPU."""

import pytest
import torch

from tolerance import assert_as_good_as
from unsoftmax.kernels.mixer import AttentionShape, Owned, Rotary
from unsoftmax.kernels.polysketch.chunked import PolySketchState, polysketch
from unsoftmax.kernels.polysketch.layer import PolySketchAttention, PolySketchOptions
from unsoftmax.kernels.polysketch.reference import polysketch_reference
from unsoftmax.kernels.polysketch.sketch import LearnedSketch, append

pytest.importorskip("triton")
from unsoftmax.kernels.polysketch import triton_block, triton_step
from unsoftmax.kernels.polysketch.triton_sketch import sketch_triton
from unsoftmax.kernels.polysketch.triton_step import own

SMALL = {  # B, T, HQ, H, D, E, r, block
    "one token": (1, 1, 2, 1, 16, 16, 16, 16),
    "less than a block": (1, 15, 2, 1, 16, 16, 16, 16),
    "a block": (1, 16, 2, 1, 16, 16, 16, 16),
    "and one more": (1, 17, 2, 1, 16, 16, 16, 16),
    "odd sizes, groups of three": (1, 52, 6, 2, 20, 24, 8, 16),
    "three slices": (1, 72, 1, 1, 16, 16, 24, 16),
}
NEAR = {  # block, window, sinks, local; and T
    "softmax in one block": (16, 16, 0, "softmax", 53),
    "softmax in a window of two": (16, 32, 0, "softmax", 67),
    "softmax with sinks": (16, 32, 3, "softmax", 75),
    "nothing yet far": (16, 32, 3, "softmax", 16),
    "the first far keys": (16, 32, 3, "softmax", 49),
    "a window longer than a chunk": (16, 80, 3, "softmax", 130),
    "powers in a window with sinks": (16, 48, 5, "power", 100),
}
SEGMENTS = (1, 17 * 32 + 5, 1, 1, 16, 16, 8, 16)
WIDE = {
    **SMALL,
    "Mistral's heads": (1, 1100, 8, 2, 128, 128, 32, 256),
    "two segments": (2, 18 * 64 + 7, 4, 2, 64, 64, 16, 64),
    "r 64": (1, 700, 4, 1, 128, 64, 64, 256),
    "wide heads": (1, 300, 2, 2, 256, 256, 32, 64),
    "large blocks": (1, 2100, 2, 1, 64, 128, 32, 1024),
    "groups of seven": (1, 300, 7, 1, 64, 64, 32, 128),
}


def case(sizes, dtype=torch.float64, device="cpu"):
    """q, k, v, phi_q, phi_k of sizes at which near and far weights are alike; exact in dtype.

    Products keep away from 0, as scores with an offset do: else a first token's gradients are differences
    divided by next to nothing.
    """
    B, T, HQ, H, D, E, r, _ = sizes
    tensors = []
    for heads, size, common in ((HQ, D, 1.5), (H, D, 1.5), (H, E, None), (HQ, r, 2.0), (H, r, 2.0)):
        x = torch.randn(B, T, heads, size)
        if common is not None:
            x = x * 0.5 / size**0.25
            x[..., 0] += common
        tensors.append(x)
    return [x.to(device, dtype).double() for x in tensors]


def results(form, tensors, dtype, do, *, more=None, **rule):
    more = more or {}
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    extra = [x.to(dtype if dtype == torch.float64 else torch.float32).requires_grad_() for x in more.values()]
    o, _ = form(*leaves, **dict(zip(more, extra)), **rule)
    grads = torch.autograd.grad(o, leaves + extra, do.to(o.dtype), allow_unused=True)
    names = ("dq", "dk", "dv", "dphi_q", "dphi_k", *(f"d{n}" for n in more))
    # no far key, no gradient in the definition
    filled = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves + extra, grads))
    return {"o": o.detach(), **dict(zip(names, filled))}


@pytest.fixture(autouse=True)
def short_chunks(request, monkeypatch):
    """States every 32 tokens, so that short texts have some; two pairs a program, as in 16 bits."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(triton_block, "CHUNK", 32)
        sums, shipped = triton_block.Tiles(128, 32, 4, 1), triton_block.plan
        cut = {"states": sums, "gradients": sums}
        monkeypatch.setattr(triton_block, "plan", lambda *given: shipped(*given)._replace(**cut))


def check(sizes, dtype, device, more=None, **rule):
    tensors = case(sizes, dtype, device)
    do = torch.randn(*tensors[0].shape[:3], sizes[5]).to(device, dtype).double()
    rule["block"] = sizes[-1]
    for name, x in (more or {}).items():
        if x.dim() == 1:  # of noise alone, what a head's sum over all tokens leaves is less than its rounding
            a, b = (polysketch_reference(*tensors, **{name: x + h}, **rule)[0] for h in (1e-3, -1e-3))
            do += ((a - b) / (a - b).square().mean().sqrt().clamp(min=1e-9)).to(dtype).double()
    gold = results(polysketch_reference, tensors, torch.float64, do, more=more, **rule)
    plain = results(polysketch_reference, tensors, dtype, do, more=more, **rule)
    ours = results(polysketch, tensors, dtype, do, more=more, backend="triton", keep_state=False, **rule)
    for name, exact in gold.items():
        if not exact.norm() > 1e-9:  # a first token's weight does not matter, up to rounding
            assert ours[name].abs().max() < 1e-5, name
        else:
            assert_as_good_as(name, ours[name], plain[name], exact, dtype)


@pytest.mark.parametrize("sizes", SMALL.values(), ids=SMALL)
def test_output_and_every_gradient_equal_the_definition(sizes, device):
    offset = torch.rand(sizes[2], dtype=torch.float64, device=device)
    check(sizes, torch.float32, device, {"offset": offset})


@pytest.mark.parametrize("degree", [2, 8])
def test_other_degrees_and_the_published_normaliser_equal_the_definition(degree, device):
    check((1, 52, 2, 1, 16, 16, 8, 16), torch.float32, device, degree=degree, normaliser=1.0)


def test_a_far_scale_equals_the_definition(device):
    scale = torch.randn(2, dtype=torch.float64, device=device)
    check((1, 52, 2, 1, 16, 16, 8, 16), torch.float32, device, {"far_scale": scale})


@pytest.mark.parametrize("near", NEAR.values(), ids=NEAR)
def test_windows_and_sinks_equal_the_definition_and_leave_the_same_state(near, device):
    block, window, sinks, local, T = near
    sizes = (1, T, 2, 1, 16, 16, 8, block)
    rule = {"window": window, "sinks": sinks, "local": local}
    more = {"far_scale": torch.randn(1, T, 2, dtype=torch.float64, device=device)}
    check(sizes, torch.float32, device, more, **rule)
    tensors = [x.float() for x in case(sizes, device=device)]
    ours, plain = (polysketch(*tensors, block=block, backend=b, **rule)[1] for b in ("triton", "torch"))
    gold = polysketch(*(x.double() for x in tensors), block=block, backend="torch", **rule)[1]
    same_state(ours, plain, gold)


@pytest.mark.parametrize("rule", [{}, {"local": "softmax", "window": 32, "sinks": 4}], ids=str)
def test_packed_documents_equal_the_definition_and_ignore_their_neighbours(rule, device):
    cu = torch.tensor([0, 20, 21, 21, 100, 117], device=device)
    sizes = (1, 117, 2, 1, 16, 16, 8, 16)
    check(sizes, torch.float32, device, cu_seqlens=cu, **rule)
    tensors = [x.float() for x in case(sizes, device=device)]
    inside = slice(21, 100)
    others = [torch.full_like(x, torch.nan) for x in tensors]
    for x, other in zip(tensors, others):
        other[:, inside] = x[:, inside]
    rule = {"block": 16, "cu_seqlens": cu, "keep_state": False, "backend": "triton", **rule}
    a, b = (polysketch(*given, **rule)[0][:, inside] for given in (tensors, others))
    assert torch.equal(a, b)


def same_state(ours, plain, gold):
    for name, a, b, c in zip(ours._fields, ours, plain, gold):
        if name == "S":
            assert_as_good_as(name, a, b, c)
        else:
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b), name


def test_tokens_beyond_a_row_s_length_give_zero_and_leave_no_trace(device):
    tensors = [x.float().requires_grad_() for x in case((2, 40, 2, 1, 16, 16, 16, 16), device=device)]
    lengths, do = torch.tensor([40, 21], device=device), torch.randn(2, 40, 2, 16, device=device)
    found = []
    for backend in ("triton", "torch"):
        o, _ = polysketch(*tensors, block=16, lengths=lengths, keep_state=False, backend=backend)
        found.append([o, *torch.autograd.grad(o, tensors, do)])
    assert not found[0][0][1, 21:].any()
    assert all((a - b).norm() <= 1e-5 * b.norm() for a, b in zip(*found))


@pytest.mark.parametrize("size", [-200.0, 200.0])
def test_softmax_beside_far_weights_that_leave_float32(size, device):
    tensors = case((1, 60, 2, 1, 16, 16, 16, 16), torch.float32, device)
    more, do = {"far_scale": torch.full((1, 60, 2), size, device=device)}, torch.randn(1, 60, 2, 16)
    rule = {"more": more, "local": "softmax", "block": 16}
    gold = results(polysketch, tensors, torch.float64, do.to(device), backend="torch", **rule)
    ours = results(polysketch, tensors, torch.float32, do.to(device), backend="triton", **rule)
    for name, exact in gold.items():
        error = (ours[name] - exact).norm()
        assert error <= 1e-5 * max(exact.norm(), gold["dv"].norm()), name  # what is left is next to nothing


STEPS = {  # block, window, sinks, local, degree, HQ, tokens before
    "powers": (16, 16, 0, "power", 4, 2, (14, 31)),
    "powers in a window with sinks": (16, 48, 3, "power", 2, 3, (0, 46)),
    "softmax": (16, 32, 3, "softmax", 4, 2, (2, 63)),
}


@pytest.mark.parametrize("several", [1, 40])
@pytest.mark.parametrize("rule", STEPS.values(), ids=STEPS)
def test_more_tokens_equal_the_definition_and_leave_the_same_state(rule, several, device):
    block, window, sinks, local, degree, HQ, before = rule
    rule = {"block": block, "window": window, "sinks": sinks, "local": local, "degree": degree}
    tensors = [x.float() for x in case((2, 110, HQ, 1, 20, 24, 16, block), device=device)]
    scale = torch.randn(2, 110, HQ, device=device)
    if local == "power":
        rule["offset"] = torch.rand(HQ, device=device)

    def run(dtype, backend, start, stop, state=None, lengths=None):
        given, some = [x[:, start:stop].to(dtype) for x in tensors], scale[:, start:stop].to(dtype)
        more = {"far_scale": some, "lengths": lengths, "state": state, "backend": backend}
        return polysketch(*given, **more, **rule)

    lengths = torch.tensor(before, device=device)
    kinds = ((torch.float32, "triton"), (torch.float32, "torch"), (torch.float64, "torch"))
    mine, plain, gold = (run(*kind, 0, max(before), lengths=lengths)[1] for kind in kinds)
    for t, stop in ((64, 65), (65, 66), *((t, t + several) for t in range(66, 69, several))):
        lengths = None if stop == t + 1 else torch.tensor([several, 23], device=device)
        ours, mine = run(torch.float32, "triton", t, stop, mine, lengths)
        other, plain = run(torch.float32, "torch", t, stop, plain, lengths)
        exact, gold = run(torch.float64, "torch", t, stop, gold, lengths)
        assert_as_good_as("o", ours, other, exact)
        same_state(mine, plain, gold)


def aged(sizes, before, rule, device, extra=0):
    """Inputs of some tokens to come, and the state of rows that have seen `before` tokens."""
    B, *rest = sizes
    tensors = [x.float() for x in case((B, max(before) + extra, *rest), device=device)]
    seen = torch.tensor(before, device=device)
    _, state = polysketch(*(x[:, : max(before)] for x in tensors), lengths=seen, backend="torch", **rule)
    return [x[:, max(before) :] for x in tensors], state


def owned(state):
    rest = (x.clone() for x in state[1:])
    return PolySketchState(own(state.S), *rest)


IN_PLACE = {  # HQ, H, D, E, r, block; tokens before; rule
    "powers": ((3, 1, 16, 24, 8, 16), (7, 46), {"local": "power"}),
    "powers in a window with sinks": (
        (2, 2, 20, 40, 8, 16),
        (0, 46),
        {"window": 48, "sinks": 3, "degree": 2},
    ),
    "softmax": ((2, 1, 16, 16, 8, 16), (2, 63), {"window": 32, "sinks": 4, "local": "softmax"}),
}


@pytest.fixture
def few_parts(request, monkeypatch):
    """Interpreted programs take long."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(triton_step, "cut", lambda *sizes: triton_step.Cut(64, 32, 2, warps=4))


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize("which", IN_PLACE.values(), ids=IN_PLACE)
def test_a_state_changed_in_place_is_the_state_written_anew(which, device):
    sizes, before, rule = which
    rule, steps = {"block": sizes[-1], **rule}, 18
    tokens, start = aged((2, *sizes), before, rule, device, extra=steps)
    scale, asleep = torch.randn(2, steps, sizes[0], device=device), {4: 0, 5: 1, 16: 0}
    mine = held = owned(start)
    anew, kept = start, [x.clone() for x in start]
    for t in range(steps):
        token, more = [x[:, t, None] for x in tokens], {"far_scale": scale[:, t, None], **rule}
        real = torch.arange(2, device=device) != asleep.get(t, -1)
        ours, mine = polysketch(*token, state=mine, in_place=real, backend="triton", **more)
        assert all(a is b for a, b in zip(mine, held))
        o, anew = polysketch(*token, state=anew, lengths=real.long(), backend="triton", **more)
        assert torch.equal(ours, o) and not o[~real].any() and o[real].any(-1).all()
        assert all(torch.equal(a, b) for a, b in zip(mine, anew)), t
    assert all(torch.equal(a, b) for a, b in zip(start, kept)), "the state given was changed"


@pytest.mark.slow
@pytest.mark.usefixtures("few_parts")
def test_600_tokens_in_place_equal_the_block_algorithm(device):
    sizes, before, rule = IN_PLACE["softmax"]
    rule = {"block": sizes[-1], **rule}
    tokens, start = aged((2, *sizes), before, rule, device, extra=600)
    mine, plain, every = owned(start), start, torch.ones(2, dtype=torch.bool, device=device)
    gold = PolySketchState(*(x.double() if x.is_floating_point() else x for x in start))
    outputs = []
    for t in range(600):
        token = [x[:, t, None] for x in tokens]
        o, mine = polysketch(*token, state=mine, in_place=every, backend="triton", **rule)
        other, plain = polysketch(*token, state=plain, backend="torch", **rule)
        exact, gold = polysketch(*(x.double() for x in token), state=gold, backend="torch", **rule)
        outputs.append((o, other, exact))
    assert_as_good_as("o", *(torch.cat(x, 1) for x in zip(*outputs)))
    same_state(mine, plain, gold)


@pytest.mark.parametrize("chosen", [None, (128, 16, 1), (32, 64, 8)], ids=str)
def test_a_step_of_many_parts_equals_the_definition(chosen, monkeypatch, device):
    if chosen:
        monkeypatch.setattr(triton_step, "cut", lambda *sizes: triton_step.Cut(*chosen, warps=4))
    rule = {"block": 16, "window": 64, "sinks": 3, "local": "softmax"}
    tokens, state = aged((1, 2, 1, 16, 40, 48, 16), (95,), rule, device, extra=1)
    ours, mine = polysketch(*tokens, state=state, backend="triton", **rule)
    other, plain = polysketch(*tokens, state=state, backend="torch", **rule)
    gold = PolySketchState(*(x.double() if x.is_floating_point() else x for x in state))
    exact, gold = polysketch(*(x.double() for x in tokens), state=gold, backend="torch", **rule)
    assert_as_good_as("o", ours, other, exact)
    same_state(mine, plain, gold)


def test_a_layer_s_own_state_is_apart_from_the_one_given_and_forward_takes_it(device):
    shape = AttentionShape(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16)
    layer = PolySketchAttention(shape, PolySketchOptions(sketch_size=16, block=16)).to(device)
    x = torch.randn(2, 41, 32, device=device)
    turns = torch.randn(2, 41, 16, device=device).chunk(2, -1)[0].repeat(1, 1, 2)
    rotary = Rotary(turns.cos(), turns.sin())
    _, state = layer(x[:, :40], rotary=Rotary(*(r[:, :40] for r in rotary)), keep_state=True)
    kept, mine = [x.clone() for x in state], layer.own(state)
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(mine, state) if a.numel())
    last = {"rotary": Rotary(*(r[:, 40:] for r in rotary)), "keep_state": True}
    every = torch.ones(2, dtype=torch.bool, device=device)
    with torch.no_grad():
        y, after = layer(x[:, 40:], state=Owned(mine, every), **last)
        other, plain = layer(x[:, 40:], state=state, **last)
    assert torch.allclose(y, other, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(after, plain))
    assert all(torch.equal(a, b) for a, b in zip(state, kept))


@pytest.mark.gpu
@pytest.mark.parametrize("local", ["power", "softmax"])
def test_a_graph_of_a_step_in_place_gives_what_steps_give(local, device):
    window = {"local": local, "window": 64, "sinks": 4}
    rule = {"block": 32, "backend": "triton", **window}
    tokens, start = aged((3, 8, 2, 64, 64, 32, 32), (5, 40, 95), {"block": 32, **window}, device, extra=600)
    mine, anew = owned(start), start
    token = [x[:, 0, None].clone() for x in tokens]
    real = torch.tensor([True, True, True], device=device)
    with torch.no_grad():
        polysketch(*token, state=owned(start), in_place=real, **rule)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = polysketch(*token, state=mine, in_place=real, **rule)
        for t in range(600):
            real[1] = t % 7 != 3
            for x, whole in zip(token, tokens):
                x.copy_(whole[:, t, None])
            graph.replay()
            other, anew = polysketch(*token, state=anew, lengths=real.long(), **rule)
            assert torch.equal(o, other), t
    assert all(torch.equal(a, b) for a, b in zip(mine, anew))


def test_several_segments_equal_the_definition_and_leave_the_same_state(device):
    tensors = [x.float() for x in case(SEGMENTS, device=device)]
    ours, plain = (polysketch(*tensors, block=16, backend=backend) for backend in ("triton", "torch"))
    gold = polysketch(*(x.double() for x in tensors), block=16, backend="torch")
    assert_as_good_as("o", ours[0], plain[0], gold[0])
    same_state(ours[1], plain[1], gold[1])


@pytest.mark.parametrize("rule", [{}, {"local": "softmax", "window": 32, "sinks": 4}], ids=str)
def test_a_later_token_changes_no_earlier_bit(rule, device):
    sizes, cut = (*SEGMENTS[:1], 110, *SEGMENTS[2:]), 90
    tensors = [x.float() for x in case(sizes, device=device)]
    do = torch.randn(1, cut, 1, 16, device=device)
    found = []
    for change in (1.0, -3.0):
        leaves = [torch.cat((x[:, :cut], x[:, cut:] * change), 1).requires_grad_() for x in tensors]
        o, _ = polysketch(*leaves, block=16, backend="triton", **rule)
        grads = torch.autograd.grad(o[:, :cut], leaves, do)
        found.append([o[:, :cut].detach(), *(g[:, :cut] for g in grads)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_rows_without_weight_give_zero(device):
    q, k, v, phi_q, phi_k = (x.float() for x in case((1, 40, 2, 1, 16, 16, 16, 16), device=device))
    nothing = torch.zeros_like(q).requires_grad_()
    o, _ = polysketch(nothing, k, v, phi_q * 0, phi_k, block=16, backend="triton")
    (grad,) = torch.autograd.grad(o.sum(), nothing)
    assert not o.any() and not grad.any()


def test_ones_average_to_ones_even_where_sketches_cancel(device):
    q, k, v, phi_q, phi_k = (x.float() for x in case((1, 40, 3, 3, 16, 16, 16, 16), device=device))
    phi_q = phi_q - phi_q.mean(-1, keepdim=True) * (1 - 1e-3)  # what is left beside constant keys
    q, phi_k = q * 1e-3, torch.ones_like(phi_k)
    o, _ = polysketch(q, k, torch.ones_like(v), phi_q, phi_k, block=16, backend="triton")
    assert torch.allclose(o, torch.ones_like(o), atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sinks": 17}, "17 sinks"),
        ({"degree": 6}, "degree 6"),
        ({"block": 24}, "block 24"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(wrong, message, device):
    tensors = case((1, 20, 2, 1, 16, 16, 16, 16), device=device)
    with pytest.raises(ValueError, match=f"does not take {message}"):
        polysketch(*(x.float() for x in tensors), **({"block": 16} | wrong), backend="triton")


def test_float16_is_refused_by_name_as_powers_would_leave_it(device):
    tensors = case((1, 20, 2, 1, 16, 16, 16, 16), device=device)
    with pytest.raises(ValueError, match="does not take dtype"):
        polysketch(*(x.half() for x in tensors), block=16, backend="triton")


@pytest.mark.parametrize("degree", [2, 4])
def test_the_learned_sketch_and_every_gradient_equal_the_definition(degree, device):
    H, N, D, r = 2, 6, 20, 24
    shapes = {
        "x": (2, 70, N, D),
        "maps": (H, degree // 2, D + 1, r),
        "factor": (N,),
        "last": (N,),
        "mean": (N, D),
        "tilt": (N, D),
    }
    given = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    dphi, dlift = torch.randn(2, 70, N, r, device=device), torch.randn(2, 70, N, device=device)
    sketch = LearnedSketch(degree, D + 1, r, H)

    def definition(x, maps, *, factor, last, mean, tilt):
        lift = (x * tilt).sum(-1)
        x = append((x - mean) * factor[:, None], last)
        return torch.func.functional_call(sketch, {"query": maps, "key": maps}, (x, x[:, :, :H]))[0], lift

    def run(form, dtype):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
        rest = {name: leaves[name] for name in ("factor", "last", "mean", "tilt")}
        both = form(leaves["x"], leaves["maps"], **rest)
        grads = torch.autograd.grad(both, list(leaves.values()), (dphi.to(dtype), dlift.to(dtype)))
        return [*(x.detach() for x in both), *grads]

    results = (
        run(sketch_triton, torch.float32),
        run(definition, torch.float32),
        run(definition, torch.float64),
    )
    for name, *three in zip(("phi", "lift", *shapes), *results):
        assert_as_good_as(name, *three)


@pytest.mark.parametrize("local", ["softmax", "power"])
def test_a_layer_hands_the_kernels_what_it_computes_without(local, device):
    shape = AttentionShape(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16)
    layer = PolySketchAttention(shape, PolySketchOptions(sketch_size=16, local=local, block=16)).to(device)
    with torch.no_grad():
        for parameter in layer.new_parameters().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    q, k, v = (torch.randn(1, 40, heads, 16, device=device) for heads in (2, 1, 1))
    found = []
    for prepare in (layer._narrow, layer._wide):
        (*qk, phi_q, phi_k), more = prepare(q, k)
        o, _ = polysketch(*qk, v, phi_q, phi_k, block=16, local=local, backend="torch", **more)
        parameters = list(layer.new_parameters().values())
        found.append([o, *torch.autograd.grad(o.square().sum(), parameters, allow_unused=True)])
    for ours, plain in zip(*found):
        assert (ours is None) == (plain is None)
        assert ours is None or (ours - plain).norm() <= 1e-4 * plain.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", WIDE.values(), ids=WIDE)
def test_wide_grid_equals_the_definition(sizes, dtype, device):
    offset = torch.rand(sizes[2], dtype=torch.float64, device=device)
    check(sizes, dtype, device, {"offset": offset})
    scale = torch.randn(*sizes[:3], dtype=torch.float64, device=device)
    rule = {"local": "softmax", "window": 2 * sizes[-1], "sinks": 4}
    check(sizes, dtype, device, {"far_scale": scale}, **rule)
