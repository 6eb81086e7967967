"""Run as a script by tools/check_package.py: the installed package, used as by its user, where nothing is installed but
what it declares. With --kernels, only that it was installed with its CUDA kernels, and that they are found.
"""

import json
import math
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import mor_kernels
from mor_kernels import ops
from mor_kernels.decode import Engine, SamplingParams
from mor_kernels.model import MoR, MoRConfig

COMMAND = Path(sys.prefix) / "bin" / "mor-kernels"
TINY = ["hidden_size=16", "intermediate_size=24", "num_hidden_layers=5", "num_attention_heads=2", "head_dim=8",
        "num_key_value_heads=1", "max_position_embeddings=64", "num_recursions=3", "vocab_size=300"]  # fmt: skip
TRAINING = ["batch_size=2", "sequence_length=16", "log_every=1", "eval_every=2", "eval_batches=1", "checkpoint_every=2",
            "validation=0.1", "progress=false"]  # fmt: skip
TEXT = "The quick brown fox jumps over the lazy dog, and the dog looks up – naïvely – at the fox. " * 40


def call(*arguments, fails=False):
    finished = subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, encoding="utf-8")
    assert bool(finished.returncode) == fails, f"{arguments}: {finished.stdout}{finished.stderr}"
    return finished.stdout + finished.stderr


def installed(kernels):
    place = Path(mor_kernels.__file__)
    assert place.is_relative_to(sys.prefix), f"imported from {place}, not from this environment"
    assert mor_kernels.__version__ == version("mor-kernels")
    facts = call("doctor")
    assert f"{mor_kernels.__version__} in {place.parent}" in facts and "eager backend" in facts, facts
    assert (find_spec("mor_kernels._C") is not None) == kernels
    assert ("built by CUDA" in facts) == kernels, facts
    print(facts)


def operators():
    """Route, attend and scatter back, against the same written out."""
    x, router = torch.randn(2, 12, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    routed = ops.route(x, router, k=5)
    q = routed.rows.view(2, 5, 2, 4)
    mixed = ops.attention(q, q, q, q_positions=torch.arange(5).expand(2, 5))
    y = ops.scatter_back(x, mixed.flatten(2), routed.indices, routed.gates)
    y.square().sum().backward()
    got = y.detach(), x.grad, router.grad
    x.grad = router.grad = None
    logits = x @ router
    indices = logits.topk(5).indices.sort().values
    rows = x.gather(1, indices[..., None].expand(2, 5, 8))
    q = rows.view(2, 5, 2, 4).transpose(1, 2)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
    gates = 0.1 * logits.gather(1, indices).sigmoid()
    y = x.scatter_add(1, indices[..., None].expand(2, 5, 8), gates[..., None] * mixed)
    y.square().sum().backward()
    torch.testing.assert_close(got, (y.detach(), x.grad, router.grad))


def models(folder):
    """Training lowers the loss, compiled or not; a saved model is the same; decoding is what the model says."""
    for router in ("expert_choice", "token_choice"):
        config = MoRConfig.from_size("135M", num_recursions=2, router=router, hidden_size=32, intermediate_size=48,
                                     num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                                     vocab_size=50)  # fmt: skip
        model = MoR(config)
        tokens = torch.randint(50, (4, 17))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(8):
            loss = model(tokens[:, :-1], targets=tokens[:, 1:]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0] and math.isfinite(losses[-1]), losses
        with torch.no_grad():
            expected = model(tokens[:, :-1], targets=tokens[:, 1:]).loss
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(tokens[:, :-1], targets=tokens[:, 1:]).loss, expected)

        model.eval().save_pretrained(folder / router)
        again = MoR.from_pretrained(folder / router).eval()
        prompt = tokens[0, :6].tolist()
        with torch.no_grad():
            assert torch.equal(again(tokens).logits, model(tokens).logits)
            text = list(prompt)
            for _ in range(6):
                text.append(model(torch.tensor([text])).logits[0, -1].argmax().item())
        settings = SamplingParams(max_tokens=6, temperature=0.0)
        generated = Engine(again, max_sequences=2).generate([prompt, prompt[:2]], settings)
        assert generated[0].tokens == text[6:], (generated[0].tokens, text)


def command(folder):
    """Train, go on, generate, evaluate, show depths; and each extra's command or module without it."""
    text, run = folder / "fox.txt", folder / "run"
    text.write_text(TEXT, encoding="utf-8")
    arguments = ["train", run, "--source", text, "--model", *TINY, "router=expert_choice", "--train", *TRAINING]
    told = call(*arguments, "steps=2")
    assert "matplotlib" in told, f"that curves.png needs matplotlib: {told}"
    call(*arguments, "steps=4")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "lm" in step] == [1, 2, 3, 4], steps
    settings = ["generate", run, "--prompt", "The quick", "--max-tokens", "8", "--seed", "1"]
    assert call(*settings).startswith("The quick") and call(*settings) == call(*settings)
    call("eval", run, "--text", text, "--json", folder / "eval.json")
    assert json.loads((folder / "eval.json").read_text())
    assert "fox" in call("depth", run, "The quick brown fox", "--color", "never")

    # what is not installed is named, with the way to get it
    for extra, arguments in {
        "mor-kernels[server]": ["serve", run],
        "mor-kernels[plot]": ["depth", run, "The quick", "--png", folder / "depths.png"],
        "mor-kernels[datasets]": ["train", folder / "other", "--source", "hf:some/text", "--model", *TINY],
    }.items():
        told = call(*arguments, fails=True)
        assert f"pip install {extra}" in told and "Traceback" not in told, told
    try:
        import mor_kernels.hf  # noqa: F401
    except ImportError as error:
        assert "pip install mor-kernels[hf]" in str(error), error
    else:
        raise AssertionError("mor_kernels.hf was imported without transformers")


def main():
    torch.manual_seed(0)
    kernels = sys.argv[1:] == ["--kernels"]
    installed(kernels)
    if not kernels:
        operators()
        with tempfile.TemporaryDirectory() as folder:
            models(Path(folder))
            command(Path(folder))


main()
