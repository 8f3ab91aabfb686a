"""How long the slots of gated slot attention keep what is written into them, on a sample of text."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from unsoftmax.kernels.gsa import layer as gsa_layer
from unsoftmax.kernels.gsa.layer import GSAOptions

QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


@torch.no_grad()
def slot_lifetimes(model: Any, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Lifetimes a layer and kind of slot, in tokens, for every layer of gated slot attention.

    The lifetime of a write is the number of tokens until half of it is gone (log_gate summed since is at most
    -ln 2). Writes of the first half of the text count, each by its share 1 - exp(log_gate), so that most of
    them can be followed to their end; one that outlives the text counts with the length it was seen.

    Args:
        model: a converted model.
        ids: [T] int64, one document.

    Returns:
        [{"layer": n, "slots": {kind: {"p10", "median", "p90", "kept"}}}]; kept is the share of writes still
        there at the end. For the kinds see `kinds`.
    """
    layers = {id(m): n for n, m in _gsa_layers(model)}
    options = {n: m.options for n, m in _gsa_layers(model)}
    found = []
    with _recorded_gates(model) as gates:
        model(ids.to(model.device).unsqueeze(0), use_cache=False)
    for key, log_gate in gates.items():
        n = layers[key]
        lives, share = lifetimes_of(log_gate)
        slots = {
            kind: summarise(lives[..., part], share[..., part]) for kind, part in kinds(options[n]).items()
        }
        found.append({"layer": n, "slots": {kind: s for kind, s in slots.items() if s is not None}})
    return sorted(found, key=lambda layer: layer["layer"])


def _gsa_layers(model: Any) -> list[tuple[int, Any]]:
    attention = [(n, layer.self_attn) for n, layer in enumerate(model.model.layers)]
    return [(n, m) for n, m in attention if isinstance(m, gsa_layer.GatedSlotAttention)]


@contextlib.contextmanager
def _recorded_gates(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Within the block, collects log_gate [T, H, M] of each layer's next call, keyed by the module's id."""
    gates: dict[int, torch.Tensor] = {}
    current: list[int] = []
    soft, hard = gsa_layer.gsa, gsa_layer.slot_attention

    def recording(q, k, v, log_gate, **options):
        gates[current[-1]] = log_gate[0].double().cpu()
        return soft(q, k, v, log_gate, **options)

    def recording_writes(q, k, v, write, bias, *, num_slots, **options):
        gates[current[-1]] = gates_of(write[0].cpu(), num_slots)
        return hard(q, k, v, write, bias, num_slots=num_slots, **options)

    hooks = [
        m.register_forward_pre_hook(lambda module, _: current.append(id(module)))
        for _, m in _gsa_layers(model)
    ]
    gsa_layer.gsa, gsa_layer.slot_attention = recording, recording_writes
    try:
        yield gates
    finally:
        gsa_layer.gsa, gsa_layer.slot_attention = soft, hard
        for hook in hooks:
            hook.remove()


def gates_of(write: torch.Tensor, num_slots: int) -> torch.Tensor:
    """log_gate [T, H, M] float64 of one-hot writes [T, H, W]: nothing is kept where one falls (e^-100)."""
    T, H, _ = write.shape
    gates = torch.zeros(T, H, num_slots + 1, dtype=torch.float64)
    return gates.scatter(-1, write.long() + 1, -100.0)[..., 1:]  # slot 0 takes those who write nowhere


def lifetimes_of(log_gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lifetime of each write and its share, both [T // 2, H, M] float64, of log_gate [T, H, M].

    A lifetime of inf: not yet half gone at the end.
    """
    T, H, M = log_gate.shape
    lost = -log_gate.double().cumsum(0).permute(1, 2, 0).reshape(H * M, T).contiguous()  # rises with time
    early = max(1, T // 2)
    gone = torch.searchsorted(lost, lost[:, :early] + math.log(2) - 1e-9)
    lives = (gone - torch.arange(early)).double()
    lives[gone == T] = math.inf
    return lives.view(H, M, early).permute(2, 0, 1), -torch.expm1(log_gate[:early].double())


def summarise(lives: torch.Tensor, share: torch.Tensor) -> dict[str, float] | None:
    """Quantiles of the lifetimes, weighted by share, and the share kept; None if nothing was written."""
    lives, weight = lives.flatten(), share.flatten()
    total = weight.sum()
    if not total > 0:
        return None
    kept = (weight * lives.isinf()).sum() / total
    lives, order = lives.sort()
    reached = weight[order].cumsum(0) / total
    longest = lives[lives.isfinite()].max().item() if lives.isfinite().any() else math.inf
    found = {}
    for name, q in QUANTILES.items():
        value = lives[min(int(torch.searchsorted(reached, q)), len(lives) - 1)].item()
        found[name] = value if math.isfinite(value) else longest
    return {**found, "kept": kept.item()}


def kinds(options: GSAOptions) -> dict[str, slice]:
    """Which slots are what, by the layer's options: sinks, the ring, and a memory ring for each rate."""
    if options.start != "ring":
        return {"slots": slice(None)}
    names = ["sinks", "ring", *(f"memory, 1 token in {1 / rate:.0f}" for rate in options.memory_rates)]
    edges = list(itertools.accumulate((options.sinks, *options.rings), initial=0))
    return {name: slice(a, b) for name, a, b in zip(names, edges, edges[1:]) if b > a}
