"""Is the conversion what it says? Numbers held against thresholds, one row a claim.

Everything runs in float32, but for the ways to call one model, which are compared in float64: where a
mixer chooses, a score within float32's rounding of a threshold may fall either way, and that is no fault
of the call. Where two float32 models fit into memory, whole models are compared; where they do not, the
same checks run on one layer at a time, over the teacher's own hidden states.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as library_logging

from unsoftmax.convert.config import SOFTMAX
from unsoftmax.convert.load import load
from unsoftmax.convert.load import tokenizer as load_tokenizer
from unsoftmax.convert.measure import Measurement, measure, token_ids, token_rows
from unsoftmax.convert.model import CACHE
from unsoftmax.convert.source import Source, available_memory, open_source
from unsoftmax.convert.start import TeacherLayers, one_layer
from unsoftmax.convert.weights import Plan, differing_copies
from unsoftmax.recipes.schema import Recipe
from unsoftmax.recipes.text import documents

SAMPLE_ROWS, SAMPLE_TOKENS = 4, 512
CALL_TOKENS = 192  # of the first row: enough for a ring of 64 to wrap twice
PIECES = (1, 7, 64)  # prefill in pieces of these sizes, then the rest but DECODED
DECODED = 8  # tokens fed one at a time
PADDING = 13  # tokens of left padding

# Relative error of hidden states. float32 sums in another order differ by about 1e-6 a layer.
SAME = 1e-4

IDENTITY = "identity conversion (all softmax), largest difference"
RING = "ring start against the window control, rel. error"


@dataclasses.dataclass(frozen=True)
class Check:
    """One row: a number, the most it may be, and what came of it; limit None is for information only."""

    name: str
    value: float
    limit: float | None = None
    unit: str = ""

    @property
    def passed(self) -> bool | None:
        """None where there is no limit. NaN never passes."""
        return None if self.limit is None else self.value <= self.limit

    def line(self) -> str:
        verdict = {True: "PASS", False: "FAIL", None: "    "}[self.passed]
        allowed = "" if self.limit is None else f"   allowed {self.limit:.3g}"
        return f"  {verdict}  {self.name:52} {self.value:10.4g} {self.unit}{allowed}"


def verify_conversion(
    source: Source, folder: Path, plan: Plan, recipe: Recipe, *, say: Callable[[str], None] = print
) -> list[Check]:
    """Hold the converted folder against its source; says each row as it is known, and returns them all."""
    written = open_source(folder, converted=True)
    rows = sample_rows(source, recipe)
    checks: list[Check] = []

    def add(check: Check) -> None:
        checks.append(check)
        say(check.line())

    say(f"verification on {rows.numel():,} held-out tokens, float32")
    add(Check("copied tensors whose bits differ", len(differing_copies(source, plan, written)), 0))
    need, have = 8 * sum(math.prod(plan.shapes[key]) for key in plan.copied), available_memory()
    with _without_bars():
        if any(entry.start is None for entry in source.entries.values()):
            say("  layer by layer: the source's pickles are read tensor by tensor")
            _check_layers(source, written, rows, add)
        elif need > 0.8 * have:
            say(f"  layer by layer: two whole models need {need >> 30} GiB and {have >> 30} GiB are free")
            _check_layers(source, written, rows, add)
        else:
            _check_whole(source, folder, rows, add)
    return checks


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """The library's own progress bars would cut through the table."""
    shown = library_logging.is_progress_bar_enabled()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library_logging.enable_progress_bar()


def sample_rows(source: Source, recipe: Recipe) -> torch.Tensor:
    """Held-out text, [R, T] int64: the recipe's own, or the part of its calibration text set aside."""
    tokenizer, wanted = load_tokenizer(source.folder), SAMPLE_ROWS * SAMPLE_TOKENS
    own = recipe.data.held_out
    texts = documents(own) if own else documents(recipe.calibration.text, held_out=True)
    ids = token_ids(tokenizer, texts, wanted)
    if len(ids) < SAMPLE_TOKENS:  # a text of one or two documents sets nothing aside
        ids += token_ids(tokenizer, documents(own or recipe.calibration.text), wanted - len(ids))
    if not ids:
        raise ValueError(f"{own or recipe.calibration.text} holds no text to verify with; name one that does")
    length = min(SAMPLE_TOKENS, len(ids), source.config.max_position_embeddings)
    return token_rows(ids, length, SAMPLE_ROWS)


