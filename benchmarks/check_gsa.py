"""Do the gated slot attention kernels hold on this GPU, and how fast are they beside softmax?

    PYTHONPATH=src python benchmarks/check_gsa.py [--quick] [--json FILE]

Correctness first (against the PyTorch form in float64; one line a failing case), each group of cases in a
process of its own, all at once; then times in milliseconds at Mistral-7B's shape, 32,768 tokens. After a
CUDA error a group runs again in a fresh process that waits for every kernel, so that the guilty one is named.
--quick takes at most about 110 seconds.
"""

import argparse
import json
import subprocess
import sys
import time

import torch
import triton

from unsoftmax.kernels.gsa import triton_chunk, triton_op, triton_tiles
from unsoftmax.kernels.gsa.chunked import gsa
from unsoftmax.kernels.gsa.reference import GSAState

CAPS = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 1e-5}
FLOORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}
NAMES = ["o", "K", "V", "kept", "dq", "dk", "dv", "dlog_gate", "dK0", "dV0", "dkept0"]
SHAPES = {  # HQ, H, D, E, M
    "mistral": (8, 2, 128, 128, 64),
    "odd": (6, 2, 60, 100, 48),
    "small": (2, 2, 64, 64, 16),
    "wide": (4, 1, 128, 128, 128),
}
LENGTHS = [1, 15, 17, 64, 127, 129, 300]
TABLES = ("BLOCKS", "HEADS", "WARPS", "STAGES", "EARLY", "REGISTERS")
SHIPPED = {name: dict(getattr(triton_tiles, name)) for name in TABLES}
VARIANTS = [  # what differs from the cut as shipped; keep: whether forward leaves P for backward
    {},
    {"EARLY": {"forward": 0, "weights": 0, "queries": 0}, "REGISTERS": {"forward": 168, "queries": 168}},
    {"EARLY": {"forward": 1}, "REGISTERS": {"weights": None}},
]
PACKED = [0, 1, 34, 34, 170, 300]


def gates(kind: str, z: torch.Tensor) -> torch.Tensor:
    if kind == "soft":
        return -z.abs()
    if kind == "long":
        return -0.7 / 10 ** (3 + 1.5 * z).clamp(0, 6)
    if kind == "mixed":
        table = torch.tensor([0.0, -1e-6, -5.0, -50.0, -1e4], dtype=z.dtype, device=z.device)
        return table[(z.abs() * 97).long() % 5]
    if kind == "strong":
        return -10 - z.abs()
    ring = torch.arange(z.shape[1], device=z.device) % z.shape[-1]
    return torch.zeros_like(z).scatter(-1, ring.view(1, -1, 1, 1).expand(*z.shape[:3], 1), -9.0)


def case(shape, T: int, kind: str, dtype, mass: bool, state: bool, cu=None, backend="triton", B=2):
    """Relative errors by name, and what tests/tolerance.py allows of each.

    Also that two runs agree bit for bit, and that nothing later disturbs.
    """
    HQ, H, D, E, M = SHAPES[shape]
    B = B if cu is None else 1
    N = B if cu is None else len(cu) - 1
    torch.manual_seed(T)

    def draw(*size):
        return torch.randn(*size, device="cuda", dtype=torch.float64)

    ins = [x.to(dtype).double() for x in (draw(B, T, HQ, D), draw(B, T, H, D), draw(B, T, H, E))]
    ins.append(gates(kind, draw(B, T, H, M)).float().double())
    if state:  # one that tokens leave: with any other, u / z of a small mass z magnifies every rounding
        past = [draw(N, 40, HQ, D), draw(N, 40, H, D), draw(N, 40, H, E), gates(kind, draw(N, 40, H, M))]
        ins += [x.float().double() for x in gsa(*past, mass=mass, backend="torch")[1]]
    cut = None if cu is None else torch.tensor(cu, device="cuda")
    ups = [draw(B, T, HQ, E).to(dtype), *(draw(N, H, M, *s).float() for s in ((D,), (E,), ()))]

    def run(tensors, backend):
        tensors = [x.detach().requires_grad_() for x in tensors]
        st = GSAState(*tensors[4:]) if state else None
        o, s = gsa(*tensors[:4], mass=mass, state=st, cu_seqlens=cut, backend=backend)
        out = [o, *s]
        grads = torch.autograd.grad(out, tensors, [u.to(x.dtype) for u, x in zip(ups, out)])
        return [x.detach() for x in (*out, *grads)]

    gold = run(ins, "torch")
    cast = [x.to(dtype) for x in ins[:3]] + [x.float() for x in ins[3:]]
    ours, again = run(cast, backend), run(cast, backend)
    errors, allowed, plain = {}, {}, None
    for name, a, b, c in zip(NAMES, ours, gold, again):
        if not a.isfinite().all():
            errors[name] = float("nan")
        elif not a.equal(c):
            errors[name + " (two runs differ)"] = 1.0
        elif not b.any():
            errors[name] = a.abs().max().item()
        elif name in ("dq", "dk", "dK0") and b.norm() < 1e-3 * gold[6].norm():
            errors[name] = ((a.double() - b).norm() / gold[6].norm()).item()
        else:
            errors[name] = ((a.double() - b).norm() / b.norm()).item()
            if errors[name] > FLOORS[dtype] and b.numel() >= 64:
                plain = plain or run(cast, "torch")
                own = (plain[NAMES.index(name)].double() - b).norm() / b.norm()
                allowed[name] = min(CAPS[dtype], max(FLOORS[dtype], 2 * own.item()))
    if kind == "ring" and T > 1:
        closed = cast[3] < -1
        a, b = ours[7][closed].double(), gold[7][closed]
        errors["dlog_gate at overwrites"] = ((a - b).norm() / b.norm().clamp_min(1e-30)).item() / 5
    if T > 64 and cu is None:
        n = T // 2 + 3
        part = gsa(*(x[:, :n] for x in cast[:4]), mass=mass,
                   state=GSAState(*cast[4:]) if state else None, backend=backend)[0]  # fmt: skip
        if not part.equal(ours[0][:, :n]):
            errors["a later token disturbs o"] = 1.0
    return errors, {n: allowed.get(n, CAPS[dtype]) for n in errors}


