"""PolySketch's Triton kernels on a GPU: right in every dtype and shape, and how fast, beside softmax.

    PYTHONPATH=src python benchmarks/check_polysketch.py [--out DIR] [--quick | --decode] [--limit SECONDS]

First every case against a dense float64 oracle, in several processes, a line as each ends; they also compile
what is timed. Then whole operations at Mistral-7B's shape, the learned sketch, decoding, torch's softmax
(cuDNN, FlashAttention-2), and each kernel over its tiles. Within --limit seconds it stops: checks get
seven tenths of them, and the most wanted times come first. DIR/polysketch.json has everything that was
reached. Milliseconds are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from unsoftmax.kernels.polysketch import triton_block as block_kernels
from unsoftmax.kernels.polysketch import triton_sketch as sketch_kernels
from unsoftmax.kernels.polysketch import triton_step as step_kernels
from unsoftmax.kernels.polysketch.chunked import PolySketchState, polysketch
from unsoftmax.kernels.polysketch.sketch import LearnedSketch, append, num_features
from unsoftmax.kernels.polysketch.triton_block import Plan, Tiles, plan
from unsoftmax.kernels.polysketch.triton_sketch import sketch_triton

CAPS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # as tests/tolerance.py
FLOORS = {torch.bfloat16: 4e-3, torch.float32: 1e-6}
CASES = [  # B, T, HQ, H, D, E, r, block, degree, offset, normaliser
    *((2, T, 4, 2, 64, 64, 32, 64, 4, True, 0.0) for T in (1, 2, 63, 64, 65, 130, 199)),
    *((1, 300, 2, 2, D, E, 16, 64, 4, False, 0.0) for D, E in ((16, 16), (20, 24), (80, 96), (128, 64))),
    *((1, 300, 8, 2, 64, 64, r, 64, 4, True, 0.0) for r in (8, 16, 24, 32, 64)),
    *((1, 300, 4, 2, 64, 64, 32, C, 4, True, 0.0) for C in (16, 32, 128, 192, 256)),
    *((1, 300, 4, 2, 64, 64, 32, 64, degree, True, 1.0) for degree in (2, 8)),
    *((1, 300, HQ, H, 64, 64, 32, 64, 4, True, 0.0) for HQ, H in ((1, 1), (3, 1), (7, 1), (6, 2), (16, 1))),
    (1, 300, 2, 2, 256, 256, 32, 64, 4, True, 0.0),
    (1, 300, 4, 1, 192, 128, 64, 64, 4, True, 0.0),
    (2, 18 * 64 + 7, 4, 2, 64, 64, 32, 64, 4, True, 0.0),
    (1, 1100, 8, 2, 128, 128, 32, 256, 4, True, 0.0),
    (1, 1100, 8, 2, 128, 128, 64, 256, 4, False, 0.0),
    (1, 2100, 2, 1, 128, 128, 16, 1024, 4, True, 0.0),
    *((2, T, 4, 2, 64, 64, 32, 32, 0, True, 0.0, 64, 4) for T in (1, 2, 32, 33, 64, 65, 97, 300, 700)),
    *(
        (1, 700, 6, 2, 80, 96, 24, C, 0, True, 1.0, W, 7)
        for C, W in ((16, 16), (48, 96), (64, 320), (256, 256))
    ),
    (1, 5000, 4, 2, 128, 128, 32, 32, 0, True, 0.0, 64, 4),
    (1, 1100, 8, 2, 128, 128, 64, 128, 0, True, 0.0, 128, 0),
    (1, 1100, 4, 2, 64, 64, 32, 64, 4, True, 0.0, 192, 3),
]
QUICK = [
    *((2, T, 4, 2, 64, 64, 32, 64, 4, True, 0.0) for T in (1, 2, 63, 65, 199)),
    (1, 300, 7, 1, 80, 96, 24, 32, 8, True, 1.0),
    (1, 1100, 8, 2, 128, 128, 64, 256, 4, True, 0.0),
    (2, 18 * 64 + 7, 4, 2, 64, 64, 32, 64, 4, True, 0.0),
    *((2, T, 4, 2, 64, 64, 32, 32, 0, True, 0.0, 64, 4) for T in (1, 2, 33, 97, 700)),
    (1, 1100, 8, 2, 128, 128, 32, 32, 0, True, 0.0, 64, 4),
    (1, 1100, 4, 2, 64, 64, 32, 64, 4, True, 0.0, 192, 3),
]
SOFT = [32, 64, 4]  # block, window and sinks of local="softmax", as conversions have them
MISTRAL = {"HQ": 32, "H": 8, "D": 128, "E": 128}
LAYOUTS = [(16, 2048), (4, 8192), (1, 32768)]
VARIANTS = {  # rows, keys, warps, stages
    "forward": (
        *((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)),
        *((128, 128, 8, 2), (128, 32, 8, 3), (64, 32, 4, 3), (128, 64, 4, 2)),
    ),
    "queries": (
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 8, 2), (128, 64, 8, 2)),
        *((64, 32, 4, 3), (64, 64, 4, 1), (128, 32, 8, 2)),
    ),
    "keys": (
        *((64, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 2), (64, 128, 8, 2)),
        *((64, 64, 8, 1), (32, 64, 4, 2), (32, 64, 8, 3)),
    ),
    "states": ((128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2), (64, 64, 4, 2)),
    "sinks": ((64, 16, 4, 3), (32, 16, 4, 2), (128, 16, 4, 2), (128, 16, 8, 2)),
}
VARIANTS["gradients"] = VARIANTS["states"]
TRIED = {  # in a quick run: by whether near weights are softmax
    False: {
        "forward": ((64, 32, 4, 3),),
        "queries": ((64, 32, 4, 3),),
        "keys": ((64, 64, 4, 2),),
        "states": ((128, 64, 4, 3), (128, 32, 4, 3)),
        "gradients": ((64, 128, 4, 2), (64, 128, 4, 3), (128, 32, 4, 3)),
    },
    True: {
        "forward": ((64, 32, 4, 3),),
        "queries": ((64, 32, 4, 3),),
        "keys": ((64, 64, 4, 2), (64, 64, 8, 2)),
    },
}
SKETCH_TILES = {  # tokens, warps, stages
    "forward": ((128, 4, 2), (64, 4, 3)),
    "backward": ((32, 4, 3), (64, 4, 3)),
}
STUCK = 15  # seconds without a line after which the main process shows where it is
WHOLE = ((32, 256), (16, 256), (64, 256), (32, 512), (64, 512), (64, 1024))  # r, block
SHORT = WHOLE[:3]


def dense(q, k, v, phi_q, phi_k, offset, block, degree, normaliser, window, sinks):
    """All weights at once; operands in their dtype, weights and their sums in float32 or wider.

    Degree 0 is local="softmax", and offset then the far scale [B, T, HQ].
    """
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v, phi_q, phi_k = (x.transpose(1, 2) for x in (q, k, v, phi_q, phi_k))
    k, v, phi_k = (x.repeat_interleave(G, 1) for x in (k, v, phi_k))
    near, far = (q @ k.mT).to(wide), (phi_q @ phi_k.mT).to(wide) ** 2
    i = torch.arange(T, device=q.device)
    exact = ((i[:, None] // block - i // block) < window // block) | (i < sinks)
    future = i[:, None] < i
    top = near.new_zeros(near.shape[:-1])
    if degree == 0:
        near = near.masked_fill(future, -torch.inf)
        top = near.detach().amax(-1)
        near, far = (near - top[..., None]).exp(), far * (offset.to(wide).mT - top)[..., None].exp()
    else:
        near = (near if offset is None else near + offset.to(wide)[:, None, None]) ** degree
    w = torch.where(exact, near, far).tril()
    o = (w.to(v.dtype) @ v).to(wide) / (w.sum(-1) + normaliser * (-top).exp())[..., None]
    return o.transpose(1, 2)


def inputs(B, T, HQ, H, D, E, r, dtype, seed=0):
    """q, k, v and sketches whose products keep away from 0, as scores with an offset do.

    Where a row's only weights are powers of scores near 0, gradients are differences divided by next to
    nothing, and no form in this dtype comes close to the oracle.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((HQ, D, 1.5), (H, D, 1.5), (H, E, None), (HQ, r, 2.0), (H, r, 2.0))
    found = []
    for heads, n, common in sizes:
        x = torch.randn(B, T, heads, n, device="cuda", generator=generator)
        if common is not None:
            x = x * 0.5 / n**0.25
            x[..., 0] += common
        found.append(x.to(dtype))
    return found


