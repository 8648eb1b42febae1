"""What a step of a recurrent layer does with its gates, for all samples.

Exponentials are powers of two: the whole part of the power goes into the exponent of the float, a polynomial gives the
rest.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.dot_product import dot
from fxq.backends.loops.code.row_loops import scale_products as scale_products
from fxq.backends.loops.code.row_loops import scale_sums as scale_sums

_f, _i = np.float32, np.int32
_LOG2E = _f(1.4426950408889634)
_MOST = _f(120)
"""Powers of two are kept within 2**-120 and 2**120: a sigmoid with these is 1 or 0."""


@helper
def _sigmoid(x):
    power = -x * _LOG2E
    power = -_MOST if power < -_MOST else power
    power = _MOST if power > _MOST else power
    whole = np.rint(power)
    r = power - whole
    # Taylor series of 2**r up to r**6: |r| <= 1/2
    p = _f(1.5403530e-4) * r + _f(1.3333558e-3)
    p = p * r + _f(9.6181291e-3)
    p = p * r + _f(5.5504109e-2)
    p = p * r + _f(2.4022651e-1)
    p = p * r + _f(6.9314718e-1)
    p = p * r + _f(1)
    two = _i((_i(whole) + _i(127)) << _i(23)).view(np.float32)
    return _f(1) / (_f(1) + p * two)


@helper
def _tanh(x):
    square = x * x
    # Taylor series of tanh(x) / x up to x**10: near zero the difference would lose all digits.
    p = -(_f(8.8632353e-3) * square - _f(2.1869489e-2)) * square - _f(5.3968254e-2)
    p = (p * square + _f(1.3333333e-1)) * square - _f(3.3333333e-1)
    near = x + x * square * p
    far = _f(2) * _sigmoid(_f(2) * x) - _f(1)
    return near if square < _f(0.0625) else far


@helper
def _keep(h, integers, qmax, step, least):
    """Round a sample's state, as `recurrent_steps.round_state` does; what its integers are to be multiplied with."""
    size = _f(1)
    factor = _f(1) / step
    if step == 0:
        bits, largest = h.view(np.int32), _i(0)
        for j in range(len(h)):
            largest = max(largest, _i(bits[j] & _i(0x7FFFFFFF)))  # in the order of floats, NaN the last
        size = _i(largest).view(np.float32)
        size = least if size < least else size
        factor = qmax / size
    half, last = qmax + _f(1.5), _f(2) * qmax + _f(1)
    for j in range(len(h)):
        value = h[j] * factor + half  # what is cut off is a fraction
        value = _f(1) if value < _f(1) else value
        integers[j] = np.uint8(_i(last if value > last else value))
    return size


@compiled("f* u8* f* i i f f f")
def keep(h, integers, sizes, samples, width, qmax, step, least):
    """Round a state, float32 (samples, width), to uint8, and write what each sample's is multiplied with."""
    h, integers, sizes = carray(h, (samples, width)), carray(integers, (samples, width)), carray(sizes, samples)
    for n in range(samples):
        sizes[n] = _keep(h[n], integers[n], qmax, step, least)


@compiled("u8* i i16* i i32* i i")
def multiply(integers, width, wide, weight, sums, count, columns):
    """The product of one sample's state with a weight.

    Args:
        integers: uint8 (width,).
        width: how many values the state has.
        wide: int16 (columns,), written over, zeros behind `width`.
        weight: the address of int8 (count, columns).
        sums: int32 (count,), written.
        count: how many gates there are.
        columns: `width` or more, a multiple of `MULTIPLE`.
    """
    state, integers, sums = carray(wide, width), carray(integers, width), carray(sums, count)
    for k in range(width):
        state[k] = integers[k]
    address = state.ctypes.data
    for j in range(count):
        sums[j] = dot(address, weight + j * columns, columns)


@compiled("f* f* f* u8* f* i i f f f")
def lstm(gates, cell, h, integers, sizes, samples, hidden, qmax, step, least):
    """One step of an lstm, and its state rounded.

    Args:
        gates: float32 (samples, 4 * hidden), in the order of `recurrent_steps.lstm`.
        cell: float32 (samples, hidden), written over.
        h: float32 (samples, hidden), written.
        integers: uint8 (samples, hidden), written: `h` rounded.
        sizes: float32 (samples,), written: what a sample's integers are multiplied with.
        samples: how many there are.
        hidden: how many values each state has.
        qmax: the integers on either side of zero.
        step: the scale of the state; 0: it is measured for each sample.
        least: the least range that is measured.
    """
    shape = (samples, hidden)
    gates, cell, sizes = carray(gates, (samples, 4 * hidden)), carray(cell, shape), carray(sizes, samples)
    h, integers = carray(h, shape), carray(integers, shape)
    for n in range(samples):
        gate, c, y = gates[n], cell[n], h[n]
        i, f, o, g = gate[:hidden], gate[hidden : 2 * hidden], gate[2 * hidden : 3 * hidden], gate[3 * hidden :]
        for j in range(hidden):
            c[j] = _sigmoid(f[j]) * c[j] + _sigmoid(i[j]) * _tanh(_f(-0.5) * g[j])
            y[j] = _sigmoid(o[j]) * _tanh(c[j])
        sizes[n] = _keep(y, integers[n], qmax, step, least)


@compiled("f* f* f* f* u8* f* i i f f f")
def gru(gates, new, last, h, integers, sizes, samples, hidden, qmax, step, least):
    """One step of a gru, and its state rounded.

    The gates are (samples, 3 * hidden), what the state gives to the new gate the last of them. `new` is what the input
    gives to that, `last` the state before, both float32 (samples, hidden). All else is as in `lstm`.
    """
    shape = (samples, hidden)
    gates, new, last = carray(gates, (samples, 3 * hidden)), carray(new, shape), carray(last, shape)
    h, integers, sizes = carray(h, shape), carray(integers, shape), carray(sizes, samples)
    for n in range(samples):
        gate, x, before, y = gates[n], new[n], last[n], h[n]
        reset, update, other = gate[:hidden], gate[hidden : 2 * hidden], gate[2 * hidden :]
        for j in range(hidden):
            value = _tanh(x[j] + _sigmoid(reset[j]) * other[j])
            y[j] = value + _sigmoid(update[j]) * (before[j] - value)
        sizes[n] = _keep(y, integers[n], qmax, step, least)


@compiled("f* i f* u8* f* i i f f f")
def rnn(gates, is_tanh, h, integers, sizes, samples, hidden, qmax, step, least):
    """One step of an rnn, and its state rounded.

    The gates are (samples, hidden), their function is tanh, or relu where `is_tanh` is 0. All else is as in `lstm`.
    """
    shape = (samples, hidden)
    gates, h, integers, sizes = carray(gates, shape), carray(h, shape), carray(integers, shape), carray(sizes, samples)
    for n in range(samples):
        gate, y = gates[n], h[n]
        for j in range(hidden):
            y[j] = _tanh(gate[j]) if is_tanh else (_f(0) if gate[j] < _f(0) else gate[j])
        sizes[n] = _keep(y, integers[n], qmax, step, least)
