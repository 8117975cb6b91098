"""A loaded target of a JAX worker: see `gradwire_workers.program.Program`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Callable, NoReturn, Sequence, Union

import jax
import numpy as np

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import GradwireError, UsageError
from gradwire_wire.tensors.jax import element_type
from gradwire_workers import program as contract
from gradwire_workers.jax.compiled import KeepPlan, RunPlan
from gradwire_workers.jax.flats import JaxFlat
from gradwire_workers.jax.functions import Eager, Signature, Traced, is_untraceable, needs_values
from gradwire_workers.jax.models import RETURN
from gradwire_workers.jax.residuals import Compiled, Interpreted, Recomputed
from gradwire_workers.jax.words import derived, pullback_of
from gradwire_workers.program import Optimizer, Residual, Result, WorkerSite

__all__ = ["Program", "innermost"]

PLANS = 1024  # of each kind, for each target; the least recently used go first
Word = Sequence[Any]
Kept = Any  # tuple[Result, Residual]


class Program(contract.Program):
    """A function, or whatever callable a factory returned. JAX's arrays are values: it has no state here.

    Plans are made once for each (site, word, signature): compiled ones where the target can be traced.
    Operands may be numpy arrays as well: compiled programs take their memory as it is.
    """

    training: Union[bool, None] = None
    generation = 0
    may_have_rules = rules_end = True

    def __init__(self, target: Callable[..., Any], is_module: bool) -> None:
        self.is_module = is_module
        self._target = target
        self._trace = lru_cache(maxsize=PLANS)(self._new_trace)
        self._function = lru_cache(maxsize=PLANS)(self._new_function)
        self._runner = lru_cache(maxsize=PLANS)(self._new_runner)
        self._keeper = lru_cache(maxsize=PLANS)(self._new_keeper)
        self._draws = lru_cache(maxsize=PLANS)(self._new_draws)
        self._not_kept: set[Any] = set()  # what _keep has found to have no pullback at the forward

    def run(self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        signature = _signature(operands)
        return self._runner(self._seedless(site, word, signature), word, signature)(operands)

    def keep(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, Residual]:
        return self._keep(site, word, None, operands)

    def keep_rows(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, Residual]:
        return self._keep(site, word, word[-1][1], operands)

    @staticmethod
    def stack(rows: Sequence[Any], axis: int) -> Any:
        return jax.block_until_ready(jax.numpy.stack(rows, axis))

    def spec(self, site: WorkerSite, avals: Sequence[Aval]) -> tuple[list[Aval], bytes]:
        """From the trace, which runs the target's Python on tracers (at most once a signature) and no array."""
        signature = tuple((a.shape, element_type(a.dtype)) for a in avals)
        try:
            traced = self._trace(self._seedless(site, (), signature), signature)
        except Exception as error:
            if not needs_values(error):
                raise
            raise UsageError(
                "what this function returns cannot be told without running it, since it looks at values or keeps "
                f"them: give options(out_spec=...), or call it outside of compiled code ({_first_line(error)})"
            ) from error
        return traced.avals, traced.structure

    def has_rules(self, site: WorkerSite, avals: Sequence[Aval]) -> bool:
        """Of the trace that ``spec`` has made."""
        signature = tuple((a.shape, element_type(a.dtype)) for a in avals)
        return self._trace(self._seedless(site, (), signature), signature).has_rules

    # -- plans -----------------------------------------------------------------------------------

    def _seedless(self, site: WorkerSite, word: Word, signature: Signature) -> WorkerSite:
        """The site without its seed where the function does not look at it: one plan then serves all seeds."""
        if site.seed is None or site.compile is False:
            return site
        without = replace(site, seed=None)
        return site if self._draws(without, innermost(word, signature)) else without

    def _new_draws(self, site: WorkerSite, signature: Signature) -> bool:
        """Whether seeds matter. They may where it cannot be traced."""
        try:
            return self._new_trace(replace(site, seed=0), signature).draws
        except Exception:  # told, if it is the user's, by whoever traces it next
            return True

    def _new_trace(self, site: WorkerSite, signature: Signature) -> Traced:
        return Traced(JaxFlat(self._target, site), signature, site.seed, check_leaks=site.compile is not True)

    def _new_function(self, site: WorkerSite, signature: Signature) -> Traced | Eager:
        if site.compile is not False:
            try:
                return self._trace(site, signature)
            except Exception as error:
                if site.compile or not is_untraceable(error):
                    raise
        return self._new_eager(site)

    def _new_eager(self, site: WorkerSite) -> Eager:
        return Eager(JaxFlat(self._target, site), site.seed)

    def _new_runner(
        self, site: WorkerSite, word: tuple[Any, ...], signature: Signature
    ) -> Callable[[Sequence[Any]], Result]:
        function = self._function(site, innermost(word, signature))
        if isinstance(function, Traced):
            plan, structure = RunPlan(function, word), b"" if word else function.structure
            return lambda operands: Result(plan(operands), structure)
        return lambda operands: _run_eagerly(function, word, operands)

    def _new_keeper(
        self, site: WorkerSite, word: tuple[Any, ...], rows: tuple[bool, ...] | None, signature: Signature
    ) -> Callable[[Sequence[Any]], Kept]:
        base = innermost(word, signature)
        function = self._function(site, base)
        if not isinstance(function, Traced):
            if rows is not None:
                primal = (*word, ("P", tuple(range(len(signature)))))  # as a traced one is kept: by its rules
                return lambda operands: (
                    self.run(site, primal, operands),
                    Recomputed(self.again(), site, word, operands),
                )
            return lambda operands: self._keep_eagerly(function, site, word, operands)
        plan = KeepPlan(function, word, signature) if rows is None else KeepPlan(function, (), base, rows)
        structure = b"" if word else function.structure

        def keep(operands: Sequence[Any]) -> Kept:
            results, leaves, nbytes = plan(operands)
            again = self.again()
            return Result(results, structure), Compiled(plan, leaves, nbytes, again, site, word, operands)

        return keep

    def _keep(self, site: WorkerSite, word: Any, rows: Any, operands: Sequence[Any]) -> Kept:
        """A target whose pullback JAX cannot give (a callback, say) may still have the derivative asked for later."""
        signature = _signature(operands)
        site = self._seedless(site, word, signature)
        key = (site, word, rows, signature)
        if key not in self._not_kept:
            try:
                return self._keeper(*key)(operands)
            except GradwireError:
                raise
            except Exception as error:
                del error  # where it is the user's own, the plain forward raises it again
        kept = self._keep_operands(site, word, operands)
        if len(self._not_kept) >= PLANS:
            self._not_kept.clear()
        self._not_kept.add(key)
        return kept

    def _keep_operands(self, site: WorkerSite, word: Any, operands: Sequence[Any]) -> Kept:
        again = self.again()
        return self.run(site, word, operands), Recomputed(again, site, word, operands)

    def again(self) -> Any:
        """What residuals ask for what they cannot give: this program, as it is now."""
        return self

    def _keep_eagerly(self, function: Eager, site: WorkerSite, word: Any, operands: Sequence[Any]) -> Kept:
        arrays = [jax.device_put(x) for x in operands]
        again = self.again()
        aside = 0 if word else function.moves
        forward = derived(function, word) if word else function.forward
        results, pullback = pullback_of(forward, arrays, aside)
        jax.block_until_ready((results, pullback))
        own = results if word else function.settled(results)
        residual = Interpreted(own, pullback, again, site, word, arrays, function.lifted)
        return Result(own, b"" if word else function.structure), residual

    # -- state -----------------------------------------------------------------------------------

    def train(self, mode: bool) -> None:
        _refuse("train() and eval()", "pass the mode as an argument, such as f(params, x, train=True)")

    def parameters(self) -> dict[str, Any]:
        _refuse("parameters()")

    def buffers(self) -> dict[str, Any]:
        _refuse("buffers()")

    def state_dict(self) -> dict[str, Any]:
        _refuse("state_dict()")

    def load_state_dict(self, state: dict[str, np.ndarray], strict: bool = True) -> None:
        _refuse("load_state_dict()")

    def grads(self) -> dict[str, Any]:
        _refuse("grads()")

    def requires_grad(self, flag: bool, names: Sequence[str]) -> None:
        _refuse("requires_grad_()")

    def frozen(self) -> list[str]:
        return []

    def optimizer(self, target: Any, kwargs: dict[str, Any], groups: Any = None) -> Optimizer:
        _refuse("optimizer()")

    def functional(
        self, buffers: bool, training: bool | None = None, trainable: bool | None = None
    ) -> NoReturn:
        _refuse("functional()")