# ---- whole models


@torch.no_grad()
def _check_whole(source: Source, folder: Path, rows: torch.Tensor, add: Callable[[Check], None]) -> None:
    """Two models at a time at most."""
    ids, scores = rows[:1, :CALL_TOKENS], {}
    model = load(source.folder)
    reference = hidden_states(model.model, model.model.embed_tokens(ids))
    scores["source"] = measure(model, rows)
    del model
    model = load(source.folder, layer_mixers=[{"name": SOFTMAX}] * source.config.num_hidden_layers)
    h = model.model.embed_tokens(ids)
    add(Check(IDENTITY, difference(hidden_states(model.model, h), reference), 0))

    model = load(folder)
    add(Check("saved and reloaded, tensors that differ", _reload_differs(model, folder), 0))
    for check in _check_calls(model.model, h):
        add(check)
    own, score = hidden_states(model.model, h), measure(model, rows)
    limit, entries = window_control(model.config)
    if entries != model.config.layer_mixers:
        model = load(source.folder, layer_mixers=entries)
        if limit is not None:
            add(Check(RING, relative_error(own, hidden_states(model.model, h)), limit))
        scores["window control"] = measure(model, rows)
    for name, m in (scores | {"converted": score}).items():
        add(_perplexity(name, m))
        if m.recall_tokens:
            add(Check(f"recall nll, {name}", m.recall_nll, unit=f"over {m.recall_tokens} tokens"))


def _perplexity(name: str, m: Measurement) -> Check:
    limit = None if math.isfinite(m.ppl) else 0.0  # a perplexity that is no number fails
    return Check(f"perplexity, {name}", m.ppl, limit)


def window_control(config: PretrainedConfig) -> tuple[float | None, list[dict]]:
    """Each ring layer as softmax over the window its slots could hold, and how far the two may be apart.

    None where slots keep what is worth it: then they and the window hold other tokens, and differ. Slots
    dealt unevenly are held against a window of as many in every head.
    """
    rings = [e for e in config.layer_mixers if e["name"] == "gsa" and e["start"] == "ring"]
    slots = [n for e in rings for n in _each(e["num_slots"])]
    entries, same = [], True
    for entry in config.layer_mixers:
        if entry in rings:
            uneven, sinks = not isinstance(entry["num_slots"], int), entry["sinks"]
            reach = round(sum(slots) / len(slots)) if uneven else entry["num_slots"]
            entries.append({"name": "window", "window": reach - sinks, "sinks": sinks})
            same = same and not uneven and entry["recent"] is None
        else:
            entries.append(entry)
            same = same and entry["name"] in (SOFTMAX, "window")
    return (SAME if same else None), entries


def _each(num_slots: int | list[int] | tuple[int, ...]) -> list[int]:
    return [num_slots] if isinstance(num_slots, int) else list(num_slots)


def _reload_differs(model: PreTrainedModel, folder: Path) -> int:
    with tempfile.TemporaryDirectory(dir=folder, prefix="reload-") as again:
        model.save_pretrained(again)
        reloaded = load(again).state_dict()
    own = model.state_dict()
    same = [key for key in own if key in reloaded and torch.equal(own[key], reloaded[key])]
    return len(own.keys() | reloaded.keys()) - len(same)


# ---- layer by layer


