"""Milliseconds a token and memory of generation: converted models beside softmax, at several lengths.

    python benchmarks/generation.py [--shape mistral-7b] [--batch 1 48] [--context 2048 16384] [--out FILE]

Random weights of the shape in bfloat16. For every batch and context a prompt of random tokens of that length
is read in pieces (one row, whose cache all rows then share), and tokens are written one after another: ours
by convert.generate with its CUDA graph, softmax by the library's model with a static cache under a CUDA graph
(torch.compile, reduce-overhead) and with its growing cache. Before anything is timed, the tokens that the
graph writes are held against those of plain steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig, MistralForCausalLM, StaticCache
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from unsoftmax.convert.config import convert_config
from unsoftmax.convert.generate import generate
from unsoftmax.convert.model import CACHE, CONVERTED_MODELS

SHAPES = {
    "mistral-7b": MistralConfig(sliding_window=None, max_position_embeddings=1 << 20),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    ),
}
SOURCES = {"llama": LlamaForCausalLM, "mistral": MistralForCausalLM}
GSA = {"name": "gsa", "num_slots": 64, "sinks": 4, "recent": 8}
KINDS = {
    "gsa, 64 slots": lambda heads: GSA,
    "gsa, slots dealt": lambda heads: GSA | {"num_slots": ([28, 48, 64, 96, 40, 88, 64, 84] * heads)[:heads]},
    "polysketch, r 32": lambda heads: {"name": "polysketch"},
}
STEPS = 64


def build(shape: str, mixer: dict | None) -> torch.nn.Module:
    """Random weights on the GPU, in bfloat16."""
    config = SHAPES[shape]
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            if mixer is None:
                model = SOURCES[config.model_type](config)
            else:
                config = convert_config(config, [mixer] * config.num_hidden_layers)
                model = CONVERTED_MODELS[SHAPES[shape].model_type](config)
        finally:
            torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def ours(model, ids: torch.Tensor, batch: int, fuse: bool) -> dict:
    """Prefill and steps of a converted model."""
    started = clock()
    first = generate(model, ids, max_new_tokens=1)
    prefill = clock() - started
    more = first.tokens[:, -1:].expand(batch, -1)
    first.cache.batch_repeat_interleave(batch)
    times = []
    for steps in (4, 4, 4 + STEPS):  # what the last two share, capturing included, falls out
        started = clock()
        generate(model, more, max_new_tokens=steps, cache=first.cache, fuse=fuse)
        times.append(clock() - started)
    return {"prefill": prefill, "step": (times[2] - times[1]) / STEPS}


@torch.no_grad()
def softmax(model, ids: torch.Tensor, batch: int, static: bool) -> dict:
    """The same of the library's model."""
    T = ids.shape[1]
    if static:
        cache = StaticCache(config=model.config, max_cache_len=T + STEPS + 8)
        step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=False)
    else:
        cache, step = DynamicCache(config=model.config), model.forward
    started = clock()
    for part in range(0, T, 8192):
        piece = ids[:, part : part + 8192]
        at = torch.arange(part, part + piece.shape[1], device="cuda")
        out = model(piece, position_ids=at[None], **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    token, prefill = out.logits[:, -1:].argmax(-1).expand(batch, -1), clock() - started
    for layer in cache.layers if batch > 1 else ():
        layer.keys, layer.values = (x.repeat_interleave(batch, 0) for x in (layer.keys, layer.values))
        if static:
            layer.max_batch_size = batch
            torch._dynamo.mark_static_address(layer.keys)
            torch._dynamo.mark_static_address(layer.values)
    position = torch.full((1, 1), T, device="cuda")
    for n in range(STEPS + 5):
        if n == 5:
            started = clock()
        torch.compiler.cudagraph_mark_step_begin()
        out = step(token.clone(), position_ids=position.clone(), **{CACHE: cache}, use_cache=True)
        token, position = out.logits[:, -1:].argmax(-1).clone(), position + 1
    return {"prefill": prefill, "step": (clock() - started) / STEPS}


def profile(model, fuse: bool) -> None:
    """Print what 16 steps of one row launch."""
    ids = torch.randint(1000, (1, 77), device="cuda")
    generate(model, ids, max_new_tokens=8, fuse=fuse)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        generate(model, ids, max_new_tokens=24, fuse=fuse)
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:24]:
        print(
            f"    {row.self_device_time_total / 24e3:7.3f} ms a token  x{row.count / 24:6.1f}  {row.key[:80]}"
        )


def same_tokens(model) -> bool:
    ids = torch.randint(1000, (3, 77), device="cuda")
    a, b = (generate(model, ids, max_new_tokens=40, graph=which).tokens for which in (True, False))
    return torch.equal(a, b)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", choices=SHAPES, default="mistral-7b")
    p.add_argument("--batch", type=int, nargs="+", default=[1, 48])
    p.add_argument("--context", type=int, nargs="+", default=[2048, 16384])
    p.add_argument("--kinds", nargs="+", default=[*KINDS, "softmax, growing cache", "softmax, static cache"])
    p.add_argument("--fuse", action=argparse.BooleanOptionalAction, default=True, help="see generate()")
    p.add_argument(
        "--profile", action="store_true", help="also the kernels of 16 steps of each kind, one row"
    )
    p.add_argument("--limit", type=float, default=1e9, metavar="SECONDS", help="begin nothing after so long")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    begun, found = time.monotonic(), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.shape}, bf16", flush=True)
    for kind in args.kinds:
        started = clock()
        softmax_kind = kind not in KINDS
        heads = SHAPES[args.shape].num_key_value_heads
        model = build(args.shape, None if softmax_kind else KINDS[kind](heads))
        note = "" if softmax_kind or same_tokens(model) else "   WRONG: the graph's tokens differ"
        print(f"{kind}: built in {clock() - started:.1f} s{note}", flush=True)
        if args.profile and not softmax_kind:
            profile(model, args.fuse)
        for batch in args.batch:
            for context in args.context:
                if time.monotonic() - begun > args.limit:
                    print("out of time")
                    return
                ids = torch.randint(1000, (1, context), device="cuda")
                torch.cuda.reset_peak_memory_stats()
                before, started = torch.cuda.memory_allocated(), clock()
                try:
                    static = "static" in kind
                    row = (
                        softmax(model, ids, batch, static)
                        if softmax_kind
                        else ours(model, ids, batch, args.fuse)
                    )
                except torch.OutOfMemoryError:
                    row = {"prefill": float("nan"), "step": float("nan")}
                row |= {"kind": kind, "batch": batch, "context": context, "first_call": clock() - started}
                row["memory"] = (torch.cuda.max_memory_allocated() - before) / 2**30
                found.append(row)
                print(
                    f"  {kind:24s} B {batch:3d}  context {context:6d}  step {1e3 * row['step']:8.3f} ms"
                    f"  {batch / row['step']:9.0f} tok/s  prefill {row['prefill']:7.2f} s"
                    f"  above weights {row['memory']:6.2f} GiB  all {row['first_call']:5.1f} s",
                    flush=True,
                )
                gc.collect()
                torch.cuda.empty_cache()
                torch._dynamo.reset()
        del model
        gc.collect()
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
