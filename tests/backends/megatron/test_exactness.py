"""One RL step gives the same loss and gradients in every layout of ranks, and those of the FSDP trainer."""

import pytest
import torch
import torch.distributed as dist

from tests.backends.megatron.families import save_family
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import run_world, trainer_args
from tests.tiny_model import save_tiny_model

# With lr = eps = 1 the first AdamW step moves a parameter by -g / (|g| + 1), from which its gradient g follows.
READABLE = ("--lr", "1", "--adam-eps", "1", "--weight-decay", "0", "--clip-grad", "0", "--calculate-per-token-loss")
# --ci-test: what must be exactly zero in the first step is.
GRPO = ("--ci-test", "--use-kl-loss", "--kl-loss-coef", "0.1", "--entropy-coef", "0.01", "--eps-clip-high", "0.3")
PACKED = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "60")
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DENSE = {
    "one rank": (1, {}),
    "every layer recomputed": (1, RECOMPUTED),
    "DP2": (2, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2+SP": (2, TP2SP),
    "PP2": (2, PP2),
    "CP2": (2, CP2),
    "TP2+SP attention recomputed": (2, TP2SP | {"recompute_granularity": "selective"}),
    "CP4": (4, {"context_parallel_size": 4}),
    "TP2+SP PP2": (4, TP2SP | PP2),
    "TP2+SP CP2": (4, TP2SP | CP2),
    "PP2 DP2": (4, PP2),
}
EXPERTS = {
    "one rank": (1, {}),
    "every layer recomputed": (1, RECOMPUTED),
    "PP2": (2, PP2),
    "PP2 every layer recomputed": (2, PP2 | RECOMPUTED),
    "EP2 CP2": (2, EP2 | CP2),
    "TP2+SP EP2": (2, TP2SP | EP2 | {"expert_tensor_parallel_size": 1}),
    "TP2+SP ETP2": (2, TP2SP | {"expert_tensor_parallel_size": 2}),
}
# Balance is a matter of a micro-batch, and of those data-parallel ranks have others.
EXPERTS_DP = {"DP2": (2, {}), "EP2": (2, EP2)}
BALANCE = ("--moe-aux-loss-coeff", "2")
DELTA_NETS = {name: layout for name, layout in EXPERTS.items() if "CP" not in name}
LATENT = {name: EXPERTS[name] for name in ("one rank", "PP2", "EP2 CP2", "TP2+SP EP2", "TP2+SP ETP2")}
STAGES = {
    "PP2 VPP2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "PP2 VPP4": (2, PP2 | {"virtual_pipeline_model_parallel_size": 4}),
    "PP4 VPP2": (4, {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}),
}


def gradients_of(before: dict, after: dict) -> dict[str, torch.Tensor]:
    moved = {name: (before[name] - after[name]).double() for name in before}
    return {name: step / (1 - step.abs()) for name, step in moved.items()}


def one_step(rank, world_size, port, path, layouts, flags):
    """{layout: (metrics, gradients by checkpoint name)}"""
    results = {}
    for name, layout in layouts.items():
        args = trainer_args(path, *flags, data_pad_size_multiplier=4, make_vocab_size_divisible_by=12, **layout)
        trainer = start_trainer(args, rank, world_size, port, with_ref=True)
        before = parameters_of(trainer)
        metrics = train_rollout(trainer, 0)
        results[name] = (metrics, gradients_of(before, parameters_of(trainer)))
        stop_trainer()
    dist.destroy_process_group()
    return results


def fsdp_step(rank, world_size, port, path, flags):
    from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
    from tests.backends import trainers

    trainer = trainers.make_trainer(
        FSDPTrainRayActor, trainer_args(path, *flags), rank, world_size, port, with_ref=True
    )
    before = {name: value.clone() for name, value in trainers.parameters_of(trainer).items()}
    metrics = trainers.train_rollout(trainer, 0)
    return metrics, gradients_of(before, trainers.parameters_of(trainer))


def split_experts(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' stacked experts under the checkpoint's names."""
    out = {}
    for name, tensor in gradients.items():
        if name.endswith("experts.gate_up_proj"):
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                prefix = name.replace("gate_up_proj", f"{i}.")
                out |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            out |= {name.replace("down_proj", f"{i}.down_proj.weight"): expert for i, expert in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def all_layouts(path, layouts, *flags, fsdp_ranks=1):
    """FSDP's (metrics, gradients) and those of every rank of every layout."""
    metrics, gradients = run_world(fsdp_step, fsdp_ranks, path, flags)[0]
    return (metrics, split_experts(gradients)), steps_of_layouts(path, layouts, *flags)


def steps_of_layouts(path, layouts, *flags):
    """{layout: (metrics, gradients)} of every rank of every layout."""
    ranks = []
    for size in sorted({world for world, _ in layouts.values()}):
        fitting = {name: layout for name, (world, layout) in layouts.items() if world == size}
        ranks += run_world(one_step, size, path, fitting, flags)
    return ranks


def check(results, layout, tolerance=1e-5, same_rows=True):
    """`same_rows`: the balance of experts, a matter of micro-batches, is the same."""
    (metrics, gradients), ranks = results
    largest = max(g.abs().max().item() for g in gradients.values())
    found = [rank[layout] for rank in ranks if layout in rank]
    assert found
    for ours, theirs in found:
        # A router's correction bias is no parameter in transformers; nothing here moves it.
        fixed = {name for name in theirs if name.endswith("e_score_correction_bias")}
        assert not any(theirs[name].any() for name in fixed)
        assert set(theirs) - fixed == set(gradients)
        assert set(ours) == set(metrics)
        keys = ("loss", "pg_loss", "kl_loss", "entropy_loss", "grad_norm", "pg_clipfrac", "ppo_kl")
        for key in (
            *keys,
            *(("moe_aux_loss", "moe_max_load") if same_rows and "train/moe_max_load" in metrics else ()),
        ):
            assert ours[f"train/{key}"] == pytest.approx(metrics[f"train/{key}"], rel=1e-5, abs=1e-7), key
        for name, gradient in gradients.items():
            assert (theirs[name] - gradient).abs().max().item() < tolerance * largest, name


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("dense"))
    save_tiny_model(path, tie_word_embeddings=True)
    return all_layouts(path, DENSE, *READABLE, *GRPO, *PACKED)


@pytest.mark.integration
@pytest.mark.parametrize("layout", DENSE)
def test_dense_step_equals_fsdp(dense, layout):
    check(dense, layout)


TOP_P = ("--use-rollout-top-p-replay", "--rollout-top-p", "0.9")
REPLAYED = {name: DENSE[name] for name in ("TP2+SP", "CP2")}


@pytest.mark.integration
def test_step_with_top_p_replay_equals_fsdp(tmp_path, dense):
    path = str(tmp_path / "model")
    save_tiny_model(path, tie_word_embeddings=True)
    results = all_layouts(path, REPLAYED, *READABLE, *GRPO, *PACKED, *TOP_P)
    for layout in REPLAYED:
        check(results, layout)
    entropies = [metrics["train/entropy_loss"] for (metrics, _), _ in (results, dense)]
    assert entropies[0] < 0.6 * entropies[1]  # of a few tokens instead of all


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("experts"))
    save_family("qwen3_moe", path)
    flags = (*READABLE, *GRPO, *PACKED, *BALANCE)
    alone = all_layouts(path, EXPERTS, *flags)
    shared = all_layouts(path, EXPERTS_DP, *flags, fsdp_ranks=2)
    return dict.fromkeys(EXPERTS, alone) | dict.fromkeys(EXPERTS_DP, shared)


