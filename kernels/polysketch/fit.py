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
from unsoftmax.kernels.polysketch.sketch import LearnedSketch, append

if TYPE_CHECKING:
    from unsoftmax.kernels.polysketch.layer import PolySketchAttention

MAX_ROWS = 12  # calibration rows that are kept
QUERIES = 32  # queries looked at in each
RIDGE = 0.1  # of the regression on q, in units of its mean squared size
LEAST = 1e-3  # a score 1 + b s nearer to zero counts as this, so that KL is finite


class _Row(NamedTuple):
    """One calibration row: n queries with far keys, and what they may look at."""

    q: torch.Tensor  # [n, HQ, D]
    k: torch.Tensor  # [T, H, D], less key_mean
    far: torch.Tensor  # [n, T] bool
    scores: torch.Tensor  # [HQ, n, T], scale q . (k - key_mean), of later keys too
    share: torch.Tensor  # [HQ, n, T], the teacher's attention over far keys, adding up to 1
    entropy: torch.Tensor  # [HQ, n], of share
    log_far: torch.Tensor  # [HQ, n], log sum of exp(scores) over far keys
    log_near: torch.Tensor  # [HQ, n], the same over near keys; -inf for local="power"

    @property
    def mass(self) -> torch.Tensor:
        """The teacher's attention to all far keys, [HQ, n]."""
        return (self.log_far - self.log_near).sigmoid()


@torch.no_grad()
def fit(layer: PolySketchAttention, batches: Iterable[tuple[torch.Tensor, Rotary]]) -> dict[str, float]:
    """Set the layer's new parameters; returns medians over heads of KL and sharpness, and mean far masses."""
    found = _collect(layer, batches)
    if not found:
        return {}
    mean = torch.stack([k.mean(0) for _, k, _, _ in found]).mean(0)
    layer.power.key_mean.copy_(mean)
    rows = [_row(layer, q, k - mean, causal, far) for q, k, causal, far in found]
    sharpness, kl = _sharpness(layer, rows)
    layer.power.offset.fill_(1.0)
    layer.power.sharpness.copy_(sharpness)
    if isinstance(layer.sketch, LearnedSketch):
        _principal(layer, rows)
    report = {"sharpness": sharpness.median().item(), "kl_exact_power": kl.median().item()}
    if layer.options.local == "softmax":
        report |= _far_mass(layer, rows, mean)
    return report


