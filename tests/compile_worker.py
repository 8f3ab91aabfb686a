"""Compiles shipped kernels for a chip without one, and prints what each needs; see test_compile_kernels.

    python compile_worker.py onehot 90

A line of JSON a kernel: {"name", "registers", "stack", "shared", "tensor_cores"}.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # set by conftest; here it would hide the compiler

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unsoftmax.kernels.chip import registers

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
Job = tuple[
    str, Any, dict[str, str], dict[str, Any], dict[str, int]
]  # name, kernel, types, constants, options


def onehot() -> Iterator[Job]:
    """Mistral's layer in bfloat16 and SmolLM2's in float32, with biases and two writes a token; both in
    bfloat16 with other slots for each head; and the choice of slots."""
    from unsoftmax.kernels.gsa import triton_onehot as ops

    operands = ("q", "k", "v", "o", "do", "dq", "dk", "dv", "end_k", "end_v", "new_k", "new_v")
    singles = ("bias", "lse", "delta", "slot_bias", "part", "part_bias", "dbias", "end_bias", "new_bias")
    absent = ("table", "state_k", "state_v", "state_bias", "d_end", "d_end_bias", "d_state", "d_state_bias")
    bf16 = torch.bfloat16
    for D, G, dtype, M in (
        (128, 4, bf16, 64),
        (64, 3, torch.float32, 64),
        (128, 4, bf16, 384),
        (64, 3, bf16, 384),
    ):
        b = ops.fitted(ops.blocks_for(D, D, G, dtype), (int(sys.argv[2]) // 10, 0))
        types = dict.fromkeys(operands, f"*{NAMES[dtype]}") | dict.fromkeys(singles, "*fp32")
        types |= dict.fromkeys(("last", "until", "dies", "owner", "end_copy", "heads"), "*i32")
        types |= {"write": "*i64", "scale": "fp32"} | dict.fromkeys(("T", "n", "M", "S", "blocks"), "i32")
        fixed = dict.fromkeys(absent) | {
            "H": 8,
            "G": G,
            "W": 2,
            "D": D,
            "E": D,
            "BD": D,
            "BE": D,
            "C": b.chunk,
        }
        fixed |= {"BIAS": True, "STATE": False, "PACKED": False, "END": False, "SIZE": 2 * D}
        if M > 64:  # as the layer calls it: without biases
            fixed |= {"W": 1, "UNEVEN": True, "BIAS": False} | dict.fromkeys(("bias", "part_bias", "dbias"))
        else:
            fixed |= {"UNEVEN": False, "heads": None}
        read, dq = (
            {"BN": keys, "NS": -(-M // keys), "BR": rows, "HB": heads}
            for keys, rows, heads in ((b.keys, b.read_rows, b.read_heads), (b.dq_keys, b.dq_rows, b.dq_heads))
        )
        sums = {"BR": b.dkv_rows, "BN": b.keys}
        kernels = {
            "_lives": (ops._lives, {"BM": 64}, 4, 3),
            "_owners": (ops._owners, {"BT": ops.SCAN, "BM": 16}, 4, 3),
            "_take": (ops._take, {"BM": 16}, 4, 3),
            "_read": (ops._read, read, b.read_warps, b.read_stages),
            "_dq": (ops._dq, dq, b.dq_warps, b.dq_stages),
            "_dkv slots": (ops._dkv, sums | {"OWN": False, "KB": -(-M // b.keys)}, b.dkv_warps, b.dkv_stages),
            "_dkv own": (ops._dkv, sums | {"OWN": True, "KB": b.chunk // b.keys}, b.dkv_warps, b.dkv_stages),
            "_after": (ops._after, {"BX": ops.ELEMENTS, "U": b.ahead}, 1, 3),
            "_step": (ops._step, {"BM": b.keys, "BG": 16, "NS": -(-M // b.keys)}, ops.STEP_WARPS, 1),
        }
        for name, (kernel, more, warps, stages) in kernels.items():
            options = {"num_warps": warps, "num_stages": stages}
            yield f"{name} D {D} M {M} {NAMES[dtype]}", kernel, types, fixed | more, options
    from unsoftmax.kernels.gsa import triton_keep

    types = dict.fromkeys(("importance", "decay", "worth_in", "worth_out"), "*fp32")
    types |= {"heads": "*i32", "near": "*i32"}
    types |= dict.fromkeys(("write", "cu_seqlens", "seen", "born_in", "born_out"), "*i64") | {"real": "*i8"}
    types |= dict.fromkeys(("T", "S", "sinks", "recent"), "i32")
    whole = dict.fromkeys(("PADDED", "SEEN", "STATE", "KEEP"), True) | {"PACKED": False, "cu_seqlens": None}
    plain = dict.fromkeys(("PADDED", "SEEN", "STATE", "KEEP", "PACKED"), False)
    plain |= dict.fromkeys(("real", "cu_seqlens", "seen", "born_in", "worth_in", "born_out", "worth_out"))
    blocks = {n: x for n, x in plain.items() if n not in ("born_out", "worth_out")}
    for M, flags, close in ((64, plain, 0), (512, whole, 0), (64, blocks, 64), (512, blocks, 64)):
        options = {"num_warps": 1, "num_stages": 3}
        fixed = (
            flags | {"H": 8, "SLOTS": M, "CLOSE": close, "APPROX": True} | ({} if close else {"near": None})
        )
        yield f"_choose {M} near {close}", triton_keep._choose, types, fixed, options


def polysketch() -> Iterator[Job]:
    """Powers and softmax windows at Mistral's layer in bfloat16, softmax at SmolLM2's in float32."""
    from unsoftmax.kernels.polysketch import triton_block as ops
    from unsoftmax.kernels.polysketch import triton_sketch, triton_step

    singles = (
        "offset",
        "lift",
        "z",
        "near_row",
        "far_row",
        "doffset",
        "dlift",
        "delta",
        "far_delta",
        "scale",
    )
    absences = ("table", "places", "first_span")  # documents packed in a row
    singles += ("sink_dk", "sink_dv", "totals", "dW", "dbias", "slopes", "dfactor", "dlast", "dmean", "dtilt")
    singles += ("maps", "factor", "last", "mean", "tilt", "dmaps", "own", "final", "stats", "S_after")
    numbers = dict.fromkeys(("T", "n", "steps", "spans", "parts", "segments", "SIZE"), "i32")
    numbers |= dict.fromkeys(("N", "size", "count"), "i32") | dict.fromkeys(("ends", "firsts"), "*i32")
    numbers |= {"cu": "*i64", "normaliser": "fp32", "real": "*i32"}
    numbers |= dict.fromkeys(("seen", "seen_after", "begun"), "*i64")
    powers, softmax = [256, 256, 0, 0, 4], [32, 64, 4, 1, 4]
    for HQ, H, D, dtype, rule in (
        (32, 8, 128, torch.bfloat16, powers),
        (32, 8, 128, torch.bfloat16, softmax),
        (9, 3, 64, torch.float32, softmax),
    ):
        q, k, phi = (torch.empty(1, 1024, h, d, device="meta") for h, d in ((HQ, D), (H, D), (HQ, 32)))
        s, cut = ops._shape(q, k, k, phi, rule), ops.plan(dtype, D)
        absent = ["lift", "dlift", "sink_dk", "sink_dv"] if rule is powers else ["offset", "doffset"]
        stack, rows = s.stacked(cut.sinks)
        kernels = {
            "_forward": (ops._forward, s.query_tiles(cut.forward), cut.forward),
            "_queries": (ops._queries, s.query_tiles(cut.queries), cut.queries),
            "_keys": (ops._keys, s.key_tiles(cut.keys) | {"SPAN": ops.SPAN}, cut.keys),
            "_states": (ops._states, s.sum_tiles(H, False, cut.states), cut.states),
            "_states in reverse": (ops._states, s.sum_tiles(HQ, True, cut.gradients), cut.gradients),
            "_masses": (ops._masses, s.mass_tiles(H, False, cut.states), cut.states),
            "_masses in reverse": (ops._masses, s.mass_tiles(HQ, True, cut.gradients), cut.gradients),
        }
        for name, more in (
            ("_center", {"H": H, "E": D, "SPAN": ops.SPAN, "EARLY": ops.EARLY, "BT": 32, "BE": D}),
            ("_prefix", {"REVERSE": False, "BN": 32, "BF": 64}),
            ("_join", {"REVERSE": True, "BS": 2048}),
            ("_starts", {"CHUNK": s.chunk, "C": s.C, "W": s.W, "BN": 1024}),
            ("_programs", {"BN": 1024, "BP": 256}),
        ):
            kernels[name] = (getattr(ops, name), more | {"num_warps": 4, "num_stages": 3}, None)
        for batch, in_place in ((1, True), (64, True), (1, False)):
            token = (x[:, 0].expand(batch, -1, -1) for x in (q, k, k, phi))
            step = triton_step.launches(*token, rule, D + 4 if in_place else D + 1, not in_place)
            form = f"rows {batch}{' in place' if in_place else ''}"
            kernels[f"_parts {form}"] = (triton_step._parts, step.parts, None)
            kernels[f"_finish {form}"] = (triton_step._finish, step.finish, None)
        if s.sinks:
            more = {"STACK": stack, "SPAN": ops.SPAN, "BM": rows}
            kernels["_sinks"] = (ops._sinks, s.exact_tiles(cut.sinks) | more, cut.sinks)
        x = torch.empty(1, 64, HQ, D, device="meta", dtype=dtype)
        maps = torch.empty(H, 2, D + 1, 32, device="meta")
        if rule is softmax:
            kernels["_sketch"] = (triton_sketch._sketch, triton_sketch._options(x, maps), None)
            options = triton_sketch._options(x, maps, backward=True)
            kernels["_sketch_backward"] = (triton_sketch._sketch_backward, options, None)
            kernels["_gather"] = (triton_sketch._gather, triton_sketch._sums(x, maps), None)
        for name, (kernel, fixed, tiles) in kernels.items():
            names = kernel.arg_names
            options = {o: fixed.get(o) or getattr(tiles, o[4:]) for o in ("num_warps", "num_stages")}
            options |= {"maxnreg": registers(int(sys.argv[2]) // 10)} if "maxnreg" in fixed else {}
            fixed = {n: fixed[n] for n in names if n in fixed}
            fixed |= {n: None for n in (*absent, *absences) if n in names}
            if name in ("_starts", "_programs"):
                del fixed["table" if name == "_starts" else "places"]
            types = {n: "*fp32" if n in singles else f"*{NAMES[dtype]}" for n in names} | numbers
            types |= dict.fromkeys({"H", "E", "F"} - fixed.keys(), "i32")
            types |= {"S": "*fp32", "parts": "*fp32"} if name.startswith(("_parts", "_finish")) else {}
            types |= dict.fromkeys(("table", "places"), "*i32")
            yield f"{name} {rule} {NAMES[dtype]}", kernel, types, fixed, options


def slots() -> Iterator[Job]:
    """Gated slots at SmolLM2's layer in float32 and float16; in bfloat16 the scan and decoding."""
    from unsoftmax.kernels.gsa import triton_chunk as ops

    singles = ("g", "gamma", "dgamma", "dg", "sg", "total", "init", "final", "kept0", "kept1", "k1", "v1")
    singles += ("other_init", "other_final")
    # slots between kernels
    rest = ("k0", "v0", "dk0", "dv0", "dk1", "dv1", "sk", "sv", "own", "buf", "other")
    shared = ("scan", "decode")
    names = ("own_state", "forward", "backward_reads", "backward", *shared)
    warps = {"own_state": "own", "backward_reads": "reads", "decode": "forward", "scan": "own"}
    for D, G, dtype in ((128, 4, torch.bfloat16), (64, 3, torch.float32), (64, 3, torch.float16)):
        q, k, g = (torch.empty(1, 256, *size, device="meta") for size in ((8 * G, D), (8, D), (8, 64)))
        plan = ops._Plan(q.to(dtype), k, k, g, None)
        fixed = plan.tiles() | {"D": D, "E": D, "X": D, "XP": D, "slots": 64, "MASS": True, "PARTS": 1}
        fixed |= {"EARLY": False, "GP": 4}
        fixed |= {"REVERSE": False, "DECAY": True, "HAS_INIT": True, "BOTH": True, **ops.SCAN}
        fixed |= dict.fromkeys(("seg_start", "seg_end", "doc_first"))
        for name in shared if dtype == torch.bfloat16 else names:
            kernel = getattr(ops, f"_{name}")
            types = dict.fromkeys(kernel.arg_names, f"*{NAMES[dtype]}")
            types |= {f"{x}_ptr": f"*{NAMES[plan.dot]}" for x in rest}
            types |= {f"{x}_ptr": "*fp32" for x in singles}
            types |= dict.fromkeys(("T", "H", "n", "first", "Y"), "i32") | {"scale": "fp32"}
            if name == "decode":
                types |= {"k0_ptr": "*fp32", "v0_ptr": "*fp32"}
            own = {n: fixed[n] for n in kernel.arg_names if n in fixed}
            if name == "scan":  # one of two buffers, with its size, is taken at run time
                del own["X"]
                types["X"] = "i32"
            options = ops._options(warps.get(name, name))
            yield f"_{name} D {D} {NAMES[dtype]}", kernel, types, own, options


