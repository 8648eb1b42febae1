"""Networks as programs: lists of steps on memory of their own, which one call of compiled code runs."""
