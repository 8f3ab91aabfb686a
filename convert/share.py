"""How many slots each head gets: more where forgetting costs the loss more, the sum staying the same.

To second order, exchanging a head's attention output o_t for another costs the loss (g_t . d_t)^2 / 2 a
token, g the loss's gradient at o and d the difference (the empirical Fisher). The teacher runs over text
once, forward and backward; each head is tried with a few numbers of slots; then slots are dealt where they
save most. The loss is that of tokens which text further back foretells (measure.recall_mask): what slots are
for.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from unsoftmax.convert.load import load
from unsoftmax.convert.measure import recall_mask
from unsoftmax.convert.source import Source, available_memory
from unsoftmax.kernels.gsa.layer import GatedSlotAttention, GSAOptions
from unsoftmax.kernels.gsa.onehot import slot_attention
from unsoftmax.kernels.mixer import Rotary

SIZES = (1 / 4, 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4, 6)  # numbers of slots tried, in num_slots


def shares_slots(mixer: GatedSlotAttention) -> bool:
    """Whether a layer's num_slots may be dealt unevenly: what is kept must depend on what it is worth."""
    return mixer.options.start == "ring" and mixer.options.recent is not None and len(mixer.options.each) == 1


def can_share(source: Source, device: torch.device, tokens: int) -> bool:
    """Whether the teacher can be loaded whole, and run over rows of `tokens` in the memory that is free."""
    if any(entry.start is None for entry in source.entries.values()):
        return False  # pickles are read tensor by tensor
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    return sharing_bytes(source, tokens) < 0.9 * free


def sharing_bytes(source: Source, tokens: int) -> int:
    """About what the teacher takes in float32, forward and backward over one row of `tokens`."""
    c = source.config
    weights = sum(math.prod(entry.shape) for entry in source.entries.values())
    a_layer = 10 * c.hidden_size + 4 * c.num_attention_heads * c.head_dim + 4 * c.intermediate_size
    kept = c.num_hidden_layers * a_layer + 3 * c.vocab_size  # by each token; logits, softmax, gradient
    return 4 * (weights + tokens * kept)


def sizes_of(options: GSAOptions) -> list[int]:
    """Numbers of slots to try for a head whose recipe says options.num_slots, rising."""
    slots = options.each[0]
    return sorted({round(slots * s) for s in SIZES if round(slots * s) > options.sinks} | {slots})


