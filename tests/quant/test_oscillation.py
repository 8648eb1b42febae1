"""Which weights are frozen: against the algorithm of the paper, written for one weight and in plain numbers."""

import math

import pytest
import torch

from fxq.quant.oscillation import END_FREQUENCY, MOMENTUM, START_FREQUENCY, Oscillation, max_frequency


def frozen_at(integers, highest):
    """Nagel et al. 2022, algorithm 1, for one weight: what it is frozen to, or None."""
    before, direction, frequency, mean = integers[0], 0, 0.0, float(integers[0])
    for now in integers:
        change = now - before
        back = change != 0 and math.copysign(1, change) == -direction
        frequency = MOMENTUM * back + (1 - MOMENTUM) * frequency
        mean = MOMENTUM * now + (1 - MOMENTUM) * mean
        if change:
            direction = math.copysign(1, change)
        if frequency > highest:
            return round(mean)
        before = now
    return None


def noted(oscillation, rows, highest):
    """Integers at which elements are frozen after forwards with these integers; None for elements that are free."""
    for i, now in enumerate(rows):
        oscillation.now.copy_(now)
        oscillation.update(highest, first=i == 0)
    return [int(n) if frozen else None for n, frozen in zip(oscillation.before, oscillation.frozen, strict=True)]


def test_as_in_the_paper():
    torch.manual_seed(0)
    centres, spread = torch.randint(-6, 6, (300,)) + torch.rand(300), torch.rand(300)
    rows = [(centres + spread * torch.randn(300)).round().clamp(-7, 7).to(torch.int8) for _ in range(60)]
    frozen_integers = noted(Oscillation(torch.Size([300]), torch.int8), rows, 0.06)
    wanted = [frozen_at(list(map(int, column)), 0.06) for column in torch.stack(rows).T]
    assert 50 < sum(n is not None for n in wanted) < 290
    differ = sum(a != b for a, b in zip(frozen_integers, wanted, strict=True))
    assert differ <= 6  # means in the middle between two integers, of which float16 has the other side


def test_what_goes_one_way_or_stands_still_stays_free():
    rows = [torch.tensor([n // 4, 3], dtype=torch.int8) for n in range(60)]
    assert noted(Oscillation(torch.Size([2]), torch.int8), rows, END_FREQUENCY) == [None, None]


def test_it_is_frozen_where_it_was_most_of_the_time():
    rows = [torch.tensor([3 - (n % 5 == 4), 200 + (n % 5 == 4)], dtype=torch.uint8) for n in range(60)]
    assert noted(Oscillation(torch.Size([2]), torch.uint8), rows, 0.02) == [3, 200]


@pytest.mark.parametrize(
    ("step", "wanted"),
    [(0, START_FREQUENCY), (50, (START_FREQUENCY + END_FREQUENCY) / 2), (100, END_FREQUENCY), (1000, END_FREQUENCY)],
)
def test_more_and_more_are_frozen(step, wanted):
    assert max_frequency(step, 100) == pytest.approx(wanted)
