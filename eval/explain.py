"""What a converted checkpoint's layers keep: lifetimes, important tokens, distances against the teacher."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from unsoftmax.convert import provenance
from unsoftmax.convert.load import CONVERTED_TYPES, load, named_device, read_config
from unsoftmax.convert.load import tokenizer as load_tokenizer
from unsoftmax.convert.verify import relative_error
from unsoftmax.eval.heldout import PYTHON_DOCS, held_out_rows
from unsoftmax.eval.lifetimes import slot_lifetimes
from unsoftmax.eval.plot import Curve, Plot, figure
from unsoftmax.eval.report import lifetime_plot, write_page
from unsoftmax.eval.suites import Suite
from unsoftmax.kernels.mixer import Mixer, Rotary

TOKENS = 1024
SHOWN = 5  # most important tokens of a layer
TABLE_NOTE = (
    "distance: relative error of what the layer's attention adds, on the teacher's own input to it\n"
    "slots: tokens until half of a write is gone, the middle one (a tenth live shorter - longer)\n"
    "important: tokens of the text that the layer would keep longest"
)


def explain(
    checkpoint: str | Path,
    *,
    teacher: str | Path | None = None,
    text: str | None = None,
    tokens: int = TOKENS,
    out: str | Path | None = None,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Print a table with a line a layer.

    Args:
        checkpoint: a converted folder or hub id.
        teacher: what distances are taken from; None: the source that its provenance names, if it is a folder
            here, else no distances.
        text: held-out text, as recipes name texts; None is "python-docs". Its first `tokens` tokens are read.
        out: folder for explain.html, which has the table and plots.
        device: "cpu", "cuda", ...; None takes the GPU where there is one.

    Returns:
        [{"layer", "mixer", "distance" (None without a teacher), "slots" as of `slot_lifetimes`, "important":
        tokens as text}], a dict a layer.

    Raises:
        ValueError: a checkpoint that is not converted, a teacher that is or has another shape, too short a
            text.
    """
    device, folder = named_device(device), None if out is None else _folder(Path(out))
    config = read_config(checkpoint)
    if config.model_type not in CONVERTED_TYPES:
        raise ValueError(
            f"{checkpoint} is not converted, so all its layers are softmax; name what convert-checkpoint made"
        )
    if tokens < 16:
        raise ValueError(f"--tokens is {tokens}; it must be at least 16, such as {TOKENS}")
    source = _teacher(checkpoint, teacher, config)
    words = load_tokenizer(checkpoint)
    suite = Suite("sample", rows=1, row_tokens=min(tokens, config.max_position_embeddings))
    ids = held_out_rows(text or PYTHON_DOCS, words, suite)[0]
    model = load(checkpoint, device=device)
    distances: Sequence[float | None] = [None] * config.num_hidden_layers
    if source is not None:
        distances = attention_distances(model, load(source, device=device), ids)
    slots = {found["layer"]: found["slots"] for found in slot_lifetimes(model, ids)}
    important = important_tokens(model, ids)
    layers = [
        {
            "layer": n,
            "mixer": entry["name"],
            "distance": distances[n],
            "slots": slots.get(n, {}),
            "important": [words.decode([i]) for i in important.get(n, [])],
        }
        for n, entry in enumerate(config.layer_mixers)
    ]
    for line in [*table_lines(layers), TABLE_NOTE]:
        say(line)
    if source is None:
        say("no distances: name the teacher with --teacher")
    if folder is not None:
        say(f"page: {_write(folder / 'explain.html', str(checkpoint), layers)}")
    return layers


def _folder(out: Path) -> Path:
    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {out}: {folder} is a file, not a folder; name another")
    return out


def _teacher(checkpoint: str | Path, teacher: str | Path | None, config: Any) -> str | None:
    """The teacher, checked; None if none is named and none is here."""
    found = None if teacher is None else str(teacher)
    if found is None:
        named = provenance.teacher(checkpoint)
        found = named if named and Path(named).is_dir() else None
    if found is None:
        return None
    theirs = read_config(found)
    if theirs.model_type in CONVERTED_TYPES:
        raise ValueError(f"--teacher {found} is converted itself; name the checkpoint that it was made from")
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(theirs, key) != getattr(config, key):
            raise ValueError(
                f"--teacher {found} has {key} {getattr(theirs, key)}, and {checkpoint} has "
                f"{getattr(config, key)}; name the checkpoint that it was made from"
            )
    return found


