"""Loops of recurrent layers: one step of all samples, from the gates to the quantized state.

Exponentials are powers of two: the whole part of the power becomes the exponent of the float, and a polynomial gives
the rest.
"""

from __future__ import annotations

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # Numba does not list it

from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.row_loops import scale_products as scale_products
from fxq.backends.loops.code.row_loops import scale_sums as scale_sums

_f, _i = np.float32, np.int32
_LOG2E = _f(1.4426950408889634)
_MAX_EXPONENT = _f(120)
"""Powers of two stay within 2**-120 and 2**120: a sigmoid of these is 1 or 0."""


@helper
def _sigmoid(x):
    power = -x * _LOG2E
    power = -_MAX_EXPONENT if power < -_MAX_EXPONENT else power
    power = _MAX_EXPONENT if power > _MAX_EXPONENT else power
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
    # Taylor series of tanh(x) / x up to x**10: near zero the difference below would lose all digits.
    p = -(_f(8.8632353e-3) * square - _f(2.1869489e-2)) * square - _f(5.3968254e-2)
    p = (p * square + _f(1.3333333e-1)) * square - _f(3.3333333e-1)
    near = x + x * square * p
    far = _f(2) * _sigmoid(_f(2) * x) - _f(1)
    return near if square < _f(0.0625) else far


@helper
def quantize_state(h, integers, qmax, step, min_range):
    """Quantize the state of one sample as `recurrent_steps.round_state` does, and return the factor of its products."""
    size = _f(1)
    factor = _f(1) / step
    if step == 0:
        bits, largest = h.view(np.int32), _i(0)
        for j in range(len(h)):
            largest = max(largest, _i(bits[j] & _i(0x7FFFFFFF)))  # ordered as floats, NaN last
        size = _i(largest).view(np.float32)
        size = min_range if size < min_range else size
        factor = qmax / size
    half, last = qmax + _f(1.5), _f(2) * qmax + _f(1)
    for j in range(len(h)):
        value = h[j] * factor + half  # the conversion below truncates
        value = _f(1) if value < _f(1) else value
        integers[j] = np.uint8(_i(last if value > last else value))
    return size


@compiled("f* u8* f* i i f f f")
def keep(h, integers, sizes, samples, width, qmax, step, min_range):
    """Quantize a state, float32 (samples, width), to uint8. `sizes` gets the factor of each sample's products."""
    h, integers, sizes = carray(h, (samples, width)), carray(integers, (samples, width)), carray(sizes, samples)
    for n in range(samples):
        sizes[n] = quantize_state(h[n], integers[n], qmax, step, min_range)


