"""PolySketch's Triton kernels on a GPU: right in every dtype and shape, and how fast, beside softmax.

    PYTHONPATH=src python benchmarks/check_polysketch.py [--out DIR] [--quick] [--no-variants]

First every case against a dense float64 oracle, one line a failing one; then each kernel over its tiles,
whole operations at Mistral-7B's shape, and in the same run torch's softmax (cuDNN, FlashAttention-2), the
learned sketch, and the block algorithm in plain PyTorch. Several processes compile beforehand. The
short table comes last; DIR/polysketch.json has everything. Milliseconds are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from unsoftmax.kernels.polysketch import triton_block as block_kernels
from unsoftmax.kernels.polysketch import triton_sketch as sketch_kernels
from unsoftmax.kernels.polysketch.chunked import polysketch
from unsoftmax.kernels.polysketch.sketch import LearnedSketch, append
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


def correctness(cases: list) -> list[str]:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    lines = []
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases:
            try:
                wrong = check(case, dtype)
            except Exception as error:  # one broken case must not hide the others
                wrong = [f"{type(error).__name__}: {str(error)[:300]}"]
            if wrong:
                lines.append(f"WRONG {dtype} {case}: {'; '.join(wrong)}")
                print(lines[-1], flush=True)
    lines += extremes()
    print(f"correctness: {2 * len(cases) + 9} cases, {len(lines)} wrong", flush=True)
    return lines


def extremes() -> list[str]:
    """Constant keys of norm sqrt(D) for 64k tokens; queries of 0; ones as values; a later token."""
    wrong = []
    T, dtype = 65536, torch.bfloat16
    q, k, v, phi_q, phi_k = inputs(1, T, 2, 1, 64, 64, 32, dtype)
    k, phi_k = torch.ones_like(k), torch.ones_like(phi_k)
    o, _ = polysketch(q, k, torch.ones_like(v), phi_q, phi_k, backend="triton")
    if not (o.float() - 1).abs().max() < 0.02:
        wrong.append(f"WRONG constant keys: ones average to {o.min():.3f} .. {o.max():.3f}")
    o, _ = polysketch(q * 0, k, v, phi_q * 0, phi_k, backend="triton")
    if o.any() or not o.isfinite().all():
        wrong.append("WRONG q = 0: not 0")
    cut, tensors = 3000, inputs(1, 5000, 4, 2, 128, 128, 32, dtype)
    do = torch.randn(1, cut, 4, 128, device="cuda", dtype=dtype)
    found = []
    for factor in (1.0, -3.0):
        leaves = [torch.cat((x[:, :cut], x[:, cut:] * factor), 1).requires_grad_() for x in tensors]
        o = polysketch(*leaves, backend="triton")[0][:, :cut]
        found.append([o.detach(), *(g[:, :cut] for g in torch.autograd.grad(o, leaves, do))])
    if not all(torch.equal(a, b) for a, b in zip(*found)):
        wrong.append("WRONG a later token changes an earlier bit")
    cu = torch.tensor([0, 700, 701, 1500, 5000], device="cuda")
    for rule in ({}, {"local": "softmax", "block": 32, "window": 64, "sinks": 4}):
        rule |= {"keep_state": False, "backend": "triton"}
        o, _ = polysketch(*tensors, cu_seqlens=cu, **rule)
        alone, _ = polysketch(*(x[:, 1500:].contiguous() for x in tensors), **rule)
        if not (o[:, 1500:].float() - alone.float()).norm() < 1e-2 * alone.float().norm():
            wrong.append("WRONG a packed document differs from itself alone")
    wrong += steps()
    for line in wrong:
        print(line, flush=True)
    return wrong


def steps() -> list[str]:
    """Tokens one at a time past two ends of blocks, beside the block algorithm in float64."""
    wrong = []
    for local, block, window, sinks in (("power", 64, 64, 0), ("softmax", 32, 64, 4)):
        rule = {"local": local, "block": block, "window": window, "sinks": sinks}
        for dtype in CAPS:
            tensors = inputs(2, 400, 8, 2, 128, 128, 32, dtype)
            lengths = torch.tensor([290, 260], device="cuda")
            some = [x[:, :300] for x in tensors]
            _, mine = polysketch(*some, lengths=lengths, backend="torch", **rule)
            gold = type(mine)(*(x.double() if x.is_floating_point() else x for x in mine))
            for t in range(300, 301 + 2 * block):
                last = t == 300 + 2 * block  # many at once
                token = tensors if last else [x[:, t % 400, None] for x in tensors]
                o, mine = polysketch(*token, state=mine, backend="triton", **rule)
                exact, gold = polysketch(*(x.double() for x in token), state=gold, backend="torch", **rule)
                pairs = {"o": (o, exact), "S": (mine.S, gold.S)}
                bad = [n for n, (a, b) in pairs.items() if not (a - b).norm() <= CAPS[dtype] * b.norm()]
                same = torch.equal(mine.k.double(), gold.k) and torch.equal(mine.seen, gold.seen)
                if bad or not same:
                    wrong.append(f"WRONG step {t} {local} {dtype}: {bad or 'the buffers'}")
                    break
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


def quick_variants(result: dict) -> None:
    """The tiles in question, and what the kernels of other sketch sizes take as shipped."""
    shipped = plan(torch.bfloat16, 128)._asdict()
    for r, soft in ((32, False), (32, True), (16, False), (64, False)):
        for kernel, run in runners(1, 32768, r, 256, soft).items():
            cuts = TRIED[soft].get(kernel, ()) if r == 32 else (shipped[kernel],)
            if cuts and (r != 16 or kernel in ("states", "gradients")):
                compare(result, f"r {r} {'softmax ' * soft}{kernel}", run, cuts)


def both(run, leaves, every: bool) -> tuple[float, float, float]:
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
    wall = bench(step, 120)
    with torch.no_grad():
        launches("forward", run, forward)
    launches("forward + backward", step, wall, every)
    return forward, wall, peak


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


def launches(label: str, run, wall: float, every: bool = False) -> None:
    """What a call's kernels take in all, beside what it takes from outside and on the host."""
    try:
        kernels, host = profiled(run)
    except Exception as error:
        print(f"{label}: not profiled: {type(error).__name__} {str(error)[:200]}", flush=True)
        return
    count, total = (sum(x) for x in zip(*kernels.values()))
    print(f"  {label}: {count} kernels {total:.3f}, wall {wall:.3f}, host {host:.3f}", flush=True)
    if every:
        for name, (count, total) in sorted(kernels.items(), key=lambda x: -x[1][1])[:22]:
            print(f"    {total:7.3f} x{count:<3d} {name[:90]}", flush=True)