@torch.no_grad()
def attention_distances(model: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor) -> list[float]:
    """Relative error of each layer's attention on the teacher's own input to it.

    model: converted. teacher: plain, of the same shape. ids: [T] int64.
    """
    found: dict[int, float] = {}

    def against(n: int) -> Callable[..., None]:
        layer = model.model.layers[n].self_attn

        def compare(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            if isinstance(layer, Mixer):
                y, _ = layer(x, rotary=Rotary(*kwargs["position_embeddings"]))
            else:
                y = layer(*args, **kwargs)[0]
            found[n] = relative_error(y, output[0])

        return compare

    hooks = [
        layer.self_attn.register_forward_hook(against(n), with_kwargs=True)
        for n, layer in enumerate(teacher.model.layers)
    ]
    try:
        teacher(ids.to(teacher.device).unsqueeze(0), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[n] for n in range(len(hooks))]


@torch.no_grad()
def important_tokens(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, list[int]]:
    """The token ids of highest mean importance in each layer that has one, each once, the first first.

    Sinks do not count: they stay whatever their importance.
    """
    layers = {n: layer.self_attn for n, layer in enumerate(model.model.layers)}
    scored = {n: m for n, m in layers.items() if hasattr(m, "importance")}
    found: dict[int, list[int]] = {}

    def rank(n: int) -> Callable[..., None]:
        def look(module: Any, args: tuple) -> None:
            sinks = module.options.sinks
            score = module.importance(args[0])[0, sinks:].float().flatten(1)
            score = ((score - score.mean(0)) / score.std(0).clamp_min(1e-9)).mean(1).cpu()
            kinds, each = ids[sinks:].cpu().unique(return_inverse=True)
            total = torch.zeros(len(kinds)).index_add(0, each, score)
            mean = total / torch.bincount(each, minlength=len(kinds))
            found[n] = kinds[mean.topk(min(SHOWN, len(kinds))).indices].tolist()

        return look

    hooks = [m.register_forward_pre_hook(rank(n)) for n, m in scored.items()]
    try:
        model(ids.to(model.device).unsqueeze(0), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def table_lines(layers: Sequence[dict[str, Any]]) -> list[str]:
    """The table as text, one line a layer; columns that no layer fills are left out."""
    kinds = list(dict.fromkeys(kind for layer in layers for kind in layer["slots"]))
    cells = [["layer", "mixer", "distance", *kinds, "important"]]
    for layer in layers:
        distance = "" if layer["distance"] is None else f"{layer['distance']:.3f}"
        slots = [_slots(layer["slots"].get(kind)) for kind in kinds]
        important = " ".join(map(repr, layer["important"]))
        cells.append([str(layer["layer"]), layer["mixer"], distance, *slots, important])
    columns = [column for column in zip(*cells) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    left = ("mixer", "important")
    return [
        "  ".join(
            cell.ljust(width) if column[0] in left else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns)
        ).rstrip()
        for line in zip(*columns)
    ]


def _slots(slots: dict[str, float] | None) -> str:
    if slots is None:
        return ""
    if slots["kept"] > 0.99:
        return "kept"
    return f"{slots['median']:.0f} ({slots['p10']:.0f} - {slots['p90']:.0f})"


def _write(page: Path, name: str, layers: Sequence[dict[str, Any]]) -> Path:
    lifetimes = [layer for layer in layers if layer["slots"]]
    far = [(layer["layer"], layer["distance"]) for layer in layers if layer["distance"] is not None]
    caption = "Relative error of what each layer's attention adds, on the teacher's own input to it."
    plots = [
        Plot("Distance against the teacher", "layer", "relative error", [Curve("distance", far)], caption),
        lifetime_plot(lifetimes),
    ]
    drawn = "".join(figure(plot) for plot in plots if plot is not None)
    table = html.escape("\n".join(table_lines(layers)))
    parts = [
        f"<h1>What the layers of {html.escape(name)} keep</h1>",
        f'<div class="plots">{drawn}</div>' if drawn else "",
        f'<h2>Layer by layer</h2><div class="scroll"><pre>{table}</pre></div>',
        *(f'<p class="soft">{html.escape(line)}</p>' for line in TABLE_NOTE.splitlines()),
    ]
    return write_page(page, f"What the layers of {name} keep", parts)
