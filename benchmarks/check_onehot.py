"""One-hot slot attention's Triton kernels on a GPU: right in every dtype and shape, and how fast.

    PYTHONPATH=src python benchmarks/check_onehot.py [--out DIR] [--quick] [--no-variants] [--choose]

First every case against the PyTorch form in float64, one line a failing one; then forward and backward over
their block sizes, where the time goes, whole operations at Mistral-7B's shape beside torch's softmax (cuDNN,
FlashAttention-2) in the same run, and a decode step under a CUDA graph. Several processes compile beforehand.
The short table comes last; DIR/onehot.json has everything. Milliseconds are medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import triton
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from unsoftmax.kernels.gsa import triton_onehot
from unsoftmax.kernels.gsa.keep import choose_slots
from unsoftmax.kernels.gsa.layer import GatedSlotAttention, GSAOptions
from unsoftmax.kernels.gsa.onehot import slot_attention
from unsoftmax.kernels.gsa.onehot_reference import SlotState, slots_of
from unsoftmax.kernels.gsa.triton_keep import NEAR, choose_slots_triton
from unsoftmax.kernels.gsa.triton_onehot import Blocks, blocks_for, slot_attention_triton
from unsoftmax.kernels.mixer import AttentionShape, Rotary

CAPS = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 1e-5}  # as tests/tolerance.py
FLOORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}
LENGTHS = (*range(1, 18), 63, 64, 65, 127, 128, 129, 2000)
HEADS = ((16, 16), (32, 20), (60, 64), (80, 96), (100, 128))
GROUPS = ((1, 1), (3, 1), (9, 3), (8, 1), (16, 2))
CASES = [  # B, T, HQ, H, D, E, M, W, bias, state, lengths of packed documents
    *((2, T, 4, 2, 64, 64, 64, 2, True, False, None) for T in LENGTHS),
    *((1, 200, 2, 2, D, E, 48, 2, True, False, None) for D, E in HEADS),
    *((1, 200, 4, 1, D, D, 64, 2, True, True, None) for D in (128, 192, 256)),
    *((1, 300, 4, 2, 64, 64, M, 1, False, False, None) for M in (1, 3, 16, 32, 60, 64, 100, 128, 256)),
    *((1, 300, HQ, H, 32, 32, 64, 2, True, False, None) for HQ, H in GROUPS),
    *((2, 300, 4, 2, 64, 64, 32, W, bias, True, None) for W in (1, 2) for bias in (False, True)),
    (1, 500, 4, 2, 64, 64, 64, 2, True, False, (0, 1, 1, 63, 64, 65, 0, 306)),
    (1, 500, 4, 2, 64, 64, 64, 2, True, True, (0, 1, 1, 63, 64, 65, 0, 306)),
    (1, 500, 4, 2, 64, 64, 30, 1, False, False, (100, 1, 0, 399)),
    (2, 700, 9, 3, 64, 64, (28, 384, 64), 1, False, True, None),
    (2, 300, 16, 4, 128, 128, (28, 384, 64, 100), 2, True, True, None),
    (1, 500, 9, 3, 64, 64, (28, 384, 64), 1, False, True, (0, 1, 1, 63, 64, 65, 0, 306)),
    (9000, 8, 8, 8, 16, 16, 16, 1, False, False, None),
    (1, 8192, 4, 1, 128, 128, 64, 2, True, False, None),
]  # fmt: skip
UNEVEN = (16, 28, 28, 32, 48, 64, 104, 192)  # slots of 8 heads, 64 on average
SMALL = (28, 100, 64)  # of SmolLM2's 3
QUICK = [  # one-hot writes at Mistral's head shape: the kernels that are timed
    (2, 300, 8, 2, 128, 128, 64, 2, True, False, None),
    (2, 300, 8, 2, 128, 128, 64, 1, True, True, None),
    (1, 500, 8, 2, 128, 128, 64, 2, True, True, (0, 1, 1, 63, 64, 65, 0, 306)),
    (2, 700, 9, 3, 64, 64, SMALL, 1, False, False, None),
    (2, 500, 32, 8, 128, 128, UNEVEN, 1, False, True, None),
    (1, 500, 9, 3, 64, 64, SMALL, 1, False, True, (0, 1, 1, 63, 64, 65, 0, 306)),
    (2, 1, 9, 3, 64, 64, SMALL, 1, False, True, None),
]
MISTRAL = (32, 8, 128)
SHIPPED = blocks_for(128, 128, 4, torch.bfloat16)
LAYOUTS = [(16, 2048), (4, 8192), (1, 32768)]
FORWARD = [(64, 1, 4, 2), (64, 2, 4, 2), (64, 4, 4, 1), (64, 4, 4, 3)]  # tokens, heads, warps, stages
DQ = [(64, 2, 4, 1), (64, 4, 4, 1), (64, 4, 4, 2)]
DKV = [(32, 4, 2), (32, 4, 3), (32, 4, 4), (16, 4, 3)]  # queries, warps, stages
REST = {  # other changes
    "narrow parts": {"wide_parts": 0},
    "ahead 4": {"ahead": 4},
    "uneven": {},
    "uneven, read 1 head": {"read_heads": 1, "read_stages": 2},
    "uneven, dq 1 head": {"dq_heads": 1, "dq_stages": 2},
}


def writes(B, T, H, M, W, seed=0):
    """Sinks, a ring, and a second ring that 1 token in 8 enters too (W = 1: instead)."""
    if not isinstance(M, int):
        return torch.cat([writes(B, T, 1, m, W, seed + h) for h, m in enumerate(M)], 2)
    generator = torch.Generator("cuda").manual_seed(seed)
    t = torch.arange(T, device="cuda")
    memory = (M - 4) // 2 if M > 8 else 0
    sinks = min(4, M - 1)
    ring = M - sinks - memory
    chosen = torch.rand(B, T, H, device="cuda", generator=generator) < (0.125 if memory else 0.0)
    chosen &= (t >= sinks).view(1, T, 1)
    turn = ((t >= sinks).view(1, T, 1) & ((W == 2) | ~chosen)).cumsum(1) - 1
    first = torch.where((t < sinks).view(1, T, 1), t.view(1, T, 1), sinks + turn % ring)
    second = sinks + ring + (chosen.cumsum(1) - 1) % max(memory, 1)
    if W == 1:
        return torch.where(chosen, second, first).unsqueeze(-1)
    return torch.stack((first, torch.where(chosen, second, -1)), -1)


def inputs(B, T, HQ, H, D, E, M, W, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, device="cuda", generator=generator)

    q, k, v = normal(B, T, HQ, D), normal(B, T, H, D), normal(B, T, H, E)
    return [*(x.to(dtype) for x in (q, k, v)), writes(B, T, H, M, W, seed), normal(B, T, H, W)]


def everything(op, tensors, bias, state, doys, **more) -> dict[str, torch.Tensor]:
    q, k, v, write, b = tensors
    leaves = {"q": q, "k": k, "v": v} | ({"bias": b} if bias else {})
    if state is not None:
        leaves |= {f"state {n}": x for n, x in state._asdict().items()}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items()}
    old = None if state is None else SlotState(*(leaves[f"state {n}"] for n in SlotState._fields))
    o, end = op(leaves["q"], leaves["k"], leaves["v"], write, leaves.get("bias"), state=old, **more)
    outs = [o, end.k, end.v] + ([end.bias.exp()] if bias or state is not None else [])
    loss = sum((x.double() * d).sum() for x, d in zip(outs, doys))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {f"d{n}": torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), grads)}
    return dict(zip(("o", "K", "V", "weight"), (x.detach() for x in outs))) | found


def check(case, dtype) -> list[str]:
    """What is wrong with one case, in words."""
    B, T, HQ, H, D, E, M, W, bias, with_state, lengths = case
    tensors = inputs(B, T, HQ, H, D, E, M, W, dtype)
    torch.manual_seed(1)
    if D == 64:  # any writes at all, not only a ring's
        tensors[3] = torch.stack([torch.randint(-1, m, (B, T, W), device="cuda") for m in slots_of(M, H)], 2)
    cu = None if lengths is None else torch.tensor([0, *lengths], device="cuda").cumsum(0)
    N, S, state = B if cu is None else len(lengths), sum(slots_of(M, H)), None
    if with_state:
        sizes = ((D,), (E,), ())
        state = SlotState(*(torch.randn(N, S, *s, device="cuda") for s in sizes))
        state = SlotState(
            state.k.to(dtype), state.v.to(dtype), state.bias.masked_fill(state.bias < -0.5, -torch.inf)
        )
    doys = [
        torch.randn(*s, device="cuda").to(dtype).double()
        for s in ((B, T, HQ, E), (N, S, D), (N, S, E), (N, S))
    ]
    more = {"num_slots": M, "cu_seqlens": cu}
    wide = [x.double() if x.is_floating_point() else x for x in tensors]
    wide_state = None if state is None else SlotState(*(x.double() for x in state))
    exact = everything(slot_attention, wide, bias, wide_state, doys, backend="torch", **more)
    plain = everything(slot_attention, tensors, bias, state, doys, backend="torch", **more)
    ours, again = (
        everything(slot_attention, tensors, bias, state, doys, backend="triton", **more) for _ in range(2)
    )
    wrong = []
    for name, gold in exact.items():
        mine, gold = ours[name], gold.nan_to_num(0.0)
        if not torch.equal(mine.nan_to_num(7.0), again[name].nan_to_num(7.0)):
            wrong.append(f"{name} differs from run to run")
        if not mine.isfinite().all():
            wrong.append(f"{name} has {(~mine.isfinite()).sum()} entries that are not finite")
            continue
        size = gold.norm()
        if name in ("dq", "dk", "dbias", "dstate k", "dstate bias") and size < 1e-3 * exact["dv"].norm():
            size = exact["dv"].norm()
        if not size > 0:
            if mine.any():
                wrong.append(f"{name} is not 0")
            continue
        error, other = (
            ((x.double().nan_to_num(0.0) - gold).norm() / size).item() for x in (mine, plain[name])
        )
        allowed = CAPS[dtype] if gold.numel() < 64 else min(CAPS[dtype], max(2 * other, FLOORS[dtype]))
        if not error <= allowed:
            wrong.append(f"{name} {error:.1e} > {allowed:.1e} (plain {other:.1e})")
    return wrong


def correctness(quick: bool) -> list[str]:
    lines = []
    cases = [
        (case, dtype)
        for dtype in ([torch.bfloat16] if quick else CAPS)
        for case in (QUICK if quick else CASES)
    ]
    for case, dtype in cases:
        try:
            wrong = check(case, dtype)
        except Exception as error:  # one broken case must not hide the others
            wrong = [f"{type(error).__name__}: {str(error)[:300]}"]
        if wrong:
            lines.append(f"WRONG {dtype} {case}: {'; '.join(wrong)}")
            print(lines[-1], flush=True)
    for part in (causality, pieces):
        try:
            found = part()
        except Exception as error:
            found = [f"WRONG {part.__name__}: {type(error).__name__}: {str(error)[:300]}"]
        lines += found
        for line in found:
            print(line, flush=True)
    print(f"correctness: {len(cases) + 2} cases, {len(lines)} wrong", flush=True)
    return lines


def causality() -> list[str]:
    """A later token changes no earlier bit, output or gradient; nor does its absence."""
    cut, (q, k, v, write, bias) = 3000, inputs(1, 5000, 8, 2, 128, 128, 64, 2, torch.bfloat16)
    do, found = torch.randn(1, cut, 8, 128, device="cuda", dtype=torch.bfloat16), []
    for factor, T in ((1.0, 5000), (-3.0, 5000), (1.0, cut)):
        leaves = [torch.cat((x[:, :cut], x[:, cut:T] * factor), 1).requires_grad_() for x in (q, k, v, bias)]
        o = slot_attention(*leaves[:3], write[:, :T], leaves[3], num_slots=64)[0][:, :cut]
        found.append([o.detach(), *(g[:, :cut] for g in torch.autograd.grad(o, leaves, do))])
    same = [all(torch.equal(a, b) for a, b in zip(found[0], other)) for other in found[1:]]
    return [] if all(same) else [f"WRONG a later token, or its absence, changes an earlier bit: {same}"]


def pieces() -> list[str]:
    """A prompt and single steps equal the whole; a given state stays as it was; CUDA graphs capture."""
    return [line for M in (64, (28, 100)) for line in _pieces(M)]


def _pieces(M) -> list[str]:
    tensors = inputs(3, 200, 8, 2, 128, 128, M, 2, torch.bfloat16)
    whole, end = slot_attention(*tensors, num_slots=M)
    at, out, state, lines = 0, [], None, []
    for n in (150, *[1] * 50):
        kept = None if state is None else [x.clone() for x in state]
        o, new = slot_attention(*(x[:, at : at + n] for x in tensors), num_slots=M, state=state)
        if kept is not None and not all(torch.equal(a, b) for a, b in zip(kept, state)):
            lines.append("WRONG a state given in was changed")
        at, state = at + n, new
        out.append(o)
    error = ((torch.cat(out, 1) - whole).float().norm() / whole.float().norm()).item()
    if not error < 5e-3:
        lines.append(f"WRONG pieces differ from the whole by {error:.1e}")
    if not all(torch.equal(a, b) for a, b in zip(state, end)):
        lines.append("WRONG the slots after single steps are not those of the whole")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = slot_attention(*tensors, num_slots=M)
    graph.replay()
    if not torch.equal(captured, whole):
        lines.append("WRONG a replayed CUDA graph gives another answer")
    return lines


def bench(run, rep=60) -> float:
    return triton.testing.do_bench(run, warmup=20, rep=rep, return_mode="median")


def step_of(B, T, HQ, H, D, M, blocks=None, W=1):
    """Forward, and forward + backward, at one shape, as functions."""
    q, k, v, write, bias = inputs(B, T, HQ, H, D, D, M, W, torch.bfloat16)
    bias = bias if W == 2 else None  # as the layer of one write has none
    leaves = [x.requires_grad_() for x in (q, k, v, bias) if x is not None]
    do, sizes = torch.randn_like(q), slots_of(M, H)

    def forward():
        return slot_attention_triton(q, k, v, write, bias, sizes, D**-0.5, None, None, False, blocks)[0]

    def step():
        return torch.autograd.grad(forward(), leaves, do)

    return forward, step


def as_blocks(kind: str, cut: tuple[int, ...]) -> Blocks:
    names = ("rows", "warps", "stages") if kind == "dkv" else ("rows", "heads", "warps", "stages")
    return SHIPPED._replace(**{f"{kind}_{name}": x for name, x in zip(names, cut)})


def variants(result: dict) -> None:
    for kind, cuts in (("read", FORWARD), ("dq", DQ), ("dkv", DKV)):
        tried = {str(cut): as_blocks(kind, cut) for cut in cuts}
        if kind == "dkv":
            tried |= {name: SHIPPED._replace(**change) for name, change in REST.items()}
        times = {}
        for name, blocks in tried.items():
            M = UNEVEN if name.startswith("uneven") else 64
            forward, step = step_of(1, 32768, *MISTRAL, M, blocks)
            try:
                with torch.set_grad_enabled(kind != "read"):
                    times[name] = bench(forward if kind == "read" else step)
            except Exception as error:
                print(f"{kind} {name}: {type(error).__name__} {str(error)[:200]}", flush=True)
        print(f"{kind}: " + "  ".join(f"{c} {t:.3f}" for c, t in times.items()), flush=True)
        result[f"variants {kind}"] = times


def profile(result: dict, W: int) -> None:
    """Where one step at 1 x 32k spends its time."""
    _, step = step_of(1, 32768, *MISTRAL, 64, W=W)
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    rows = {e.key[:60]: (e.self_device_time_total / 5e3, e.count // 5) for e in seen.key_averages()}
    result[f"kernels W {W}"] = rows
    for name, (ms, count) in sorted(rows.items(), key=lambda x: -x[1][0])[:12]:
        print(f"  W {W} {name:60s} {ms:7.3f} ms  x{count}", flush=True)


def host(result: dict) -> None:
    """How long Python takes to launch a call whose kernels the GPU does not wait for: medians of 40."""
    forward, step = step_of(1, 128, 9, 3, 64, SMALL, W=1)
    importance, decay = torch.randn(1, 128, 3, device="cuda"), torch.ones(3, device="cuda")
    layer = GatedSlotAttention(AttentionShape(576, 9, 3, 64), GSAOptions(num_slots=SMALL, recent=16)).cuda()
    x = torch.randn(1, 128, 576, device="cuda", requires_grad=True)
    rotary = Rotary(*(torch.randn(1, 128, 64, device="cuda") for _ in range(2)))

    def choose():
        return choose_slots(importance, decay, SMALL, sinks=4, recent=16, keep_state=False)

    def whole():
        with torch.autocast("cuda", torch.bfloat16):
            return layer(x, rotary=rotary)[0]

    runs = (
        ("forward", forward, False),
        ("forward to differentiate", forward, True),
        ("step", step, True),
        ("choose", choose, False),
        ("a layer's forward", whole, False),
        ("a layer's step", lambda: whole().sum().backward(), True),
    )
    for name, run, grad in runs:
        with torch.set_grad_enabled(grad):
            times = []
            for _ in range(50):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                times.append(1e3 * (time.perf_counter() - start))
        result[f"host {name}, ms"] = took = sorted(times[10:])[20]
        print(f"host, {name}: {took:.3f} ms", flush=True)


@torch.no_grad()
def choosing(result: dict, variants: bool = False) -> None:
    """choose_slots at Mistral's heads and SmolLM2's, the same slots for each and others.

    Blocks of tokens must choose as one token after another does, exactly. variants: times blocks too.
    """
    wrong = result.setdefault("wrong", [])
    kinds, sizes = ("drawn", "alike", "smooth", "rising"), ((64,) * 3, (28, 384, 100))
    for kind, M, recent in itertools.product(kinds, sizes, (5, 8, 16)):
        same = same_choice(kind, M, recent)
        if not all(same.values()):
            wrong.append(f"WRONG choose_slots, {kind}, slots {M}, recent {recent}: {same}")
            print(wrong[-1], flush=True)
    shapes = [(B, T, 8, M) for B, T in LAYOUTS for M in ((64,) * 8, UNEVEN)]
    for B, T, H, M in [*shapes, (16, 1024, 3, (64,) * 3), (16, 1024, 3, (28, 384, 64))]:
        importance, decay = 2 * torch.randn(B, T, H, device="cuda"), torch.ones(H, device="cuda")
        options = {"sinks": 4, "recent": 16, "keep_state": False}
        if T < 2000:
            want = choose_slots(importance.cpu()[:2, :300], decay.cpu(), M, **options)[0]
            ours = choose_slots(importance, decay, M, **options)[0][:2, :300]
            same = (ours.cpu() == want).float().mean().item()
            if same < 0.999:
                wrong.append(f"WRONG choose_slots: {same:.4f} of the choices are the CPU's")
                print(wrong[-1], flush=True)
        took = {}
        for near in (0, NEAR) if variants else (None,):

            def run(importance=importance, decay=decay, M=M, near=near):
                choose_slots_triton(importance, decay, M, 4, 16, None, None, None, None, False, near)

            took[near] = bench(run)
        name = f"choose {B}x{T}, {min(M)} to {max(M)} slots"
        result[name] = min(took.values())
        print(f"{name}: " + ", in blocks ".join(f"{ms:.3f} ms" for ms in took.values()), flush=True)


def same_choice(kind: str, M: tuple[int, ...], recent: int) -> dict[str, bool]:
    """Whether blocks choose as single tokens do: rows in two pieces, and packed documents."""
    H, cu = len(M), torch.tensor([0, 1, 40, 40, 700, 3000], device="cuda")
    importance, decay = 2 * torch.randn(1, 3000, H, device="cuda"), torch.linspace(0.3, 2, H, device="cuda")
    if kind == "alike":
        importance, decay = importance.round(), torch.zeros_like(decay)
    elif kind == "smooth":
        importance = importance.cumsum(1) / 8
    elif kind == "rising":
        decay = -decay
    seen, rule, found = torch.full((1,), 1700, device="cuda"), (M, 4, recent, None), []
    for near in (NEAR, 0):
        write, state = choose_slots_triton(
            importance[:, :1700], decay, *rule, None, None, None, True, near=near
        )
        more, end = choose_slots_triton(
            importance[:, 1700:], decay, *rule, seen, state, None, True, near=near
        )
        packed, last = choose_slots_triton(importance, decay, *rule, None, None, cu, True, near=near)
        found.append((write, *state, more, *end, packed, *last))
    names = ("write", "born", "worth", "more", "then born", "then worth", "packed", "its born", "its worth")
    return {name: torch.equal(a, b) for name, a, b in zip(names, *found)}


def row(result: dict, name: str, forward, step) -> None:
    try:
        with torch.no_grad():
            fast = bench(forward)
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peak, both = (torch.cuda.max_memory_allocated() - before) / 2**20, bench(step, 120)
    except Exception as error:
        print(f"{name}: {type(error).__name__} {str(error)[:300]}", flush=True)
        return
    result[name] = {"forward": fast, "forward + backward": both, "peak MiB": peak}
    print(f"{name:36s} {fast:8.3f} {both:8.3f} {peak:8.0f} MiB", flush=True)


def operations(result: dict, quick: bool) -> None:
    for W, (B, T) in itertools.product((1, 2), LAYOUTS):
        row(result, f"slots 64, {W} writes, {B}x{T}", *step_of(B, T, *MISTRAL, 64, W=W))
    for B, T in LAYOUTS:
        row(result, f"slots 16 to 192, {B}x{T}", *step_of(B, T, *MISTRAL, UNEVEN))
    for M in (64, (28, 384, 64)):
        row(result, f"SmolLM2 (9/3 heads, D 64), {M}, 16x1024", *step_of(16, 1024, 9, 3, 64, M))
    for M in () if quick else (128, 256):
        row(result, f"slots {M}, 1x32768", *step_of(1, 32768, *MISTRAL, M))
    row(result, "slots 64, 1x131072", *step_of(1, 131072, *MISTRAL, 64))
    for B in () if quick else (1, 16):
        row(result, f"SmolLM2 (9/3 heads, D 64), {B}x2048", *step_of(B, 2048, 9, 3, 64, 64))
    for B, T in LAYOUTS[-1:] if quick else LAYOUTS:
        q, k, v, _, _ = inputs(B, T, *MISTRAL[:2], 128, 128, 64, 2, torch.bfloat16)
        leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        do = torch.randn_like(leaves[0])
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION)):

            def softmax(leaves=leaves, backend=backend):
                with sdpa_kernel(backend):
                    return functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

            def step(softmax=softmax, leaves=leaves, do=do):
                return torch.autograd.grad(softmax(), leaves, do)

            row(result, f"softmax {name} {B}x{T}", softmax, step)


@torch.no_grad()
def decoding(result: dict) -> None:
    """One step under a CUDA graph, in microseconds."""
    shipped = triton_onehot.STEP_WARPS
    for B, warps in itertools.product((1, 8, 64), (8,)):
        triton_onehot.STEP_WARPS = warps
        tensors = inputs(B, 1, *MISTRAL[:2], 128, 128, 64, 2, torch.bfloat16)
        _, state = slot_attention(
            *inputs(B, 128, *MISTRAL[:2], 128, 128, 64, 2, torch.bfloat16), num_slots=64
        )
        slot_attention(*tensors, num_slots=64, state=state)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                _, state = slot_attention(*tensors, num_slots=64, state=state)
        result[f"decode B {B}, {warps} warps, us"] = took = 1e3 * bench(graph.replay) / 20
        print(f"decode B {B}, {warps} warps: {took:.1f} us", flush=True)
    triton_onehot.STEP_WARPS = shipped


def jobs(quick: bool, tiles: bool) -> list[tuple]:
    """A call, and its arguments, of everything that is to be compiled."""
    kinds = (("read", FORWARD), ("dq", DQ), ("dkv", DKV)) if tiles else ()
    found = [(small, kind, as_blocks(kind, cut)) for kind, cuts in kinds for cut in cuts]
    rest = REST.items() if tiles else ()
    sizes = {name: UNEVEN if name.startswith("uneven") else 64 for name in REST}
    found += [(small, "rest", SHIPPED._replace(**change), 1, MISTRAL, sizes[name]) for name, change in rest]
    if quick:
        found += [(check, case, torch.bfloat16) for case in QUICK]
        found += [(small, "whole", None, 2), *((small, "whole", None, 1, MISTRAL, M) for M in (64, UNEVEN))]
        found += [(small, "whole", None, 1, (9, 3, 64), M) for M in (64, (28, 384, 64), SMALL)]
        return [*found, (decoding, {}), (choosing, {"wrong": []}), (host, {}), (pieces,)]
    found += [(check, case, dtype) for case in CASES if case[0] < 100 for dtype in CAPS]
    shapes = [(shape, M) for shape in (MISTRAL, (9, 3, 64)) for M in (64, 128, 256)]
    return [*found, *((small, "whole", None, W, *s) for s in shapes for W in (1, 2)), (decoding, {})]


def small(kind: str, blocks: Blocks | None, W: int = 1, shape=MISTRAL, M=64) -> None:
    forward, step = step_of(1, 1024, *shape, M, blocks, W)
    with torch.set_grad_enabled(kind != "read"):
        (forward if kind == "read" else step)()


def warm(part: int, parts: int, quick: bool, tiles: bool) -> None:
    """Compiles this process's share of everything, by running it small."""
    for job, *arguments in jobs(quick, tiles)[part::parts]:
        try:
            job(*arguments)
        except Exception:
            continue  # the main process meets it again and says so


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="bf16 at Mistral's shape only")
    parser.add_argument("--no-variants", action="store_true", help="only the shipped block sizes")
    parser.add_argument("--choose", action="store_true", help="only the choice of slots, in both its forms")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.warm is not None:
        return warm(arguments.warm, arguments.processes, arguments.quick, not arguments.no_variants)
    start = time.perf_counter()
    if arguments.choose:
        choosing(chosen := {}, variants=True)
        return print(f"{len(chosen['wrong'])} wrong, {time.perf_counter() - start:.0f} s")
    flags = [f"--{name}" for name in ("quick", "no-variants") if getattr(arguments, name.replace("-", "_"))]
    command = [sys.executable, __file__, *flags, "--processes", str(arguments.processes), "--warm"]
    workers = [subprocess.Popen([*command, str(i)]) for i in range(arguments.processes)]
    for worker in workers:
        worker.wait()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    result: dict = {"wrong": correctness(arguments.quick)}
    print(f"checked after {time.perf_counter() - start:.0f} s", flush=True)
    if not arguments.no_variants:
        variants(result)
    parts = (
        (host,),
        (choosing,),
        (profile, 1),
        (profile, 2),
        (decoding,),
        (operations, arguments.quick),
    )
    for part, *more in parts:
        try:
            part(result, *more)
        except Exception as error:
            print(f"{type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"total {time.perf_counter() - start:.0f} s")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "onehot.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
