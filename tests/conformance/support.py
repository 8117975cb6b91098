"""Which transformation of which caller goes through which worker, and with which sentence the others are refused.

`tests.conformance.test_transforms` holds every cell of this table to what it says.
`python -m tests.conformance.support` writes it as docs/reference/support.md.
"""

from __future__ import annotations

import importlib
import pathlib
from typing import Any, NamedTuple

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "support.md"
WORKERS = ("torch", "tensorflow", "jax", "numpy")
HEADINGS = {"torch": "torch", "tensorflow": "TensorFlow", "jax": "JAX", "numpy": "numpy"}


class Caller(NamedTuple):
    """framework: whose transformations these are. options: of its `run`."""

    title: str
    framework: str
    options: dict[str, Any]

    @property
    def transforms(self) -> Any:
        return importlib.import_module(f"tests.conformance.transforms.in_{self.framework}")


CALLERS = {
    "jax": Caller("JAX", "jax", {"compiled": False}),
    "jax-jit": Caller("JAX, all of it under `jit`", "jax", {"compiled": True}),
    "torch": Caller("torch", "torch", {}),
    "tensorflow": Caller("TensorFlow", "tensorflow", {}),
    "numpy": Caller("numpy", "numpy", {}),
}
ROWS = [(caller, cell) for caller, c in CALLERS.items() for cell in c.transforms.CELLS]

# ---- What is refused: by sentence, the cells -----------------------------------------------------------------------

SECOND = "smooth is a numpy function, and these have first derivatives only: a second one was asked for"
OF_NUMPY = {  # by a numpy worker alone, since numpy has no derivatives but those a function brings along
    "jax": ("hessian", "grad of grad", "hessian of vmap"),
    "torch": (
        *("double backward", "func.hessian", "func.grad of func.grad", "autograd.functional.hessian"),
        *("gradgradcheck", "func.hessian of func.vmap"),
    ),
    "tensorflow": (
        *("nested tapes", "tf.function with an unknown batch, nested tapes in it"),
        "tf.function, nested tapes around it",
        # TensorFlow makes its tangents by differentiating the pullback; Remote.jvp does not
        *("ForwardAccumulator", "tf.function, ForwardAccumulator around it"),
    ),
    "numpy": (),
}
OF_ALL = {
    "torch.func's transforms (grad, vjp, jvp, vmap) and forward_ad inside a compiled function cannot pass through a "
    "remote call. Put the transform outside, or its function under torch.compiler.disable": (
        *("func.grad in compile", "func.jvp in compile", "func.vmap in compile"),
    ),
    "is_grads_batched=True, torch.autograd.functional with vectorize=True and gradcheck(check_batched_grad=True) "
    "cannot pass through a remote call. Use torch.func.jacrev (which makes one batched pullback), or leave them out": (
        *("is_grads_batched", "functional.jacobian, vectorize"),
    ),
    "a tf.autodiff.ForwardAccumulator cannot pass through a remote call inside a tf.function (TensorFlow would take "
    "its tangent for zero). Call it outside of the tf.function, or use remote.jvp": (
        "tf.function, ForwardAccumulator in it",
    ),
    "gradwire_calls_another_process__use_jit_compile_False": ("tf.function, jit_compile",),
}


def refusal(caller: str, cell: str, worker: str) -> str | None:
    """The sentence of the error; None where the cell works."""
    for sentence, cells in OF_ALL.items():
        if cell in cells:
            return sentence
    return SECOND if worker == "numpy" and cell in OF_NUMPY[CALLERS[caller].framework] else None


def run(caller: str, cell: str, function: Any, x: Any, w: Any) -> Any:
    """The transformation of the function at numpy arrays."""
    c = CALLERS[caller]
    return c.transforms.run(cell, function, x, w, **c.options)


# ---- The page ------------------------------------------------------------------------------------------------------

HEAD = """\
# What goes through a remote call

One table for each caller: its transformations of a remote function `smooth(x, w)` with two results, by the
framework of the worker that has it. ✓: the results are those of the caller's own framework in process, to
1e-9 in float64. Otherwise the sentence of the error that is raised; nothing is silently wrong.

This page is written by `python -m tests.conformance.support`, and `tests/conformance/test_transforms.py`
holds every cell to what it says.
"""


def page() -> str:
    """The table in Markdown."""
    parts = [HEAD]
    for caller, (title, _, _) in CALLERS.items():
        parts.append(
            f"\n## {title}\n\n| | {' | '.join(HEADINGS[w] for w in WORKERS)} |\n|---|---|---|---|---|\n"
        )
        for cell in (cell for c, cell in ROWS if c == caller):
            found = [refusal(caller, cell, worker) for worker in WORKERS]
            parts.append(f"| {cell} | {' | '.join(_cell(sentence) for sentence in found)} |\n")
    return "".join(parts)


def _cell(sentence: str | None) -> str:
    if sentence is None:
        return "✓"
    return sentence.replace("_", "\\_").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
