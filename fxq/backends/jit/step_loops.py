"""What a step of a recurrent layer does behind its integer product, for all samples: one loop for all of it.

Exponentials are powers of two: the whole part of the power goes into the exponent of the float, a polynomial gives the
rest.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from fxq.backends.jit.compiler import compiled, helper
from fxq.backends.jit.dot_product import dot

_f, _i = np.float32, np.int32
_LOG2E = _f(1.4426950408889634)
_MOST = _f(120)
"""Powers of two are kept within 2**-120 and 2**120: a sigmoid with these is 1 or 0."""


@helper
def _sigmoid(x):  # type: ignore[no-untyped-def]
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
def _tanh(x):  # type: ignore[no-untyped-def]
    return _f(2) * _sigmoid(_f(2) * x) - _f(1)


@helper
def _read(product, sums, is_plain, zeros, scale, size, bias, gate):  # type: ignore[no-untyped-def]
    """What one sample's product and the input give to its gates; `sums` where it is not scaled yet."""
    if is_plain:
        for j in range(len(gate)):
            gate[j] = _f(sums[j] - zeros[j]) * (scale[j] * size) + bias[j]
    else:
        for j in range(len(gate)):
            gate[j] = product[j] * size + bias[j]


@helper
def _keep(h, integers, qmax, step, least):  # type: ignore[no-untyped-def]
    """Round a sample's state, as `recurrent_steps.keep` does; what its integers are to be multiplied with."""
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
def keep(h, integers, sizes, samples, width, qmax, step, least):  # type: ignore[no-untyped-def]
    """Round a state, float32 (samples, width), to uint8, and write what each sample's is multiplied with."""
    h, integers, sizes = carray(h, (samples, width)), carray(integers, (samples, width)), carray(sizes, samples)
    for n in range(samples):
        sizes[n] = _keep(h[n], integers[n], qmax, step, least)


@compiled("u8* i i16* i i32* i i")
def multiply(integers, width, wide, weight, sums, count, columns):  # type: ignore[no-untyped-def]
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


@compiled("f* i32* i i32* f* f* f* f* f* u8* f* i i f f f")
def lstm(  # type: ignore[no-untyped-def]
    product, sums, is_plain, zeros, scale, bias, gates, cell, h, integers, sizes, samples, hidden, qmax, step, least
):
    """One step of an lstm behind its product; for gates and their order see `recurrent_steps.lstm`.

    Args:
        product: float32 (samples, 4 * hidden), the product with the state, scaled but for `sizes`.
        sums: int32 of that shape: the same, not scaled.
        is_plain: 1 where `sums` is read, else `product` is.
        zeros: int32 (4 * hidden,), taken off `sums`.
        scale: float32 (4 * hidden,), that of `sums`.
        bias: float32 (samples, 4 * hidden), what is added.
        gates: float32 (4 * hidden,), written over.
        cell: float32 (samples, hidden), written over.
        h: float32 (samples, hidden), written.
        integers: uint8 (samples, hidden), written: `h` rounded.
        sizes: float32 (samples,), read and then written: what a sample's integers are multiplied with.
        samples: how many there are.
        hidden: how many values each state has.
        qmax: the integers on either side of zero.
        step: the scale of the state; 0: it is measured for each sample.
        least: the least range that is measured.
    """
    count = 4 * hidden
    product, sums, bias = carray(product, (samples, count)), carray(sums, (samples, count)), carray(bias, (samples, count))
    zeros, scale, gates, sizes = carray(zeros, count), carray(scale, count), carray(gates, count), carray(sizes, samples)
    cell, h, integers = carray(cell, (samples, hidden)), carray(h, (samples, hidden)), carray(integers, (samples, hidden))
    for n in range(samples):
        _read(product[n], sums[n], is_plain, zeros, scale, sizes[n], bias[n], gates)
        i, f, o, g = gates[:hidden], gates[hidden : 2 * hidden], gates[2 * hidden : 3 * hidden], gates[3 * hidden :]
        c, y = cell[n], h[n]
        for j in range(hidden):
            c[j] = _sigmoid(f[j]) * c[j] + _sigmoid(i[j]) * (_f(1) - _f(2) * _sigmoid(g[j]))
            y[j] = _sigmoid(o[j]) * _tanh(c[j])
        sizes[n] = _keep(y, integers[n], qmax, step, least)


@compiled("f* i32* i i32* f* f* f* f* f* f* u8* f* i i f f f")
def gru(  # type: ignore[no-untyped-def]
    product, sums, is_plain, zeros, scale, bias, gates, new, last, h, integers, sizes, samples, hidden, qmax, step, least
):
    """One step of a gru behind its product. What is not said here is as in `lstm`, with 3 gates.

    Args:
        new: float32 (samples, hidden), what the input gives to the new gate.
        last: float32 (samples, hidden), the state before.
    """
    count = 3 * hidden
    product, sums, bias = carray(product, (samples, count)), carray(sums, (samples, count)), carray(bias, (samples, count))
    zeros, scale, gates, sizes = carray(zeros, count), carray(scale, count), carray(gates, count), carray(sizes, samples)
    new, last = carray(new, (samples, hidden)), carray(last, (samples, hidden))
    h, integers = carray(h, (samples, hidden)), carray(integers, (samples, hidden))
    for n in range(samples):
        _read(product[n], sums[n], is_plain, zeros, scale, sizes[n], bias[n], gates)
        reset, update, other = gates[:hidden], gates[hidden : 2 * hidden], gates[2 * hidden :]
        x, before, y = new[n], last[n], h[n]
        for j in range(hidden):
            value = _tanh(x[j] + _sigmoid(reset[j]) * other[j])
            y[j] = value + _sigmoid(update[j]) * (before[j] - value)
        sizes[n] = _keep(y, integers[n], qmax, step, least)


@compiled("f* i32* i i32* f* f* i f* u8* f* i i f f f")
def rnn(  # type: ignore[no-untyped-def]
    product, sums, is_plain, zeros, scale, bias, is_tanh, h, integers, sizes, samples, hidden, qmax, step, least
):
    """One step of an rnn behind its product: as in `lstm`, with one gate, whose nonlinearity is tanh or relu."""
    shape = (samples, hidden)
    product, sums, bias = carray(product, shape), carray(sums, shape), carray(bias, shape)
    zeros, scale, sizes = carray(zeros, hidden), carray(scale, hidden), carray(sizes, samples)
    h, integers = carray(h, shape), carray(integers, shape)
    for n in range(samples):
        y = h[n]
        _read(product[n], sums[n], is_plain, zeros, scale, sizes[n], bias[n], y)
        for j in range(hidden):
            y[j] = _tanh(y[j]) if is_tanh else (_f(0) if y[j] < _f(0) else y[j])
        sizes[n] = _keep(y, integers[n], qmax, step, least)
