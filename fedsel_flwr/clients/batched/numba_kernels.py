"""Compiled loops of the backend "numba": one client's training, over its examples and units.

A perceptron of 784-64-30-10 holds 200 KB. Each client is trained from its first step to its last before the next
client. So its data stay in the core's own cache, and no step calls Python or the allocator. Without Numba these
functions are not used.

All parameters are in one vector: for each layer its weights, one row of inputs per unit, and then its biases. Units are
padded to a multiple of `UNITS`, and the rows of activations to a multiple of `EXAMPLES`. The padding is zero and stays
zero. All functions are in this file because a function that Numba has cached does not notice changes in another file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

UNITS, EXAMPLES = 8, 2
"""Number of units and of examples that the innermost loops process at once."""

MISSING = ""
"""The reason why Numba cannot be imported; "" if it can."""
try:
    # By import_module, because the annotations of some versions do not allow wrappers such as _compiled.
    njit: Any = import_module("numba").njit
# Numba is not installed, or not for this NumPy. Or a user's file hides a module that Numba imports.
except Exception as error:
    njit, MISSING = None, f"{type(error).__name__}: {error}"


def _compiled(function: Function) -> Function:
    """Compile a function at its first call, or load it if an earlier process has cached it."""
    if njit is None:
        return function
    # Sums may be reordered and fused with products, because otherwise no sum would use the vector unit. The flags
    # "nnan" and "ninf" are left out, because infinite numbers and NaN show that a training diverged.
    options = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    # Numba finds no folder for its cache.
    except RuntimeError:
        return njit(**options)(function)  # type: ignore[no-any-return]


@_compiled
def _forward(x: Floats, w: Floats, b: Floats, y: Floats) -> None:
    """Set y = x w' + b, shapes (n, d), (m, d), (m,) and (n, m)."""
    # Unrolled by hand, because compilers do not unroll the outer loops. Each loaded value is used in two or four of the
    # eight sums, which stay in registers. The padding makes a loop for the remainder unnecessary.
    for j in range(0, w.shape[0], 4):
        for i in range(0, x.shape[0], 2):
            p0, p1, p2, p3 = b[j], b[j + 1], b[j + 2], b[j + 3]
            q0, q1, q2, q3 = p0, p1, p2, p3
            for k in range(x.shape[1]):
                p, q = x[i, k], x[i + 1, k]
                w0, w1, w2, w3 = w[j, k], w[j + 1, k], w[j + 2, k], w[j + 3, k]
                p0 += p * w0
                p1 += p * w1
                p2 += p * w2
                p3 += p * w3
                q0 += q * w0
                q1 += q * w1
                q2 += q * w2
                q3 += q * w3
            y[i, j], y[i, j + 1], y[i, j + 2], y[i, j + 3] = p0, p1, p2, p3
            y[i + 1, j], y[i + 1, j + 1], y[i + 1, j + 2], y[i + 1, j + 3] = q0, q1, q2, q3


@_compiled
def _by_input(g: Floats, w: Floats, into: Floats) -> None:
    """Set into = g w, shapes (n, m), (m, d) and (n, d)."""
    into[:] = 0
    # Eight units and two examples at once: each row of `into` is read and written once for eight products, and each row
    # of w is read once for two examples.
    for i in range(0, g.shape[0], 2):
        for j in range(0, w.shape[0], 8):
            p0, p1, p2, p3 = g[i, j], g[i, j + 1], g[i, j + 2], g[i, j + 3]
            p4, p5, p6, p7 = g[i, j + 4], g[i, j + 5], g[i, j + 6], g[i, j + 7]
            q0, q1, q2, q3 = g[i + 1, j], g[i + 1, j + 1], g[i + 1, j + 2], g[i + 1, j + 3]
            q4, q5, q6, q7 = g[i + 1, j + 4], g[i + 1, j + 5], g[i + 1, j + 6], g[i + 1, j + 7]
            for k in range(w.shape[1]):
                w0, w1, w2, w3 = w[j, k], w[j + 1, k], w[j + 2, k], w[j + 3, k]
                w4, w5, w6, w7 = w[j + 4, k], w[j + 5, k], w[j + 6, k], w[j + 7, k]
                into[i, k] += p0 * w0 + p1 * w1 + p2 * w2 + p3 * w3 + p4 * w4 + p5 * w5 + p6 * w6 + p7 * w7
                into[i + 1, k] += q0 * w0 + q1 * w1 + q2 * w2 + q3 * w3 + q4 * w4 + q5 * w5 + q6 * w6 + q7 * w7


@_compiled
def _add_product(g: Floats, x: Floats, scale: Any, into: Floats) -> None:
    """Add scale g' x to into, shapes (n, m), (n, d) and (m, d)."""
    # Eight units and two examples at once: each row of x is read once for eight units, each row of `into` once for two
    # examples. The scale multiplies the sixteen factors, not the products.
    for j in range(0, into.shape[0], 8):
        for i in range(0, x.shape[0], 2):
            p0, p1, p2, p3 = scale * g[i, j], scale * g[i, j + 1], scale * g[i, j + 2], scale * g[i, j + 3]
            p4, p5, p6, p7 = scale * g[i, j + 4], scale * g[i, j + 5], scale * g[i, j + 6], scale * g[i, j + 7]
            h = g[i + 1]
            q0, q1, q2, q3 = scale * h[j], scale * h[j + 1], scale * h[j + 2], scale * h[j + 3]
            q4, q5, q6, q7 = scale * h[j + 4], scale * h[j + 5], scale * h[j + 6], scale * h[j + 7]
            for k in range(x.shape[1]):
                p, q = x[i, k], x[i + 1, k]
                into[j, k] += p0 * p + q0 * q
                into[j + 1, k] += p1 * p + q1 * q
                into[j + 2, k] += p2 * p + q2 * q
                into[j + 3, k] += p3 * p + q3 * q
                into[j + 4, k] += p4 * p + q4 * q
                into[j + 5, k] += p5 * p + q5 * q
                into[j + 6, k] += p6 * p + q6 * q
                into[j + 7, k] += p7 * p + q7 * q