def along(form, shift, do):
    """do and, as large, the direction in which o moves with a shift [HQ] a head.

    The shift's gradient, a sum over all tokens, would cancel under noise alone: what is left of it then is
    less than any form's rounding in 16 bits.
    """
    moved = form(shift + 1e-3) - form(shift - 1e-3)
    return do + (moved / moved.square().mean().sqrt().clamp(min=1e-9)).to(do.dtype)


def grads(form, tensors, offset, do):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    shift = None if offset is None else offset.detach().clone().requires_grad_()
    o = form(*leaves, shift)
    wanted = leaves + ([] if shift is None else [shift])
    found = torch.autograd.grad(o, wanted, do.to(o.dtype), allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found)]
    names = ["o", "dq", "dk", "dv", "dphi_q", "dphi_k", "doffset"]
    return dict(zip(names, [o.detach(), *found]))


def check(case, dtype) -> list[str]:
    """What is wrong with one case, in words."""
    B, T, HQ, H, D, E, r, block, degree, shifted, normaliser, window, sinks = (*case, case[7], 0)[:13]
    tensors = inputs(B, T, HQ, H, D, E, r, dtype)
    offset = torch.rand(HQ, device="cuda") if shifted else None
    if degree == 0:
        offset = torch.randn(B, T, HQ, device="cuda")
    do = torch.randn(B, T, HQ, E, device="cuda").to(dtype)

    def oracle(q, k, v, phi_q, phi_k, shift):
        return dense(q, k, v, phi_q, phi_k, shift, block, degree, normaliser, window, sinks)

    def ours(q, k, v, phi_q, phi_k, shift):
        local = (
            {"local": "softmax", "far_scale": shift} if degree == 0 else {"degree": degree, "offset": shift}
        )
        return polysketch(
            q, k, v, phi_q, phi_k, block=block, normaliser=normaliser, window=window, sinks=sinks,
            backend="triton", keep_state=False, **local,
        )[0]  # fmt: skip

    if offset is not None and degree:
        do = along(lambda shift: oracle(*(x.double() for x in tensors), shift), offset.double(), do)
    exact = grads(oracle, [x.double() for x in tensors], None if offset is None else offset.double(), do)
    plain, found = grads(oracle, tensors, offset, do), grads(ours, tensors, offset, do)
    again = grads(ours, tensors, offset, do)
    wrong = []
    for name, gold in exact.items():
        mine = found[name]
        if not torch.equal(mine, again[name]):
            wrong.append(f"{name} differs from run to run")
        if gold.norm() < 1e-9 * max(1, gold.numel()) ** 0.5:
            continue  # one key alone: its weight does not matter
        error, other = (((x.double() - gold).norm() / gold.norm()).item() for x in (mine, plain[name]))
        allowed = CAPS[dtype] if gold.numel() < 64 else min(CAPS[dtype], max(2 * other, FLOORS[dtype]))
        small = name != "o" and gold.norm() < 1e-3 * exact["dv"].norm()
        if not error <= allowed and not small:
            wrong.append(f"{name} {error:.1e} > {allowed:.1e} (plain {other:.1e})")
    return wrong


def check_all(cases: list, dtype: torch.dtype) -> list[str]:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return [f"T {case[1]}: {'; '.join(wrong)}" for case in cases if (wrong := check(case, dtype))]


def families(cases: list, dtype: torch.dtype) -> list[list]:
    """Cases that share kernels: alike but for B and T, in bfloat16 also in having a state."""
    found: dict = {}
    for case in cases:
        block, window = case[7], (*case, case[7], 0)[11]
        far = case[1] // block * block - (window - block) >= block * max(1, block_kernels.CHUNK // block)
        found.setdefault((case[2:], far or dtype == torch.float32), []).append(case)
    return list(found.values())


