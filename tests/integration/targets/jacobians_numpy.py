"""What a Jacobian, or a batch, is asked of, in numpy."""

import numpy as np

BUFFER = np.empty(4)


def noisy(x):
    return noisy.vjp(x)[0]


def _noisy_vjp(x):
    mask = (np.random.random(x.shape) < 0.5) * 2
    return mask * x * x, lambda out_bar: (2 * mask * x * out_bar,)


noisy.vjp = _noisy_vjp
noisy.spec = lambda x: x


def thrifty(x, w):
    """Writes its result, and its cotangent, to the memory of the last one, and to its arguments."""
    w *= 2
    np.multiply(x, w, out=BUFFER)
    return BUFFER


def _thrifty_vjp(x, w):
    w = 2 * w
    bar = np.empty(4)

    def pullback(out_bar):
        np.multiply(out_bar, w, out=bar)
        out_bar *= x
        out_bar *= 2
        return bar, out_bar

    return x * w, pullback


def _thrifty_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    dx *= 2 * w
    dw *= 2 * x
    dx += dw
    np.multiply(x, 2 * w, out=BUFFER)
    return BUFFER, dx


thrifty.vjp, thrifty.jvp = _thrifty_vjp, _thrifty_jvp
thrifty.spec = lambda x, w: x
