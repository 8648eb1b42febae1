"""Models that trace only in part: the largest submodules that can be traced are quantized in their places."""
