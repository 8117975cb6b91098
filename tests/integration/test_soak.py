"""Half a minute of `soak.py`, with a worker killed every four seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = float(os.environ.get("GRADWIRE_SOAK_S", "25"))

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import soak
tally = soak.soak(float(sys.argv[2]), 1, 4.0)
print(dict(tally.counts), *tally.wrong, sep="\\n")
sys.exit(bool(tally.wrong) or tally.counts["workers killed"] < 3 or tally.counts["calls answered"] < 100)
"""


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 250)
def test_half_a_minute_of_the_soak() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE, str(Path(__file__).parent), str(SECONDS)],
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS + 240,
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
