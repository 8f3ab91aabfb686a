"""The start of a converted layer, in closed form from calibration text.

1. key_mean: the mean of a head's keys, which no softmax can see.
2. sharpness b, offset 1: least KL from the teacher's attention over far keys (all keys for local="power") to
   (1 + b s) ** p, a grid and then a golden section, each row weighing as much as its far keys do.
3. A learned sketch: with Mq and Mk the second moments of a head's queries and keys, the singular vectors of
   Mq^(1/2) Mk^(1/2) write s as a sum of products of uncorrelated unit coordinates, strongest first; the
   largest terms of (1 + b s) ** (p / 2) in these coordinates start the sketch (LearnedSketch.start).
4. far_scale and far_query: a ridge regression on q of what log far mass the sketch misses, then the constant
   that makes the mean far mass the teacher's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from unsoftmax.kernels.mixer import Rotary
from unsoftmax.kernels.polysketch.sketch import LearnedSketch

if TYPE_CHECKING:
    from unsoftmax.kernels.polysketch.layer import PolySketchAttention

MAX_ROWS = 16  # calibration rows that are kept
QUERIES = 48  # queries looked at in each
RIDGE = 0.1  # of the regression on q, in units of its mean squared size
LEAST = 1e-12  # a weight below this share counts as this share, so that KL is finite


class _Row(NamedTuple):
    """One calibration row: a few queries and what they may look at."""

    q: torch.Tensor  # [n, HQ, D]
    k: torch.Tensor  # [T, H, D]
    scores: torch.Tensor  # [HQ, n, T], the teacher's logits, -inf for later keys
    far: torch.Tensor  # [n, T] bool


@torch.no_grad()
def fit(layer: PolySketchAttention, batches: Iterable[tuple[torch.Tensor, Rotary]]) -> dict[str, float]:
    """Set the layer's new parameters; returns medians over heads of KL, sharpness and far mass."""
    rows = _collect(layer, batches)
    if not rows:
        return {}
    layer.key_mean.copy_(torch.stack([row.k.mean(0) for row in rows]).mean(0))
    sharpness, kl = _sharpness(layer, rows)
    layer.offset.fill_(1.0)
    layer.sharpness.copy_(sharpness)
    if isinstance(layer.sketch, LearnedSketch):
        _principal(layer, rows)
    report = {"sharpness": sharpness.median().item(), "kl_exact_power": kl.median().item()}
    if layer.options.local == "softmax":
        report |= _far_mass(layer, rows)
    return report


def _collect(layer, batches) -> list[_Row]:
    options, rows = layer.options, []
    for x, rotary in batches:
        T = x.shape[1]
        i = torch.linspace(T // 4, T - 1, min(QUERIES, T - T // 4), device=x.device).long()
        j = torch.arange(T, device=x.device)
        causal = j <= i[:, None]
        near = (j // options.block > i[:, None] // options.block - options.window // options.block) | (
            j < options.sinks
        )
        far = causal if options.local == "power" else causal & ~near
        for b in range(len(x)):
            if len(rows) == MAX_ROWS or not far.any():
                return rows
            each = Rotary(*(r[b : b + 1] if len(r) > 1 else r for r in rotary))
            q, k, _ = (t[0].float() for t in layer.project(x[b : b + 1], each))
            q = q[i]
            scores = layer.scale * torch.einsum(
                "nhgd,thd->hgnt", q.unflatten(1, (k.shape[1], -1)), k
            ).flatten(0, 1)
            rows.append(_Row(q, k, scores.masked_fill(~causal, -torch.inf), far))
    return rows


def _sharpness(layer, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """b of least KL and that KL, [HQ]."""
    grid = torch.logspace(-1.7, 0.6, 24, device=rows[0].q.device)
    losses = torch.stack([_kl(layer, rows, b.expand(layer.shape.num_heads)) for b in grid])
    best = losses.argmin(0)
    low, high = grid[(best - 1).clamp(min=0)], grid[(best + 1).clamp(max=len(grid) - 1)]
    golden = (5**0.5 - 1) / 2
    for _ in range(8):
        left, right = high - golden * (high - low), low + golden * (high - low)
        better = _kl(layer, rows, left) < _kl(layer, rows, right)
        low, high = torch.where(better, low, left), torch.where(better, right, high)
    b = (low + high) / 2
    return b, _kl(layer, rows, b)


def _kl(layer, rows, b) -> torch.Tensor:
    """Mean KL of (1 + b s) ** p from the teacher over far keys, [HQ]; rows weigh as their far mass."""
    total = weight = 0.0
    for row in rows:
        s = _centred(layer, row)
        share = _teacher(row).softmax(-1).nan_to_num(0)  # rows without far keys
        w = (1 + b[:, None, None] * s).pow(layer.options.degree) * row.far
        log_w = (w / w.sum(-1, keepdim=True).clamp(min=1e-30)).clamp(min=LEAST).log()
        kl = (torch.special.xlogy(share, share) - share * log_w).sum(-1)
        mass = (row.scores.softmax(-1) * row.far).sum(-1)
        total, weight = total + (kl * mass).sum(1), weight + mass.sum(1)
    return total / weight.clamp(min=1e-9)


def _centred(layer, row) -> torch.Tensor:
    """scale q . (k - key_mean), [HQ, n, T], 0 for later keys."""
    shift = layer.scale * torch.einsum(
        "nhgd,hd->hgn", row.q.unflatten(1, (row.k.shape[1], -1)), layer.key_mean.float()
    )
    return (row.scores - shift.flatten(0, 1).unsqueeze(-1)).masked_fill(row.scores == -torch.inf, 0)


def _teacher(row) -> torch.Tensor:
    return row.scores.masked_fill(~row.far, -torch.inf)


def _principal(layer, rows) -> None:
    """Start the learned sketch at the strongest directions that queries and keys share."""
    H = layer.shape.num_kv_heads
    q = torch.cat([row.q for row in rows]) * (layer.scale * layer.sharpness.float())[:, None]
    q = q.unflatten(1, (H, -1)).transpose(0, 1).flatten(1, 2)  # [H, n, D]
    k = (torch.cat([row.k for row in rows]) - layer.key_mean.float()).transpose(0, 1)
    roots = [torch.linalg.cholesky(_moment(x)) for x in (q, k)]
    U, strength, Vh = torch.linalg.svd(roots[0].transpose(1, 2) @ roots[1])
    axes = (
        torch.linalg.solve_triangular(root.transpose(1, 2), basis, upper=True)
        for root, basis in zip(roots, (U, Vh.transpose(1, 2)))
    )
    layer.sketch.start(*(a.float() for a in axes), strength.float())


def _moment(x: torch.Tensor) -> torch.Tensor:
    """Second moments of x [H, n, D] in float64, [H, D, D], with a little of their mean on the diagonal."""
    x = x.double()
    moment = x.transpose(1, 2) @ x / x.shape[1]
    mean = moment.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-12)
    return moment + 1e-4 * mean[:, None, None] * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)


