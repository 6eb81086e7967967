"""The benchmark of training steps without a GPU: plain PyTorch against ours, the check and what it catches, rows."""

import dataclasses

import pytest
import torch

from bench import train
from bench.harness import Mismatch, Samples, measure
from mor_kernels.model import MoR, MoRConfig, config

TINY = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip
COMPARED = ("vanilla", "recursive-2", "mor-2", "mor-3")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that wait for tiny operations take a hundred times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(name, device="cpu", seed=0):
    return train.make(MoRConfig(**{**TINY, **train.CASES[name]}), 2, 13, device, seed)


def gradients(inputs, how="ours, eager", dtype=torch.float32):
    return train.Step(inputs, how).gradients(dtype)


@pytest.mark.parametrize("name", COMPARED)
def test_plain_is_the_same_model(name):
    ours, plain = (gradients(tiny(name), how) for how in ("ours, eager", "plain eager"))
    assert ours.keys() == plain.keys() and len(plain) > 20
    for key, want in plain.items():
        assert want.norm() > 0, key
        assert (ours[key] - want).norm() <= 1e-5 * want.norm(), key


def test_a_step_changes_every_parameter():
    for how in ("ours, eager", "plain eager"):
        step = train.Step(tiny("mor-3"), how)
        before = [p.detach().clone() for p in step.model.parameters()]
        step()
        assert all(not torch.equal(p, old) for p, old in zip(step.model.parameters(), before))
        assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["vanilla", "mor-3"])
def test_right_gradients_pass(name, dtype):
    assert 0 <= train.check(tiny(name), gradients(tiny(name), dtype=dtype), True) < 1


def half(t):
    return t / 2


def negated(t):
    return -t


def first_row_lost(t):
    t = t.clone()
    t[0] = 0
    return t


@pytest.mark.parametrize(
    ("key", "mutation", "why"),
    [
        ("layers.1.self_attn.k_proj.weight", half, "gradients: the error is"),
        ("layers.0.mlp.gate_proj.weight", first_row_lost, "gradients: the error is"),
        ("routers.1.weight", negated, "gradients: the error is"),
        ("norm.weight", lambda t: t * torch.nan, "gradients: the error is"),
        ("layers.1.self_attn.q_proj.weight", lambda t: None, "no gradient"),
        ("loss", lambda t: t + 0.02, "loss: the error is"),
    ],
)
def test_one_wrong_value_is_caught(key, mutation, why):
    outputs = gradients(tiny("mor-2"))
    outputs[key] = mutation(outputs[key])
    with pytest.raises(Mismatch, match=why):
        train.check(tiny("mor-2"), outputs, True)


def test_where_plain_has_no_such_model_gradients_must_be_there_and_finite():
    for name in ("mor-2-token", "mor-2-shared"):
        outputs = gradients(tiny(name))
        assert train.check(tiny(name), outputs, True) == 0
        for wrong, why in ((torch.full((1,), torch.inf), "finite"), (None, "no gradient")):
            with pytest.raises(Mismatch, match=why):
                train.check(tiny(name), {**outputs, "norm.weight": wrong}, True)


def test_every_case_is_a_model_of_the_size_with_its_operations():
    """On the meta device, where models have shapes alone."""
    made = train.cases(train.CASES, "360M", 16, 2048)
    assert [case.name for case in made] == list(train.CASES) and len(made) == 15
    for case in made:
        (of_case, batch, length, device), changes = case.make.args, train.CASES[case.name]
        layers = 34 if "4" in case.name else 32  # the paper's
        assert of_case == MoRConfig.from_size("360M", num_hidden_layers=layers, **changes)
        assert (batch, length, device) == (2, 2048, "cuda")
        assert case.flops == 16 * of_case.flops(2048, training=True)
        plain = ["plain"] if case.name in train.PLAIN else []
        assert [i.name for i in case.implementations] == [*plain, "ours, graph"]
        assert [i.ours for i in case.implementations] == [False] * len(plain) + [True]
    vanilla, recursive = made[:2]
    assert vanilla.flops == recursive.flops and 300e6 < vanilla.nbytes / 28 < 400e6 and recursive.nbytes < 0.7e10
    with torch.device("meta"):
        assert vanilla.nbytes == 28 * sum(p.numel() for p in MoR(MoRConfig.from_size("360M")).parameters())
    assert train.cases(["vanilla"], "360M", 1, 4096)[0].make.args[0].max_position_embeddings == 4096