def share_slots(
    source: Source,
    mixers: Mapping[int, GatedSlotAttention],
    new: Mapping[str, torch.Tensor],
    rows: torch.Tensor,
    *,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[int, tuple[int, ...]]:
    """Slots of each head of each layer, as many in all as before.

    Args:
        mixers: layer to its mixer, all with the same options; only shapes and options are read.
        new: target key to tensor, the fitted importance of each layer.
        rows: [R, T] int64 of calibration text.
    """
    sizes = sizes_of(next(iter(mixers.values())).options)
    cost: dict[int, torch.Tensor] = {}
    teacher = load(source.folder, dtype=torch.float32, device=str(device)).requires_grad_(False)
    begun, said = time.monotonic(), time.monotonic()
    heads = {layer: _head_of(teacher, layer, mixer, new) for layer, mixer in mixers.items()}
    for n, row in enumerate(rows.to(device).split(1)):
        for layer, seen in _backward(teacher, row, list(mixers)).items():
            found = costs(heads[layer], **seen, sizes=sizes)
            cost[layer] = cost.get(layer, 0) + found
        now = time.monotonic()
        if now - said > 5 or n + 1 == len(rows):
            left = (now - begun) / (n + 1) * (len(rows) - n - 1)
            say(f"  share    row {n + 1}/{len(rows)} of {rows.shape[1]} tokens   {left:4.0f} s left")
            said = now
    return deal(cost, sizes, next(iter(mixers.values())).options.each[0])


def _head_of(
    teacher: PreTrainedModel, layer: int, mixer: GatedSlotAttention, new: Mapping[str, torch.Tensor]
) -> GatedSlotAttention:
    """The mixer with the fitted importance, over the teacher's own projections."""
    with torch.device("meta"):
        own = type(mixer)(mixer.shape, mixer.options)
    attention = teacher.model.layers[layer].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(own, name, getattr(attention, name))
    prefix = f"model.layers.{layer}.self_attn."
    fitted = {n: new[prefix + n].to(teacher.device) for n in own.new_tensors()}
    own.load_state_dict(fitted, strict=False, assign=True)
    return own.requires_grad_(False)


def _backward(teacher: PreTrainedModel, row: torch.Tensor, layers: list[int]) -> dict[int, dict[str, Any]]:
    """For each layer: its input x, its rotary factors, the heads' output o, and the loss's gradient there."""
    seen: dict[int, dict[str, Any]] = {layer: {} for layer in layers}
    with _watched(teacher, seen), torch.enable_grad():
        embeddings = teacher.get_input_embeddings()(row).requires_grad_()
        logits = teacher(inputs_embeds=embeddings, use_cache=False).logits[0, :-1].float()
        loss = F.cross_entropy(logits, row[0, 1:], reduction="none")
        far = recall_mask(row.cpu()).to(row.device)[0, 1:]
        (loss * far if far.any() else loss).sum().backward()
    return {
        layer: {
            "x": s["x"].detach(),
            "rotary": Rotary(*(t.detach() for t in s["rotary"])),
            "o": s["o"].detach(),
            "gradient": s["o"].grad,
        }
        for layer, s in seen.items()
    }


@contextlib.contextmanager
def _watched(teacher: PreTrainedModel, seen: dict[int, dict[str, Any]]) -> Iterator[None]:
    def keep_rotary(module, args, out):
        for mine in seen.values():
            mine["rotary"] = out

    hooks = [teacher.model.rotary_emb.register_forward_hook(keep_rotary)]
    for layer, mine in seen.items():
        block = teacher.model.layers[layer]

        def keep_output(module, args, mine=mine):
            args[0].retain_grad()
            mine["o"] = args[0]

        hooks += [
            block.input_layernorm.register_forward_hook(lambda m, a, out, mine=mine: mine.update(x=out)),
            block.self_attn.o_proj.register_forward_pre_hook(keep_output),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def costs(
    mixer: GatedSlotAttention,
    *,
    x: torch.Tensor,
    rotary: Rotary,
    o: torch.Tensor,
    gradient: torch.Tensor,
    sizes: list[int],
) -> torch.Tensor:
    """What each number of slots costs each key/value head [H, sizes], float64 on the CPU: sum of (g . d)^2.

    Args:
        x: [B, T, hidden], the layer's normed input in the teacher.
        o, gradient: [B, T, HQ * D], the heads' output in the teacher and the loss's gradient there.
    """
    H = mixer.shape.num_kv_heads
    q, k, v = mixer.project(x, rotary)
    write = mixer.writes(x, slots=tuple(size for size in sizes for _ in range(H)))[0]
    found = []
    for size, mine in zip(sizes, write.split(H, -1)):
        other = slot_attention(q, k, v, mine.unsqueeze(-1), num_slots=size, scale=mixer.scale)[0]
        change = (gradient * (other.flatten(2) - o)).unflatten(-1, (H, -1, mixer.shape.head_dim)).sum(-1)
        found.append(change.double().square().sum((0, 1, 3)))
    return torch.stack(found, -1).cpu()


def deal(cost: Mapping[int, torch.Tensor], sizes: list[int], mean: int) -> dict[int, tuple[int, ...]]:
    """Slots of each head, `mean` on average or a little less: each step goes where a slot saves most.

    What is left once no slot saves anything (rows too short to need them) goes to the heads with fewest.
    cost: layer to [H, sizes]; sizes rise. Raises ValueError where it is NaN or inf.
    """
    for layer, rows in cost.items():
        bad = (~rows.isfinite()).nonzero().tolist()
        if bad:
            head, size = bad[0]
            raise ValueError(
                f"layer {layer}, head {head}: what {sizes[size]} slots cost the loss came out as "
                f"{float(rows[head, size])}; with --set calibration.sharing_tokens=0 every head gets "
                "mixer.num_slots"
            )
    at = {(layer, h): 0 for layer, rows in cost.items() for h in range(len(rows))}
    left = (mean - sizes[0]) * len(at)
    while True:
        best: tuple[float, tuple[int, int], int] | None = None
        for (layer, h), now in at.items():
            for to in range(now + 1, len(sizes)):
                more = sizes[to] - sizes[now]
                saved = float(cost[layer][h, now] - cost[layer][h, to]) / more
                if more <= left and (best is None or saved > best[0]):
                    best = saved, (layer, h), to
        if best is None:
            break
        saved, head, to = best
        if saved <= 0:
            head = min(at, key=at.__getitem__)
            to = at[head] + 1
            if to == len(sizes) or sizes[to] - sizes[at[head]] > left:
                break
        left -= sizes[to] - sizes[at[head]]
        at[head] = to
    return {layer: tuple(sizes[at[layer, h]] for h in range(len(rows))) for layer, rows in cost.items()}
