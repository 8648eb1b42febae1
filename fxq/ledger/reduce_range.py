"""Choice of the role that has 7 bits (reduce_range) if kernels saturate with 8 bits of both roles."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from fxq.graph.info import info
from fxq.ledger.ledger import ReducedRange
from fxq.ledger.output_check import output_sqnrs, rank
from fxq.pipeline.manager import PassManager
from fxq.quant.spec import REDUCIBLE_ROLES
from fxq.recipe.pass_base import Pass

log = logging.getLogger("fxq")


def run_with_reduced_range(manager: PassManager, passes: Sequence[Pass]) -> tuple[PassManager, ReducedRange | None]:
    """Run passes up to the qdq graph; if layers saturate with 8 bits, choose the role that has 7 bits.

    With `Recipe.reduce_range="auto"`, the passes run for both roles, and both graphs run on the recorded samples. The
    role whose output has the higher SQNR against the float model's is chosen (see `output_sqnrs`).

    Args:
        manager: manager of the calibrated graph.
        passes: the passes to run.

    Returns:
        The manager of the resulting graph, and the choice; None if no layer saturates.
    """
    plans = (info(node).plan for node in manager.gm.graph.nodes)
    if not any(plan.overflows for plan in plans if plan is not None):
        manager.run(passes)
        return manager, None
    if manager.context.recipe.reduce_range != "auto":
        manager.run(passes)
        return manager, ReducedRange(manager.context.reduce_range)
    forks = {role: manager.fork(reduce_range=role) for role in REDUCIBLE_ROLES}
    with warnings.catch_warnings():
        for fork in forks.values():
            fork.run(passes)
            warnings.simplefilter("ignore")  # the second fork would repeat the warnings of the first
    sqnrs = dict(zip(forks, output_sqnrs([fork.gm for fork in forks.values()], manager.context), strict=True))
    best = max(forks, key=lambda role: rank(sqnrs[role]))
    log.info("7 bits for %s; SQNR of the output by the role that has 7 bits: %s", best, sqnrs)
    return forks[best], ReducedRange(best, sqnrs)
