"""Support for models of other libraries, imported when such a model is used."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def decoder_support(model: nn.Module) -> Any:
    """Module of fxq that quantizes a model as a decoder of its library; None if it is no such decoder."""
    if "transformers" not in sys.modules:
        return None
    from fxq.integrations import transformers as support

    return support if support.is_decoder(model) else None
