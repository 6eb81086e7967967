from __future__ import annotations

import pytest

from mor_kernels.train.schedule import cosine, trapezoid


def test_trapezoid():
    rates = [trapezoid(step, 100, 2.0) for step in range(100)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert set(rates[5:80]) == {2.0}
    assert rates[80:] == pytest.approx([2.0 * (1 - (step - 80) / 20) for step in range(80, 100)])
    assert trapezoid(100, 100, 2.0) == 0


def test_cosine():
    rates = [cosine(step, 100, 2.0) for step in range(100)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert rates[5] == 2.0 and rates == sorted(rates[:5]) + sorted(rates[5:], reverse=True)
    assert cosine(5 + 95 // 2, 100, 2.0) == pytest.approx(1.0, abs=0.02)
    assert cosine(100, 100, 2.0) == pytest.approx(0)


@pytest.mark.parametrize("schedule", [trapezoid, cosine])
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_short_runs_never_stand_still(schedule, steps):
    assert all(0 < schedule(step, steps, 1.0) <= 1 for step in range(steps))


def test_no_warmup_and_no_cooldown():
    assert [trapezoid(step, 4, 1.0, warmup=0, cooldown=0) for step in range(4)] == [1.0] * 4
    assert cosine(0, 4, 1.0, warmup=0) == 1.0
