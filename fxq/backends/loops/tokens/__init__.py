"""Decoders token by token: what they compute between two attentions as one call of a compiled loop.

A bound graph with states that grow (`fxq/runtime/growing.py`) runs its float ops on a few tokens, and its weight-only
linear layers, as steps of `fxq/backends/loops/code/token_loops.py`. The graph itself stays as it is.
"""