def _collect(layer, batches) -> list[tuple[torch.Tensor, ...]]:
    """(q [n, HQ, D], k [T, H, D], causal [n, T], far [n, T]) of rows that have far keys."""
    options, rows = layer.options, []
    for x, rotary in batches:
        T = x.shape[1]
        i = torch.linspace(T // 4, T - 1, min(QUERIES, T - T // 4), device=x.device).long()[:, None]
        j = torch.arange(T, device=x.device)
        far = causal = j <= i
        if options.local == "softmax":
            oldest = i // options.block - options.window // options.block
            far = causal & (j // options.block <= oldest) & (j >= options.sinks)
        some = far.any(1)
        for b in range(len(x) if some.any() else 0):
            if len(rows) == MAX_ROWS:
                return rows
            each = Rotary(*(r[b : b + 1] if len(r) > 1 else r for r in rotary))
            q, k, _ = (t[0].float() for t in layer.project(x[b : b + 1], each))
            rows.append((q[i[some, 0]], k, causal[some], far[some]))
    return rows


def _row(layer, q, k, causal, far) -> _Row:
    scores = layer.scale * _products(q, k)
    there = scores.masked_fill(~far, -torch.inf)
    log_far, share = there.logsumexp(-1), there.softmax(-1)
    log_near = scores.masked_fill(far | ~causal, -torch.inf).logsumexp(-1)
    return _Row(q, k, far, scores, share, log_far - (share * scores).sum(-1), log_far, log_near)


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q [n, HQ, D] times k [T, H, D], [HQ, n, T]."""
    return torch.einsum("nhgd,thd->hgnt", q.unflatten(1, (k.shape[1], -1)), k).flatten(0, 1)


def _sharpness(layer, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """b of least KL and that KL, [HQ]."""
    grid = torch.logspace(-1.7, 0.6, 12, device=rows[0].q.device)
    losses = torch.stack([_kl(layer, rows, b.expand(layer.shape.num_heads)) for b in grid])
    best = losses.argmin(0)
    low, high = grid[(best - 1).clamp(min=0)], grid[(best + 1).clamp(max=len(grid) - 1)]
    golden = (5**0.5 - 1) / 2
    for _ in range(6):
        left, right = high - golden * (high - low), low + golden * (high - low)
        better = _kl(layer, rows, left) < _kl(layer, rows, right)
        low, high = torch.where(better, low, left), torch.where(better, right, high)
    b = (low + high) / 2
    return b, _kl(layer, rows, b)


def _kl(layer, rows, b) -> torch.Tensor:
    """Mean KL of (1 + b s) ** p from the teacher over far keys, [HQ]; rows weigh as their far mass."""
    total = weight = 0.0
    for row in rows:
        log_w = (b[:, None, None] * row.scores).add_(1).abs_().clamp_(min=LEAST).log_()
        kl = _divergence(row, log_w.mul_(layer.options.degree))
        total, weight = total + (kl * row.mass).sum(1), weight + row.mass.sum(1)
    return total / weight.clamp(min=1e-9)


def _divergence(row: _Row, log_w: torch.Tensor) -> torch.Tensor:
    """KL [HQ, n] of weights, not normalised, from the teacher over far keys."""
    log_sum = log_w.masked_fill(~row.far, -torch.inf).logsumexp(-1)
    return log_sum - (row.share * log_w).sum(-1) - row.entropy


def _principal(layer, rows) -> None:
    """Start the learned sketch at the strongest directions that queries and keys share."""
    H = layer.shape.num_kv_heads
    q = torch.cat([row.q for row in rows]) * (layer.scale * layer.power.sharpness.float())[:, None]
    q = q.unflatten(1, (H, -1)).transpose(0, 1).flatten(1, 2)  # [H, n, D]
    k = torch.cat([row.k for row in rows]).transpose(0, 1)
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


def _far_mass(layer, rows, key_mean) -> dict[str, float]:
    """Fit far_scale and far_query; returns the far mass of teacher and layer, and the KL of the sketch."""
    have, kl = [], []
    for row in rows:
        phi_q, phi_k = layer.sketches(row.q[None], (row.k + key_mean)[None])
        log_w = 2 * _products(phi_q[0], phi_k[0]).abs().clamp(min=LEAST**2).log()
        have.append(log_w.masked_fill(~row.far, -torch.inf).logsumexp(-1))
        kl.append(_divergence(row, log_w))
    have, kl, far, near, share = (
        torch.cat(x, 1) for x in (have, kl, *zip(*((r.log_far, r.log_near, r.mass) for r in rows)))
    )  # [HQ, all n]
    q = torch.cat([row.q for row in rows]).transpose(0, 1) * layer.scale
    change = _ridge(q, (far - have).clamp(-10, 10), share * (1 - share) + 1e-3)
    layer.power.far_query.copy_(key_mean.repeat_interleave(len(q) // len(key_mean), 0) + change)
    have = have + torch.einsum("hnd,hd->hn", q, change)
    layer.power.far_scale.copy_(_matching(have - near, share.mean(1)))
    ours = (have - near + layer.power.far_scale[:, None]).sigmoid()
    kl = (kl * share).sum(1) / share.sum(1).clamp(min=1e-9)
    return {
        "far_mass_teacher": share.mean().item(),
        "far_mass": ours.mean().item(),
        "kl_sketch": kl.median().item(),
    }


def _ridge(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Slopes [HQ, D] of y [HQ, n] on x [HQ, n, D], with a free constant."""
    D = x.shape[-1]
    design = append(x, 1.0).double()
    gram = design.transpose(1, 2) @ (design * weight.unsqueeze(-1))
    size = gram[:, :D, :D].diagonal(dim1=1, dim2=2).mean(-1)
    penalty = append((RIDGE * size)[:, None].expand(-1, D), 0.0) + 1e-9
    target = design.transpose(1, 2) @ (weight * y).double().unsqueeze(-1)
    return torch.linalg.solve(gram + torch.diag_embed(penalty), target)[:, :D, 0].float()


def _matching(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """c [HQ] so that the mean over n of sigmoid(x + c) is the target, by bisection; x [HQ, n]."""
    low, high = (torch.full_like(target, bound) for bound in (-40.0, 40.0))
    for _ in range(50):
        middle = (low + high) / 2
        more = (x + middle[:, None]).sigmoid().mean(1) < target
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return (low + high) / 2
