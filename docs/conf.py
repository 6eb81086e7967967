"""Settings of Sphinx, for ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import mor_kernels  # noqa: E402
from bench import report  # noqa: E402
from bench.harness import RESULTS, title  # noqa: E402
from mor_kernels.ops._measured import CHOICES  # noqa: E402

project = "mor-kernels"
release = mor_kernels.__version__
html_title = f"mor-kernels {release}"
html_theme = "furo"
html_static_path, html_css_files = ["static"], ["wide.css"]
extensions = ["sphinx.ext.autodoc", "myst_parser"]
myst_heading_anchors = 3

smartquotes_action = "De"  # dashes and dots; what is in quotes is mostly to be typed
toc_object_entries_show_parents = "hide"
default_role = "code"  # `name` in a docstring is code, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90

# A reference to a name of ours that leads nowhere is an error. Those of other packages aren't looked up, which would
# take the network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!mor_kernels\b).*")]

# files of the root, and the pages that they become
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
STAND_IN = re.compile(r"\[(\w+\.md)\]\(\.\./\1\)\s*")
RELATIVE = re.compile(r"(?<=\]\()(?!https?:|#)")


def rebase(app, docname: str, source: list[str]) -> None:
    """A page that is nothing but a link to a file of the root becomes that file; links to those lead to their pages."""
    if found := STAND_IN.fullmatch(source[0]):
        text = (ROOT / found[1]).read_text(encoding="utf-8")
        source[0] = RELATIVE.sub("../", text).replace("](../docs/", "](")
    for file, page in PAGES.items():
        source[0] = source[0].replace(f"](../{file}", f"]({page}")


def sections(app, what: str, name: str, obj, options, lines: list[str]) -> None:
    """Args, Returns and Raises. What comes before a colon is no type, neither in "Returns:" nor of an attribute, where
    Napoleon can't be told."""
    if what != "attribute":
        lines[:] = GoogleDocstring(lines, Config(napoleon_use_rtype=False), app, what, name, obj, options).lines()


class Measured(SphinxDirective):
    """Of a benchmark's newest results, those of the operators named: our fastest kernel beside the floor."""

    required_arguments = 1
    option_spec = {"ops": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        wanted = re.split(r",\s*", self.options["ops"])
        found = report.results(self.arguments[0], RESULTS)
        path = max(found, key=lambda path: found[path]["environment"]["date"])
        self.env.note_dependency(str(path))
        lines = []
        for op, case, _, own in report.cases_of(found[path]):
            if op in wanted and own and not own["failed"]:
                times = f"{own['ms'] / own['floor_ms']:.2f}"
                lines.append((op, case, own["impl"], f"{own['ms']:.3g}", f"{own['floor_ms']:.3g}", times))
        if missing := set(wanted) - {op for op, *_ in lines}:
            raise self.error(f"{path.name} has nothing of ours for {', '.join(sorted(missing))}")
        table = report.markdown(("operator", "case", "kernel", "ms", "floor, ms", "x floor"), lines)
        return parsed(self, [f"{title(found[path])}:", "", *table])


class Numerics(SphinxDirective):
    """A part of the newest result of bench/numerics.py: its chart and its tables."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        part = self.arguments[0]
        found = report.results("numerics", RESULTS)
        dates = {path: result["parts"][part]["date"] for path, result in found.items() if part in result["parts"]}
        self.env.note_dependency(str(RESULTS))  # for the first one
        if not dates:
            return parsed(self, [report.NONE])
        path = max(dates, key=lambda path: dates[path])
        self.env.note_dependency(str(path))
        measured = found[path]["parts"][part]
        head = f"{title(found[path])}; commit {report.commit_of(measured)}, {dates[path][:10]}:"
        chart = f"![Errors](../bench/results/{path.stem}-{part}.png)"
        return parsed(self, [head, "", chart, "", *report.numerics_table(part, measured)])


class Choices(SphinxDirective):
    """Which of Triton's and the CUDA kernels serve an operator, and what was measured."""

    def run(self) -> list[nodes.Node]:
        lines = [(f"`{op}`", choice.reason) for op, choice in CHOICES.items()]
        return parsed(self, report.markdown(("operator", "measured"), lines))


def parsed(directive: SphinxDirective, lines: list[str]) -> list[nodes.Node]:
    node = nodes.container()
    directive.state.nested_parse(StringList(lines, directive.env.docname), 0, node)
    return node.children


def setup(app) -> None:
    app.connect("source-read", rebase)
    app.connect("autodoc-process-docstring", sections)
    app.add_directive("measured", Measured)
    app.add_directive("choices", Choices)
    app.add_directive("numerics", Numerics)