def jobs(quick: bool) -> dict[str, list]:
    """Cases by process: what shares compiled kernels stays together."""
    if quick:
        spots = [(1, "soft"), (17, "ring"), (64, "soft"), (129, "soft"), (300, "ring"), (129, "mixed"),
                 (129, "strong"), (129, "long")]  # fmt: skip
        few = [(17, "soft"), (129, "ring")]
        groups = [
            ("mistral", torch.bfloat16, True, spots),
            ("mistral", torch.bfloat16, True, [PACKED]),
            ("mistral", torch.bfloat16, False, few),
            ("odd", torch.bfloat16, True, spots),
            ("small", torch.bfloat16, True, few),
            ("odd", torch.float32, True, few),
            ("odd", torch.float16, True, few),
        ]
    else:
        spots = [(T, kind) for kind in ("soft", "ring") for T in LENGTHS]
        spots += [(129, kind) for kind in ("long", "mixed", "strong")]
        types = [(shape, torch.bfloat16) for shape in SHAPES] + [
            ("odd", torch.float32),
            ("odd", torch.float16),
        ]
        groups = [(*t, mass, what) for t in types for mass in (True, False) for what in (spots, [PACKED])]
    found = {}
    for shape, dtype, mass, what in groups:
        packed = what[0] is PACKED
        name = " ".join(
            (shape, str(dtype)[6:], "mass" if mass else "plain") + (("packed",) if packed else ())
        )
        if packed:
            found[name] = [(shape, 300, "soft", dtype, mass, True, PACKED)]
        else:
            found[name] = [(shape, T, kind, dtype, mass, T % 2 == 1, None) for T, kind in what]
    return found


class Waiting:
    """A kernel that is waited for after each launch, and named if it fails."""

    def __init__(self, name: str, kernel) -> None:
        self.name, self.kernel = name, kernel

    def __getitem__(self, grid):
        def launch(*args, **more):
            try:
                self.kernel[grid](*args, **more)
                torch.cuda.synchronize()
            except Exception as error:
                raise RuntimeError(f"kernel {self.name} grid {grid}: {repr(error)[:120]}") from error

        return launch


def job(name: str, quick: bool, named: bool) -> None:
    """Run a group of cases; print one JSON line each."""
    if named:
        for kernel in ("_own_state", "_scan", "_forward", "_backward_reads", "_backward"):
            setattr(triton_chunk, kernel, Waiting(kernel, getattr(triton_chunk, kernel)))
        for kernel in (
            "_gates",
            "_write",
            "_ask",
            "_forward",
            "_weights_grad",
            "_queries_grad",
            "_pairs_grad",
            "_dx",
        ):
            setattr(triton_tiles, kernel, Waiting(kernel, getattr(triton_tiles, kernel)))
    for c in jobs(quick)[name]:
        label, began = f"{name} T {c[1]} {c[2]}", time.time()
        try:
            errors, allowed = case(*c)
            bad = {n: f"{e:.1e}" for n, e in errors.items() if not e <= allowed[n]}
            line = {"case": label, "bad": bad, "errors": errors}
        except Exception as error:
            line = {"case": label, "bad": {"error": repr(error)[:300]}, "errors": {}}
            line["sticky"] = "CUDA error" in repr(error) or "kernel _" in repr(error)
        print(json.dumps({**line, "seconds": round(time.time() - began, 1)}), flush=True)
        if line.get("sticky"):
            return


