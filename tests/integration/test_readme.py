"""The README's example runs as it stands there."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_the_first_example(torch_python: str) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    assert len([line for line in example[1].splitlines() if line.strip()]) <= 15
    run = subprocess.run(
        [sys.executable, "-c", example[1]], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "Array" in run.stdout or "[" in run.stdout
