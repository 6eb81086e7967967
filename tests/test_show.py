"""Pictures: the page in a browser, the numbers behind the charts, and colours in a terminal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

from mor_kernels import show
from mor_kernels.__main__ import main
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.train import load_tokenizer, prepare

TEXT = "The quick brown fox jumps over the lazy dog, and the dog looks up – naïvely – at the fox.\n" * 6
AWKWARD = [
    "\n", "<script>document.title='ran'</script>", "</main>", " & &amp;", " \"quoted\" 'too'", "\t", "\r\n", " é",
    "", "", "", "😀", " שלום עולם", " مرحبا", "\n\n", "  ", "a\u00adb",
    "<img src=http://example.com/x.png onerror=alert(1)>",
]  # fmt: skip
# What a page can tell only once it is laid out. The policy that forbids scripts is taken out for it.
MEASURE = """<script>
const report = {errors: []};
window.onerror = message => { report.errors.push(message) };
addEventListener('load', () => {
  const light = color => {
    const linear = color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255).map(
      v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const spans = [...document.querySelectorAll('main > span')];
  const style = element => getComputedStyle(element);
  const body = style(document.body);
  report.text = document.querySelector('main').textContent;
  report.spans = spans.length;
  report.foreign = document.querySelectorAll('main script, main img, [src], [href]').length;
  report.contrast = Math.min(contrast(light(body.color), light(body.backgroundColor)),
    ...spans.map(s => contrast(light(style(s).color), light(style(s).backgroundColor))));
  report.grounds = [1, 2, 3].map(d => light(style(document.querySelector('main .d' + d)).backgroundColor));
  report.page = light(body.backgroundColor);
  report.titles = spans.slice(0, 40).map(s => s.title);
  report.hidden = spans.filter(s => !s.getBoundingClientRect().width && s.textContent.trim()).length;
  report.lines = new Set(spans.map(s => Math.round(s.getBoundingClientRect().top))).size;
  report.marks = [...document.querySelectorAll('main i')].map(i => getComputedStyle(i, '::before').content).join('');
  report.overflow = document.documentElement.scrollWidth - innerWidth;
  document.body.dataset.report = JSON.stringify(report);
});
</script>"""
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Body(HTMLParser):
    def handle_starttag(self, tag, attributes):
        if tag == "body":
            self.data = dict(attributes)


def in_browser(page, folder, *flags):
    """What MEASURE found, and what the browser's console said."""
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', page)[0]
    assert "default-src 'none'" in policy and "script-src" not in policy
    file = folder / "page.html"
    file.write_text(page.replace(policy, "").replace("</style>", "</style>" + MEASURE), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom",
               "--disable-background-networking", "--no-first-run", "--enable-logging=stderr", "--window-size=800,600",
               f"--user-data-dir={folder / 'profile'}", *flags, file.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    body = Body()
    body.feed(done.stdout)
    return json.loads(body.data["data-report"]), re.findall(r"CONSOLE.*", done.stderr)


@pytest.mark.skipif(not BROWSER, reason="neither chromium nor google-chrome is on PATH")
@pytest.mark.parametrize("flags", [(), ("--force-dark-mode",)], ids=["light", "dark"])
def test_the_page_in_a_browser(tmp_path, flags):
    pieces = AWKWARD + [f" word{i}" for i in range(5000)]
    tokens = [show.Token(text, i, i % 3 + 1, f"router logits {i}.50") for i, text in enumerate(pieces)]
    found, console = in_browser(show.page(tokens, 3, 'Depth <of> "each"'), tmp_path, *flags)
    assert found["errors"] == [] and console == []
    assert found["text"] == "".join(pieces) and found["spans"] == len(pieces) and found["foreign"] == 0
    assert found["titles"][1] == f"{AWKWARD[1]!r} · id 1 · 2 recursions · router logits 1.50"
    assert found["titles"][9] == "part of a character · id 9 · 1 recursion · router logits 9.50"
    assert found["hidden"] == 0 and found["overflow"] <= 0
    assert found["lines"] > 300  # wrapped: 5,000 words of some 9 characters, about 90 on a line
    assert found["marks"] == '"↵"' * "".join(pieces).count("\n")
    assert found["contrast"] >= 4.5  # WCAG 2, level AA, for text of any size
    steps = [(max(a, b) + 0.05) / (min(a, b) + 0.05) for a, b in zip(found["grounds"], found["grounds"][1:])]
    assert min(steps) >= 1.5  # lightness alone tells neighbouring depths apart
    dark = bool(flags)
    assert (found["page"] < 0.05) if dark else (found["page"] > 0.9)
    assert found["grounds"] == sorted(found["grounds"], reverse=not dark)  # the deepest stand out of the page


@pytest.mark.parametrize("recursions", [1, 2, 4, 6])
def test_the_page_counts(recursions):
    depths = [1 + i % recursions for i in range(60)] + [1] * 40
    shown = show.page([show.Token("x", 0, depth) for depth in depths], recursions, "t")
    for depth in range(1, recursions + 1):
        count = depths.count(depth)
        assert f"</b>{depth} recursion{'s' * (depth > 1)}: {count} ({count / 100:.0%})</li>" in shown
    assert f"100 tokens, mean depth {sum(depths) / 100:.2f} of {recursions}" in shown


def test_scores_by_hand():
    config = MoRConfig(num_hidden_layers=8, num_recursions=3, router="expert_choice")
    nan = float("nan")
    logits = torch.tensor([[1.0, 0.5, -2.0], [2.0, -1.0, nan], [3.0, 4.0, 5.0], [-4.0, float("inf"), -6.0]])
    depths = torch.tensor([2, 1, 3, 2])
    assert show.split_scores(show.scores(logits, config), depths, config) == [
        ("recursion 1", [1.0, 2.0, 3.0, -4.0], []),
        ("recursion 2", [0.5, 4.0], [-1.0]),
        ("recursion 3", [5.0], [-2.0, -6.0]),
    ]
    assert show.describe(logits[1].tolist(), config) == "router logits 2.00, -1.00"
    config = MoRConfig(num_hidden_layers=4, num_recursions=2, router="token_choice")
    logits = torch.tensor([[0.0, 0.0], [0.0, 1.0986123], [1.0986123, 0.0]])  # ln 3
    probs = [part._replace(kept=pytest.approx(part.kept), dropped=pytest.approx(part.dropped))
             for part in show.split_scores(show.scores(logits, config), torch.tensor([1, 2, 1]), config)]  # fmt: skip
    assert probs == [("depth 1", [0.5, 0.75], [0.25]), ("depth 2", [0.75], [0.5, 0.25])]


@pytest.mark.parametrize("low, high", [(-3.0, 7.0), (0.3, 0.9), (-5.0, -1.0), (0.0, 0.0), (2.0, 2.0)])
def test_no_bin_lies_on_both_sides_of_the_threshold(low, high):
    edges = show._bins(show.Scores("", [low], [high]), 0.0)
    assert len(edges) <= 32 or low == high
    assert min(edges) <= low and high <= max(edges) and len(edges) >= 2
    assert not any(a < 0 < b for a, b in zip(edges, edges[1:]))


def test_charts_show_the_numbers(monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(show, "_save", lambda figure, path: figures.append(figure))
    show.depth_chart([1, 3, 3, 3], 3, "x.png", "t")
    bars = figures.pop().axes[0].patches
    assert [bar.get_height() for bar in bars] == [25.0, 0.0, 75.0]
    config = MoRConfig(num_hidden_layers=4, num_recursions=2, router="expert_choice")
    found = [show.Scores("recursion 1", [1.0, 2.0, 9.0], []), show.Scores("recursion 2", [0.5, 4.0], [-1.0])]
    show.score_chart(found, config, "x.png", "t", 0.0)
    first, second = figures.pop().axes
    for axes, counts in ((first, [3]), (second, [2, 1])):
        heights = []
        for outline in axes.patches:
            x, y = outline.get_xy().T
            steps = sorted(set(x))  # the outline's edges
            area = abs(sum(a * d - b * c for a, b, c, d in zip(x, y, x[1:], y[1:]))) / 2
            heights.append(area / (steps[1] - steps[0]))
        assert heights == pytest.approx(counts)  # areas of equal bins are numbers of tokens
    assert len(first.lines) == 0 and [line.get_xdata()[0] for line in second.lines] == [0.0]
    assert "2 kept, 1 dropped" in second.get_title()


def test_colors(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert show.use_color("auto", Terminal()) and show.use_color("always") and not show.use_color("never", Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not show.use_color("auto", Terminal())
    assert len({show.ansi("x", depth, 4) for depth in range(5)}) == 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny models of every kind, with a tokenizer."""
    out = tmp_path_factory.mktemp("models")
    (out / "text.txt").write_text(TEXT, encoding="utf-8")
    prepare(out / "text.txt", out / "data", vocab_size=280)
    torch.manual_seed(3)
    kinds = {"expert": {"router": "expert_choice"},
             "token": {"router": "token_choice"}, "none": {}}  # fmt: skip
    for name, fields in kinds.items():
        model = MoR(MoRConfig(vocab_size=280, hidden_size=16, intermediate_size=24, num_hidden_layers=5, head_dim=8,
                              num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
                              num_recursions=3, initializer_range=0.5, **fields))  # fmt: skip
        model.save_pretrained(out / name)
        shutil.copy(out / "data" / "tokenizer.json", out / name)
    return out


def printed_counts(printed):
    return [tuple(map(int, found)) for found in re.findall(r"\d: (\d+) (?:kept|chosen).*?; (\d+) ", printed)]


@pytest.mark.parametrize("name, mode", [("expert", "threshold"), ("expert", "topk"), ("token", None)])
def test_scores_of_a_text(folder, tmp_path, capsys, name, mode):
    pytest.importorskip("matplotlib")
    text, png = TEXT[:250], tmp_path / "scores.png"
    options = ["--mode", mode] if mode else []
    assert main(["scores", str(folder / name), text, *options, "--png", str(png), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert png.read_bytes().startswith(b"\x89PNG") and f"chart in {png}" in printed
    model = MoR.from_pretrained(folder / name).eval()
    ids = load_tokenizer(folder / name / "tokenizer.json").encode(text).ids
    assert len(ids) > 64  # several blocks
    depths = [d for i in range(0, len(ids), 64) for d in model(torch.tensor([ids[i : i + 64]]), mode=mode).depths[0]]
    assert len(set(map(int, depths))) > 1
    if name == "token":
        want = [(sum(d == r for d in depths), sum(d != r for d in depths)) for r in (1, 2, 3)]
    else:
        want = [(sum(d >= r for d in depths), sum(d == r - 1 for d in depths)) for r in (1, 2, 3)]
    assert printed_counts(printed) == [(int(kept), int(dropped)) for kept, dropped in want]


def test_depths_of_a_long_text(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page, png = tmp_path / "map.html", tmp_path / "depths.png"
    arguments = ["depth", str(folder / "expert"), "--file", str(folder / "text.txt"), "--html", str(page)]
    assert main([*arguments, "--png", str(png)]) == 0
    printed = capsys.readouterr()
    assert re.search(r"tokens, read in blocks of 64", printed.err) and printed.out.startswith(TEXT)
    assert png.read_bytes().startswith(b"\x89PNG")
    titles = re.findall(r'title="(.*?)"', page.read_text(encoding="utf-8"))
    assert len(titles) > 128 and all("recursion" in title and "router logit" in title for title in titles)


def test_errors_name_what_was_wrong(folder, tmp_path, capsys, monkeypatch):
    cases = [
        (["scores", str(folder / "none"), "fox"], r"none: expected a model with routers, got one of router='none'"),
        (["scores", str(folder / "expert"), ""], r"text: expected at least one token, got none"),
        (["scores", str(folder / "expert"), "a", "--file", "b"], r"text: expected none beside --file, got both"),
        (["depth", str(folder / "expert"), "fox", "--png", str(tmp_path / "no" / "x.png")], r"No such file"),
    ]
    for arguments, message in cases:
        assert main(arguments) == 1
        assert re.search(f"mor-kernels {arguments[0]}: .*{message}", capsys.readouterr().err)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it weren't installed
    assert main(["depth", str(folder / "expert"), "fox", "--png", str(tmp_path / "x.png")]) == 1
    assert re.search(r"--png: expected matplotlib .*pip install mor-kernels\[plot\]", capsys.readouterr().err)