def warm(variant: int) -> None:
    setup(VARIANTS[variant])
    step(*big(1, 256, 64 if variant else 128))  # the cases warm the kernels as shipped


KEEPS = triton_op.keeps


def setup(variant: dict) -> None:
    triton_op.keeps = KEEPS if variant.get("keep", True) else lambda *tensors: False
    for name, shipped in SHIPPED.items():
        table = getattr(triton_tiles, name)
        table.clear()
        table.update({**shipped, **variant.get(name, {})})


def big(B: int, T: int, M: int = 64):
    def draw(*size):
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = draw(B, T, 32, 128), draw(B, T, 8, 128), draw(B, T, 8, 128), draw(B, T, 32, 128)
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, 8, M, device="cuda")) / 8
    return [x.requires_grad_() for x in (q, k, v, g)], do


def step(ins, do):
    o, _ = gsa(*ins, mass=True, backend="triton")
    return torch.autograd.grad(o, ins, do)


def bench(f) -> float:
    return triton.testing.do_bench(f, warmup=20, rep=60, return_mode="median")


def times(B: int, T: int, M: int = 64) -> dict[str, float]:
    ins, do = big(B, T, M)
    with torch.no_grad():
        fwd = bench(lambda: gsa(*ins, mass=True, backend="triton"))
    both = bench(lambda: step(ins, do))
    return {"forward": fwd, "both": both, "MiB": peak(lambda: step(ins, do))}