@compiled("f* f* f* u8* f* i i f f f")
def lstm(gates, cell, h, integers, sizes, samples, hidden, qmax, step, min_range):
    """Compute one step of an LSTM, and quantize its state.

    Args:
        gates: float32 (samples, 4 * hidden), in the order of `recurrent_steps.lstm`.
        cell: float32 (samples, hidden), overwritten.
        h: float32 (samples, hidden), written.
        integers: uint8 (samples, hidden), written: `h` quantized.
        sizes: float32 (samples,), written: factor of the products of a sample's integers.
        samples: Number of samples.
        hidden: Values of each state.
        qmax: Number of integers on either side of zero.
        step: Scale of the state; 0 if it is dynamic, one scale per sample.
        min_range: Smallest dynamic range.
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
        sizes[n] = quantize_state(y, integers[n], qmax, step, min_range)


@compiled("f* f* f* f* u8* f* i i f f f")
def gru(gates, new, last, h, integers, sizes, samples, hidden, qmax, step, min_range):
    """Compute one step of a GRU, and quantize its state.

    `gates` is float32 (samples, 3 * hidden); its last third is the state's part of the new gate. `new` is the input's
    part of that gate and `last` the previous state, both float32 (samples, hidden). Further arguments are those of
    `lstm`.
    """
    shape = (samples, hidden)
    gates, new, last = carray(gates, (samples, 3 * hidden)), carray(new, shape), carray(last, shape)
    h, integers, sizes = carray(h, shape), carray(integers, shape), carray(sizes, samples)
    for n in range(samples):
        gate, x, before, y = gates[n], new[n], last[n], h[n]
        reset, update, state_part = gate[:hidden], gate[hidden : 2 * hidden], gate[2 * hidden :]
        for j in range(hidden):
            value = _tanh(x[j] + _sigmoid(reset[j]) * state_part[j])
            y[j] = value + _sigmoid(update[j]) * (before[j] - value)
        sizes[n] = quantize_state(y, integers[n], qmax, step, min_range)


@compiled("f* i f* u8* f* i i f f f")
def rnn(gates, is_tanh, h, integers, sizes, samples, hidden, qmax, step, min_range):
    """Compute one step of an RNN, and quantize its state.

    `gates` is float32 (samples, hidden). The activation function is tanh, or relu if `is_tanh` is 0. Further arguments
    are those of `lstm`.
    """
    shape = (samples, hidden)
    gates, h, integers, sizes = carray(gates, shape), carray(h, shape), carray(integers, shape), carray(sizes, samples)
    for n in range(samples):
        gate, y = gates[n], h[n]
        for j in range(hidden):
            y[j] = _tanh(gate[j]) if is_tanh else (_f(0) if gate[j] < _f(0) else gate[j])
        sizes[n] = quantize_state(y, integers[n], qmax, step, min_range)


@compiled("f* f* f* f* i i")
def float_lstm(gates, inputs, cell, h, samples, hidden):
    """Compute one step of an LSTM with float states.

    Args:
        gates: float32 (samples, 4 * hidden), overwritten: part of the gates that the state adds, in the order input,
            forget, cell, output.
        inputs: float32 (samples, 4 * hidden): part that the input adds.
        cell: float32 (samples, hidden), overwritten.
        h: float32 (samples, hidden), written.
        samples: Number of samples.
        hidden: Values of each state.
    """
    shape = (samples, hidden)
    gates, inputs = carray(gates, (samples, 4 * hidden)), carray(inputs, (samples, 4 * hidden))
    cell, h = carray(cell, shape), carray(h, shape)
    for n in range(samples):
        gate, added, c, y = gates[n], inputs[n], cell[n], h[n]
        for j in range(4 * hidden):
            gate[j] += added[j]
        i, f, g, o = gate[:hidden], gate[hidden : 2 * hidden], gate[2 * hidden : 3 * hidden], gate[3 * hidden :]
        for j in range(hidden):
            c[j] = _sigmoid(f[j]) * c[j] + _sigmoid(i[j]) * _tanh(g[j])
            y[j] = _sigmoid(o[j]) * _tanh(c[j])


@compiled("f* f* f* f* i i")
def float_gru(gates, inputs, last, h, samples, hidden):
    """Compute one step of a GRU with float states.

    `gates` and `inputs` are float32 (samples, 3 * hidden), in the order reset, update, new; `last` is the previous
    state, float32 (samples, hidden). Further arguments are those of `float_lstm`.
    """
    shape = (samples, hidden)
    gates, inputs = carray(gates, (samples, 3 * hidden)), carray(inputs, (samples, 3 * hidden))
    last, h = carray(last, shape), carray(h, shape)
    for n in range(samples):
        gate, added, before, y = gates[n], inputs[n], last[n], h[n]
        for j in range(2 * hidden):
            gate[j] += added[j]
        reset, update, state_part = gate[:hidden], gate[hidden : 2 * hidden], gate[2 * hidden :]
        x = added[2 * hidden :]
        for j in range(hidden):
            value = _tanh(x[j] + _sigmoid(reset[j]) * state_part[j])
            y[j] = value + _sigmoid(update[j]) * (before[j] - value)


@compiled("f* f* i f* i i")
def float_rnn(gates, inputs, is_tanh, h, samples, hidden):
    """Compute one step of an RNN with float states.

    `gates` and `inputs` are float32 (samples, hidden). The activation function is tanh, or relu if `is_tanh` is 0.
    Further arguments are those of `float_lstm`.
    """
    shape = (samples, hidden)
    gates, inputs, h = carray(gates, shape), carray(inputs, shape), carray(h, shape)
    for n in range(samples):
        gate, added, y = gates[n], inputs[n], h[n]
        for j in range(hidden):
            value = gate[j] + added[j]
            y[j] = _tanh(value) if is_tanh else (_f(0) if value < _f(0) else value)
