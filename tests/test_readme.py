"""README and docs: their Python runs as it stands, and what they say of operators and floors is so."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

from bench import kv
from mor_kernels import ops

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```", re.S | re.M)
FUNCTIONS = [name for name in ops.__all__ if not isinstance(getattr(ops, name), type)]


def blocks(path: Path) -> list[str]:
    """The Python of a page, but for what says in a comment why it isn't run; elsewhere lines stay empty, so that an
    error has the page's line."""
    text = path.read_text(encoding="utf-8")
    found = [match for match in BLOCK.finditer(text) if not match[1]]
    return ["\n" * text.count("\n", 0, match.start(2)) + match[2] for match in found]


PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if blocks(path)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_examples_run(page, tmp_path, monkeypatch):
    """From top to bottom, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for block in blocks(page):
        try:
            exec(compile(block, page, "exec"), namespace)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] == "mor_kernels":
                raise
            pytest.skip(f"{error.name}, an optional package, is not installed")
    if page.name == "README.md":
        assert namespace["x"].grad is not None and len(namespace["done"][0].tokens) == 5


def test_every_operator_is_shown():
    """In an example; but variants of others that are, and metrics, which are functions of a tensor or two."""
    pages = README + (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    variants = {"scatter_back_", "kv_append", "rms_norm"}
    metrics = {"dead_token_ratio", "sampling_accuracy", "max_vio", "routing_entropy", "router_bias_update"}
    assert set(re.findall(r"\bops\.(\w+)\(", pages)) == set(FUNCTIONS) - variants - metrics


def test_the_reference_has_every_operator_once():
    page = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\.\. auto(?:function|class):: (\w+)", page)) == sorted(ops.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_tell_arguments_and_errors(name):
    function = getattr(ops, name)
    description, _, errors = inspect.getdoc(function).partition("Raises:\n")
    parameters = set(inspect.signature(function).parameters)
    assert set(re.findall(r"^    (\w+): ", description, re.M)) == parameters
    source, module = inspect.getsource(function), inspect.getmodule(function)
    for name, helper in inspect.getmembers(module, inspect.isfunction):
        if helper.__module__ == module.__name__ and helper is not function and f"{name}(" in source:
            source += inspect.getsource(helper)
    refuses = "_checks.no_gradient(" in source
    raised = {"ValueError"} | ({"RuntimeError"} if refuses or "backend" in parameters else set())
    assert set(re.findall(r"^    (\w+): ", errors, re.M)) == raised
    assert ("gradients are on" in errors) == refuses


def test_every_fault_has_a_test_that_exists():
    text, _, _ = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").partition("\n## Campaigns")
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith(("| fault", "| ---"))]
    assert rows
    there: dict[str, set[str]] = {}
    for row in rows:
        fault, _, tests, backends = row.strip("| ").split(" | ")
        named = re.findall(r"`(tests/[^`]+)::(\w+)`", tests)
        assert named and backends and ", ".join(f"`{path}::{name}`" for path, name in named) == tests, fault
        for path, name in named:
            if path not in there:
                tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
                there[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in there[path], f"{path} has no {name}"


def test_the_map_of_the_files_has_every_folder_and_nothing_that_is_gone():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = re.search(r"```\n(mor_kernels/\n.*?)```", text, re.S)[1]
    named = set(re.findall(r"\w+(?:/(?=\s)|\.(?:py|cpp|h|txt)\b)", tree))
    parts = ("mor_kernels", "csrc", "bench", "docs", "tests")
    places = [*ROOT.iterdir(), *(path for part in parts for path in (ROOT / part).rglob("*"))]
    there = {f"{path.name}{'/' * path.is_dir()}" for path in places}
    packages = {f"{path.parent.name}/" for path in (ROOT / "mor_kernels").rglob("__init__.py")}
    assert packages <= named <= there, (packages - named, named - there)


def sizes(case: str) -> dict[str, int]:
    """The sizes in a case's name; benchmarks of keys and values have heads of their own."""
    case = re.sub(r"H(\d+)/(\d+)", r"H\1 G\2", case)
    case = re.sub(r"(\d+) tokens", r"tokens\1", case).replace("mean ", "mean")
    found = {name: int(number) for name, number in re.findall(r"([A-Za-z]+)(\d+)", case)}
    return {"H": kv.HEADS, "G": kv.GROUPS, "d": kv.WIDTH} | found


def test_floors_are_what_the_benchmarks_count():
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- floors -->\n(.*?)<!-- /floors -->", text, re.S)[1]
    lines = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    formulas = {op: {"bytes": moved, "flops": flops} for op, moved, flops in lines}
    met = set()
    for path in (ROOT / "bench" / "results").glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["benchmark"] in ("routing", "kv", "layer", "attn_flops"):
            for row in (row for row in result["rows"] if row["op"] in formulas):
                met.add(row["op"])
                for kind, formula in formulas[row["op"]].items():
                    if formula or kind in row:
                        # ragged rows are whole numbers, which make up their mean but for a token or two
                        slack = 1e-3 if "mean" in row["case"] else 0
                        wanted = pytest.approx(row[kind], rel=slack, abs=0)
                        assert eval(formula, sizes(row["case"])) == wanted, (row["op"], row["case"], kind)
    assert met == formulas.keys()