def softly(leaves, scale, cu=None):
    block, window, sinks, _, _ = [*SOFT, 1, 4]
    rule = {"local": "softmax", "block": block, "window": window, "sinks": sinks}
    keep_state = cu is None and not torch.is_grad_enabled()
    return polysketch(*leaves, far_scale=scale, cu_seqlens=cu, keep_state=keep_state, **rule)[0]


def documents(count: int, length: int) -> torch.Tensor:
    return torch.arange(count + 1, device="cuda") * length


def operations(result: dict, quick: bool) -> None:
    for r, block in SHORT if quick else WHOLE:
        for B, T in LAYOUTS if (r, block) == (32, 256) and not quick else LAYOUTS[-1:]:
            leaves = [x.requires_grad_() for x in inputs(B, T, r=r, dtype=torch.bfloat16, **MISTRAL)]
            offset = torch.rand(32, device="cuda", requires_grad=True)

            def run(leaves=leaves, block=block, offset=offset):
                return polysketch(
                    *leaves, block=block, offset=offset, keep_state=not torch.is_grad_enabled()
                )[0]

            row(result, f"polysketch r {r} block {block} {B}x{T}", run, [*leaves, offset])
        if block == WHOLE[0][1]:
            leaves = [x.requires_grad_() for x in inputs(1, 32768, r=r, dtype=torch.bfloat16, **MISTRAL)]
            scale = torch.randn(1, 32768, 32, device="cuda", requires_grad=True)

            def soft(leaves=leaves, scale=scale):
                return softly(leaves, scale)

            row(result, f"polysketch r {r} softmax window 1x32768", soft, [*leaves, scale])
            if r == 32:
                cu = documents(16, 2048)

                def together(leaves=leaves, scale=scale, cu=cu):
                    return softly(leaves, scale, cu)

                row(result, "the same, packed 16 x 2048", together, [*leaves, scale])
    learned_sketch(result, quick)
    if not quick:
        tensors = inputs(1, 32768, r=32, dtype=torch.bfloat16, **MISTRAL)
        with torch.no_grad():
            polysketch(*tensors, backend="torch")
            torch.cuda.synchronize()
            start = time.perf_counter()
            polysketch(*tensors, backend="torch")
            torch.cuda.synchronize()
            result["plain torch, forward"] = 1e3 * (time.perf_counter() - start)
        print(f"plain torch (float32 inside) forward {result['plain torch, forward']:.1f}")
    for B, T in () if quick else LAYOUTS:
        q, k, v, _, _ = inputs(B, T, r=8, dtype=torch.bfloat16, **MISTRAL)
        leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION)):

            def softmax(leaves=leaves, backend=backend):
                with sdpa_kernel(backend):
                    return functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

            row(result, f"softmax {name} {B}x{T}", softmax, leaves)


