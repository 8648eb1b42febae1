"""Which role gives up a bit where kernels overflow with 8: the recipe's, or the one with which the output is better."""

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
    """Run passes as far as the qdq graph; where layers overflow with 8 bits, with 7 bits for the better of two roles.

    With `Recipe.reduce_range="auto"` the passes run for either role, and both graphs run on the recorded samples. The
    role whose output has the higher SQNR against the float model's stays (see `output_sqnrs`).

    Returns:
        The manager of the graph to go on with, and what was chosen; None where nothing overflows.
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
            warnings.simplefilter("ignore")  # the other one would say it all again
    found = dict(zip(forks, output_sqnrs([fork.gm for fork in forks.values()], manager.context), strict=True))
    best = max(forks, key=lambda role: rank(found[role]))
    log.info("7 bits for %s; the output's SQNR by what has 7 bits: %s", best, found)
    return forks[best], ReducedRange(best, found)
