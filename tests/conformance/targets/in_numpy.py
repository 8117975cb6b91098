"""The functions of the conformance table, in numpy, with the derivatives they bring along."""

import numpy as np


def affine(x, w):
    return np.tanh(x @ w)


def _affine_vjp(x, w):
    y = affine(x, w)

    def pullback(y_bar):
        z_bar = y_bar * (1 - y * y)
        return z_bar @ w.T, x.T @ z_bar

    return y, pullback


def _affine_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = affine(x, w)
    return y, (dx @ w + x @ dw) * (1 - y * y)


affine.vjp, affine.jvp = _affine_vjp, _affine_jvp


def two(x, w):
    return np.tanh(x @ w) * x.sum(), (x**3).sum()


def _two_vjp(x, w):
    t, s = np.tanh(x @ w), x.sum()

    def pullback(out_bar):
        a_bar, b_bar = out_bar
        z_bar = a_bar * s * (1 - t * t)
        x_bar = z_bar @ w.T + (a_bar * t).sum() + b_bar * 3 * x**2
        return x_bar.astype(x.dtype), (x.T @ z_bar).astype(x.dtype)

    return two(x, w), pullback


def _two_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    t = np.tanh(x @ w)
    dt = (dx @ w + x @ dw) * (1 - t * t)
    return two(x, w), (dt * x.sum() + t * dx.sum(), (3 * x**2 * dx).sum())


two.vjp, two.jvp = _two_vjp, _two_jvp


def keywords(x, *, scale=2.0, mode="a", mask=None):
    y = np.sin(x) * x.dtype.type(scale) if mode == "a" else x
    return {"y": y, "aux": (y * 2, mask, mode, 3)}


def _keywords_vjp(x, *, scale=2.0, mode="a", mask=None):
    def pullback(out_bar, kwargs=False):
        y_bar = out_bar["y"] + 2 * out_bar["aux"][0]
        args_bar = ((y_bar * np.cos(x) * scale).astype(x.dtype) if mode == "a" else y_bar,)
        return (args_bar, {}) if kwargs else args_bar

    return keywords(x, scale=scale, mode=mode, mask=mask), pullback


def _keywords_jvp(primals, tangents, *, scale=2.0, mode="a", mask=None):
    (x,), (dx,) = primals, tangents
    dy = (np.cos(x) * dx * scale).astype(x.dtype) if mode == "a" else dx
    return keywords(x, scale=scale, mode=mode, mask=mask), {"y": dy, "aux": (2 * dy, None, None, None)}


keywords.vjp, keywords.jvp = _keywords_vjp, _keywords_jvp


def pick(w, index):
    return (w[index] ** 2).sum(), index * 2


def _pick_vjp(w, index):
    def pullback(out_bar):
        w_bar = np.zeros_like(w)
        np.add.at(w_bar, index, 2 * w[index] * out_bar[0])
        return w_bar, None

    return pick(w, index), pullback


def _pick_jvp(primals, tangents):
    (w, index), (dw, _) = primals, tangents
    return pick(w, index), ((2 * w[index] * dw[index]).sum(), None)


pick.vjp, pick.jvp = _pick_vjp, _pick_jvp


def tree(state, *, step):
    a, (b, factor) = state["a"], state["b"]
    return {"sum": a + b * a.dtype.type(factor), "items": [a * b, {"step": step}]}


def _tree_vjp(state, *, step):
    a, (b, factor) = state["a"], state["b"]

    def pullback(out_bar, kwargs=False):
        sum_bar, product_bar = out_bar["sum"], out_bar["items"][0]
        b_bar = (sum_bar * factor + product_bar * a).astype(a.dtype)
        args_bar = ({"a": sum_bar + product_bar * b, "b": [b_bar, None]},)
        return (args_bar, {"step": None}) if kwargs else args_bar

    return tree(state, step=step), pullback


def _tree_jvp(primals, tangents, *, step):
    a, (b, factor) = primals[0]["a"], primals[0]["b"]
    da, db = tangents[0]["a"], tangents[0]["b"][0]
    out_dot = {"sum": (da + db * factor).astype(a.dtype), "items": [da * b + a * db, {"step": None}]}
    return tree(*primals, step=step), out_dot


tree.vjp, tree.jvp = _tree_vjp, _tree_jvp


class _Shape:
    """Result stand-ins for `spec`."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


affine.spec = lambda x, w: _Shape((x.shape[0], w.shape[1]), x.dtype)
two.spec = lambda x, w: (_Shape((x.shape[0], w.shape[1]), x.dtype), _Shape((), x.dtype))
keywords.spec = lambda x, scale=2.0, mode="a", mask=None: {"y": x, "aux": (x, mask, mode, 3)}
pick.spec = lambda w, index: (_Shape((), w.dtype), index)
tree.spec = lambda state, step: {"sum": state["a"], "items": [state["a"], {"step": step}]}


def smooth(x, w):
    return np.tanh(x @ w) * x.sum(), (x**3).sum()


def _smooth_vjp(x, w):
    t, s = np.tanh(x @ w), x.sum()

    def pullback(out_bar):
        a_bar, b_bar = out_bar
        z_bar = a_bar * s * (1 - t * t)
        x_bar = z_bar @ w.T + (a_bar * t).sum() + b_bar * 3 * x**2
        return x_bar, x.reshape(-1, len(w)).T @ z_bar.reshape(-1, w.shape[1])

    return smooth(x, w), pullback


smooth.vjp, smooth.jvp = _smooth_vjp, _two_jvp
smooth.spec = lambda x, w: (_Shape((*x.shape[:-1], w.shape[1]), x.dtype), _Shape((), x.dtype))
