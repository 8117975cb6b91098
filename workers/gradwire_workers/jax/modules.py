"""A module in a JAX worker: pure programs over its state, which the worker holds, and the verbs about that state.

A call is a pure function of operands, parameters, buffers and a random key. The latter three are handed to the
compiled programs as what the function closes over (`Traced.consts`), so every word, order and batch works as for
functions, no program is compiled anew when they change, and no residual has a copy of them. Where pullbacks
accumulate, the parameters come as operands before the caller's own instead (they are *lifted*), and are pulled along.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Callable, Sequence

import numpy as np

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import ResidualLostError
from gradwire_workers.jax.hidden import Core, Form, InLayer, Replay, with_buffers, with_parameters, without
from gradwire_workers.jax.models import Model
from gradwire_workers.jax.optimizers import OptaxOptimizer
from gradwire_workers.jax.store import Store
from gradwire_workers.keras_layers import check_unconstrained
from gradwire_workers.program import Program, Residual, Result, WorkerSite

__all__ = ["ModuleProgram"]

Word = Any


class ModuleProgram(Program):
    """See `gradwire_workers.program.Program`.

    form: how a call's arguments become the model's. mode: of its calls, where that is not the module's own. buffers: whether
    they are among a call's arguments.
    """

    is_module = may_have_rules = rules_end = True
    stack = staticmethod(Core.stack)

    def __init__(
        self, store: Store, form: Form = without, mode: bool | None = None, buffers: bool = False
    ) -> None:
        self._store, self._form, self._mode, self._has_buffers_given = store, form, mode, buffers
        self._core = Core(store, form, self._names())

    @classmethod
    def of(cls, model: Model) -> ModuleProgram:
        return cls(Store(model))

    @property
    def generation(self) -> int:
        return self._store.generation

    @property
    def moves_in_evaluation(self) -> bool:  # type: ignore[override]
        return bool(self._store.model.moving_in_evaluation)

    @property
    def training(self) -> bool | None:
        own = self._store.training
        return own if own is None or self._mode is None else self._mode

    # -- calls -----------------------------------------------------------------------------------

    def run(self, site: WorkerSite, word: Word, operands: Sequence[Any]) -> Result:
        names = self._core.lifted if site.accumulate and _is_pullback(word) else []
        with self._core.at(self._store.moment(site.seed), moves=True):
            if not names:
                return self._core.run(_site(site, False, self._store.kinds), word, operands)
            result = self._core.run(
                _site(site, True, self._store.kinds),
                shifted(word, len(names), True),
                [*self._lifted(names), *operands],
            )
        axes = tuple(range(len(word) - 1 - _last(word)))
        self._store.accumulate(names, [_summed(x, axes) for x in result.tensors[: len(names)]])
        return Result(result.tensors[len(names) :])

    def keep(self, site: WorkerSite, word: Word, operands: Sequence[Any]) -> tuple[Result, Residual]:
        return self._keep(self._core.keep, site, word, operands)

    def keep_rows(self, site: WorkerSite, word: Word, operands: Sequence[Any]) -> tuple[Result, Residual]:
        return self._keep(self._core.keep_rows, site, word, operands)

    def _keep(
        self, keep: Callable[..., Any], site: WorkerSite, word: Word, operands: Sequence[Any]
    ) -> tuple[Result, Residual]:
        # an anchored forward is pulled for the parameters' sake, whatever its own site says
        names = self._core.lifted if site.accumulate or site.anchored else []
        with self._core.at(self._store.moment(site.seed), moves=True):
            again = self._core.again()
            result, inner = keep(
                _site(site, bool(names), self._store.kinds),
                shifted(word, len(names), False),
                [*self._lifted(names), *operands],
            )
        if names or not self._core.lifted:
            residual = Owned(inner, self._store, names)
        else:
            residual = Unlifted(
                inner, self._store, again, _site(site, True, self._store.kinds), word, operands
            )
        self._store.note(residual)
        return result, residual

    def _names(self) -> list[str]:
        return self._store.trainable() if self._form is without else []

    def _lifted(self, names: Sequence[str]) -> list[Any]:
        return [self._store.parameters[name] for name in names]

    def spec(self, site: WorkerSite, avals: Sequence[Aval]) -> tuple[list[Aval], bytes]:
        with self._core.at(self._store.moment(site.seed), moves=False):
            return self._core.spec(_site(site, False, self._store.kinds), avals)

    def has_rules(self, site: WorkerSite, avals: Sequence[Aval]) -> bool:
        with self._core.at(self._store.moment(site.seed), moves=False):
            return self._core.has_rules(_site(site, False, self._store.kinds), avals)

    # -- state -----------------------------------------------------------------------------------

    def has_moved(self) -> bool:
        return self._store.has_moved and not self._has_buffers_given

    def train(self, mode: bool) -> None:
        """A module without modes stays as it is: ``training`` is None."""
        if self._store.training is not None:
            self._store.training = mode

    def parameters(self) -> dict[str, Any]:
        return dict(self._store.parameters)

    def buffers(self) -> dict[str, Any]:
        return dict(self._store.buffers)

    def state_dict(self) -> dict[str, Any]:
        return {**self._store.parameters, **self._store.buffers}

    def load_state_dict(self, state: dict[str, np.ndarray], strict: bool = True) -> None:
        self._store.load(state, strict)

    def grads(self) -> dict[str, Any]:
        return {name: self._store.gradients.get(name) for name in self._store.parameters}

    def requires_grad(self, flag: bool, names: Sequence[str]) -> None:
        if flag:
            self._store.frozen -= set(names)
        else:
            self._store.freeze(names)
        self._core = Core(self._store, self._form, self._names())

    def frozen(self) -> list[str]:
        return [name for name in self._store.parameters if name in self._store.frozen]

    def aliases(self) -> dict[str, str]:
        """None: what two parts of a module share, its library has under one path."""
        return {}

    def optimizer(
        self, target: Any, kwargs: dict[str, Any], groups: Sequence[dict[str, Any]] | None = None
    ) -> OptaxOptimizer:
        return OptaxOptimizer(self._store, target, kwargs, groups)

    def regularizers(self) -> list[str]:
        return self._store.model.regularizers()

    def functional(
        self, buffers: bool, training: bool | None = None, trainable: bool | None = None
    ) -> ModuleProgram:
        check_unconstrained(self._store.model.variables(self._store.trainable()))
        form: Form = with_buffers if buffers else with_parameters
        return ModuleProgram(
            self._store, form if trainable is None else InLayer(form, trainable), training, buffers
        )


class Owned(Residual):
    """A kept forward of a module: its pullbacks add the parameters' cotangents to the module's gradients.

    names: of the parameters that are the first operands of ``inner``.
    """

    def __init__(self, inner: Residual, store: Store, names: Sequence[str]) -> None:
        self._inner: Residual | None = inner
        self._store, self._names = store, names
        self.nbytes = inner.nbytes

    def lose(self) -> None:
        """Let go of it: its parameters are needed no more."""
        self._inner = None

    def derive(
        self, op: Any, linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Residual | None]:
        inner, count = self._held(), len(self._names)
        (plain,) = shifted((op,), count, False)
        if not (accumulate and count and op[0] == "T"):
            tensors, further = inner.derive(plain, linear, keep=keep, accumulate=False)
            return tensors, None if further is None else self._further(further)
        if keep:  # what is kept is the caller's pullback alone, whose results are what its derivative moves
            (own,) = shifted((("T", (), *op[2:]),), count, True)
            bars, _ = inner.derive(own, linear, keep=False, accumulate=False)
            tensors, further = inner.derive(plain, linear, keep=True, accumulate=False)
        else:
            (both,) = shifted((op,), count, True)
            found, further = inner.derive(both, linear, keep=False, accumulate=False)
            bars, tensors = found[:count], found[count:]
        self._store.accumulate(self._names, bars)
        return tensors, None if further is None else self._further(further)

    def differentiated(self, primals: Word) -> Owned:
        inner = self._held()
        return self._further(inner.differentiated(shifted(primals, len(self._names), False)))

    def derive_rows(
        self, op: Any, axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray
    ) -> list[Any] | None:
        inner, count = self._held(), len(self._names)
        pulled = bool(count) and op[0] == "T"
        (wide,) = shifted((op,), count, pulled)
        found = inner.derive_rows(wide, (False,) * count + tuple(axes), linear, rows)
        if found is None or not pulled:
            return found
        self._store.accumulate(self._names, [_summed(x, (0,)) for x in found[:count]])
        return found[count:]

    def derive_batch(self, op: Any, mapped: tuple[bool, ...], linear: Sequence[Any]) -> list[Any] | None:
        (plain,) = shifted((op,), len(self._names), False)
        return self._held().derive_batch(plain, mapped, linear)

    def _held(self) -> Residual:
        if self._inner is None:
            raise ResidualLostError(
                "the parameters were changed many times (optimizer steps or load_state_dict) since the forward whose gradient "
                "is asked for, and it was let go. Run the forward again"
            )
        return self._inner

    def _further(self, inner: Residual) -> Owned:
        residual = Owned(inner, self._store, self._names)
        self._store.note(residual)
        return residual


class Unlifted(Owned):
    """A kept forward whose site did not say that its pullbacks would accumulate. If one does, the forward runs again."""

    def __init__(
        self,
        inner: Residual,
        store: Store,
        again: Replay,
        site: WorkerSite,
        word: Word,
        operands: Sequence[Any],
    ) -> None:
        super().__init__(inner, store, [])
        self._again, self._site, self._word, self._operands = again, site, word, list(operands)

    def lose(self) -> None:
        super().lose()
        self._operands.clear()

    def differentiated(self, primals: Word) -> Owned:
        inner = self._held()
        residual = Unlifted(
            inner.differentiated(primals),
            self._store,
            self._again,
            self._site,
            (*self._word, *primals),
            self._operands,
        )
        self._store.note(residual)
        return residual

    def derive(
        self, op: Any, linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Residual | None]:
        found = super().derive(op, linear, keep=keep, accumulate=False)
        if accumulate and op[0] == "T":
            names, values = self._again.lifted
            word = shifted((*self._word, ("T", (), *op[2:])), len(names), True)
            bars = self._again.run(self._site, word, [*values, *self._operands, *linear]).tensors
            self._store.accumulate(names, bars)
        return found


@dataclass(frozen=True)
class ModuleSite(WorkerSite):
    """What plans are kept by. ``kinds``: which dtypes the state has. The seed is a value like others."""

    kinds: int = 0


@lru_cache(maxsize=4096)
def _site(site: WorkerSite, lifted: bool, kinds: int) -> ModuleSite:
    facts = {f.name: getattr(site, f.name) for f in fields(site)}
    return ModuleSite(**{**facts, "seed": None, "accumulate": lifted, "kinds": kinds})


@lru_cache(maxsize=4096)
def shifted(word: Word, count: int, pull: bool) -> Word:
    """The word for ``count`` more operands in front; with ``pull`` its last pullback is with respect to these as well."""
    last = _last(word) if pull else -1
    return tuple(_shifted(op, count, i == last) for i, op in enumerate(word)) if count else word


def _shifted(op: Any, count: int, pull: bool) -> Any:
    if op[0] == "V":
        return ("V", (False,) * count + tuple(op[1]))
    wrt = tuple(i + count for i in op[1])
    return (op[0], (*range(count), *wrt) if pull else wrt, *op[2:])


def _last(word: Word) -> int:
    """Where the word's last derivative is; -1 where there is none."""
    return max((i for i, op in enumerate(word) if op[0] in "JT"), default=-1)


def _is_pullback(word: Word) -> bool:
    last = _last(word)
    return last >= 0 and word[last][0] == "T"


def _summed(x: Any, axes: tuple[int, ...]) -> Any:
    return x.sum(axes) if axes and x is not None else x
