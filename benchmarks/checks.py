"""What the checks of a call cost: families, dtypes, layouts and headers of its tensors, at both ends.

    python benchmarks/checks.py [--json FILE]

A caller of numpy. At its end: whose tensors these are, each array as a carrier (dtype known, byte order native, layout
one that can be described), and what its strides are or which plan is its. At the worker's end: each header checked
against its bytes or its segment; of a call that has a plan, which every call but the first two of its kind has, the
places in shared memory alone, for everything else is known when the frame has its plan's length. Not in it, for a call
without any check would do as much: msgpack, copies, wake-ups. Target: 10 µs for a call of up to 8 tensors.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable

import msgpack
import numpy as np

from gradwire.families import exported, family_of_call
from gradwire.plans import signature_of
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import dtype_named
from gradwire_wire.exchange import dense_strides
from gradwire_wire.headers import Header, check_place, checked_header, inline, packed, small_layout
from gradwire_wire.structures import positional
from gradwire_wire.tensors.numpy import export_all

TARGET_US, TENSORS = 10.0, 8
SEGMENT_NBYTES = 1 << 20


def median_us(act: Callable[[], object], repeats: int = 20_000) -> float:
    """The median duration of one call of ``act``, the clock's own taken off."""
    spent = []
    for function in (lambda: None, act):
        times = []
        for _ in range(repeats):
            begun = time.perf_counter_ns()
            function()
            times.append(time.perf_counter_ns() - begun)
        spent.append(sorted(times)[repeats // 2])
    return (spent[1] - spent[0]) / 1000


def client(arrays: list[np.ndarray]) -> Callable[[], object]:
    structure = positional(len(arrays))

    def act() -> None:
        family_of_call(arrays, structure, None)
        for carrier in exported(arrays, structure):
            carrier.array.flags.c_contiguous or dense_strides(carrier.array)

    return act


def planned_client(arrays: list[np.ndarray]) -> Callable[[], object]:
    structure = positional(len(arrays))

    def act() -> None:
        family_of_call(arrays, structure, None)
        signature_of(export_all(arrays))

    return act


def planned_worker(arrays: list[np.ndarray], is_shared: bool) -> Callable[[], object]:
    avals = [(Aval(x.shape, dtype_named(x.dtype.name)), x.nbytes) for x in arrays] if is_shared else []

    def act() -> None:
        for aval, nbytes in avals:
            check_place(aval, nbytes, 1, 4096, 3, 0, lambda number: SEGMENT_NBYTES)

    return act


def worker(headers: list[list[object]]) -> Callable[[], object]:
    received = msgpack.unpackb(msgpack.packb(headers), use_list=True)

    def act() -> None:
        for raw in received:
            small_layout(raw) or checked_header(raw, lambda number: SEGMENT_NBYTES)

    return act


def small(array: np.ndarray) -> list[object]:
    carrier = Carrier(array, dtype_named(array.dtype.name))
    return inline(array.tobytes(), array.shape, carrier.dtype)


def shared(array: np.ndarray) -> list[object]:
    dtype = dtype_named(array.dtype.name)
    return packed(Header(1, 4096, 3, array.shape, None, dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    found = {}
    print(f"{'checks of a call, µs':<40}{'client':>8}{'worker':>8}{'both':>8}")
    for count in (1, TENSORS):
        for name, header, shape in (("small", small, (4, 8)), ("in shared memory", shared, (64, 64))):
            arrays = [np.ones(shape, np.float32) for _ in range(count)]
            tensors = f"{count} tensor{'s' * (count > 1)}, {name}"
            kinds = {
                f"{tensors}, first": (client(arrays), worker([header(x) for x in arrays])),
                f"{tensors}, planned": (planned_client(arrays), planned_worker(arrays, header is shared)),
            }
            for said, acts in kinds.items():
                ends = [median_us(act) for act in acts]
                found[said] = {"client_us": ends[0], "worker_us": ends[1]}
                print(f"{said:<40}{ends[0]:>8.1f}{ends[1]:>8.1f}{sum(ends):>8.1f}")
    print(f"target: at most {TARGET_US:.0f} for up to {TENSORS} tensors")
    if arguments.json:
        arguments.json.write_text(json.dumps({"checks": found, "target_us": TARGET_US}, indent=1) + "\n")


if __name__ == "__main__":
    main()
