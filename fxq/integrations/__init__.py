"""Support for models of other libraries, imported when such a model is used."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def generator_support(model: nn.Module) -> Any:
    """Module of fxq that quantizes a model which generates, with the calls of its library; None for other models."""
    if "transformers" not in sys.modules:
        return None
    from fxq.integrations import transformers as support

    return support if support.generates(model) else None