def _far_mass(layer, rows) -> dict[str, float]:
    """Fit far_scale and far_query; returns the far mass of teacher and layer, and the KL of the sketch."""
    H, D = layer.shape.num_kv_heads, layer.shape.head_dim
    layer.far_scale.zero_()
    layer.far_query.copy_(layer.key_mean.repeat_interleave(layer.shape.num_heads // H, 0))
    wanted, ours, near, used, kls = [], [], [], [], []
    for row in rows:
        some = row.far.any(-1)
        phi_q, phi_k = layer.sketches(row.q[None], row.k[None])
        product = torch.einsum("nhgr,thr->hgnt", phi_q[0].unflatten(1, (H, -1)), phi_k[0]).flatten(0, 1)
        w = (product.square() * row.far)[:, some]
        mass = w.sum(-1)
        factor = layer.far_factor(row.q[None])[0].T[:, some]
        wanted.append(_teacher(row).logsumexp(-1)[:, some])
        near.append(row.scores.masked_fill(row.far, -torch.inf).logsumexp(-1)[:, some])
        ours.append(mass.clamp(min=1e-30).log() + factor)
        used.append(row.q[some])
        share = _teacher(row)[:, some].softmax(-1)
        log_w = (w / mass.unsqueeze(-1).clamp(min=1e-30)).clamp(min=LEAST).log()
        kls.append((torch.special.xlogy(share, share) - share * log_w).sum(-1))
    want, have, close, kl = (torch.cat(x, 1) for x in (wanted, ours, near, kls))  # [HQ, n]
    q = torch.cat(used).transpose(0, 1) * layer.scale  # [HQ, n, D]
    share = (want - close).sigmoid()
    weight = share * (1 - share) + 1e-3
    miss = (want - have).clamp(-10, 10)
    design = torch.cat((q, torch.ones_like(q[..., :1])), -1).double()
    gram = design.transpose(1, 2) @ (design * weight.unsqueeze(-1))
    size = gram[:, :D, :D].diagonal(dim1=1, dim2=2).mean(-1)
    penalty = torch.diag_embed(
        torch.cat((torch.ones(D), torch.zeros(1))).to(gram) * (RIDGE * size)[:, None] + 1e-9
    )
    solved = torch.linalg.solve(
        gram + penalty, design.transpose(1, 2) @ (weight * miss).double().unsqueeze(-1)
    )
    layer.far_query += solved[:, :D, 0].to(layer.far_query)
    have = have + torch.einsum("hnd,hd->hn", q, solved[:, :D, 0].float())
    constant = _matching(have - close, share.mean(1))
    layer.far_scale.copy_(constant)
    mean = (have - close + constant[:, None]).sigmoid().mean(1)
    kl = (kl * share).sum(1) / share.sum(1).clamp(min=1e-9)
    return {
        "far_mass_teacher": share.mean().item(),
        "far_mass": mean.mean().item(),
        "kl_sketch": kl.median().item(),
    }


def _matching(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """c [HQ] so that the mean over n of sigmoid(x + c) is the target, by bisection; x [HQ, n]."""
    low, high = (torch.full_like(target, bound) for bound in (-40.0, 40.0))
    for _ in range(50):
        middle = (low + high) / 2
        more = (x + middle[:, None]).sigmoid().mean(1) < target
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return (low + high) / 2
