"""Figures as a table, and the facts of the machine they are of."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import indent
from typing import Any

__all__ = ["PARTS", "machine", "tables", "why_not"]

PARTS = ("convert", "copy", "wake", "queue", "compute", "return")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def machine() -> dict[str, Any]:
    """What the figures depend on, as far as it can be read."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "governor": _text(GOVERNOR) or "not readable",
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": dict(_versions()),
        "lane": os.environ.get("GRADWIRE_LANE", "page"),
    }


def _processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in _text(Path("/proc/cpuinfo")).splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("gradwire", "numpy", "pyzmq", "msgpack", "torch", "jax", "tensorflow", "tensorflow-cpu"):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def tables(results: Mapping[str, Any]) -> str:
    """The results for a terminal: machine, then a table for each work, then the sizes."""
    parts = ["\n".join(_facts(results))]
    parts += [_aligned(_work_rows(results, name)) for name in results["works"]]
    parts.append(_aligned(_size_rows(results)))
    failed = [
        f"{name}: {why_not(figures)}" for name, figures in results["callers"].items() if "error" in figures
    ]
    if "error" in results["pipe"]:
        failed.append(f"pickle over a pipe: {results['pipe']['error']}")
    return "\n\n".join([*parts, *(["Not measured:\n" + indent("\n".join(failed), "  ")] if failed else [])])


def why_not(figures: Mapping[str, Any]) -> str:
    """Why a caller has no figures: a sentence, and where the target raised its traceback in the worker."""
    traceback = figures.get("traceback", "").rstrip()
    return f"{figures['error']}\n\n{traceback}" if traceback else str(figures["error"])


def _facts(results: Mapping[str, Any]) -> Iterator[str]:
    m, worker = results["machine"], results["worker"]
    yield f"{m['date']}  {m['processor']}, {m['processors']} processors, governor {m['governor']}, load {m['load']}"
    yield f"{m['system']}, Python {m['python']}: " + ", ".join(f"{k} {v}" for k, v in m["packages"].items())
    yield (
        f"worker: {worker.get('framework')} {worker.get('version')}, Python {worker.get('python')}, "
        f"{worker.get('threads')} threads, tensors by {worker.get('carried_by')}"
    )
    yield "µs; the parts are medians of traced calls, which take some tens of µs longer; in order of time but for convert"


def _work_rows(results: Mapping[str, Any], name: str) -> list[list[str]]:
    head = [name, "p50", "p95", "p99", "÷ in process", *PARTS, "by"]
    rows = [head]
    direct = results["direct"].get(name, {})
    for caller, figures in results["callers"].items():
        work = figures.get("works", {}).get(name)
        if work is not None:
            parts = [_us(work["parts_us"].get(part)) for part in PARTS]
            by = " ".join(x for x in (work.get("by", ""), work.get("sent_as", "")) if x)
            rows.append([f"{caller} caller", *_percentiles(work), _ratio(work, direct), *parts, by])
    rows.append(["in process (in the worker)", *_percentiles(direct), _ratio(direct, direct)])
    piped = results["pipe"].get("works", {}).get(name, {})
    rows.append(["pickle over a pipe (numpy)", *_percentiles(piped), _ratio(piped, direct)])
    return rows


def _size_rows(results: Mapping[str, Any]) -> list[list[str]]:
    callers = [c for c, figures in results["callers"].items() if figures.get("sizes")]
    rows = [["identity, there and back, p50", *callers, "pickle over a pipe"]]
    for nbytes in results["sizes"]:
        found = [results["callers"][c]["sizes"][nbytes] for c in callers]
        piped = results["pipe"].get("sizes", {}).get(nbytes, {})
        rows.append([in_units(int(nbytes)), *(_us(f.get("p50_us")) for f in [*found, piped])])
    return rows


def in_units(nbytes: int) -> str:
    """``64 KiB``."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


def _percentiles(figures: Mapping[str, Any]) -> list[str]:
    return [_us(figures.get(f"{p}_us")) for p in ("p50", "p95", "p99")]


def _ratio(figures: Mapping[str, Any], direct: Mapping[str, Any]) -> str:
    if "p50_us" not in figures or not direct.get("p50_us"):
        return "–"
    return f"{figures['p50_us'] / direct['p50_us']:.2f}"


def _us(x: float | None) -> str:
    return "–" if x is None else f"{x:.1f}" if x < 1000 else f"{x:.0f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    columns = max(map(len, rows))
    full = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in full) for i in range(columns)]
    lines = []
    for row in full:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
