"""examples/sentences: a pre-trained encoder in a torch worker gives the bits it gives in its own process, and trains."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import users_environment

SENTENCES = Path(__file__).parent.parent.parent / "examples" / "sentences"


def said_by(*command: object) -> str:
    run = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=users_environment(),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_encoder_gives_the_same_bits_and_a_head_learns(
    sentences_python: Path, demo_python: Path, tmp_path: Path
) -> None:
    remote, local = tmp_path / "remote.npy", tmp_path / "local.npy"
    report = said_by(
        demo_python,
        SENTENCES / "train.py",
        "--python",
        sentences_python,
        "--save-embeddings",
        remote,
        "--finetune",
        2,
    )
    said_by(sentences_python, SENTENCES / "encoder.py", SENTENCES / "sentences.tsv", local)
    embeddings = np.load(remote)
    assert embeddings.shape == (80, 384) and embeddings.dtype == np.float32
    assert embeddings.tobytes() == np.load(local).tobytes()
    (accuracy,) = re.findall(r"head alone: accuracy on new sentences ([\d.]+)", report)
    assert float(accuracy) >= 0.9
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", report)[0])
    assert last < first