def row(result, name, run, leaves, every: bool = False) -> None:
    try:
        forward, step, peak = both(run, leaves, every)
    except Exception as error:
        print(f"{name}: {type(error).__name__} {str(error)[:300]}", flush=True)
        return
    result[name] = {"forward": forward, "forward + backward": step, "peak MiB": peak}
    print(f"{name:36s} {forward:8.3f} {step:8.3f} {peak:8.0f} MiB", flush=True)


def learned_sketch(result: dict, quick: bool) -> None:
    """The sketch of 1 x 32k in bfloat16: this project's kernels, PyTorch, and a whole operation with it."""
    for r in (32, 16, 64):
        if quick and r != 32:
            continue
        q, k, v, _, _ = inputs(1, 32768, r=8, dtype=torch.bfloat16, **MISTRAL)
        sketch = LearnedSketch(4, 129, r, 8).cuda()
        torch.nn.init.normal_(sketch.query, std=0.1)
        torch.nn.init.normal_(sketch.key, std=0.1)
        offset, factor = torch.rand(32, device="cuda"), torch.rand(32, device="cuda")
        leaves = [q, k, v, *sketch.parameters(), offset, factor]
        for leaf in leaves:
            leaf.requires_grad_()

        def ours(q=q, k=k, sketch=sketch, offset=offset, factor=factor):
            phi_q, _ = sketch_triton(q, sketch.query, factor=factor, last=offset)
            return phi_q, sketch_triton(k, sketch.key, factor=None, last=None)[0]

        def plain(q=q, k=k, sketch=sketch, offset=offset, factor=factor):
            q = append(q * factor[:, None].to(q.dtype), offset.to(q.dtype))
            return sketch(q, append(k, 1.0))

        def flat(form):
            return lambda: torch.cat([x.flatten() for x in form()])

        def whole(q=q, k=k, v=v, offset=offset, ours=ours):
            return polysketch(q, k, v, *ours(), offset=offset, keep_state=not torch.is_grad_enabled())[0]

        for mine, other in zip(ours(), plain()):
            error = ((mine.float() - other.float()).norm() / other.float().norm()).item()
            if not error < 1e-2:
                print(f"WRONG learned sketch r {r}: {error:.1e} from PyTorch's")
        used = [q, k, *sketch.parameters(), offset, factor]
        row(result, f"learned sketch r {r}, Triton", flat(ours), used)
        row(result, f"learned sketch r {r}, torch", flat(plain), used)
        row(result, f"polysketch r {r} 1x32768 with sketch", whole, leaves, every=True)


def decoding(result: dict) -> None:
    """One step of 1 and 64 documents in a CUDA graph, and what its bytes take at 4.26 TB/s."""
    for r, B in ((32, 1), (32, 64), (64, 64)):
        tensors = inputs(B, 512, r=r, dtype=torch.bfloat16, **MISTRAL)
        block, window, sinks, _, _ = [*SOFT, 1, 4]
        rule = {"local": "softmax", "block": block, "window": window, "sinks": sinks}
        with torch.no_grad():
            _, state = polysketch(*tensors, **rule)
            token = [x[:, :1].contiguous() for x in tensors]

            def run(token=token, state=state, rule=rule):
                return polysketch(*token, state=state, **rule)

            try:
                run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
            except Exception as error:
                print(f"decode r {r} B {B}: {type(error).__name__} {str(error)[:300]}", flush=True)
                continue
            wall, eager = bench(graph.replay), bench(run)
        size = 2 * sum(x.nbytes for x in state)  # read, and written anew
        result[f"decode r {r} B {B}"] = {"graph": wall, "eager": eager, "bytes": size}
        print(
            f"decode r {r} B {B}: graph {wall:.4f}, eager {eager:.4f}, bytes' {size / 4.26e9:.4f}", flush=True
        )


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