@pytest.mark.integration
@pytest.mark.parametrize("layout", [*EXPERTS, *EXPERTS_DP])
def test_step_with_balanced_experts_equals_fsdp(experts, layout):
    check(experts[layout], layout)
    metrics = experts[layout][0][0]
    assert metrics["train/moe_aux_loss"] > 1.01 and metrics["train/moe_max_load"] > 1.1


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("latent"))
    save_family("deepseek_v3", path)
    return all_layouts(path, LATENT, *READABLE, *GRPO, *PACKED)


@pytest.mark.integration
@pytest.mark.parametrize("layout", LATENT)
def test_step_with_latent_attention_equals_fsdp(latent, layout):
    check(latent, layout)


def fsdp_step_unpacked(rank, world_size, port, path, flags):
    """Of a model whose states would go from one sequence of a row into the next: a sequence per row."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM

    Qwen3NextForCausalLM._is_stateful = False
    return fsdp_step(rank, world_size, port, path, flags)


@pytest.fixture(scope="module")
def delta_nets(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("delta_nets"))
    save_family("qwen3_next", path)
    flags = (*READABLE, *GRPO, "--train-backend", "megatron")  # arguments for fsdp are refused
    metrics, gradients = run_world(fsdp_step_unpacked, 1, path, flags)[0]
    return (metrics, split_experts(gradients)), steps_of_layouts(path, DELTA_NETS, *flags, *PACKED)


@pytest.mark.integration
@pytest.mark.parametrize("layout", DELTA_NETS)
def test_step_with_packed_delta_nets_equals_unpacked_fsdp(delta_nets, layout):
    check(delta_nets, layout, tolerance=2e-5, same_rows=False)  # layouts in float64: test_float64


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("stages"))
    save_tiny_model(path, tie_word_embeddings=True, num_hidden_layers=8)
    return all_layouts(path, STAGES, *READABLE, *GRPO, *PACKED)


@pytest.mark.integration
@pytest.mark.parametrize("layout", STAGES)
def test_step_over_virtual_stages_equals_fsdp(stages, layout):
    check(stages, layout)


SCHEDULED = (
    *(
        "--weight-decay",
        "0.1",
        "--clip-grad",
        "0.5",
        "--lr",
        "1e-2",
        "--adam-eps",
        "1e-3",
        "--lr-decay-style",
        "cosine",
    ),
    *("--lr-warmup-iters", "2", "--num-steps-per-rollout", "2"),
)


def several_steps(rank, world_size, port, path, layout):
    """Parameters after two rollouts of two steps; FSDP's where there is no layout."""
    if layout is None:
        from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
        from tests.backends import trainers

        trainer = trainers.make_trainer(FSDPTrainRayActor, trainer_args(path, *SCHEDULED), rank, world_size, port)
        rates = [trainers.train_rollout(trainer, i)["train/lr-pg_0"] for i in range(2)]
        return rates, trainers.parameters_of(trainer)
    args = trainer_args(path, *SCHEDULED, data_pad_size_multiplier=4, make_vocab_size_divisible_by=12, **layout)
    trainer = start_trainer(args, rank, world_size, port)
    rates = [train_rollout(trainer, i)["train/lr-pg_0"] for i in range(2)]
    return rates, parameters_of(trainer)


@pytest.mark.integration
def test_decay_clipping_and_schedule_equal_fsdp(tmp_path):
    path = str(tmp_path / "model")
    save_tiny_model(path)
    rates, expected = run_world(several_steps, 1, path, None)[0]
    for layout in ({}, TP2SP):
        for ours, parameters in run_world(several_steps, 2, path, layout):
            assert ours == rates
            for name, value in parameters.items():
                assert (value - expected[name]).abs().max() < 2e-6, name