def constant_keys() -> list[str]:
    """Constant keys of norm sqrt(D) for 64k tokens; queries of 0; ones as values."""
    wrong = []
    q, k, v, phi_q, phi_k = inputs(1, 65536, 2, 1, 64, 64, 32, torch.bfloat16)
    k, phi_k = torch.ones_like(k), torch.ones_like(phi_k)
    o, _ = polysketch(q, k, torch.ones_like(v), phi_q, phi_k, backend="triton")
    if not (o.float() - 1).abs().max() < 0.02:
        wrong.append(f"ones average to {o.min():.3f} .. {o.max():.3f}")
    o, _ = polysketch(q * 0, k, v, phi_q * 0, phi_k, backend="triton")
    if o.any() or not o.isfinite().all():
        wrong.append("q = 0: not 0")
    return wrong


def later_token() -> list[str]:
    cut, tensors = 3000, inputs(1, 5000, 4, 2, 128, 128, 32, torch.bfloat16)
    do = torch.randn(1, cut, 4, 128, device="cuda", dtype=torch.bfloat16)
    found = []
    for factor in (1.0, -3.0):
        leaves = [torch.cat((x[:, :cut], x[:, cut:] * factor), 1).requires_grad_() for x in tensors]
        o = polysketch(*leaves, backend="triton")[0][:, :cut]
        found.append([o.detach(), *(g[:, :cut] for g in torch.autograd.grad(o, leaves, do))])
    same = all(torch.equal(a, b) for a, b in zip(*found))
    return [] if same else ["a later token changes an earlier bit"]


def packed_document(local: str) -> list[str]:
    rule = {"local": "softmax", "block": 32, "window": 64, "sinks": 4} if local == "softmax" else {}
    rule |= {"keep_state": False, "backend": "triton"}
    tensors = inputs(1, 5000, 4, 2, 128, 128, 32, torch.bfloat16)
    cu = torch.tensor([0, 700, 701, 1500, 5000], device="cuda")
    with torch.no_grad():
        o, _ = polysketch(*tensors, cu_seqlens=cu, **rule)
        alone, _ = polysketch(*(x[:, 1500:].contiguous() for x in tensors), **rule)
    error = ((o[:, 1500:].float() - alone.float()).norm() / alone.float().norm()).item()
    return [] if error < 1e-2 else [f"a packed document differs from itself alone by {error:.1e}"]


def more_tokens(local: str, dtype: torch.dtype, several: bool) -> list[str]:
    """One token at a time past the end of a block, or several, beside the block algorithm in float64."""
    block, window, sinks = (32, 64, 4) if local == "softmax" else (64, 64, 0)
    rule = {"local": local, "block": block, "window": window, "sinks": sinks}
    tensors = inputs(2, 400, 8, 2, 128, 128, 32, dtype)
    lengths = torch.tensor([290, 260], device="cuda")
    some = [x[:, :300] for x in tensors]
    _, mine = polysketch(*some, lengths=lengths, backend="torch", **rule)
    gold = type(mine)(*(x.double() if x.is_floating_point() else x for x in mine))
    for t in range(300, 301 if several else 306 + block):
        token = tensors if several else [x[:, t % 400, None] for x in tensors]
        o, mine = polysketch(*token, state=mine, backend="triton", **rule)
        exact, gold = polysketch(*(x.double() for x in token), state=gold, backend="torch", **rule)
        pairs = {"o": (o, exact), "S": (mine.S, gold.S)}
        errors = {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}
        wrong = [f"{name} off by {error:.1e}" for name, error in errors.items() if not error <= CAPS[dtype]]
        if not (torch.equal(mine.k.double(), gold.k) and torch.equal(mine.seen, gold.seen)):
            wrong.append("the buffers differ")
        if wrong:
            return [f"token {t - 300}: {', '.join(wrong)}"]
    return []


def check_sketch(dtype: torch.dtype) -> list[str]:
    """phi, lift and every gradient of the learned sketch, with all that a layer may give it."""
    D, N, r = 128, 8, 32
    shapes = {"x": (2, 700, N, D), "maps": (2, 2, D + 1, r), "factor": (N,), "last": (N,)}
    shapes |= {"mean": (N, D), "tilt": (N, D)}
    given = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    given["x"], given["maps"] = given["x"].to(dtype), given["maps"] * 0.1
    dphi = torch.randn(2, 700, N, r, device="cuda").to(dtype)
    dlift = torch.randn(2, 700, N, device="cuda")
    sketch = LearnedSketch(4, D + 1, r, 2)

    def definition(x, maps, *, factor, last, mean, tilt):
        lift = (x * tilt).sum(-1)
        x = append((x - mean) * factor[:, None], last)
        return torch.func.functional_call(sketch, {"query": maps, "key": maps}, (x, x[:, :, :2]))[0], lift

    def run(form, wide):
        leaves = {n: (x.to(wide) if wide else x.clone()).requires_grad_() for n, x in given.items()}
        both = form(leaves["x"], leaves["maps"], **{n: leaves[n] for n in list(shapes)[2:]})
        asked = [g.to(o.dtype) for g, o in zip((dphi, dlift), both)]
        return [*(x.detach() for x in both), *torch.autograd.grad(both, list(leaves.values()), asked)]

    gold, plain = run(definition, torch.float64), run(definition, dtype)
    wrong = []
    for name, mine, exact, other in zip(("phi", "lift", *shapes), run(sketch_triton, None), gold, plain):
        error, least = (((x.double() - exact).norm() / exact.norm()).item() for x in (mine, other))
        if not error <= max(CAPS[dtype], 2 * least):
            wrong.append(f"{name} {error:.1e} (plain {least:.1e})")
    return wrong


