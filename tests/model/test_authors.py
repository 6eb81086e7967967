"""Checkpoints of the authors' code: restated here as it computes, in loops and with its names, saved, and loaded.

``Theirs`` was written from what their modules compute, not from ours. It runs one sequence after another in float64;
its state dict names each use of a layer, as theirs does.
"""

from __future__ import annotations

import itertools
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from mor_kernels.__main__ import main
from mor_kernels.decode import Engine, SamplingParams
from mor_kernels.model import MoR, MoRConfig
from mor_kernels.model.authors import authors_config, is_authors

LLAMA = {"model_type": "llama", "vocab_size": 19, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 8,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 1e4, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 64, "tie_word_embeddings": True}  # fmt: skip
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
               "mlp.up_proj", "mlp.down_proj")  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
# Which use of a layer has the weights of which: eight or nine layers, three recursions.
WEIGHTS = {
    "cycle": (0, 1, 2, 0, 1, 2, 0, 1, 2), "sequence": (0, 0, 0, 1, 1, 1, 2, 2, 2),
    "middle_cycle": (0, 1, 2, 1, 2, 1, 2, 3), "middle_sequence": (0, 1, 1, 1, 2, 2, 2, 3),
}  # fmt: skip


def their_config(kind=None, *, sharing="middle_cycle", ln_share=True, kv=None, mor=None, **options):
    """The file of a run in their nesting; kind "expert", "token" or None for fixed depth."""
    expert = {"cap_warmup_step": 0, "router_func": "sigmoid", "alpha": 0.5, "sampling": "aux_loss",
              "include_first": True, "coeff": 0.1, "gating": "weighted"}  # fmt: skip
    token = {"bal_warmup_step": 0, "router_func": "softmax", "alpha": 1.0, "balancing": "loss", "coeff": 0.1,
             "u": 0.001, "gating": "weighted"}  # fmt: skip
    (expert if kind == "expert" else token).update(options)
    return {
        "name": "a run", "learning_rate": 3e-3, "max_length": 32, "num_warmup_steps": 7, "model_config": None,
        "recursive": {"enable": True, "base_depth": None, "num_recursion": 3, "sharing": sharing,
                      "ln_share": ln_share, "initialization": "random"},
        "kv_sharing": {"enable": kv is not None, "num_recursion": None, "sharing": None, **(kv or {})},
        "relaxation": {"enable": False, "method": "lora", "lora": {"r": 16}},
        "mor": {"enable": kind is not None, "type": kind or "expert", "capacity": None, "rand_router": False,
                "router_type": "linear", "z_loss": False, "z_coeff": 0.01, "temp": 1.0, "expert": expert,
                "token": token, **(mor or {})},
    }  # fmt: skip


