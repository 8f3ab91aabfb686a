"""How long the slots of gated slot attention keep what is written into them, on a sample of text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from unsoftmax.kernels.gsa.layer import GatedSlotAttention, GSAOptions

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
    found = []
    for n, mixer, log_gate in _gates(model, ids):
        lives, share = lifetimes_of(log_gate)
        parts = kinds(mixer.options).items()
        slots = {kind: summarise(lives[..., part], share[..., part]) for kind, part in parts}
        found.append({"layer": n, "slots": {kind: s for kind, s in slots.items() if s is not None}})
    return found


def _gates(model: Any, ids: torch.Tensor) -> Iterator[tuple[int, GatedSlotAttention, torch.Tensor]]:
    """Each layer of gated slot attention with its log_gate [T, H, M] on the text."""
    layers = [(n, layer.self_attn) for n, layer in enumerate(model.model.layers)]
    layers = [(n, m) for n, m in layers if isinstance(m, GatedSlotAttention)]
    inputs: dict[GatedSlotAttention, torch.Tensor] = {}
    hooks = [
        m.register_forward_pre_hook(lambda module, args: inputs.update({module: args[0]})) for _, m in layers
    ]
    try:
        model(ids.to(model.device).unsqueeze(0), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for n, m in layers:
        x = inputs.pop(m)
        if m.options.start == "paper":
            yield n, m, m.soft_gates(x)[0].double().cpu()
        else:
            yield n, m, gates_of(m.writes(x)[0][0].unsqueeze(-1).cpu(), max(m.slots))


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
    """Which slots are what, by the layer's options: the sinks, and the others."""
    if options.start != "ring":
        return {"slots": slice(None)}
    found = {"sinks": slice(0, options.sinks), "others": slice(options.sinks, None)}
    return {name: part for name, part in found.items() if options.sinks or name == "others"}