def warm(claims: Path, quick: bool, tiles: bool) -> None:
    """Compiles what no other process has claimed in a folder, by running it small; the longest first."""
    jobs = [("steps", None, None), ("packed", None, None), ("decoding", None, None)]
    jobs += [("whole", r, block) for r, block in (SHORT if quick else WHOLE)]
    different = {case[2:]: case for case in (QUICK if quick else CASES)}  # kernels do not depend on T
    jobs += [("case", case, dtype) for dtype in CAPS for case in different.values()]
    if quick:
        jobs += [
            (soft, kernel, cut) for soft in TRIED for kernel in TRIED[soft] for cut in TRIED[soft][kernel]
        ]
    jobs += [("sketch", kernel, cut) for kernel, cuts in SKETCH_TILES.items() for cut in cuts]
    if tiles:
        jobs += [("tiles", kernel, cut) for kernel, cuts in VARIANTS.items() for cut in cuts]
    for index, (kind, a, b) in enumerate(jobs):
        try:
            (claims / str(index)).mkdir()
            if kind == "case":
                check(a, b)
            elif kind == "sketch":
                sketch_kernels.TILES[a] = b
                for run in sketch_runners(512, 32).values():
                    run()
            elif kind == "tiles":
                for soft in (False, True):
                    if a in (launch := runners(1, 512, 32, 256, soft)):
                        launch[a](Tiles(*b))
            elif kind == "packed":
                leaves = [x.requires_grad_() for x in inputs(1, 512, r=32, dtype=torch.bfloat16, **MISTRAL)]
                scale = torch.zeros(1, 512, 32, device="cuda")
                softly(leaves, scale, documents(4, 128)).sum().backward()
            elif kind == "steps":
                steps()
            elif kind == "decoding":
                decoding({})
            elif isinstance(kind, bool):
                runners(1, 512, 32, 256, kind)[a](Tiles(*b))
            else:
                leaves = [x.requires_grad_() for x in inputs(1, 2 * b, r=a, dtype=torch.bfloat16, **MISTRAL)]
                given = {"block": b, "offset": torch.rand(32, device="cuda"), "keep_state": False}
                polysketch(*leaves, **given)[0].sum().backward()
                if b == WHOLE[0][1]:
                    softly(leaves, torch.zeros(1, 2 * b, 32, device="cuda")).sum().backward()
        except Exception:
            continue  # the main process meets it again and says so


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="few cases and shapes, no variants")
    parser.add_argument("--no-variants", action="store_true", help="only the shipped tiles")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--warm", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.warm is not None:
        with contextlib.redirect_stdout(None):
            return warm(arguments.warm, arguments.quick, not arguments.no_variants)
    start = time.perf_counter()
    arguments.no_variants |= arguments.quick
    flags = [f"--{name}" for name in ("quick", "no-variants") if getattr(arguments, name.replace("-", "_"))]
    with tempfile.TemporaryDirectory() as claims:
        command = [sys.executable, __file__, "--warm", claims, *flags]
        for worker in [subprocess.Popen(command) for _ in range(arguments.processes)]:
            worker.wait()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    result: dict = {"wrong": correctness(QUICK if arguments.quick else CASES)}
    print(f"checked after {time.perf_counter() - start:.0f} s", flush=True)
    if not arguments.no_variants:
        fastest = variants(result)
        print(f"fastest: {fastest}", flush=True)
        result["fastest"] = str(fastest)
        shipped = block_kernels.plan
        block_kernels.plan = lambda dtype, widest: (
            fastest if dtype == torch.bfloat16 and widest == 128 else shipped(dtype, widest)
        )
    if arguments.quick:
        quick_variants(result)
    sketch_variants(result)
    operations(result, arguments.quick)
    decoding(result)
    print(f"total {time.perf_counter() - start:.0f} s")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "polysketch.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