class Theirs:
    """Their model of a configuration, with random weights that all matter."""

    def __init__(self, cfg, seed=0):
        self.cfg, self.g = cfg, torch.Generator().manual_seed(seed)
        self.mor, self.sharing = cfg["mor"], cfg["recursive"]["sharing"]
        self.kind = self.mor["type"] if self.mor["enable"] else None
        self.middle = self.sharing.startswith("middle")
        weights = WEIGHTS[self.sharing]
        self.depth = len(weights)
        self.llama = {**LLAMA, "num_hidden_layers": self.depth}
        self.state = {"model.embed_tokens.weight": self.draw(19, 12)}
        each = (self.depth - 2 * self.middle) // 3
        self.first = self.last = None
        uses = list(range(self.depth))
        if self.kind:
            blocks = [[self.prefix(r, j) for j in range(each)] for r in range(3)]
            ends = [["model.layers.0"], [f"model.layers.{4 if self.kind == 'expert' else 2}"]]
            names = [*ends[0], *itertools.chain(*blocks), *ends[1]] if self.middle else list(itertools.chain(*blocks))
        else:
            names = [f"model.layers.{i}" for i in uses]
            inner = names[1:-1] if self.middle else names
            blocks = [inner[r * each : (r + 1) * each] for r in range(3)]
        if self.middle:
            self.first, self.last = names[0], names[-1]
        self.blocks = blocks
        shared, shapes = {}, {"q": (24, 12), "k": (8, 12), "v": (8, 12), "o": (12, 24), "g": (20, 12), "u": (20, 12),
                              "d": (12, 20)}  # fmt: skip
        for name, use in zip(names, weights, strict=True):
            for part in (*PROJECTIONS, *NORMS):
                key = (use, part) if part in PROJECTIONS or cfg["recursive"]["ln_share"] else (name, part)
                if key not in shared:
                    shape = (12,) if part in NORMS else shapes[part.split(".")[1][0]]
                    shared[key] = self.draw(*shape) * 0.2 + (1 if part in NORMS else 0)
                self.state[f"{name}.{part}.weight"] = shared[key]
        self.state |= {"model.norm.weight": 1 + self.draw(12) * 0.1}
        self.state["lm_head.weight"] = self.state["model.embed_tokens.weight"]
        if not self.kind:  # their model without routers doesn't tie them
            self.state["lm_head.weight"] = self.draw(19, 12)
        if self.kind == "expert":
            for r in range(3):
                self.add_router(f"model.layers.{r + self.middle}.mor_router", 1)
                if self.mor["expert"]["sampling"] == "aux_router":
                    self.add_router(f"model.layers.{r + self.middle}.mlp_router", 1)
        elif self.kind == "token":
            self.add_router("model.layers.1.mor_router", 3)
            if self.mor["token"]["balancing"] == "loss_free":
                self.state["model.layers.1.router_bias"] = self.draw(3).float() * 0.2  # a parameter in float32

    def prefix(self, r, j):
        inside = f"{r + self.middle}.block" if self.kind == "expert" else f"1.block_list.{r}"
        return f"model.layers.{inside}.{j}"

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    def add_router(self, name, out):
        if self.mor["router_type"] == "linear":
            self.state[f"{name}.router.weight"] = self.draw(out, 12) * 0.5
        else:
            self.state[f"{name}.router.0.weight"] = self.draw(24, 12) * 0.5
            self.state[f"{name}.router.2.weight"] = self.draw(out, 24) * 0.5

    def router(self, name, x):
        w = self.state
        if self.mor["router_type"] == "linear":
            return x @ w[f"{name}.router.weight"].T
        return F.gelu(x @ w[f"{name}.router.0.weight"].T) @ w[f"{name}.router.2.weight"].T

    def layer(self, name, x, positions, cached=None, selected=None):
        """cached (k, v): what the attention sees of all tokens, apart from the rows ``selected`` that are replaced."""
        w = self.state

        def norm(part, t):
            return t / torch.sqrt(t.square().mean(-1, keepdim=True) + 1e-5) * w[f"{name}.{part}.weight"]

        def rotated(t):
            angles = positions[:, None, None] / 1e4 ** (torch.arange(2, dtype=torch.float64) / 2)
            a, b = t.chunk(2, -1)
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        h = norm("input_layernorm", x)
        q, k, v = ((h @ w[f"{name}.self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, 4)) for p in "qkv")
        q, k = rotated(q), rotated(k)
        if cached is not None:
            fresh, (k, v) = (k, v), (t.clone() for t in cached)
            if selected is not None:
                k[selected], v[selected] = fresh[0][selected], fresh[1][selected]
        mixed = torch.zeros_like(q)
        for i in range(len(x)):
            seen = positions <= positions[i] if cached is None else torch.arange(len(k)) <= positions[i]
            for head in range(6):
                scores = k[seen, head // 3] @ q[i, head] / 2
                mixed[i, head] = scores.softmax(0) @ v[seen, head // 3]
        x = x + mixed.flatten(1) @ w[f"{name}.self_attn.o_proj.weight"].T
        h = norm("post_attention_layernorm", x)
        gate, up = (h @ w[f"{name}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        return x + (F.silu(gate) * up) @ w[f"{name}.mlp.down_proj.weight"].T, (k, v)

    def run_block(self, r, x, chosen, memory):
        """f of the rows ``chosen`` of x (n, D); with shared keys their code computes all rows and takes those."""
        kv = self.cfg["kv_sharing"]
        if not kv["enable"]:
            h = x[chosen]
            for name in self.blocks[r]:
                h, _ = self.layer(name, h, chosen)
            return h
        h, everyone = x, torch.arange(len(x))
        for j, name in enumerate(self.blocks[r]):
            replaced = chosen if kv.get("update_cache") and self.sharing == "middle_cycle" else None
            h, kept = self.layer(name, h, everyone, memory.get(j), replaced)
            memory.setdefault(j, kept)
        return h[chosen]

    def forward(self, ids, labels=None):
        """As in training, without warm-up: logits, depths, and the sum that is minimised."""
        logits, depths, notes = [], [], []
        for row in ids:
            x, everyone = self.state["model.embed_tokens.weight"][row], torch.arange(len(row))
            if self.first:
                x, _ = self.layer(self.first, x, everyone)
            x, depth, note = {"expert": self.expert, "token": self.token, None: self.fixed}[self.kind](x)
            if self.last:
                x, _ = self.layer(self.last, x, everyone)
            x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.state["model.norm.weight"]
            logits.append(x @ self.state["lm_head.weight"].T)
            depths.append(depth)
            notes.append(note)
        logits, depths = torch.stack(logits), torch.stack(depths)
        if labels is None:
            return logits, depths, None
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.kind == "expert":
            e = self.mor["expert"]
            for r in range(3):
                router, deciding, targets = (torch.stack([note[r][i] for note in notes]) for i in range(3))
                if e["sampling"]:  # that of an auxiliary router has a backward pass of its own, and no coefficient
                    factor = 1.0 if e["sampling"] == "aux_router" else e["coeff"]
                    total += factor * F.binary_cross_entropy_with_logits(deciding, targets)
                if self.mor["z_loss"]:
                    total += self.mor["z_coeff"] * router.square().mean()  # the logsumexp of one number
        elif self.kind == "token":
            t = self.mor["token"]
            raw, probs = (torch.stack([note[i] for note in notes]) for i in range(2))
            if t["balancing"] == "loss":
                shares = torch.bincount(depths.flatten() - 1, minlength=3) / depths.numel()
                total += t["coeff"] * (3 * shares * probs.mean((0, 1))).sum()
            if self.mor["z_loss"]:
                total += self.mor["z_coeff"] * raw.logsumexp(-1).square().mean()
        return logits, depths, total

    def fixed(self, x):
        memory = {}
        for r in range(3):
            x = self.run_block(r, x, torch.arange(len(x)), memory)
        return x, torch.full((len(x),), 3), None

    def expert(self, x):
        e, n, notes, memory = self.mor["expert"], len(x), [], {}
        candidates, depth = torch.arange(n), torch.zeros(n, dtype=torch.int64)
        shares = [float(c) for c in (self.mor["capacity"] or "1.0,0.6666666666666666,0.3333333333333333").split(",")]
        for r in range(3):
            wrapper = f"model.layers.{r + self.middle}"
            logits = self.router(f"{wrapper}.mor_router", x[candidates] / self.mor["temp"])[:, 0]
            scores = {None: lambda t: t, "sigmoid": lambda t: t.sigmoid() * e["alpha"],
                      "tanh": lambda t: t.tanh() * e["alpha"]}[e["router_func"]](logits)  # fmt: skip
            best = scores.topk(max(1, int(shares[r] * n))).indices.sort().values
            targets = torch.zeros_like(logits)
            targets[best] = 1
            deciding = logits
            if e["sampling"] == "aux_router":
                deciding = self.router(f"{wrapper}.mlp_router", x[candidates])[:, 0]
            notes.append((logits, deciding, targets))
            chosen = candidates[best]
            update = self.run_block(r, x, chosen, memory)
            x = x.clone()
            x[chosen] += update * scores[best, None] if e["gating"] == "weighted" else update
            depth[chosen] += 1
            candidates = chosen
        return x, depth, notes

    def token(self, x):
        t, entry, memory = self.mor["token"], x, {}
        raw = self.router("model.layers.1.mor_router", x / self.mor["temp"])
        probs = t["alpha"] * (raw.sigmoid() if t["router_func"] == "sigmoid" else raw.softmax(-1))
        decided = probs
        if t["balancing"] == "loss_free":
            decided = probs + self.state["model.layers.1.router_bias"]
        depth = decided.argmax(-1) + 1
        out = entry.clone()
        for r in range(3):
            chosen = (depth > r).nonzero()[:, 0]
            if not len(chosen):
                continue
            update, x = self.run_block(r, x, chosen, memory), x.clone()
            x[chosen] = update
            for i in chosen[depth[chosen] == r + 1].tolist():
                out[i] = entry[i] + (x[i] * probs[i, r] if t["gating"] == "weighted" else x[i])
        return out, depth, (raw, probs)

    def save(self, folder, form):
        """As their runs do: the "copies" in a safetensors file, or "one" of each in several."""
        (folder / "config.json").write_text(json.dumps({**self.llama, "architectures": ["MoRLlamaForCausalLM"]}))
        (folder / "run.yaml").write_text(json.dumps(self.cfg))  # YAML, since JSON is
        state = self.state
        if form == "one":  # as safetensors files are written by transformers, in shards with an index
            state = dict({id(t): (name, t) for name, t in state.items()}.values())
            names = sorted(state)
            parts = [names[::2], names[1::2]]
            files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
            index = {name: file for part, file in zip(parts, files) for name in part}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
            for part, file in zip(parts, files):
                save_file({name: state[name] for name in part}, folder / file)
            return None
        return save_file({name: t.clone() for name, t in state.items()}, folder / "model.safetensors")


CASES = {
    "expert": their_config("expert"),
    "expert-cycle": their_config("expert", sharing="cycle"),
    "expert-mlp": their_config("expert", mor={"router_type": "mlp", "z_loss": True, "temp": 2.0}),
    "expert-wide_mlp-tanh": their_config("expert", router_func="tanh", mor={"router_type": "wide_mlp"}),
    "expert-null": their_config("expert", router_func=None, alpha=None, mor={"capacity": "1.0,0.8,0.2"}),
    "expert-aux_router": their_config("expert", sampling="aux_router", mor={"temp": 0.5, "z_loss": True}),
    "expert-aux_router-mlp": their_config("expert", sampling="aux_router", mor={"router_type": "mlp", "temp": 4.0}),
    "expert-additive": their_config("expert", gating="additive", sampling=None, ln_share=False),
    "expert-shared": their_config("expert", kv={}),
    "expert-update_cache": their_config("expert", kv={"update_cache": True}, ln_share=False),
    "expert-cycle-update_cache": their_config("expert", sharing="cycle", kv={"update_cache": True}),
    "token": their_config("token", mor={"z_loss": True}),
    "token-mlp": their_config("token", mor={"router_type": "mlp", "temp": 0.5}),
    "token-sigmoid-loss_free": their_config("token", router_func="sigmoid", alpha=0.5, balancing="loss_free"),
    "token-softmax-alpha": their_config("token", alpha=0.5, ln_share=False),
    "token-shared-loss_free": their_config("token", kv={}, balancing="loss_free"),
    "token-additive": their_config("token", gating="additive"),
    "fixed-cycle-shared": their_config(sharing="cycle", kv={}, ln_share=False),
    "fixed-sequence": their_config(sharing="sequence"),
    "fixed-sequence-norms": their_config(sharing="sequence", ln_share=False),
    "fixed-middle_cycle": their_config(sharing="middle_cycle"),
    "fixed-middle_sequence": their_config(sharing="middle_sequence"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_computes_the_same(tmp_path, case):
    theirs = Theirs(CASES[case], seed=2)
    theirs.save(tmp_path, ("copies", "one")[list(CASES).index(case) % 2])
    model = MoR.from_authors(tmp_path)
    assert model.embed_tokens.weight.dtype == torch.float64 and model.config.max_position_embeddings == 32
    ids = torch.randint(19, (3, 10), generator=torch.Generator().manual_seed(1))
    labels = torch.randint(19, (3, 10), generator=torch.Generator().manual_seed(2))
    logits, depths, total = theirs.forward(ids, labels)
    got = model(ids, labels, mode="topk")
    assert torch.equal(got.depths, depths)
    assert case.startswith("fixed") or len(depths.unique()) == 3, "the case is too tame: depths don't vary"
    # float64 on both sides: sums of some dozen terms in other orders, through eight or nine layers
    torch.testing.assert_close(got.logits, logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.loss, total, rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", ["expert-additive", "expert-update_cache", "token-softmax-alpha", "token-additive"])
def test_what_was_loaded_decodes(case):
    """Tokens at different recursions in one launch, with norms of their own and without gates."""
    theirs = Theirs(CASES[case])
    model = MoR.from_authors(theirs.state, authors_config(CASES[case], theirs.llama)).eval()
    done = Engine(model, max_sequences=3).generate([[3, 1, 4], [1], [5, 9, 2, 6, 5]], SamplingParams(max_tokens=9))
    assert len({depth for one in done for depth in one.depths}) > 1
    for one in done:
        want = model(torch.tensor([one.prompt + one.tokens[:-1]]))
        assert one.depths == want.depths[0].tolist()
        assert one.tokens == want.logits[0, len(one.prompt) - 1 :].argmax(-1).tolist()


def test_the_names_of_a_published_run():
    cfg = their_config("token", bal_warmup_step=0, coeff="1e-1", alpha=0.5, balancing="loss")
    cfg["mor"] |= {"z_loss": True, "z_coeff": "1e-5"}  # PyYAML leaves numbers without a point as text
    config = authors_config(cfg, LLAMA, rope_theta=5e4)
    want = {"router": "token_choice", "router_activation": "softmax", "alpha": 0.5, "gate": "exit_only",
            "balance": "loss", "balance_scope": "batch", "balance_coeff": 0.05, "z_coeff": 1e-5, "rope_theta": 5e4,
            "bias_update_rate": 0.002, "kv": "recursion_wise", "sharing": "middle_cycle", "share_norms": True,
            "max_position_embeddings": 32, "num_hidden_layers": 8}  # fmt: skip
    assert want.items() <= config.to_dict().items()

    cfg = their_config("expert", alpha=0.1, coeff=0.001, cap_warmup_step=10)
    cfg |= {"gradient_accumulation_steps": 4, "model_config": {"num_hidden_layers": 11, "hidden_size": 24}}
    config = authors_config(cfg, LLAMA)
    want = {"router": "expert_choice", "router_activation": "sigmoid", "alpha": 0.1, "rank": "score", "aux": "loss",
            "aux_coeff": 0.001, "capacities": (1.0, 2 / 3, 1 / 3), "cap_warmup_steps": 3, "residual": "block",
            "num_hidden_layers": 11, "hidden_size": 24, "z_coeff": 0.0, "num_recursions": 3}  # fmt: skip
    assert want.items() <= config.to_dict().items()
    cfg["mor"]["expert"]["cap_warmup_step"] = None  # theirs takes the steps of the learning rate's
    assert authors_config(cfg, LLAMA).cap_warmup_steps == 7
    cfg |= {"num_warmup_steps": None, "num_train_steps": 100}
    assert authors_config(cfg, LLAMA).cap_warmup_steps == 5

    plain = authors_config({"recursive": {"enable": False}}, LLAMA)
    assert plain == MoRConfig.from_llama(LLAMA)
    cfg["mor"]["enable"] = False
    cfg["recursive"] |= {"num_recursion": 1, "base_depth": 4, "sharing": "cycle"}
    config = authors_config({**cfg, "model_config": None}, LLAMA)
    assert (config.num_hidden_layers, config.num_recursions, config.router) == (4, 1, "none")
    assert plain.tie_word_embeddings and not config.tie_word_embeddings


def changed(section, **entries):
    """A configuration of experts (of tokens for a change in mor.token) with those entries in that section."""
    cfg = their_config("token" if section == "mor.token" else "expert")
    place = cfg
    for name in section.split("."):
        place = place.setdefault(name, {}) if name else place
    place.update(entries)
    return cfg


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (changed("", optimiser="adam"), "config: expected names that the authors' code knows, got also optimiser"),
        (changed("mor.expert", aux_coeff=1), "mor.expert: expected names .*, got also aux_coeff"),
        (changed("mor", rand_router=True), "mor.rand_router: expected False, got True"),
        (changed("mor", type="depth"), "mor.type: expected expert or token, got 'depth'"),
        (changed("mor", router_type="conv"), "mor.router_type: expected linear or mlp or wide_mlp, got 'conv'"),
        (changed("mor", capacity="1.0,0.5"), "mor.capacity: expected 3 numbers, one a recursion, got '1.0,0.5'"),
        (changed("mor", capacity=0.5), "mor.capacity: expected numbers with commas between them, or null, got 0.5"),
        (changed("mor", temp="warm"), "mor.temp: expected a number, got 'warm'"),
        (changed("mor.expert", alpha=0), r"mor.expert.alpha: expected a number > 0, got 0"),
        (changed("mor.expert", router_func="relu"), "mor.expert.router_func: expected null or sigmoid or tanh"),
        (changed("mor.expert", cap_warmup_step=9), "gradient_accumulation_steps: expected an integer .*, got None"),
        (changed("mor.token", bal_warmup_step=9), "mor.token.bal_warmup_step: expected 0, .*got 9"),
        (changed("mor.token", balancing=None), "mor.token.balancing: expected loss or loss_free, got None"),
        (changed("recursive", sharing="sequence"), "recursive.sharing: expected cycle or middle_cycle"),
        (changed("recursive", num_recursion=4), "num_hidden_layers: expected a depth .*nearest 6 or 10, got 8"),
        (changed("recursive", enable=False), "recursive.enable: expected True, got False"),
        (changed("recursive", ln_share=None), "recursive.ln_share: expected True or False, got None"),
        (changed("relaxation", enable=True), "relaxation.enable: expected False, got True"),
        (their_config(sharing="sequence", kv={}), "recursive.sharing: expected cycle or middle_cycle, got 'sequence'"),
        (their_config("token", sharing="cycle"), "recursive.sharing: expected middle_cycle, got 'cycle'"),
        (their_config("token", kv={"update_cache": True}), "mor.type: expected expert, got 'token'"),
        ({"mor": 3}, "mor: expected a mapping, got int"),
    ],
)
def test_what_is_not_known_or_not_computed_is_refused(cfg, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        authors_config(cfg, LLAMA)


def test_errors_name_the_tensor(tmp_path):
    theirs = Theirs(CASES["expert"])
    config = authors_config(theirs.cfg, theirs.llama)

    def fails(change, message):
        with pytest.raises(ValueError, match=f"^state dict: {message}"):
            MoR.from_authors({**theirs.state, **change}, config)

    name = "model.layers.2.block.1.self_attn.q_proj.weight"
    fails({name: theirs.state[name] + 1e-6}, r"layers.2.block.1.self_attn.q_proj.weight: expected the values of "
          r"layers.1.block.1.self_attn.q_proj.weight, its copy, got others .*82c97f29")  # fmt: skip
    name = "model.layers.3.block.0.mlp.up_proj.weight"
    fails({name: theirs.state[name] * 2}, r"layers.3.block.0.mlp.up_proj.weight: .*, got others$")
    fails({"lm_head.weight": theirs.state["lm_head.weight"] + 1}, "lm_head.weight: expected the values of embed_tokens")
    fails({"model.layers.1.mlp_router.router.weight": torch.ones(1, 12)}, "expected the tensors of such a model only, "
          "got also layers.1.mlp_router.router.weight")  # fmt: skip
    fails({"model.layers.1.mor_router.router.weight": torch.ones(2, 12)}, "routers.0.weight: expected shape")
    for gone in ("mor_router.router.weight", "block.1.mlp.down_proj.weight"):
        state = {name: t for name, t in theirs.state.items() if not name.endswith(gone)}
        with pytest.raises(ValueError, match=f"state dict: expected layers.1.{gone}, found none"):
            MoR.from_authors(state, config)

    with pytest.raises(ValueError, match="dense: expected the config.json of the Llama, got none"):
        authors_config(theirs.cfg)
    with pytest.raises(ValueError, match="expected the one YAML file of its training configuration"):
        authors_config(tmp_path)
    theirs.save(tmp_path, "copies")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"safetensors files, found \*.bin files only, pickles, .*python -c"):
        MoR.from_authors(tmp_path)
    (tmp_path / "run.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="run.yaml: expected a configuration, got"):
        authors_config(tmp_path)


def test_without_pyyaml_a_file_may_be_json(tmp_path, monkeypatch):
    theirs = Theirs(CASES["token"])
    theirs.save(tmp_path, "copies")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match="run.yaml: expected PyYAML to read it"):
        authors_config(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(theirs.cfg))
    assert authors_config(tmp_path / "run.json", tmp_path) == authors_config(theirs.cfg, theirs.llama)


def test_the_commands_read_such_a_folder(tmp_path, capsys):
    from mor_kernels.train import train_tokenizer

    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    theirs = Theirs(CASES["expert"])
    theirs.state["model.embed_tokens.weight"] = theirs.state["lm_head.weight"] = theirs.draw(300, 12)
    theirs.llama["vocab_size"] = 300
    theirs.save(tmp_path, "copies")
    train_tokenizer(text, 300).save(str(tmp_path / "tokenizer.json"))
    assert is_authors(tmp_path)
    assert main(["depth", str(tmp_path), "The fox", "--color", "never"]) == 0
    assert "The fox" in capsys.readouterr().out
    (tmp_path / "run.yaml").unlink()
    assert main(["depth", str(tmp_path), "The fox"]) == 1
    assert "expected the one YAML file of its training configuration" in capsys.readouterr().err
