"""Steps of an optimizer in one message each: those that are waited for, and those that are submitted.

A submitted step goes by the pipeline (`gradwire.pipeline`), which keeps the order of its calls. Where it cannot go that way (while the bridge is
traced, over tcp, with arguments that no packet takes), it is made at once, after everything that was submitted before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwire.background import futures_in, with_results
from gradwire.families import exported, face_named, in_callers_modes, tensors_named
from gradwire.site import Site
from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import UsageError
from gradwire_wire.words import Op

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gradwire.optimizer import Optimizer
    from gradwire.remote import Remote

__all__ = ["minimize", "submit"]


def minimize(remote: Remote, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """See `Optimizer.minimize`."""
    step = _read(remote, "minimize", op, args, kwargs)
    remote._drain()
    return step.make()


def submit(
    optimizer: Optimizer, remote: Remote, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Future[Any]:
    """See `Optimizer.submit`."""
    if futures_in([args, kwargs]):
        args, kwargs = with_results([args, kwargs])
    step = _read(remote, "submit", op, args, kwargs)
    steps, background = remote.handle.submitted_steps(), remote._background
    background.anteroom.drain()
    pipeline = remote.handle.pipeline(background)
    if pipeline is not None:
        pipeline.check_may_wait()
        steps.make_room()
        future = steps.new_future(pipeline)
        begun = pipeline.submit(remote.handle.step_submission(pipeline, step, optimizer), True, future)
        if begun is not None:
            return steps.noted(future)
    remote._drain()
    steps.raise_failed()
    return steps.noted(steps.done(step.make))


class _Step(NamedTuple):
    """One, with its arguments ready to be sent. adopt: makes a tensor of a result's carrier."""

    remote: Remote
    site: Site
    op: Op
    carriers: list[Carrier]
    adopt: Callable[[Carrier], Any]

    def make(self) -> Any:
        """It, and its result."""
        return self.remote.handle.minimize(self.site, self.op, self.carriers).tree(self.adopt)


def _read(remote: Remote, verb: str, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Step:
    """What is called. UsageError where the step would not happen, or an argument wants a gradient."""
    remote._check_that_it_happens(verb)
    structure, leaves, family = remote._read(args, kwargs)
    _check_of_constants(remote, verb, structure, leaves, family)
    site = remote._plain_site(structure, accumulate=True)
    adopt = tensors_named(family).adopt
    if family != "numpy":
        adopt = in_callers_modes(adopt)
    return _Step(remote, site, op, exported(leaves, structure), adopt)


def _check_of_constants(remote: Remote, verb: str, structure: bytes, leaves: list[Any], family: str) -> None:
    """UsageError where somebody is recording what made these arguments: no gradient would come back to it."""
    is_plain = getattr(face_named(family), "is_plain", None)
    if is_plain is not None and not is_plain(remote._plain_site(structure, False), leaves):
        raise UsageError(
            f"{verb}() of an optimizer of {remote.handle.name} gives no gradient to what made its arguments, and one of them requires "
            "it: detach() it, or call the module, then backward(), step() and zero_grad()"
        )
