"""The learning rate as a pure function of the step, so that a resumed run cannot disagree with itself.

    rate(step) = peak * min(1, (step + 1) / warmup) * shape(progress)

progress runs from 0 at the end of the warm-up to 1 at the last step; every shape starts at 1 and ends at
`min_ratio`, except `constant`, which stays at 1.

    cosine    min + (1 - min) (1 + cos(pi progress)) / 2
    linear    1 - (1 - min) progress
    wsd       1, then linear over the last `decay_share` of the run (Hu et al. 2024, arXiv:2404.06395)
    constant  1
"""

from __future__ import annotations

import math


def _cosine(progress: float, low: float, decay: float) -> float:
    return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2


def _linear(progress: float, low: float, decay: float) -> float:
    return 1 - (1 - low) * progress


def _wsd(progress: float, low: float, decay: float) -> float:
    return _linear(max(0.0, (progress - (1 - decay)) / decay), low, decay)


def _constant(progress: float, low: float, decay: float) -> float:
    return 1.0


SHAPES = {"cosine": _cosine, "linear": _linear, "wsd": _wsd, "constant": _constant}


def learning_rate(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    peak: float,
    min_ratio: float,
    shape: str,
    decay_share: float = 0.2,
) -> float:
    """The rate of optimizer step `step` (the first is 0) out of `total_steps`.

    decay_share: share of the steps after the warm-up in which wsd decays.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    last = max(1, total_steps - 1 - warmup_steps)
    return peak * SHAPES[shape](min(1.0, (step - warmup_steps) / last), min_ratio, decay_share)