def _check_layers(source: Source, written: Source, rows: torch.Tensor, add: Callable[[Check], None]) -> None:
    teacher = TeacherLayers(source, lambda: rows[:1, :CALL_TOKENS], torch.device("cpu"))
    worst: dict[str, Check] = {}
    for layer in range(source.config.num_hidden_layers):
        h = teacher.hidden(layer)
        for check in _check_layer(source, written, layer, h):
            if check.name not in worst or not check.value <= worst[check.name].value:
                worst[check.name] = dataclasses.replace(check, unit=f"worst in layer {layer}")
    for check in worst.values():
        add(check)


def _check_layer(source: Source, written: Source, layer: int, h: torch.Tensor) -> list[Check]:
    reference = hidden_states(one_layer(source, layer), h)
    kept = converted_layer(written, layer, {"name": SOFTMAX})
    checks = [Check(IDENTITY, difference(hidden_states(kept, h), reference), 0)]
    config = written.config
    converted = converted_layer(written, layer, config.layer_mixers[layer])
    checks += _check_calls(converted, h)
    one = copy.copy(config)
    one.layer_mixers = [config.layer_mixers[layer]]
    limit, (entry,) = window_control(one)
    if limit is not None and entry != one.layer_mixers[0]:
        control = converted_layer(written, layer, entry)
        error = relative_error(hidden_states(converted, h), hidden_states(control, h))
        checks.append(Check(RING, error, limit))
    return checks


def converted_layer(written: Source, layer: int, entry: dict) -> nn.Module:
    """One layer of the converted model with the mixer of `entry`: embeddings in, residual stream out."""
    config = copy.deepcopy(written.config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 1, None
    config.layer_mixers = [entry]
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer]]
    model = AutoModel.from_config(config, dtype=torch.float32)
    model.embed_tokens, model.norm = nn.Identity(), nn.Identity()
    prefix = f"model.layers.{layer}."
    weights = {n: written.read(prefix + n).float() for n in model.layers[0].state_dict()}
    model.layers[0].load_state_dict(weights)
    return model.eval()


# ---- the same for both


@torch.no_grad()
def hidden_states(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
    """What an inner model makes of embeddings h [B, T, hidden]."""
    return model(inputs_embeds=h, use_cache=False)[0]


def _check_calls(model: nn.Module, h: torch.Tensor) -> list[Check]:
    """Prefill in pieces and decoding, and left padding, against one call over the row h [1, T, hidden].

    The float32 model is made float64 for it, and comes back as it was.
    """
    model, h = model.double(), h.double()
    try:
        whole = hidden_states(model, h)
        errors = {
            "prefill in pieces, then decoding, rel. error": relative_error(_in_pieces(model, h), whole),
            "left padding, rel. error": relative_error(_left_padded(model, h), whole),
        }
    finally:
        model.float()
    return [Check(name, error, SAME) for name, error in errors.items()]


@torch.no_grad()
def _in_pieces(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
    T = h.shape[1]
    sizes: list[int] = []
    for size in PIECES:
        if sum(sizes) + size + DECODED < T:
            sizes.append(size)
    rest = max(0, T - sum(sizes) - DECODED)
    sizes += [rest] * (rest > 0)
    sizes += [1] * (T - sum(sizes))
    cache, out = None, []
    for part in h.split(sizes, dim=1):
        step = model(inputs_embeds=part, use_cache=True, **{CACHE: cache})
        cache = getattr(step, CACHE)
        out.append(step[0])
    return torch.cat(out, dim=1)


@torch.no_grad()
def _left_padded(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
    """The row beside a longer one, so that it needs PADDING tokens on its left."""
    T = h.shape[1]
    other = torch.cat([h.flip(1), h[:, :PADDING]], dim=1)[:, : T + PADDING]
    width = other.shape[1] - T
    padded = torch.cat(
        [h[:, :1].expand(-1, width, -1) * 3, h], dim=1
    )  # what stands in the padding must not matter
    mask = torch.ones(2, T + width, dtype=torch.int64)
    mask[0, :width] = 0
    return model(inputs_embeds=torch.cat([padded, other]), attention_mask=mask, use_cache=False)[0][
        :1, width:
    ]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; nan where either is not finite."""
    return (a.double() - b.double()).abs().max().item()


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