def runners(B, T, r, block, soft=False):
    """Each kernel's launch at one shape, as functions of its tiles."""
    q, k, v, phi_q, phi_k = inputs(B, T, r=r, dtype=torch.bfloat16, **MISTRAL)
    do, o = torch.randn_like(q), torch.randn_like(q)
    offset, lift = torch.rand(q.shape[2], device="cuda"), None
    den, delta = (1 + torch.rand(q.shape[:3], device="cuda") for _ in range(2))
    shape = block_kernels._shape(q, k, v, phi_q, [*SOFT, 1, 4] if soft else [block, block, 0, 0, 4])
    center, far_v = block_kernels._centered(v, None, shape)
    n = shape.last + 1
    S, z = block_kernels._sum_states(phi_k, far_v, None, None, None, shape, plan(q.dtype, 128).states)
    dq, dk, dv, dphi_q, dphi_k = (torch.empty_like(x) for x in (q, k, v, phi_q, phi_k))
    rows, more = torch.empty_like(den), torch.empty_like(den)
    offset_rows, lift_rows = (None, rows) if soft else (rows, None)
    sinks, spans = (None, None, None), triton.cdiv(T, block_kernels.SPAN)
    if soft:
        offset, lift = None, torch.rand_like(den)
        sinks = [torch.zeros(B, spans, SOFT[2], k.shape[2], 128, device="cuda") for _ in range(2)] + [None]

    def by_query(kernel, cut, *arguments):
        options = shape.query_tiles(cut)
        tokens, stack = options["BM"] // options["STACK"], options["STACK"]
        kernel[(triton.cdiv(T, tokens), shape.HQ // stack, B)](*arguments, **options)

    def forward(cut):
        by_query(
            block_kernels._forward, cut,
            q, k, v, phi_q, phi_k, offset, lift, S, z, center, dq, rows, more, None, None, T, n, 0.0,
        )  # fmt: skip

    def queries(cut):
        by_query(
            block_kernels._queries, cut,
            q, k, v, phi_q, phi_k, offset, S, z, center, o, den, den, do,
            dq, dphi_q, offset_rows, lift_rows, delta, more, None, None, T, n, 0.0,
        )  # fmt: skip

    def keys(cut):
        options = shape.key_tiles(cut)
        block_kernels._keys[(triton.cdiv(T, options["BN"]), shape.H, B)](
            q, k, v, far_v, phi_q, phi_k, offset, S, z, den, den, delta, do, *sinks,
            dk, dv, dphi_k, None, None, T, n, spans, SPAN=block_kernels.SPAN, **options,
        )  # fmt: skip

    def states(cut):
        block_kernels._sum_states(phi_k, v, None, None, None, shape, cut)

    def gradients(cut):
        block_kernels._sum_states(phi_q, do, den, delta, None, shape, cut)

    def sums_of_sinks(cut):
        block_kernels._sink_gradients(q, k, v, offset, den, delta, do, None, shape, cut)

    found = {"forward": forward, "queries": queries, "keys": keys, "states": states, "gradients": gradients}
    return found | ({"sinks": sums_of_sinks} if soft else {})


def bench(run, rep=60) -> float:
    return triton.testing.do_bench(run, warmup=20, rep=rep, return_mode="median")


def variants(result: dict) -> Plan:
    """Times every kernel over its tiles at 1 x 32k, and takes the fastest."""
    best = {}
    for r, soft in ((32, False), (32, True), (16, False), (64, False)):
        launch = runners(1, 32768, r, 256, soft)
        for kernel, run in launch.items():
            cuts = VARIANTS[kernel] if r == 32 else [best[kernel]]
            times = compare(result, f"r {r} {'softmax ' * soft}{kernel}", run, cuts)
            if kernel not in best:
                best[kernel] = min(cuts, key=times.__getitem__)
    return Plan(**{kernel: Tiles(*cut) for kernel, cut in best.items()})


def compare(result: dict, label: str, run, cuts) -> dict:
    """Times of one kernel by its tiles, in ms."""
    times = {}
    for cut in cuts:
        try:
            times[cut] = bench(functools.partial(run, Tiles(*cut)))
        except Exception as error:
            times[cut] = float("inf")
            print(f"{label} {cut}: {type(error).__name__} {str(error)[:200]}", flush=True)
    print(f"{label}: " + "  ".join(f"{tuple(c)} {t:.3f}" for c, t in times.items()), flush=True)
    result[label] = {str(tuple(c)): t for c, t in times.items()}
    return times


def quick_variants(result: dict) -> Iterator[object]:
    """The tiles in question, and what the kernels of other sketch sizes take as shipped."""
    shipped = plan(torch.bfloat16, 128)._asdict()
    for r, soft in ((32, False), (32, True), (16, False), (64, False)):
        for kernel, run in runners(1, 32768, r, 256, soft).items():
            cuts = TRIED[soft].get(kernel, ()) if r == 32 else (shipped[kernel],)
            if cuts and (r != 16 or kernel in ("states", "gradients")):
                yield compare(result, f"r {r} {'softmax ' * soft}{kernel}", run, cuts)


def both(run, leaves) -> tuple[float, float, float]:
    """Forward and forward + backward in ms, and the peak memory above the inputs in MiB."""
    with torch.no_grad():
        forward = bench(run)
    do = torch.randn_like(run().detach())

    def step():
        torch.autograd.grad(run(), leaves, do)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return forward, bench(step, 120), peak


def profiled(run) -> tuple[dict[str, tuple[int, float]], float]:
    """Of one call: kernels by name with their number and time in ms, and how long the host took to launch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    kernels = {
        e.key: (e.count, e.self_device_time_total / 1e3)
        for e in profiler.key_averages()
        if e.self_device_time_total
    }
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        run()
    host = 1e3 * (time.perf_counter() - start) / 5
    torch.cuda.synchronize()
    return kernels, host


def launches(label: str, run) -> None:
    """What a call's kernels take, in all and one by one, and how long the host takes to launch them."""
    try:
        kernels, host = profiled(run)
    except Exception as error:
        print(f"{label}: not profiled: {type(error).__name__} {str(error)[:200]}", flush=True)
        return
    count, total = (sum(x) for x in zip(*kernels.values()))
    print(f"{label}: {count} kernels {total:.3f}, host {host:.3f}", flush=True)
    for name, (count, total) in sorted(kernels.items(), key=lambda x: -x[1][1])[:14]:
        print(f"    {total:7.3f} x{count:<3d} {name[:60]}", flush=True)


def profiles() -> Iterator[None]:
    for name, (run, leaves) in (
        ("r 32 1x32768 with sketch", sketched(32, 32768)["with sketch"]),
        ("r 32 softmax window 1x32768", windowed(32, 32768)),
    ):
        with torch.no_grad():
            do = torch.randn_like(run())
            launches(f"{name} forward", run)
        yield

        def step(run=run, leaves=leaves, do=do):
            torch.autograd.grad(run(), leaves, do)

        yield launches(f"{name} forward + backward", step)


def softly(leaves, scale, cu=None):
    block, window, sinks, _, _ = [*SOFT, 1, 4]
    rule = {"local": "softmax", "block": block, "window": window, "sinks": sinks, "backend": "triton"}
    keep_state = cu is None and not torch.is_grad_enabled()
    return polysketch(*leaves, far_scale=scale, cu_seqlens=cu, keep_state=keep_state, **rule)[0]


def documents(count: int, length: int) -> torch.Tensor:
    return torch.arange(count + 1, device="cuda") * length


Whole = tuple[Callable[[], torch.Tensor], list[torch.Tensor]]  # an operation, and what its gradients are of


def powers(r: int, block: int, B: int, T: int) -> Whole:
    leaves = [x.requires_grad_() for x in inputs(B, T, r=r, dtype=torch.bfloat16, **MISTRAL)]
    rule = {"block": block, "offset": torch.rand(32, device="cuda", requires_grad=True), "backend": "triton"}

    def run():
        return polysketch(*leaves, keep_state=not torch.is_grad_enabled(), **rule)[0]

    return run, [*leaves, rule["offset"]]


def windowed(r: int, T: int, documents_of: int | None = None) -> Whole:
    """local="softmax", of one document or packed."""
    leaves = [x.requires_grad_() for x in inputs(1, T, r=r, dtype=torch.bfloat16, **MISTRAL)]
    scale = torch.randn(1, T, 32, device="cuda", requires_grad=True)
    cu = None if documents_of is None else documents(T // documents_of, documents_of)
    return lambda: softly(leaves, scale, cu), [*leaves, scale]


def sketched(r: int, T: int) -> dict[str, Whole]:
    """The learned sketch in bfloat16: this project's kernels, PyTorch, and a whole operation with it."""
    q, k, v, _, _ = inputs(1, T, r=8, dtype=torch.bfloat16, **MISTRAL)
    sketch = LearnedSketch(4, 129, r, 8).cuda()
    torch.nn.init.normal_(sketch.query, std=0.1)
    torch.nn.init.normal_(sketch.key, std=0.1)
    offset, factor = torch.rand(32, device="cuda"), torch.rand(32, device="cuda")
    leaves = [q, k, v, *sketch.parameters(), offset, factor]
    for leaf in leaves:
        leaf.requires_grad_()

    def ours():
        phi_q, _ = sketch_triton(q, sketch.query, factor=factor, last=offset)
        return phi_q, sketch_triton(k, sketch.key, factor=None, last=None)[0]

    def plain():
        return sketch(append(q * factor[:, None].to(q.dtype), offset.to(q.dtype)), append(k, 1.0))

    def whole():
        rule = {"offset": offset, "keep_state": not torch.is_grad_enabled(), "backend": "triton"}
        return polysketch(q, k, v, *ours(), **rule)[0]

    used = [q, k, *leaves[3:]]
    return {
        "with sketch": (whole, leaves),
        "sketch alone": (lambda: torch.cat([x.flatten() for x in ours()]), used),
        "sketch in torch": (lambda: torch.cat([x.flatten() for x in plain()]), used),
    }


def operations(result: dict, quick: bool) -> Iterator[None]:
    """Whole operations, the most wanted first."""
    yield row(result, "r 32 block 256 1x32768", *powers(32, 256, 1, 32768))
    for name, one in sketched(32, 32768).items():
        yield row(result, f"r 32 1x32768 {name}", *one)
    yield row(result, "r 32 softmax window 1x32768", *windowed(32, 32768))
    yield softmax(result, 1, 32768, "cuDNN")
    yield from decoding(result)
    yield row(result, "the same window, packed 16 x 2048", *windowed(32, 32768, 2048))
    for r, block in (SHORT if quick else WHOLE)[1:]:
        yield row(result, f"r {r} block {block} 1x32768", *powers(r, block, 1, 32768))
        if block == 256:
            yield row(result, f"r {r} softmax window 1x32768", *windowed(r, 32768))
    if quick:
        return
    for B, T in LAYOUTS[:-1]:
        yield row(result, f"r 32 block 256 {B}x{T}", *powers(32, 256, B, T))
    for r in (16, 64):
        for name, one in sketched(r, 32768).items():
            yield row(result, f"r {r} 1x32768 {name}", *one)
    tensors = inputs(1, 32768, r=32, dtype=torch.bfloat16, **MISTRAL)
    with torch.no_grad():
        times = bench(lambda: polysketch(*tensors, backend="torch"))
    result["plain torch, forward"] = times
    yield print(f"plain torch (float32 inside) forward {times:.1f}", flush=True)
    for B, T in LAYOUTS:
        for name in ("cuDNN", "FA2"):
            yield softmax(result, B, T, name)


def softmax(result: dict, B: int, T: int, name: str) -> None:
    backend = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}[name]
    tensors = inputs(B, T, r=8, dtype=torch.bfloat16, **MISTRAL)[:3]
    leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in tensors]

    def run():
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    row(result, f"softmax {name} {B}x{T}", run, leaves)


def row(result, name, run, leaves) -> None:
    try:
        forward, step, peak = both(run, leaves)
    except Exception as error:
        print(f"{name}: {type(error).__name__} {str(error)[:300]}", flush=True)
        return
    result[name] = {"forward": forward, "forward + backward": step, "peak MiB": peak}
    print(f"{name:36s} {forward:8.3f} {step:8.3f} {peak:8.0f} MiB", flush=True)


class Step(NamedTuple):
    """One step of decoding at Mistral's shape: how the state is given, and how the work is cut."""

    r: int
    local: str
    rows: int
    in_place: bool
    cut: tuple | None = None  # None: as shipped
    aligned: bool = True  # whether rows of S start so that 16 bytes can be read at a time

    @property
    def name(self) -> str:
        form = ("in place" if self.in_place else "written anew") + ("" if self.aligned else ", not aligned")
        return f"r {self.r} {self.local} {self.rows} rows {form} {self.cut or 'shipped'}"


CUTS = {  # features, columns, tiles of keys, warps, warps of _finish; by rows
    1: ((64, 64, 1, 4, 4), (32, 32, 1, 4, 2), (128, 32, 1, 8, 4)),
    8: ((64, 64, 1, 4, 4), (64, 128, 1, 8, 4), (128, 128, 1, 8, 2)),
    64: ((64, 128, 2, 4, 4), (64, 64, 2, 4, 2), (128, 128, 2, 8, 4)),
}


def steps(quick: bool) -> list[Step]:
    """What is timed, the most wanted first."""
    found = []
    for rows in (1, 64, 8):
        for local in ("softmax", "power"):
            for r in (32, 64, 16):
                found += [Step(r, local, rows, True), Step(r, local, rows, False)]
    if quick:
        return [step for step in found if step.rows != 8 and step.local == "softmax" and step.r != 16]
    for rows, cuts in CUTS.items():
        for local, r in (("softmax", 32), ("power", 32), ("softmax", 64)):
            found += [Step(r, local, rows, True, by) for by in cuts]
        found.append(Step(32, "softmax", rows, True, None, False))
    return found


def step_tensors(step: Step, phase: float = 0.5):
    """A token, a state whose open block is so full, and the rule."""
    block, window, sinks = SOFT if step.local == "softmax" else (256, 256, 0)
    B, H, D, E = step.rows, MISTRAL["H"], MISTRAL["D"], MISTRAL["E"]
    token = inputs(B, 1, r=step.r, dtype=torch.bfloat16, **MISTRAL)
    _, k, v, _, phi = inputs(B, window, r=step.r, dtype=torch.bfloat16, **MISTRAL)
    S = torch.rand(B, H, num_features(step.r), E + 1, device="cuda")
    seen = torch.full((B,), 4 * block + int(phase * (block - 1)), device="cuda")
    log_gate = torch.zeros(B, window, H, device="cuda")
    seats = [x[:, :sinks].contiguous() for x in (k, v)]
    state = PolySketchState(S, k, v, phi, log_gate, *seats, seen)
    if step.in_place and step.aligned:
        state = state._replace(S=step_kernels.own(S))
    rule = {"local": step.local, "block": block, "window": window, "sinks": sinks, "backend": "triton"}
    near = sinks + window - block / 2
    size = S.nbytes + near * B * H * (D + E) * 2
    if not step.in_place:
        size += sum(x.nbytes for x in state if x is not log_gate) + (k.nbytes + v.nbytes) * (
            1 - near / window
        )
    return token, state, rule, size


def step_run(step: Step, phase: float = 0.5, again: bool = False):
    """A function that takes the step, and the bytes it has to move; again: always at the same place."""
    token, state, rule, size = step_tensors(step, phase)
    rule["in_place"] = torch.ones(step.rows, dtype=torch.bool, device="cuda") if step.in_place else None
    start = state.seen.clone()

    def run():
        shipped = step_kernels.cut
        if step.cut is not None:
            step_kernels.cut = lambda *sizes: step_kernels.Cut(*step.cut)
        if again:
            state.seen.copy_(start)
        with torch.no_grad():
            found = polysketch(*token, state=state, **rule)
        step_kernels.cut = shipped
        return found

    return run, size


def step_time(step: Step, phase: float = 0.5, again: bool = False) -> tuple[float, float]:
    """Microseconds in a CUDA graph, and bytes."""
    run, size = step_run(step, phase, again)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return 1e3 * bench(graph.replay, rep=40), size


def decoding(result: dict, quick: bool = True) -> Iterator[None]:
    """Prints a line a step. Medians leave out the ends of blocks; what a step takes there stands last."""
    print(
        "decode: us in a CUDA graph; its bytes at 4.26 TB/s; TB/s; where a block ends in every row",
        flush=True,
    )
    for step in steps(quick):
        try:
            wall, size = step_time(step)
            line = f"{step.name:58s} {wall:8.1f} {size / 4.26e6:8.1f} {size / wall / 1e6:6.2f}"
            result[f"decode {step.name}"] = found = {"us": wall, "bytes": size}
            if step.in_place and step.cut is None:
                found["end"] = step_time(step, 1.0, again=True)[0]
                line += f" {found['end']:8.1f}"
            print(line, flush=True)
        except Exception as error:
            print(f"decode {step.name}: {type(error).__name__} {str(error)[:300]}", flush=True)
        yield


def steps_in_place(r: int, local: str, dtype: torch.dtype) -> list[str]:
    """Seventy tokens in place, rows at different ages and some asleep, beside the block algorithm in float64;
    and the last as a graph."""
    block, window, sinks = SOFT if local == "softmax" else (64, 64, 0)
    rule = {"local": local, "block": block, "window": window, "sinks": sinks}
    tensors = inputs(3, 400, r=r, dtype=dtype, **MISTRAL)
    ages = torch.tensor([290, 261, 3], device="cuda")
    _, state = polysketch(*(x[:, :300] for x in tensors), lengths=ages, backend="torch", **rule)
    mine = state._replace(S=step_kernels.own(state.S), **{
        name: x.clone() for name, x in state._asdict().items() if name != "S"
    })  # fmt: skip
    gold = type(state)(*(x.double() if x.is_floating_point() else x for x in state))
    kept = [x.clone() for x in state]
    token, real = [x[:, :1].clone() for x in tensors], torch.ones(3, dtype=torch.bool, device="cuda")
    with torch.no_grad():
        asleep = mine._replace(seen=mine.seen.clone())
        polysketch(*token, state=asleep, in_place=~real, backend="triton", **rule)
        if not all(torch.equal(a, b) for a, b in zip(asleep, state)):
            return ["rows asleep were changed"]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = polysketch(*token, state=mine, in_place=real, backend="triton", **rule)
        for t in range(70):
            for x, whole in zip(token, tensors):
                x.copy_(whole[:, 300 + t, None])
            real[1] = t % 9 != 4
            graph.replay()
            exact, after = polysketch(*(x.double() for x in token), state=gold, backend="torch", **rule)
            change = [real.view(-1, *(1,) * (x.dim() - 1)) for x in gold]
            gold = type(gold)(*(torch.where(c, a, b) for c, a, b in zip(change, after, gold)))
            exact = exact.where(real[:, None, None, None], 0)
            pairs = {"o": (o, exact), "S": (mine.S, gold.S)}
            errors = {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}
            wrong = [f"{n} off by {error:.1e}" for n, error in errors.items() if not error <= CAPS[dtype]]
            if not all(torch.equal(a.double(), b.double()) for a, b in zip(mine[1:], gold[1:])):
                wrong.append("the buffers differ")
            if wrong:
                return [f"token {t}: {', '.join(wrong)}"]
    return [] if all(torch.equal(a, b) for a, b in zip(state, kept)) else ["the state given was changed"]


def sketch_runners(T: int, r: int) -> dict:
    """The sketch's two kernels on queries, without the small tensors around them."""
    x, dphi = (torch.randn(1, T, 32, size, device="cuda", dtype=torch.bfloat16) for size in (128, r))
    given = x, torch.randn(8, 2, 129, r, device="cuda"), torch.rand(32, device="cuda"), None, None, None
    return {
        "forward": lambda: sketch_kernels._sketch_op(*given),
        "backward": lambda: sketch_kernels._sketch_backward_op(*given, dphi, None),
    }


def sketch_variants(result: dict) -> None:
    launch, shipped = sketch_runners(32768, 32), dict(sketch_kernels.TILES)
    for kernel, cuts in SKETCH_TILES.items():
        times = {}
        for cut in cuts:
            sketch_kernels.TILES[kernel] = cut
            times[str(cut)] = bench(launch[kernel])
        sketch_kernels.TILES.update(shipped)
        print(f"sketch {kernel}: " + "  ".join(f"{c} {t:.3f}" for c, t in times.items()), flush=True)
        result[f"sketch {kernel}"] = times


class Job(NamedTuple):
    """A check, or something run small so that its kernels are compiled: no lines mean that all is well."""

    name: str
    run: Callable[[], list[str] | None]


def jobs(quick: bool, tiles: bool, only_decode: bool = False) -> list[Job]:
    """What all processes do, in this order: the same list in each."""
    found = decode_jobs(not only_decode)
    return found if only_decode else [*other_jobs(quick, tiles), *found]


def decode_jobs(quick: bool) -> list[Job]:
    found = []
    for dtype in reversed(CAPS):
        name = str(dtype).removeprefix("torch.")
        for local in ("power", "softmax"):
            run = functools.partial(more_tokens, local, dtype, False)
            found.append(Job(f"step {local} {name}", run))
            for r in (32,) if quick else (32, 16, 64):
                run = functools.partial(steps_in_place, r, local, dtype)
                found.append(Job(f"in place r {r} {local} {name}", run))
    for step in steps(quick):
        found.append(Job(f"compile {step.name}", lambda step=step: step_run(step)[0]() and []))
    return found


def other_jobs(quick: bool, tiles: bool) -> list[Job]:
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in CAPS}
    found = []
    for dtype in reversed(CAPS):  # float32 takes longest to compile
        for cases in families(QUICK if quick else CASES, dtype):
            name = f"{names[dtype]} {cases[0][2:]} T {' '.join(str(case[1]) for case in cases)}"
            found.append(Job(name, functools.partial(check_all, cases, dtype)))
    found.append(Job("constant keys", constant_keys))
    found.append(Job("a later token", later_token))
    for local in ("power", "softmax"):
        found.append(Job(f"packed {local}", functools.partial(packed_document, local)))
    found += [Job(f"sketch {names[dtype]}", functools.partial(check_sketch, dtype)) for dtype in CAPS]
    for local in ("power", "softmax"):
        for dtype in reversed(CAPS):
            run = functools.partial(more_tokens, local, dtype, True)
            found.append(Job(f"continued {local} {names[dtype]}", run))

    def compiled(name: str, run: Callable[[], object]) -> None:
        found.append(Job(f"compile {name}", lambda: run() and []))

    for r, block in SHORT if quick else WHOLE:
        T = 10 * max(block, block_kernels.CHUNK)
        compiled(f"r {r} block {block}", lambda r=r, block=block, T=T: once(*powers(r, block, 1, T)))
        if block == 256:
            compiled(f"r {r} softmax", lambda r=r: once(*windowed(r, 2560)))
    compiled("packed", lambda: once(*windowed(32, 2560, 160)))
    compiled("with sketch", lambda: once(*sketched(32, 2560)["with sketch"]))
    if quick:
        shipped = plan(torch.bfloat16, 128)._asdict()
        for soft, kernel, cut in ((a, b, c) for a in TRIED for b in TRIED[a] for c in TRIED[a][b]):
            if cut != shipped[kernel]:
                compiled(f"{kernel} {cut}", lambda k=kernel, c=cut, soft=soft: tile(k, c, (soft,)))
    for kernel, cut in ((a, b) for a in SKETCH_TILES for b in SKETCH_TILES[a]):
        compiled(f"sketch {kernel} {cut}", lambda k=kernel, c=cut: sketch_launch(k, c, 512))
    if tiles:
        for kernel, cut in ((a, b) for a in VARIANTS for b in VARIANTS[a]):
            compiled(f"{kernel} {cut}", lambda k=kernel, c=cut: tile(k, c))
    return found