def tiles() -> Iterator[Job]:
    """Gated slots at Mistral's layer in bfloat16."""
    from unsoftmax.kernels.gsa import triton_tiles as ops

    D, G, M = 128, 4, 64
    q, k, g = (torch.empty(1, 256, *x, device="meta") for x in ((8 * G, D), (8, D), (8, M)))
    plan, most = ops._Plan(q.bfloat16(), k, k, g, None, ops.CHUNK), registers(int(sys.argv[2]) // 10)
    singles = ("g", "gamma", "dgamma", "dg", "total", "walk", "drift", "sums", "paired")
    singles += ("near", "col", "mark")
    sizes = {"slots": M, "MASS": True} | dict.fromkeys(("D", "E", "X", "DP", "EP", "XP", "BX", "BD", "BE"), D)
    sizes["HOLD"] = ops.STAGES["dx"] > 1
    fixed = ops._kind(plan) | sizes | {"OUT": True, "KEEP": True, "BLOCKS": ops.BLOCKS["forward"]}
    fixed |= {"seg_start": None, "seg_end": None}
    forms = [("gates", None, {}), ("write", "write", {}), ("ask", "ask", {}), ("forward", "forward", {})]
    forms += [("weights_grad", "weights", {}), ("queries_grad", "queries", {}), ("pairs_grad", "pairs", {})]
    forms += [("dx", "dx", {})]
    for name, cut, more in forms:
        kernel = getattr(ops, f"_{name}")
        cap = {"maxnreg": most or ops.REGISTERS.get(cut)}
        options = ops._options(plan, cut) | cap if cut else {"num_warps": 2}
        own = fixed | more | (ops._tiles(plan, cut) if cut in ops.HEADS else {})
        own |= {"EARLY": 0} if most else {}
        own = {n: own[n] for n in kernel.arg_names if n in own}
        types = dict.fromkeys(kernel.arg_names, "*bf16") | {f"{x}_ptr": "*fp32" for x in singles}
        types |= {"T": "i32", "H": "i32", "scale": "fp32"}
        yield f"_{name} D {D} bf16", kernel, types, own, options


def compiled(job: Job, arch: int) -> dict[str, Any]:
    name, kernel, types, fixed, options = job
    names = kernel.arg_names
    signature = {n: "constexpr" if n in fixed else types[n] for n in names}
    constants = {(i,): fixed[n] for i, n in enumerate(names) if n in fixed}
    # A launch on a GPU is specialised the same way, where pointers are aligned.
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [str(BINARIES / "cuobjdump"), "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", found).groups()
    return {
        "name": name,
        "registers": int(registers),
        "stack": int(stack),
        "shared": built.metadata.shared,
        "tensor_cores": any(x in built.asm["ptx"] for x in ("wgmma", "mma.sync", "tcgen05")),
    }


LISTS = {"onehot": onehot, "polysketch": polysketch, "slots": slots, "tiles": tiles}

if __name__ == "__main__":
    for job in LISTS[sys.argv[1]]():
        print(json.dumps(compiled(job, int(sys.argv[2]))), flush=True)
