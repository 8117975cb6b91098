"""benchmarks/page.py: what is measured gets into the page between its marks, and nothing else changes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradwire.benchmark.report import machine

ROOT = Path(__file__).resolve().parents[2]
FIGURES = {"p50_us": 200.0, "p95_us": 300.0, "p99_us": 400.0, "calls": 9.0}
BENCH: dict[str, Any] = {
    "machine": machine(),
    "worker": {"framework": "torch", "version": "2.13.0", "python": "3.11.7", "threads": 1},
    "works": ["identity"],
    "sizes": ["65536"],
    "callers": {
        "numpy": {
            "works": {"identity": {**FIGURES, "parts_us": {"convert": 7.25}}},
            "sizes": {"65536": FIGURES},
        },
        "jax": {"error": "no"},
    },
    "direct": {"identity": {**FIGURES, "p50_us": 100.0}},
    "pipe": {"works": {"identity": FIGURES}, "sizes": {"65536": FIGURES}},
}
LIMITS = {
    "machine": {"python": "3.11.7", "date": "2026-11-29"},
    "ratios": {"a ÷ b": {"us": 84.1, "beside_us": 54.2, "ratio": 1.55}, "c ÷ d": {"ratio": 3.0}},
    "limits": {"a ÷ b": 2.0, "c ÷ d": 2.0},
}
PEERS = {
    "machine": {"python": "3.11.7"},
    "peers": {
        "a pipe": {"versions": {"numpy": "2"}, "rows": {"echo 4 B": [FIGURES]}},
        "Ray": {"failed": "no wheel"},
    },
}


@pytest.fixture
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_page", ROOT / "benchmarks" / "page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def written(page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the script on a copy of the page; returns the copy's text before and after."""
    copy = tmp_path / "benchmarks.md"
    copy.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    monkeypatch.setattr(page, "PAGE", copy)
    monkeypatch.setattr(page, "BUILD", tmp_path)

    def written(*arguments: str) -> tuple[str, str, int]:
        before = copy.read_text()
        monkeypatch.setattr("sys.argv", ["page.py", *arguments])
        code: int = page.main()
        return before, copy.read_text(), code

    return written


def outside(text: str) -> list[str]:
    """The page without what is between marks."""
    kept, inside = [], False
    for line in text.splitlines():
        inside = inside and ": end -->" not in line
        if not inside:
            kept.append(line)
        inside = inside or ": begin" in line
    return kept


def test_figures_come_into_the_page_and_nothing_else_changes(written: Any, tmp_path: Path) -> None:
    for name, document in (("limits", LIMITS), ("bench", BENCH), ("peers", PEERS)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    before, after, code = written()
    assert code == 0 and outside(before) == outside(after)
    assert "| a ÷ b | 84.1 µs | 54.2 µs | 1.55 | ≤ 2.0 | ✓ |" in after
    assert "| c ÷ d |  |  | 3.00 | ≤ 2.0 | **missed** |" in after
    assert "| numpy caller | 200 | 300 | 2.00 | 7.25 |" in after and "| 64 KiB | 200 | 200 |" in after
    assert "| a pipe | 200 |" in after and "- Ray: no wheel" in after
    _, again, _ = written()
    assert again == after
    assert written("--check")[2] == 0


def test_a_difference_is_seen_and_a_check_changes_nothing(written: Any, tmp_path: Path) -> None:
    (tmp_path / "limits.json").write_text(json.dumps(LIMITS))
    before, after, code = written("--check")
    assert code == 1 and before == after


def test_what_was_not_measured_stays(written: Any) -> None:
    before, after, code = written()
    assert before == after and code == 0


def test_the_other_files_of_limits(page: ModuleType) -> None:
    idle = {"idle": {"caller": 0.01, "total": 0.02}, "limit_s": 0.1}
    flat = {"calls": 10_000, "flat": {}, "grown": ["errors, caller: +3 threads"]}
    (first,), (second,) = list(page.limit_rows(idle)), list(page.limit_rows(flat))
    assert first[1] == "0.020 s" and first[-1] == "✓"
    assert second[1] == "errors, caller: +3 threads" and second[-1] == "**missed**"


def test_the_file_of_limits_py(page: ModuleType) -> None:
    rows = [
        {"name": "a ÷ b", "limit": 1.2, "value": 1.25, "sides": [250.0, 200.0], "unit": ""},
        {"name": "idle", "limit": 0.1, "value": 0.02, "sides": None, "unit": "s"},
    ]
    assert list(page.limit_rows({"rows": rows})) == [
        ["a ÷ b", "250 µs", "200 µs", "1.25", "≤ 1.2", "**missed**"],
        ["idle", "", "", "0.02 s", "≤ 0.1", "✓"],
    ]


def test_a_page_without_marks_is_an_error(page: ModuleType) -> None:
    with pytest.raises(LookupError, match="marks"):
        page.replaced("no marks", "limits", "x")