def _refuse(verb: str, instead: str = "keep the parameters yourself and pass them as arguments") -> NoReturn:
    raise UsageError(
        f"{verb}: a plain JAX callable has no state in its worker, for JAX arrays are values; {instead}, or have the factory "
        + RETURN
    )


def _signature(operands: Sequence[Any]) -> Signature:
    return tuple((x.shape, x.dtype) for x in operands)


def innermost(word: Word, signature: Signature) -> Signature:
    """The signature of F itself where the derived function ``word`` has this one."""
    for op in reversed(word):
        if op[0] == "V":
            signature = tuple((s[1:], d) if mapped else (s, d) for (s, d), mapped in zip(signature, op[1]))
        elif op[0] != "P":
            signature = signature[: len(signature) - (len(op[1]) if op[0] == "J" else op[2])]
    return signature


def _run_eagerly(function: Eager, word: Word, operands: Sequence[Any]) -> Result:
    try:
        call = derived(function, word) if word else function.forward
        results = jax.block_until_ready(call(*map(jax.device_put, operands)))
    except jax.errors.UnexpectedTracerError as error:
        raise UsageError(
            "this function keeps arrays from one call to the next, which a traced one cannot; restart the worker "
            f"and use options(compile=False) from the first call on ({_first_line(error)})"
        ) from error
    except Exception as error:
        if not needs_values(error) or not any(op[0] == "V" for op in word):
            raise
        raise UsageError(
            "this function looks at values and cannot be batched: use options(vmap='sequential') "
            f"({_first_line(error)})"
        ) from error
    return Result(results if word else function.settled(results), b"" if word else function.structure)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
