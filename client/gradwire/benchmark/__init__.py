"""What ``gradwire bench`` measures, and how; see docs/benchmarks.md. Not loaded by ``import gradwire``.

``plan``: what is asked of each caller. ``caller``: a process of its own for each caller family, which measures. ``beside``:
the same work through a pipe. ``report`` and ``picture``: what becomes of the figures. ``far_end/``: files that the worker
(or the pipe's server) loads, in its own environment.
"""
