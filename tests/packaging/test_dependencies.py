"""What pyproject.toml asks for must not replace a torch that the user already has."""

import re
from pathlib import Path

import pytest

from tools import toolchain

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # Python 3.10, where pytest depends on it

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
GROUPS = {
    "run time": PROJECT["dependencies"],
    "build": PYPROJECT["build-system"]["requires"],
    **PROJECT["optional-dependencies"],
}


def split(requirement):
    name, bounds = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?(.*)", requirement).groups()
    return name, bounds


@pytest.mark.parametrize("group", GROUPS)
def test_floors_only(group):
    for requirement in GROUPS[group]:
        name, bounds = split(requirement)
        assert re.fullmatch(r"(>=[\d.]+(b\d+)?)?", bounds), f"{name} is pinned or capped: {bounds}"


def test_the_floor_of_torch_is_the_oldest_one_supported():
    assert [bounds for name, bounds in map(split, PROJECT["dependencies"]) if name == "torch"] == [">=2.6"]
    assert PROJECT["requires-python"] == ">=3.10"


def test_neither_torch_to_build_nor_triton_at_all():
    # a build requirement brings a second torch; a floor on Triton replaces the one that torch was built with, and torch
    assert "torch" not in [split(requirement)[0] for requirement in GROUPS["build"]]
    assert "triton" not in [split(requirement)[0] for group in GROUPS.values() for requirement in group]


def test_what_builds_the_cuda_kernels_is_written_alike():
    floors = dict(map(split, GROUPS["build"]))
    assert {name: f">={major}.{minor}" for name, (major, minor) in toolchain.TOOLS.items()}.items() <= floors.items()
