import math

import pytest

from unsoftmax.train.schedule import SHAPES, learning_rate

RUN = {"total_steps": 100, "warmup_steps": 10, "peak": 3e-4, "min_ratio": 0.3}


def rates(shape, **changes):
    return [learning_rate(step, shape=shape, **{**RUN, **changes}) for step in range(RUN["total_steps"])]


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_rises_evenly_to_the_peak_and_no_step_has_rate_zero(shape):
    found = rates(shape)
    assert found[:10] == pytest.approx([3e-5 * n for n in range(1, 11)])
    assert found[10] == pytest.approx(3e-4)
    assert min(found) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_step_has_the_lowest_rate_of_the_decay(shape):
    found = rates(shape)
    assert found[-1] == pytest.approx(3e-4 if shape == "constant" else 9e-5)
    assert found[10:] == sorted(found[10:], reverse=True)


def test_each_shape_is_the_curve_it_is_named_for():
    middle = 10 + 89 * 0.5  # halfway between two steps
    assert rates("cosine")[54] == pytest.approx(
        3e-4 * (0.3 + 0.35 * (1 + math.cos(math.pi * (54 - 10) / 89)))
    )
    assert sum(rates("linear")[54:56]) / 2 == pytest.approx(3e-4 * 0.65), middle
    stable = [r for r in rates("wsd") if r == pytest.approx(3e-4)]
    assert len(stable) == 1 + 72  # the last step of the warm-up, and four fifths of what follows


def test_no_warm_up_starts_at_the_peak():
    assert rates("linear", warmup_steps=0)[0] == 3e-4


def test_one_step_runs_have_a_rate():
    assert learning_rate(0, shape="cosine", total_steps=1, warmup_steps=0, peak=1.0, min_ratio=0.0) == 1.0
