"""Which start of a conversion learns fastest? Convert, train and score several through the product.

    python benchmarks/conversion.py SOURCE --train TEXT --valid TEXT --out DIR [--stop-after 125] NAME...

Every run has the same data, order, tokens, optimizer and schedule (32 rows of 1,024 tokens a step,
AdamW 2e-4, new parameters 2e-3, 20 steps of warm-up, linear to 0.3 at step 250; rows are plain text
with ends of text marked). Each is scored before and after training on the first 96 rows of 2,048
held-out tokens, before training also on 12 rows of 640 spaced evenly, and on facts planted in that text
(eval/planted.py). Prints a table, and writes DIR/conversion.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from unsoftmax.convert.checkpoint import convert_checkpoint
from unsoftmax.convert.load import load, tokenizer
from unsoftmax.convert.measure import SETTINGS, measure, token_ids, token_rows
from unsoftmax.eval.planted import planted_tasks
from unsoftmax.recipes.schema import load_recipe
from unsoftmax.recipes.text import documents

STEPS, ROWS, CONTEXT = 250, 32, 1024
TOKENS, ALIGNED = STEPS * ROWS * CONTEXT, 16 * ROWS * CONTEXT
PLANTED, PLANTED_ROWS = (256, 512, 1024, 2048), 32
RECIPE = "smollm2-135m-gsa"
KEPT = "mixer={name: gsa, num_slots: %d, sinks: 4, recent: %d}"
LEARN = "{loss: distil, tokens: %d, teacher_weight: 0.5}"
ALIGN = f"{{loss: align, tokens: {ALIGNED}, warmup_steps: 2}}"
NEAR = "mixer={name: polysketch, local: softmax, window: 64, sinks: 4}"
EVEN = "calibration.sharing_tokens=0"
RUNS: dict[str, tuple[str, ...]] = {
    "softmax": ("mixer={name: softmax}",),
    "window": ("mixer={name: window, window: 60, sinks: 4}",),
    "ring": ("mixer={name: gsa, num_slots: 64, sinks: 4}",),
    "even": (KEPT % (64, 8), EVEN),
    "dealt": (KEPT % (64, 8),),
    "dealt-recent-4": (KEPT % (64, 4),),
    "dealt-recent-16": (KEPT % (64, 16),),
    "even128": (KEPT % (128, 8), EVEN),
    "dealt128": (KEPT % (128, 8),),
    "dealt256": (KEPT % (256, 8),),
    "dealt-hybrid": (KEPT % (64, 8), "softmax_layers=[3, 7, 11, 15, 19, 23, 27]"),
    "paper": ("mixer={name: gsa, start: paper, num_slots: 64}",),
    "dealt-distil": (KEPT % (64, 8), f"stages=[{LEARN % TOKENS}]"),
    "dealt-align": (KEPT % (64, 8), f"stages=[{ALIGN}, {{loss: cross_entropy, tokens: {TOKENS - ALIGNED}}}]"),
    "dealt-align-distil": (KEPT % (64, 8), f"stages=[{ALIGN}, {LEARN % (TOKENS - ALIGNED)}]"),
    "polysketch": ("mixer={name: polysketch, local: power, block: 256}",),
    "polysketch-softmax": (NEAR,),
    "polysketch-softmax-distil": (NEAR, f"stages=[{LEARN % TOKENS}]"),
}


def overrides_of(name: str, train: str, valid: str, calibration_tokens: int, seed: int) -> tuple[str, ...]:
    """The recipe keys of one run: the shared setting, and what RUNS says of it."""
    return (
        f"train.seed={seed}",
        f"calibration.seed={seed}",
        f"calibration.text={train}",
        f"calibration.tokens={calibration_tokens}",
        f"data.sources.0.text={train}",
        f"data.held_out={valid}",
        f"data.context_tokens={CONTEXT}",
        "data.pack=stream",
        f"train.batch_tokens={ROWS * CONTEXT}",
        f"train.total_tokens={TOKENS}",
        "train.micro_batch_sequences=16",
        "train.save_every_steps=100000",
        "train.eval_every_steps=0",
        "train.zero_stage=0",
        "train.log_every_steps=25",
        *RUNS[name],
    )


def planted(folder: str, filler: list[int], device: str) -> dict[str, float]:
    """Shares of planted facts found, in bfloat16."""
    model = load(folder, device=device, dtype=torch.bfloat16)
    told = planted_tasks(model, tokenizer(folder), filler, PLANTED, PLANTED_ROWS, None, {}, lambda line: None)
    shares = {name: task["metrics"][0]["score"] for name, task in told.items()}
    print("    " + ", ".join(f"{name} {share:.2f}" for name, share in shares.items()), flush=True)
    return shares


def score(folder: str, rows: torch.Tensor, device: str) -> dict:
    """Held-out measurement of a checkpoint, bfloat16 autocast over float32 weights."""
    model = load(folder, device=device)
    found = measure(model, rows, batch=8, dtype=torch.bfloat16)
    print(f"    {folder}: {found.line()}", flush=True)
    return found.to_dict()


def run(name: str, args: argparse.Namespace, rows: dict[str, torch.Tensor], device: str) -> dict:
    """Convert, score, train up to args.stop_after, score again."""
    overrides = overrides_of(name, args.train, args.valid, args.calibration_tokens, args.seed)
    recipe = load_recipe(RECIPE, overrides)
    start, done = args.out / f"{name}-start", {"name": name, "recipe": recipe.to_dict()}
    clock = time.monotonic()
    if name == "softmax":
        start = Path(args.source)
    else:
        convert_checkpoint(args.source, start, recipe, verify=False, say=lambda text: None)
    done["convert_seconds"] = time.monotonic() - clock
    done["start"] = {key: score(str(start), part, device) for key, part in rows.items()}
    filler = rows["2k"].flatten().tolist()
    done["start_planted"] = planted(str(start), filler, device)
    if args.stop_after:
        clock = time.monotonic()
        folder, end = args.out / f"{name}-run", args.out / f"{name}-end"
        sets = [word for override in overrides for word in ("--set", override)]
        stop = ["--stop-after", str(args.stop_after)]
        _product("train", RECIPE, "--run", str(folder), "--model", str(start), *stop, *sets)
        done["train_seconds"] = time.monotonic() - clock
        _product("main", "export", str(folder), str(end))
        done["end"] = score(str(end), rows["2k"], device)
        done["end_planted"] = planted(str(end), filler, device)
    return done


def _product(verb: str, *words: str) -> None:
    """Run a command of the product in its own process; DeepSpeed starts once a process."""
    code = f"import sys; from unsoftmax.cli import {verb}; sys.exit({verb}())"
    subprocess.run([sys.executable, "-c", code, *words], check=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("source", help="the softmax checkpoint")
    p.add_argument("names", nargs="+", metavar="NAME", help=", ".join(RUNS))
    p.add_argument("--train", required=True, help="training text")
    p.add_argument("--valid", required=True, help="held-out text")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--stop-after", type=int, default=125, metavar="STEP", help="0: score the starts only")
    p.add_argument("--calibration-tokens", type=int, default=30_720)
    p.add_argument("--seed", type=int, default=0, help="of the order of the training text (default: 0)")
    args = p.parse_args()
    unknown = sorted(set(args.names) - set(RUNS))
    if unknown:
        p.error(f"no such run: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    ids = token_ids(tokenizer(args.source), documents(args.valid))
    rows = {key: token_rows(ids, s.length, s.rows, s.spaced) for key, s in SETTINGS.items()}
    where = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    print(f"{where}, torch {torch.__version__}, commit {_commit()}", flush=True)
    found = []
    for name in args.names:
        print(f"  {name}", flush=True)
        found.append(run(name, args, rows, device))
        (args.out / "conversion.json").write_text(json.dumps(found, indent=1) + "\n")
    print(_table(found))


def _table(found: list[dict]) -> str:
    lines = ["run                  640: ppl  recall   2k: ppl  recall   trained: ppl  recall   seconds"]
    for f in found:
        cells = [f["start"]["640"], f["start"]["2k"], f.get("end")]
        text = "   ".join(
            "        -       -" if c is None else f"{c['ppl']:9.2f} {c['recall_nll']:7.3f}" for c in cells
        )
        lines.append(f"{f['name']:20s} {text}   {f.get('train_seconds', 0):7.0f}")
    return "\n".join(lines)


def _commit() -> str:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