@_compiled
def _cross_entropy(z: Floats, labels: Ints, classes: int, share: Any) -> Any:
    """Return the mean loss of logits, shape (n, m), and turn the logits into its gradient; ``share`` is one over n."""
    # Of the type of share, because a Python 0.0 would make the sum a float64.
    loss = share * 0
    # The gradient of the padding.
    z[len(labels) :] = 0
    for i, label in enumerate(labels):
        own = z[i, :classes]
        # A shift does not change softmax, and exp of a number of at most 0 does not overflow.
        most = own.max()
        at_label = own[label] - most
        total = share * 0
        for j in range(classes):
            own[j] = math.exp(own[j] - most)
            total += own[j]
        loss += share * (math.log(total) - at_label)
        for j in range(classes):
            # softmax(z) / n
            own[j] *= share / total
        own[label] -= share
    return loss


@_compiled
def _rectify(x: Floats, by: Floats) -> None:
    """Set x to zero, shape (n, m), wherever ``by`` is at most zero; both may be the same array. NaN stays."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            # Not "if not by > 0", which would hide a NaN.
            if by[i, j] <= 0:
                x[i, j] = 0


@_compiled
def _sgd_step(g: Floats, x: Floats, biased: int, w: Floats, start: Floats, velocity: Floats, constants: Floats) -> None:
    """Take one layer's step; ``w``, ``start`` and ``velocity`` hold its weights followed by its biases.

    The formulas are those of :class:`~fedsel_flwr.clients.batched.steps.StackedSGD`.
    """
    rate, momentum, pull, mu = constants
    # Without momentum the product is added directly to the weights, and no gradient is stored.
    into, scale = w, -rate
    if momentum:
        into, scale = velocity, w.dtype.type(1)
        for k in range(len(w)):
            velocity[k] = momentum * velocity[k] + pull * w[k] - mu * start[k]
    elif pull:
        for k in range(len(w)):
            w[k] = (1 - rate * pull) * w[k] + rate * mu * start[k]
    units, width = g.shape[1], x.shape[1]
    _add_product(g, x, scale, into[: units * width].reshape(units, width))
    for i in range(g.shape[0] if biased else 0):
        for j in range(units):
            into[units * width + j] += scale * g[i, j]
    if momentum:
        for k in range(len(w)):
            w[k] -= rate * velocity[k]


@_compiled
def train_one(
    memory: tuple[Floats, Floats, Floats, Floats],
    start: Floats,
    layers: Ints,
    classes: int,
    data: tuple[Floats, Ints],
    order: Ints,
    sizes: tuple[int, int],
    constants: Floats,
    losses: Floats,
) -> None:
    """Train one client.

    Args:
        memory: Work arrays. The parameters are trained. The velocity is as long, or empty without momentum. Activations
            and their gradients have `EXAMPLES`-padded rows of all layers' widths.
        start: The received parameters.
        layers: For each layer its padded inputs and units, whether it has biases (else they are zero), and whether a
            rectifier follows, shape (n_layers, 4).
        classes: Number of the last layer's units that are not padding.
        data: The inputs of all examples, shape (n, d), and their classes.
        order: Rows of the examples, pass after pass.
        sizes: Number of examples in a pass, and in a step.
        constants: Step length, momentum, weight decay plus mu, mu.
        losses: Receives the loss before each step, shape (n_steps,).
    """
    w, velocity, activations, gradients = memory
    inputs, labels = data
    w[:] = start
    velocity[:] = 0
    seen = 0
    for step in range(len(losses)):
        # The last batch of a pass may be smaller, because no batch holds examples of two passes.
        n = min(sizes[1], sizes[0] - seen % sizes[0])
        rows = order[seen : seen + n]
        seen += n
        height = n + n % EXAMPLES
        x = activations[: height * layers[0, 0]].reshape(height, layers[0, 0])
        for i in range(n):
            x[i] = inputs[rows[i]]
        # Zero examples in the padding add nothing to the products of the step.
        x[n:] = 0
        place, at = 0, x.size
        for d, m, _, rectified in layers:
            y = activations[at : at + height * m].reshape(height, m)
            _forward(x, w[place : place + m * d].reshape(m, d), w[place + m * d : place + m * d + m], y)
            if rectified:
                _rectify(y, y)
            x = y
            place += m * d + m
            at += y.size
        losses[step] = _cross_entropy(x, labels[rows], classes, 1 / w.dtype.type(n))
        g = x
        for layer in range(len(layers) - 1, -1, -1):
            d, m, biased, _ = layers[layer]
            end, place = place, place - m * d - m
            at -= height * m
            x = activations[at - height * d : at].reshape(height, d)
            h = gradients[: height * d].reshape(height, d)
            # Before the step, which changes w. The gradient with respect to the inputs of the first layer is not
            # needed.
            if layer:
                h = gradients[at - height * d : at].reshape(height, d)
                _by_input(g, w[place : place + m * d].reshape(m, d), h)
                if layers[layer - 1, 3]:
                    _rectify(h, x)
            _sgd_step(g, x, biased, w[place:end], start[place:end], velocity[place:end], constants)
            g = h