def test_facts_of_a_turn_end_in_the_rows(monkeypatch):
    """A case as it is on a GPU, on a CPU: without CUDA graphs, and a stand-in for what is timed."""
    make = train.make
    monkeypatch.setitem(config.SIZES, "tiny", TINY)
    monkeypatch.setattr(train, "make", lambda config, batch, length, device, seed: make(config, 2, 13, "cpu", seed))
    monkeypatch.setattr(train, "Graphs", lambda parameters, backward: backward)
    (case,) = train.cases(["mor-2"], "tiny", 2, 13)
    turns = []

    def sample(case, implementation):
        turns.append(implementation.name)
        return Samples([3.0, 4.0, 5.0], "events", facts={"tokens": 26, "peak_bytes": 1000 + len(turns),
                                                         "by_kind": {"matmul": 2.5}})  # fmt: skip

    result = {"copy_bandwidth": 3e12, "matmul_flops_per_second": 7e14}
    plain, ours = measure(case, result, sample)
    assert [plain["failed"], ours["failed"]] == [None, None] and 0 < ours["error"] < 1
    first = {name: 1001 + turns.index(name) for name in ("plain", "ours, graph")}
    for row in (plain, ours):
        assert (row["op"], row["case"], row["ms"], row["timing"]) == ("train step", "mor-2", 4.0, "events")
        assert (row["tokens"], row["by_kind"], row["flops"]) == (26, {"matmul": 2.5}, case.flops)
        assert row["peak_bytes"] == first[row["impl"]]

    wrong = dataclasses.replace(case.implementations[1], prepare=lambda inputs: lambda: {"loss": torch.tensor(1.0)})
    (row,) = measure(dataclasses.replace(case, implementations=(wrong,)), result, sample)
    assert row["failed"].startswith("Mismatch: loss") and "tokens" not in row


KERNELS = {
    "attention": [
        "_backward", "_forward_narrow", "_forward_wide", "_prepare", "_finish", "_backward_kv", "_backward_q",
        "_forward",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64, "
        "128, 128, 8, 4, 4, 4, false, false, cutlass::bfloat16_t>, false, true>(pytorch_flash::Flash_bwd_params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64_4x1x1_kernel0_0",
    ],
    "matmul": [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>(float)",
        "void splitKreduce_kernel<float>()", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_nn_align8>(int)",
    ],
    "elementwise": [
        "triton_poi_fused__to_copy_copy_add_gather_scatter_add_sort_0", "triton_red_fused__scaled_dot_product_flash_mm",
        "triton_per_fused_topk_mul_sum_native_layer_norm_7", "_rope", "_swiglu", "_swiglu_backward", "_cross_entropy",
        "_add_rms_norm", "_add_rms_norm_backward", "_sum_rows", "_scaled",
        "void mor::(anonymous namespace)::rope_kernel<__nv_bfloat16>(mor::Params)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, 3ul>(int)",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4>>(long)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::CopyFunctor<float>>(long)",
    ],
    "routing": [
        "_route", "_route_backward", "_backward_of_slots", "_aux", "_aux_backward", "_gather",
        "_scatter", "_scatter_backward", "_logit_gradients", "_pack", "_choose_backward",
        "_balance_parts", "_z", "_invert", "_gather_backward",
        "void mor::(anonymous namespace)::scatter_back_kernel<__nv_bfloat16, __nv_bfloat16, 8, 1>(int)",
        "void mor::(anonymous namespace)::route_backward_kernel<__nv_bfloat16, 8, 4>(int)",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(int)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(int)",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)", "Memset (Device)", "memcpy128", "memcpy32_post",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
        "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(at::TensorIteratorBase&)>(int)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_are_known_by_their_names(kind):
    for name in KERNELS[kind]:
        assert train.grouped([(name, 1, 1.0)])["by_kind"] == {kind: 1.0}, name


def test_the_longest_kernels_are_kept():
    found = train.grouped([(f"nvjet_{i}", 2, float(i)) for i in range(50)] + [("_rope", 3, 100.0)])
    assert found["by_kind"] == {"matmul": sum(range(50)), "elementwise": 100.0}
    assert list(found["by_kind"]) == ["matmul", "elementwise"] and len(found["longest"]) == 20
    assert list(found["longest"].items())[:2] == [("3 x _rope", 100.0), ("2 x nvjet_49", 49.0)]


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        train.main(["mor-2", "mor-9"])
    assert refused.value.code == 2 and "MODEL: expected of vanilla" in (said := capsys.readouterr().err)
    assert said.strip().endswith("got mor-9")


def test_without_a_gpu_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: False)
    assert train.main(["--out", str(tmp_path), "vanilla"]) == 2
    assert "No CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "partial", "names", "steps", "variant"),
    [
        ([], False, list(train.CASES), train.STEPS, ""),
        (["mor-2", "--quick"], True, ["mor-2"], train.QUICK_STEPS, ""),
        (["--batch", "8"], False, list(train.CASES), train.STEPS, "batch 8"),
        (["--size", "1.7B", "--length", "512"], False, list(train.PLAIN), train.STEPS, "size 1.7B, length 512"),
    ],
)
def test_models_and_what_the_result_is_called(arguments, partial, names, steps, variant, monkeypatch):
    seen = []
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train, "cases", lambda names, *shape: list(names))
    monkeypatch.setattr(train, "sample", lambda case, implementation, steps, **_: seen.append(steps))

    def on_gpu(benchmark, make_cases, options, is_partial, sample, called):
        sample("case", "implementation")
        assert (benchmark, make_cases(), is_partial, called) == ("train", names, partial, variant)
        return 0

    monkeypatch.setattr(train, "on_gpu", on_gpu)
    assert train.main(arguments) == 0 and seen == [steps]
