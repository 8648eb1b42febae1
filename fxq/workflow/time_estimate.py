"""Estimate of how fast a model is with a backend, made before the model is converted or even calibrated."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fxq.common.isolation import without_autocast
from fxq.common.timed_calls import threads_set_to

log = logging.getLogger("fxq")

MAX_GAIN = 1.5
"""Largest ratio of the time with all possible ops on integers to that with some in float, as prices choose them."""


@dataclass
class Estimate:
    """Time of a call of a model lowered for one backend with all possible ops on integers, and its lower bound.

    Attributes:
        us: microseconds of a call on the example.
        least_share: function that returns the share of the time that is left if ops run in float where that is faster;
            it holds the lowered model. None: it was dropped.
        share_bound: function that returns a lower bound of that share in less time; it holds the lowered model, too.
    """

    us: float
    least_share: Callable[[], float] | None
    share_bound: Callable[[], float] | None = None
    _share: float | None = field(default=None, init=False, repr=False)
    _bound: float | None = field(default=None, init=False, repr=False)

    def cannot_be_below(self, limit_us: float) -> bool:
        """Whether a call takes more than `limit_us` microseconds even with ops in float where that is faster."""
        if self.us <= limit_us or self.us > MAX_GAIN * limit_us:
            return self.us > limit_us
        if self._bound is None and self.share_bound is not None:
            self._bound = _share_of(self.share_bound)
        if self.us * (self._bound or 0.0) > limit_us:
            return True
        if self._share is None and self.least_share is not None:
            self._share = _share_of(self.least_share)
        return self.us * (1 / MAX_GAIN if self._share is None else self._share) > limit_us

    def drop_model(self) -> None:
        """Free the lowered model."""
        self.least_share = self.share_bound = None


def _share_of(share: Callable[[], float]) -> float:
    try:
        with torch.no_grad(), without_autocast(), threads_set_to(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return share()
    except Exception as error:  # engines may raise anything; the conversion reports it
        log.debug("no prices of a trial: %s", error)
        return 0.0
