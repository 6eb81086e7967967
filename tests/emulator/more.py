import plugin, torch, random, sys, os
sys.path.insert(0, ".")
from mor_kernels import ops
import importlib
T = importlib.import_module("tests.ops.test_paged_attention")
s = importlib.import_module("tests.strategies")
cu = importlib.import_module("mor_kernels.ops.paged_attention.cuda")
from reference import ops as reference
def check(device, backend, q, caches, table, lens, scales, **options):
    exact = reference.paged_attention(q.double(), *T.values(caches, scales), table, lens, **options)
    out = ops.paged_attention(q, *caches, table, lens, backend=backend, **options, **scales)
    half = q.dtype in s.HALVES
    largest = T.values(caches, scales)[1].nan_to_num().abs().amax().item() if half and caches[1].numel() else 0.0
    s.assert_close(out, exact, q.dtype, 0.5, slack=torch.finfo(q.dtype).eps / 2 * largest)
    return out
T.check = check
seed = int(sys.argv[1]); count = int(sys.argv[2])
r = random.Random(seed)
for case in range(count):
    dtype = r.choice([torch.bfloat16, torch.float16, torch.float32])
    kept = r.choice([dtype, dtype, T.FP8, torch.bfloat16 if dtype == torch.float32 else dtype])
    width = r.choice([1, 3, 8, 16, 40, 64, 64, 80, 96, 100, 128, 128, 192, 256])
    groups = r.choice([1, 2, 3]); group = r.choice([1, 2, 3, 5, 8, 9, 16, 20, 70] if width <= 128 else [1, 3, 9])
    page = r.choice([1, 3, 16, 64])
    lanes = r.choice([1, 2, 5])
    longest = r.choice([10, 100, 400] if group < 16 else [10, 60])
    cu.LEAST_KEYS, cu.UNIT = r.choice([(256, 64), (32, 32), (64, 16), (7, 7)])
    os.environ["EMU_BLOCKS"] = str(r.choice([1, 3, 7, 1000]))
    lens = torch.tensor([r.randint(0, longest) for _ in range(lanes + 1)])
    *caches, table, scales = T.pool(lens, page, groups, width, r.randint(0, 10**6), kept)
    if r.random() < .3: table = table.t().contiguous().t()
    mode = r.choice(["", "heads", "d", "offset"])
    def strided(c, mode):
        u = c.view(torch.uint8) if c.dtype == T.FP8 else c
        if mode == "heads": u = u.transpose(1, 2).contiguous().transpose(1, 2)
        if mode == "d": u = u.transpose(2, 3).contiguous().transpose(2, 3)
        if mode == "offset":
            flat = torch.zeros(u.numel() + 1, dtype=u.dtype); flat[1:] = u.flatten(); u = flat[1:].view(u.shape)
        return u.view(T.FP8) if c.dtype == T.FP8 else u
    caches = [strided(caches[0], mode), strided(caches[1], r.choice([mode, "heads"]))]
    options = {}
    if r.random() < .5:
        rows = torch.randperm(lanes + 1)[:lanes]; rows[r.randrange(lanes)] = r.choice([-1, int(rows[0])])
        klens = torch.where(rows >= 0, lens[rows.clamp(min=0)], 5); options["rows"] = rows
    else:
        klens = lens[:lanes]; table = table[:lanes]
    n = lanes
    if r.random() < .6:
        counts = torch.tensor([r.choice([0, 1, 2, 5, 30 if group < 10 else 3]) for _ in range(lanes)])
        counts = torch.minimum(counts, klens)
        options["cu_seqlens_q"] = s.cu_seqlens(counts); n = int(counts.sum()) + r.choice([0, 2])
    if r.random() < .4:
        options["q_positions"] = torch.randint(-1, longest + 2, (n,), dtype=r.choice([torch.int64, torch.int32]))
    q = s.normal((n, groups * group, width), seed + case, dtype, r.random() < .4)
    if dtype != torch.float32 and r.random() < .3: q = q * torch.tensor(2.0 ** r.choice([-20, 6 if dtype == torch.float16 else 3]), dtype=dtype)
    desc = (dtype, kept, width, groups, group, page, lanes, longest, cu.LEAST_KEYS, cu.UNIT, os.environ["EMU_BLOCKS"], mode, list(options), n)
    print(case, desc, flush=True)
    out = T.check("cpu", "cuda", q, caches, table, klens.to(torch.int32), scales, **options)
    # the same schedule twice and other blocks: bit-equal
    kl = klens.to(torch.int32)
    lanes_options = {k: v for k, v in options.items() if k != "q_positions"}
    schedule = ops.attention_schedule(kl, groups * group, groups, n, backend="cuda", **lanes_options)
    before = schedule.clone()
    for blocks in ("2", "9", "5000"):
        os.environ["EMU_BLOCKS"] = blocks
        again = ops.paged_attention(q, *caches, table, kl, backend="cuda", schedule=schedule, **options, **scales)
        assert torch.equal(out.view(torch.uint8) if 0 else out, again), "not bit-equal"
    from mor_kernels.ops.paged_attention import _parts
    lines = int(schedule[7])
    groups_ = groups
    parts = _parts.most_parts(lanes, groups * group, groups, n, options.get("cu_seqlens_q"))
    assert int(schedule[(parts - 1) * 8]) == 0 and not schedule[parts * 8 : parts * 8 + lines * groups].any(), "counters" 
