"""Do the gated slot attention kernels hold on this GPU, and how fast are they beside softmax?

    PYTHONPATH=src python benchmarks/check_gsa.py [--json FILE]

Correctness first (against the PyTorch form in float64; one line a failing case), then times in milliseconds
at Mistral-7B's shape, 32,768 tokens. Compilation happens beforehand, in parallel processes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback

import torch
import triton

from unsoftmax.kernels.gsa import triton_chunk
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
VARIANTS = [  # segment, warps of: own, forward, reads, backward
    (128, 4, 8, 8, 8),
    (64, 4, 8, 8, 8),
    (256, 4, 8, 8, 8),
    (128, 4, 4, 16, 16),
    (128, 8, 16, 4, 4),
]


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
    """Relative errors by name; also that two runs agree bit for bit, and that nothing later disturbs."""
    HQ, H, D, E, M = SHAPES[shape]
    B = B if cu is None else 1
    N = B if cu is None else len(cu) - 1
    torch.manual_seed(T)

    def draw(*size):
        return torch.randn(*size, device="cuda", dtype=torch.float64)

    ins = [x.to(dtype).double() for x in (draw(B, T, HQ, D), draw(B, T, H, D), draw(B, T, H, E))]
    ins.append(gates(kind, draw(B, T, H, M)).float().double())
    if state:
        ins += [x.float().double() for x in (draw(N, H, M, D), draw(N, H, M, E), -draw(N, H, M).abs())]
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
    errors = {}
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
    return errors


def cases():
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for shape in SHAPES if dtype == torch.bfloat16 else ("odd",):
            for mass in (True, False):
                for kind in ("soft", "long", "mixed", "strong", "ring"):
                    for T in LENGTHS if kind in ("soft", "ring") else (129,):
                        yield shape, T, kind, dtype, mass, T % 2 == 1, None
                yield shape, 300, "soft", dtype, mass, True, [0, 1, 34, 34, 170, 300]


def warm(which: str) -> None:
    if which.startswith("case"):
        todo = sorted({(c[0], str(c[3]), c[4]) for c in cases()})
        shape, dtype, mass = todo[int(which[4:])]
        for state, cu in ((True, None), (False, None), (True, [0, 1, 40])):
            case(shape, 40, "soft", getattr(torch, dtype.split(".")[1]), mass, state, cu)
    else:
        setup(VARIANTS[int(which[7:])])
        step(*big(1, 256))


def setup(variant) -> None:
    triton_chunk.SEGMENT = variant[0]
    triton_chunk.WARPS.update(zip(("own", "forward", "reads", "backward"), variant[1:]))


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
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(ins, do)
    return {"forward": fwd, "both": both, "MiB": (torch.cuda.max_memory_allocated() - before) / 2**20}


def kernels(B: int, T: int) -> dict[str, float]:
    """Milliseconds of each kernel in one forward and backward."""
    ins, do = big(B, T)
    step(ins, do)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(ins, do)
        torch.cuda.synchronize()
    return {e.key[:40]: e.device_time_total / 1e3 for e in profile.key_averages() if e.device_time_total > 5}


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
        both = bench(lambda: torch.autograd.grad(attend(*x, is_causal=True), x, do))
    return {"forward": fwd, "both": both}


def attempt(report: dict, name: str, f, *args) -> None:
    try:
        report[name] = f(*args)
        print(name, {k: round(v, 3) for k, v in report[name].items()}, flush=True)
    except Exception as error:
        report[name] = {"error": repr(error)[-600:]}
        print(name, "FAILED", repr(error)[-600:], flush=True)
        torch.cuda.empty_cache()


def check(report: dict) -> None:
    failed, worst, count = [], {}, 0
    for c in cases():
        count += 1
        label = f"{c[0]} T {c[1]} {c[2]} {str(c[3])[6:]} {'mass' if c[4] else 'plain'}" + (
            " packed" if c[6] else ""
        )
        try:
            errors = case(*c)
        except Exception as error:
            failed.append(f"{label}: {repr(error)[-300:]}")
            print("FAIL", failed[-1], flush=True)
            if "illegal" in repr(error) or "misaligned" in repr(error):
                traceback.print_exc()
                break
            continue
        bad = {n: f"{e:.1e}" for n, e in errors.items() if not e <= CAPS[c[3]]}
        if bad:
            failed.append(f"{label}: {bad}")
            print("FAIL", failed[-1], flush=True)
        for n, e in errors.items():
            key = str(c[3])[6:], n
            worst[key] = max(worst.get(key, (0.0, "")), (e, label))
    print(f"{count} cases, {len(failed)} failed; worst errors:")
    for (dtype, n), (e, label) in worst.items():
        over = "  above the floor of the rule" if e > FLOORS[getattr(torch, dtype)] else ""
        print(f"  {dtype:9} {n:26} {e:.1e}  {label}{over}")
    report["failed"], report["worst"] = failed, {" ".join(k): v for k, v in worst.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("--warm")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    if args.warm:
        return warm(args.warm)
    began, report = time.time(), {}
    names = [f"case{i}" for i in range(len({(c[0], c[3], c[4]) for c in cases()}))]
    if args.no_check:
        names = []
    names += [f"variant{i}" for i in range(len(VARIANTS))]
    running = {n: subprocess.Popen([sys.executable, __file__, "--warm", n], stderr=subprocess.PIPE, text=True)
               for n in names}  # fmt: skip
    for n, process in running.items():
        try:
            _, err = process.communicate(timeout=max(1, 100 - (time.time() - began)))
            if process.returncode:
                print("warming", n, "failed:", err[-700:], flush=True)
        except subprocess.TimeoutExpired:
            process.kill()
            print("warming", n, "took too long", flush=True)
    print(f"compiled in {time.time() - began:.0f} s on {os.cpu_count()} cores")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    if not args.no_check:
        check(report)
    print(f"--- times, ms ({time.time() - began:.0f} s so far)")
    for i, variant in enumerate(VARIANTS):
        setup(variant)
        attempt(report, f"variant {i} {variant} 16x2k", times, 16, 2048)
        attempt(report, "    kernels", kernels, 16, 2048)
        if args.json:
            with open(args.json, "w") as f:
                json.dump(report, f, indent=1)
    setup(VARIANTS[0])
    for B, T in ((4, 8192), (1, 32768)):
        attempt(report, f"variant 0 {B}x{T}", times, B, T)
        attempt(report, "    kernels", kernels, B, T)
    from torch.nn.attention import SDPBackend

    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION)):
        attempt(report, f"softmax {name} 16x2k", softmax, 16, 2048, backend)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(report, f, indent=1)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
