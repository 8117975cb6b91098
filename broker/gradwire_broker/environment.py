"""The environment variables a worker is started with. Pure.

Three layers, later ones win: the caller's environment without what belongs to the caller's own interpreter;
what gradwire sets (memory left for others on a GPU, as many threads as the worker's share of the processors, and
that they do not keep these while they wait; Keras's backend, which is another in the caller);
what the user says with ``env=``. It is complete before the worker starts, so before any framework is imported.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradwire_wire.interpreters import cleaned

__all__ = ["SPINS", "THREADS", "chooses_threads", "fair_share", "worker_environment"]

_ALWAYS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}

THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
"""Each says how many threads some library may use."""

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SPINS = "1000"
"""How often GNU's OpenMP, which is PyTorch's, looks for its next loop before a thread of it sleeps. By itself it looks for milliseconds, and
takes the processor that the caller wants as soon as the worker has answered: a call of 0.2 ms took up to three times as long."""

_KERAS_BACKENDS = ("tensorflow", "jax", "torch")
_XLA_THREADS = ("NPROC", "PJRT_NPROC")
"""The size of XLA's pool. Its flag against multi-threaded matrix products would change their last bits."""


def chooses_threads(env: Mapping[str, str | None]) -> bool:
    """Whether the user says in ``env=`` how many threads some library gets."""
    return any(env.get(variable) for variable in (*THREADS, *_XLA_THREADS))


def fair_share(share: int, base: Mapping[str, str]) -> int:
    """A worker's share of the processors, within what its program was told to keep to.

    torchrun, for one, sets that for its ranks, which are on one machine and each have workers.
    """
    most = base.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(share, int(most)) if most.isdecimal() and int(most) > 0 else share


def worker_environment(
    base: Mapping[str, str], env: Mapping[str, str | None], *, python: str, framework: str, threads: int
) -> dict[str, str]:
    """All variables for a worker that runs ``python`` with so many threads. In ``env`` None removes a variable."""
    made = {**cleaned(base, python), **_ALWAYS, **dict.fromkeys(THREADS, str(threads))}
    if not any(made.get(name) or env.get(name) for name in _WAITING):
        made["GOMP_SPINCOUNT"] = SPINS
    if framework == "jax":
        made.update(dict.fromkeys(_XLA_THREADS, str(threads)))
    if framework in _KERAS_BACKENDS:
        made["KERAS_BACKEND"] = framework
    made.update((name, value) for name, value in env.items() if value is not None)
    return {name: value for name, value in made.items() if env.get(name, value) is not None}
