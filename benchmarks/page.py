"""Puts measured figures into docs/benchmarks.md, between its marks, from the JSON files that the benchmarks write.

    python benchmarks/page.py [--limits FILE …] [--bench FILE …] [--peers FILE] [--check]

A part whose files are missing stays as it is. Defaults: build/*.json as `make bench` and `make bench-peers` write them.
--check: change nothing, and exit with 1 where the page differs from the files.

Files of limits are those of limits.py (rows), of roundtrip.py and training.py (ratios by name, and limits by name; ``us`` and
``beside_us`` are shown beside a ratio), of idle.py and of flat.py. A figure that several have is the first one's.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))

from gradwire.benchmark.report import PARTS, in_units

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE, BUILD, PICTURES = ROOT / "docs" / "benchmarks.md", ROOT / "build", "pictures/overhead.svg"
LIMITS = ("limits", "roundtrip", "training", "idle", "flat")


def replaced(page: str, part: str, text: str) -> str:
    """The page with another text between the marks of a part. LookupError where there are none."""
    mark = re.compile(rf"(<!-- {part}: begin[^\n]*-->\n).*?(<!-- {part}: end -->)", re.S)
    if not mark.search(page):
        raise LookupError(f"{PAGE.name} has no marks of {part!r}")
    return mark.sub(lambda found: found[1] + text.strip() + "\n" + found[2], page)


def machine_line(machine: dict[str, Any]) -> str:
    """When, where, with what; as far as a file tells."""
    packages = machine.get("packages", {})
    names = [f"{k} {v}" for k, v in packages.items()]
    names += [f"{k} {machine[k]}" for k in ("numpy",) if k in machine and k not in packages]
    processors = machine.get("processors", machine.get("cores"))
    what = [
        machine.get("date", ""),
        machine.get("processor", ""),
        f"{processors} processors" if processors else "",
    ]
    what += [machine.get("system", ""), f"Python {machine['python']}" if "python" in machine else "", *names]
    return ", ".join(str(x) for x in what if x)


def figure(x: Any) -> str:
    """A number as people read it."""
    if not isinstance(x, (int, float)):
        return str(x)
    return f"{x:,.0f}".replace(",", " ") if abs(x) >= 100 else f"{x:.3g}"


def limit_rows(results: dict[str, Any]) -> Iterator[list[str]]:
    """figure, measured, beside it, ratio, limit, whether it holds."""
    for row in results.get("rows", []):
        there, beside = [f"{figure(x)} µs" for x in row["sides"]] if row["sides"] else ["", ""]
        value = f"{row['value']:.2f} {row['unit'].strip()}".strip()
        holds = "✓" if row["value"] <= row["limit"] else "**missed**"
        yield [row["name"], there, beside, value, f"≤ {row['limit']:g}", holds]
    for name, found in results.get("ratios", {}).items():
        limit = results.get("limits", {}).get(name)
        unit = next((u for u in ("us", "ms", "s") if u in found), "")
        sizes = [
            f"{figure(found[k])} {u}" if k in found else ""
            for k, u in ((unit, unit), (f"beside_{unit}", unit))
        ]
        holds = "" if limit is None else "✓" if found["ratio"] <= limit else "**missed**"
        yield [
            name,
            *(s.replace(" us", " µs") for s in sizes),
            f"{found['ratio']:.2f}",
            "" if limit is None else f"≤ {limit}",
            holds,
        ]
    if "idle" in results:
        total, limit = results["idle"]["total"], results["limit_s"]
        yield [
            "processor of an idle bridge, 60 s",
            f"{total:.3f} s",
            "",
            "",
            f"< {limit} s",
            "✓" if total < limit else "**missed**",
        ]
    if "flat" in results:
        grown = results["grown"]
        said = "; ".join(grown) if grown else "nothing grew"
        yield [
            f"{results['calls']:,} calls of each kind".replace(",", " "),
            said,
            "",
            "",
            "flat",
            "**missed**" if grown else "✓",
        ]


def limits_text(files: list[pathlib.Path]) -> str:
    """All files of limits as one table."""
    documents = [json.loads(path.read_text()) for path in files]
    machines = [d["machine"] for d in documents if "machine" in d]
    rows: dict[str, list[str]] = {}
    for document in documents:  # the first file that has a figure is the one that counts: limits.json
        for row in limit_rows(document):
            rows.setdefault(row[0], row)
    lines = ["| figure | measured | beside it | ratio | limit | |", "|---|---:|---:|---:|---:|---|"]
    head = [machine_line(machines[0]) + "; medians.", ""] if machines else []
    return "\n".join([*head, *lines, *(f"| {' | '.join(row)} |" for row in rows.values())])


def bench_text(files: list[pathlib.Path]) -> str:
    """Files of ``gradwire bench``, one for each worker, and the picture."""
    parts = []
    for path in files:
        results = json.loads(path.read_text())
        worker = results["worker"]
        parts.append(
            f"{machine_line(results['machine'])}; worker: {worker['framework']} {worker['version']}, Python {worker['python']}, "
            f"{worker['threads']} thread(s). Medians, µs."
        )
        parts += [_work_table(results, name) for name in results["works"]]
        parts.append(_size_table(results))
    if (PAGE.parent / PICTURES).exists():
        parts.append(f"![time of a call over bytes]({PICTURES})")
    return "\n\n".join(parts)


def _work_table(results: dict[str, Any], name: str) -> str:
    direct = results["direct"][name]["p50_us"]
    lines = [
        f"| {name} | p50 | p95 | ÷ in process | {' | '.join(PARTS)} |",
        "|---|" + "---:|" * (3 + len(PARTS)),
    ]
    for caller, figures in results["callers"].items():
        work = figures.get("works", {}).get(name)
        if work is not None:
            parts = [figure(work["parts_us"].get(part, "")) for part in PARTS]
            cells = [figure(work["p50_us"]), figure(work["p95_us"]), f"{work['p50_us'] / direct:.2f}", *parts]
            lines.append(f"| {caller} caller | {' | '.join(cells)} |")
    rest = " | " * len(PARTS)
    lines.append(
        f"| in process | {figure(direct)} | {figure(results['direct'][name]['p95_us'])} | 1 |{rest}|"
    )
    piped = results["pipe"].get("works", {}).get(name)
    if piped is not None:
        ratio = f"{piped['p50_us'] / direct:.2f}"
        lines.append(
            f"| pickle over a pipe | {figure(piped['p50_us'])} | {figure(piped['p95_us'])} | {ratio} |{rest}|"
        )
    return "\n".join(lines)


def _size_table(results: dict[str, Any]) -> str:
    callers = [c for c, figures in results["callers"].items() if figures.get("sizes")]
    lines = [
        f"| there and back | {' | '.join(callers)} | pickle over a pipe |",
        "|---|" + "---:|" * (len(callers) + 1),
    ]
    for nbytes in results["sizes"]:
        found = [results["callers"][c]["sizes"][nbytes] for c in callers]
        found.append(results["pipe"].get("sizes", {}).get(nbytes, {}))
        lines.append(
            f"| {in_units(int(nbytes))} | {' | '.join(figure(f.get('p50_us', '')) for f in found)} |"
        )
    return "\n".join(lines)


def peers_text(path: pathlib.Path) -> str:
    """The peers' table, as their own runner makes it."""
    from run import table

    document = json.loads(path.read_text())
    body, _, reasons = table(document["peers"]).partition("\n\n")
    listed = [f"- {line}" for line in reasons.splitlines() if line]
    versions = sorted(
        {f"{k} {v}" for peer in document["peers"].values() for k, v in peer.get("versions", {}).items()}
    )
    parts = [f"{machine_line(document['machine'])}; " + ", ".join(versions) + ".", body]
    return "\n\n".join([*parts, *(["Not measured:\n\n" + "\n".join(listed)] if listed else [])])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = [BUILD / f"{name}.json" for name in LIMITS]
    parser.add_argument("--limits", nargs="*", type=pathlib.Path, default=own, metavar="FILE")
    parser.add_argument(
        "--bench", nargs="*", type=pathlib.Path, default=[BUILD / "bench.json"], metavar="FILE"
    )
    parser.add_argument("--peers", type=pathlib.Path, default=BUILD / "peers.json", metavar="FILE")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before = page = PAGE.read_text()
    there = {name: [p for p in getattr(arguments, name) if p.exists()] for name in ("limits", "bench")}
    if there["limits"]:
        page = replaced(page, "limits", limits_text(there["limits"]))
    if there["bench"]:
        page = replaced(page, "bench", bench_text(there["bench"]))
    if arguments.peers.exists():
        page = replaced(page, "peers", peers_text(arguments.peers))
    if arguments.check:
        return int(page != before)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