def once(run: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> None:
    with torch.no_grad():
        o = run()
    torch.autograd.grad(run(), leaves, torch.zeros_like(o))


def sketch_launch(kernel: str, cut: tuple, T: int) -> None:
    shipped = dict(sketch_kernels.TILES)
    sketch_kernels.TILES[kernel] = cut
    sketch_runners(T, 32)[kernel]()
    sketch_kernels.TILES.update(shipped)


def tile(kernel: str, cut: tuple, near: tuple[bool, ...] = (False, True)) -> None:
    for soft in near:
        if kernel in (launch := runners(1, 2560, 32, 256, soft)):
            launch[kernel](Tiles(*cut))


def work(claims: Path, *chosen: bool) -> None:
    """Does what no other process has claimed in a folder, and leaves there what was wrong and the seconds."""
    for index, job in enumerate(jobs(*chosen)):
        mine = claims / str(index)
        try:
            mine.mkdir()
        except FileExistsError:
            continue
        start, broken = time.perf_counter(), False
        with (mine / "stack").open("w") as stack:
            faulthandler.dump_traceback_later(STUCK, repeat=True, file=stack)
            try:
                with contextlib.redirect_stdout(None):
                    wrong = job.run() or []
                    torch.cuda.synchronize()
            except Exception as error:
                wrong = [f"{type(error).__name__}: {str(error)[:300]}"]
                broken = any(x in wrong[0] for x in ("CUDA error", "illegal", "misaligned"))  # for good, then
            faulthandler.cancel_dump_traceback_later()
        (mine / "part").write_text(json.dumps([wrong, time.perf_counter() - start]))
        (mine / "part").rename(mine / "done")
        if broken:
            return


class Clock:
    """Seconds since the start; beyond the limit there is nothing to wait for."""

    def __init__(self, limit: float | None) -> None:
        self.start, self.limit = time.perf_counter(), limit

    def now(self) -> float:
        return time.perf_counter() - self.start

    def over(self, share: float = 1.0) -> bool:
        return self.limit is not None and self.now() > share * self.limit


def checked(arguments: argparse.Namespace, clock: Clock) -> dict:
    """Runs all jobs in processes, printing what each finds; those that take too long are stopped."""
    todo = jobs(arguments.quick, not arguments.no_variants, arguments.decode)
    flags = [
        f"--{name}"
        for name in ("quick", "no-variants", "decode")
        if getattr(arguments, name.replace("-", "_"))
    ]
    told: dict[int, list] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--work", folder, *flags]
        workers = [subprocess.Popen(command) for _ in range(arguments.processes)]
        torch.zeros(1, device="cuda")  # starts the GPU meanwhile

        def tell() -> None:
            for index, job in enumerate(todo):
                done = Path(folder, str(index), "done")
                if index not in told and done.exists():
                    told[index] = wrong, seconds = json.loads(done.read_text())
                    state = "WRONG" if wrong else "ok   "
                    if wrong or not job.name.startswith("compile"):
                        line = f"{clock.now():5.1f} {state} {seconds:5.1f} s {job.name}"
                        print(line, "; ".join(wrong), flush=True)

        while any(worker.poll() is None for worker in workers) and not clock.over(0.7):
            tell()
            time.sleep(0.1)
        for worker in workers:
            worker.kill()
            if worker.wait() not in (0, -9):
                print(f"a process ended with {worker.returncode}", flush=True)
        tell()
        waiting = 0
        for index in set(range(len(todo))) - set(told):
            begun = Path(folder, str(index), "stack")
            waiting += not begun.exists()
            if begun.exists():
                print(f"NOT FINISHED {todo[index].name}", begun.read_text()[-900:], sep="\n", flush=True)
        if waiting:
            print(f"{waiting} jobs not begun", flush=True)
    checks = {i: job for i, job in enumerate(todo) if not job.name.startswith("compile")}
    wrong = sum(bool(told[i][0]) for i in checks if i in told)
    unknown = sum(i not in told for i in checks)
    print(f"correctness: {len(checks)} groups, {wrong} wrong, {unknown} not finished", flush=True)
    print(f"checked after {clock.now():.0f} s", flush=True)
    return {todo[i].name: {"wrong": w, "seconds": s} for i, (w, s) in told.items()}


def timed(result: dict, arguments: argparse.Namespace) -> Iterator[object]:
    if arguments.decode:
        yield from decoding(result, quick=False)
        return
    if not arguments.no_variants:
        fastest = variants(result)
        print(f"fastest: {fastest}", flush=True)
        result["fastest"] = str(fastest)
        shipped = block_kernels.plan
        block_kernels.plan = lambda dtype, widest: (
            fastest if dtype == torch.bfloat16 and widest == 128 else shipped(dtype, widest)
        )
    yield from operations(result, arguments.quick)
    yield sketch_variants(result)
    if arguments.quick:
        yield from quick_variants(result)
    yield from profiles()  # last: a profiler may hang


def save(result: dict, out: Path | None) -> None:
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "polysketch.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="few cases and shapes, no variants")
    parser.add_argument("--decode", action="store_true", help="only decoding, and its launches side by side")
    parser.add_argument("--no-variants", action="store_true", help="only the shipped tiles")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop after so long (never)")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.no_variants |= arguments.quick
    if arguments.work is not None:
        return work(arguments.work, arguments.quick, not arguments.no_variants, arguments.decode)
    clock, result = Clock(arguments.limit), {}

    def stop() -> None:  # whatever the main thread waits for
        faulthandler.dump_traceback()
        print(f"stopped at {clock.now():.0f} s", flush=True)
        save(dict(result), arguments.out)
        os._exit(3)

    if arguments.limit is not None:
        guard = threading.Timer(arguments.limit + 3, stop)
        guard.daemon = True
        guard.start()
    print(f"torch {torch.__version__}, triton {triton.__version__}", flush=True)
    result["checks"] = checked(arguments, clock)
    faulthandler.dump_traceback_later(STUCK, repeat=True)
    for _ in timed(result, arguments):
        faulthandler.dump_traceback_later(STUCK, repeat=True)  # counts anew
        if clock.over():
            print("stopped: the limit is reached", flush=True)
            break
    faulthandler.cancel_dump_traceback_later()
    print(f"{torch.cuda.get_device_name()}; total {clock.now():.0f} s", flush=True)
    save(result, arguments.out)


if __name__ == "__main__":
    main()
