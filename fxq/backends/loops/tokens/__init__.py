"""Programs for single tokens: one compiled call runs the layers of a decoder, attention to its cache included.

A bound graph with states that grow (`fxq/runtime/growing.py`), in float or in integers, runs its float ops on a few
tokens, and its weight-only linear layers, as steps of `fxq/backends/loops/code/token_loops.py`. The graph itself stays
as it is.
"""
