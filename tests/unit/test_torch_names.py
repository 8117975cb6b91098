"""Where a torch module keeps tensors of any remote's names."""

from __future__ import annotations

import pytest
import torch

from gradwire.torch.names import placed


def paths(names: list[str]) -> list[str]:
    """The names of a module with a parameter at each place, which must be those of the places."""
    root = torch.nn.Module()
    places = placed(root, names)
    assert list(places) == names
    for i, place in enumerate(places.values()):
        place.part.register_parameter(place.key, torch.nn.Parameter(torch.tensor(float(i))))
    found = dict(root.named_parameters())
    for i, place in enumerate(places.values()):
        assert found[place.path] is getattr(place.part, place.key) and found[place.path] == i
    assert root.state_dict().keys() == found.keys()
    root.load_state_dict({name: x.detach() + 1 for name, x in found.items()}, strict=True)
    return list(found)


@pytest.mark.parametrize(
    "names",
    [
        ["0.weight", "0.bias", "1.0.weight", "out.weight"],
        ["dense/kernel", "dense/bias", "dense_1/kernel"],
        ["params/Dense_0/kernel", "params/Dense_0/bias", "['params']['b']"],
        ["T", "weight", "layers[0].w", "layers[0].b"],
        [],
    ],
)
def test_names_and_their_order_are_kept(names: list[str]) -> None:
    assert paths(names) == names


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([""], ["_"]),
        (["a", "a.b"], ["a_", "a.b"]),
        (["forward", "train.w"], ["forward_", "train_.w"]),
        (["a..b", ".c", "c"], ["a._.b", "c", "c_"]),
        (["forward", "forward_"], ["forward_", "forward__"]),
        (["forward.x", "forward.y"], ["forward_.x", "forward_.y"]),
    ],
)
def test_names_that_torch_cannot_have(names: list[str], wanted: list[str]) -> None:
    assert sorted(paths(names)) == sorted(wanted)
