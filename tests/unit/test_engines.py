"""Every framework's package offers all that `gradwire_workers.program.Engine` asks for. None of them is imported here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import gradwire_workers
from gradwire_wire.tensors import TensorFamily
from gradwire_workers.program import Engine

PACKAGE = Path(gradwire_workers.__file__).parent
ASKED = {
    name
    for protocol in (Engine, TensorFamily)
    for name in (*protocol.__annotations__, *vars(protocol))
    if not name.startswith("_")
}


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow", "jax"])
def test_an_engine_has_every_name(framework: str) -> None:
    tree = ast.parse((PACKAGE / framework / "__init__.py").read_text())
    bound: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            bound.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            bound.update(
                name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
            )
    assert {"NAME", "adopt", "adopter", "program"} <= ASKED <= bound
