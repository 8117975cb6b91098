"""The environment variables a worker is started with. Pure.

Three layers, later ones win: the caller's environment without what belongs to the caller's own interpreter;
what gradwire sets (memory left for others on a GPU, as many threads as the worker's share of the processors);
what the user says with ``env=``. It is complete before the worker starts, so before any framework is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["THREADS", "cleaned", "worker_environment"]

# These tell a Python where its packages are, and the worker's is another one.
_FOREIGN = ("PYTHON", "CONDA_", "_CONDA_", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "_PYI_")
_FOREIGN_EXACT = {"PYENV_VERSION", "PYENV_DIR", "PYENV_VIRTUAL_ENV", "PIPENV_ACTIVE", "POETRY_ACTIVE", "_"}

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

_XLA_THREADS = ("NPROC", "PJRT_NPROC")
"""The size of XLA's pool. Its flag against multi-threaded matrix products would change their last bits."""


def worker_environment(
    base: Mapping[str, str], env: Mapping[str, str | None], *, python: str, framework: str, threads: int
) -> dict[str, str]:
    """All variables for a worker that runs ``python`` with so many threads. In ``env`` None removes a variable."""
    made = {**cleaned(base, python), **_ALWAYS, **dict.fromkeys(THREADS, str(threads))}
    if framework == "jax":
        made.update(dict.fromkeys(_XLA_THREADS, str(threads)))
    made.update((name, value) for name, value in env.items() if value is not None)
    return {name: value for name, value in made.items() if env.get(name, value) is not None}


def cleaned(base: Mapping[str, str], python: str) -> dict[str, str]:
    """The caller's environment as the interpreter ``python`` may see it."""
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_EXACT
    }
    if "PATH" in base:
        kept["PATH"] = _path(base, python)
    return kept


def _path(base: Mapping[str, str], python: str) -> str:
    """PATH without the caller's environment, and with the worker's own where it is one, as when activated."""
    theirs = {os.path.join(base[name], "bin") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if base.get(name)}
    folders = [folder for folder in base["PATH"].split(os.pathsep) if folder not in theirs]
    prefix, name = os.path.split(os.path.dirname(python))
    if name == "bin" and any(
        os.path.exists(os.path.join(prefix, mark)) for mark in ("pyvenv.cfg", "conda-meta")
    ):
        folders = [os.path.join(prefix, "bin"), *folders]
    return os.pathsep.join(folders)
