"""The README's examples run as they stand there."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_the_examples(torch_python: str) -> None:
    """The second one goes on where the first has left off, with its bridge open again."""
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) <= 15
    again = 'bridge = gw.connect()\nworker = bridge.worker("torch", python=".envs/torch/bin/python")\n'
    run = subprocess.run(
        [sys.executable, "-c", f"{first}\n{again}{second}\nprint('loss', float(value))"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    assert "Array" in run.stdout or "[" in run.stdout
    assert float(run.stdout.split("loss")[1]) > 0