def peak(f) -> float:
    """MiB above what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def decode(B: int, dtype=torch.float32) -> dict[str, float]:
    """Milliseconds of one token after a state, replayed from a CUDA graph."""
    with torch.no_grad():
        (q, k, v, g), _ = big(B, 1)
        _, state = gsa(q, k, v, g, mass=True, backend="triton")
        state = GSAState(state.k.to(dtype), state.v.to(dtype), state.log_kept)
        step = lambda: gsa(q, k, v, g, mass=True, state=state, backend="triton")  # noqa: E731
        return {"step": triton.testing.do_bench_cudagraph(step, rep=10, return_mode="median")}


def kernels(B: int, T: int, M: int = 64) -> dict[str, float]:
    """Milliseconds of each kernel in one forward and backward."""
    ins, do = big(B, T, M)
    step(ins, do)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(ins, do)
        torch.cuda.synchronize()
    return {e.key[:40]: e.device_time_total / 1e3 for e in profile.key_averages() if e.device_time_total > 5}


def results() -> list[torch.Tensor]:
    """o and gradients of fixed problems: soft gates, a slot overwritten a token, all kinds of gates."""
    torch.manual_seed(0)
    found = []
    for kind in ("soft", "ring", "mixed"):
        ins, do = big(2, 300)
        ins[3] = gates(kind, torch.randn(2, 300, 8, 64, device="cuda")).requires_grad_()
        found += [gsa(*ins, mass=True, backend="triton")[0].detach(), *step(ins, do)]
    return found


def unlike(first: list[torch.Tensor]) -> dict[str, float]:
    names = [f"{n} {kind}" for kind in ("soft", "ring", "mixed") for n in ("o", "dq", "dk", "dv", "dg")]
    return {
        n: ((a.double() - b.double()).norm() / b.double().norm()).item()
        for n, a, b in zip(names, results(), first)
        if not a.equal(b)
    } or {"none, every bit is the same": 0.0}


def softmax(B: int, T: int, backend) -> dict[str, float]:
    from torch.nn.attention import sdpa_kernel

    x = [
        torch.randn(B, 32, T, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    do = torch.randn_like(x[0])
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(backend):
        with torch.no_grad():
            fwd = bench(lambda: attend(*x, is_causal=True))

        def both():
            return torch.autograd.grad(attend(*x, is_causal=True), x, do)

        return {"forward": fwd, "both": bench(both), "MiB": peak(both)}


def attempt(name: str, f, *args) -> None:
    try:
        print(json.dumps({"time": name, **{k: round(v, 4) for k, v in f(*args).items()}}), flush=True)
    except Exception as error:
        print(json.dumps({"time": name, "error": repr(error)[:300]}), flush=True)


def timings(quick: bool, chosen: list[int]) -> None:
    from torch.nn.attention import SDPBackend

    shapes = [(16, 2048), (4, 8192), (1, 32768)]
    setup(VARIANTS[0])
    first = results()
    for B, T in shapes:
        attempt(f"gsa {B}x{T}", times, B, T)
    attempt("kernels 4x8192", kernels, 4, 8192)
    attempt("gsa 4x8192, 128 slots", times, 4, 8192, 128)
    attempt("its kernels", kernels, 4, 8192, 128)
    for i in chosen:
        setup(VARIANTS[i])
        attempt(f"variant {i} 4x8192 {VARIANTS[i]}", times, 4, 8192)
        attempt("its kernels", kernels, 4, 8192)
        attempt("what differs from variant 0", unlike, first)
    setup(VARIANTS[0])
    for B, T in shapes:
        attempt(f"softmax cuDNN {B}x{T}", softmax, B, T, SDPBackend.CUDNN_ATTENTION)
    for warps, early in ((None, None),) if quick else ((None, None), (4, True), (8, False)):
        triton_chunk.DECODE.update(warps=warps, early=early)
        for B in (1, 8, 64) if warps is None else (64,):
            for dtype in (torch.float32, torch.bfloat16):
                how = f"{warps} warps, early {early}, {str(dtype)[6:]} slots"
                attempt(f"decode, {B} rows, {how}", decode, B, dtype)
    if not quick:
        setup(VARIANTS[0])
        attempt("softmax FA2 16x2048", softmax, 16, 2048, SDPBackend.FLASH_ATTENTION)


def start(*flags: str) -> subprocess.Popen:
    command = [sys.executable, __file__, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, name: str, until: float) -> list[dict]:
    """What the process printed by then, as JSON; the rest of its words only if it failed."""
    try:
        out, err = process.communicate(timeout=max(0.1, until - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        print("CUT", name, "took too long", flush=True)
    else:
        if process.returncode:
            print("FAIL", name, "ended with", process.returncode, err[-500:], flush=True)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="fewer cases, about 110 seconds")
    parser.add_argument("--job")
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--warm", type=int)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--variants", default=",".join(map(str, range(1, len(VARIANTS)))), help="numbers")
    args = parser.parse_args()
    if args.warm is not None:
        return warm(args.warm)
    if args.job:
        return job(args.job, args.quick, args.named)
    chosen = [int(x) for x in args.variants.split(",") if x]
    if args.time:
        return timings(args.quick, chosen)
    began, quick = time.time(), ["--quick"] * args.quick
    limit = began + (70 if args.quick else 250)
    running = {name: start("--job", name, *quick) for name in jobs(args.quick)}
    warming = {f"variant {i}": start("--warm", str(i)) for i in (0, *chosen)}
    lines, again = [], {}
    for name, process in running.items():
        found = finish(process, name, limit)
        lines += found
        if any(x.get("sticky") for x in found):
            again[name] = start("--job", name, "--named", *quick)
        print(f"{name}: {len(found)} cases, {time.time() - began:.0f} s", flush=True)
    for name, process in warming.items():
        finish(process, name, limit)
    for name, process in again.items():
        for x in finish(process, name, limit + 15):
            lines.append({**x, "case": x["case"] + ", waiting for each kernel"})
    worst = {}
    for x in lines:
        if x["bad"]:
            print("FAIL", x["case"], x["bad"], flush=True)
        for n, e in x["errors"].items():
            key = next(t for t in ("bfloat16", "float16", "float32") if f" {t} " in x["case"]), n
            worst[key] = max(worst.get(key, (0.0, "")), (e, x["case"]))
    failed = sum(bool(x["bad"]) for x in lines)
    print(f"--- {len(lines)} cases, {failed} failed, {time.time() - began:.0f} s; worst:")
    for (dtype, n), (e, label) in worst.items():
        over = "  above the floor of the rule" if e > FLOORS[getattr(torch, dtype)] else ""
        print(f"  {dtype:9} {n:26} {e:.1e}  {label}{over}")
    table = finish(
        start("--time", "--variants", args.variants, *quick), "times", began + (120 if args.quick else 540)
    )
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    print(f"--- times, ms ({time.time() - began:.0f} s)")
    for x in table:
        print(f"  {x.pop('time'):40} {x}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"cases": lines, "times": table}, f, indent=1)


if __name__ == "__main__":
    main()
