"""Contracts of the hooks that trainers call, on a micro-batch with made-up numbers."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.testing.contracts import contract, schedule_and_cut
from slime.testing.kit import Kit
from slime.utils.misc import flatten

VOCABULARY = 32


QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
COMPUTED = ("log_probs", "ref_log_probs", "advantages", "returns")


def rank_data(kit: Kit, args: Namespace, computed: tuple[str, ...] = COMPUTED) -> Any:
    """A rank's part of a rollout, with `computed` set."""
    import torch

    from slime.ray.train_data import samples_to_batch
    from slime.training.rollout_data import RankData

    data = RankData(schedule_and_cut(args, samples_to_batch(args, list(flatten(kit.finished()))))[0])
    generator = torch.Generator().manual_seed(0)
    lengths = data["response_lengths"]
    for key in computed:
        data.set_flat(key, [torch.randn(int(n), generator=generator) for n in lengths])
    return data


@contract("rollout-data-postprocess")
def rollout_data_postprocess(kit: Kit, path: str) -> None:
    """May change the rollout's data; the lists still fit."""
    from slime.training.hooks import call_data_postprocess

    args = kit.args(rollout_data_postprocess_path=path)
    data = rank_data(kit, args)
    call_data_postprocess(args, 0, data)
    lengths = [int(n) for n in data["response_lengths"]]
    assert [len(a) for a in data["advantages"]] == lengths, "an advantage per response token"


@contract("custom-advantage-function")
def custom_advantage_function(kit: Kit, path: str) -> None:
    """Sets `advantages` and `returns`, a tensor with an entry per response token for each sample."""
    from slime.training.advantages import compute_advantages

    args = kit.args(custom_advantage_function_path=path)
    data = rank_data(kit, args, COMPUTED[:2])
    compute_advantages(args, data)
    lengths = [int(n) for n in data["response_lengths"]]
    for key in ("advantages", "returns"):
        assert [len(values) for values in data[key]] == lengths, f"{key}: an entry per response token"


@contract("custom-loss-function")
def custom_loss_function(kit: Kit, path: str) -> None:
    """(loss, dict of numbers); the loss is a scalar with a gradient."""
    import torch

    from slime.training.losses import compute_loss

    args = kit.args(custom_loss_function_path=path, loss_type="custom_loss")
    mb, reduce = _micro_batch(kit, args)
    logits = torch.randn(1, len(mb.tokens), VOCABULARY, requires_grad=True)
    loss, metrics = compute_loss(args, mb, torch.zeros(sum(mb.response_lengths)), None, reduce, logits)
    _check_loss(loss, metrics, logits)


@contract("custom-tis-function")
def custom_tis_function(kit: Kit, path: str) -> None:
    """(pg_loss, modified masks, metrics), all with an entry per response token."""
    _check_policy_loss(kit, kit.args(custom_tis_function_path=path, use_tis=True))


@contract("custom-pg-loss-reducer-function")
def custom_pg_loss_reducer_function(kit: Kit, path: str) -> None:
    """Returns a function from token losses to a scalar."""
    for per_token in (False, True):
        args = kit.args(custom_pg_loss_reducer_function_path=path, calculate_per_token_loss=per_token)
        _check_policy_loss(kit, args)


@contract("custom-megatron-init")
def custom_megatron_init(kit: Kit, path: str) -> None:
    """Takes the arguments."""
    from slime.backends.megatron_utils import hooks

    hooks.after_init(kit.args(custom_megatron_init_path=path))


@contract("custom-megatron-before-log-prob-hook")
def custom_megatron_before_log_prob_hook(kit: Kit, path: str) -> None:
    """Takes the model's chunks, before the log-probs of every model that is held."""
    from slime.backends.megatron_utils import hooks

    args = kit.args(custom_megatron_before_log_prob_hook_path=path)
    for prefix in ("", "ref_"):
        hooks.before_log_prob(args, _chunks(), prefix)


@contract("custom-megatron-before-train-step-hook")
def custom_megatron_before_train_step_hook(kit: Kit, path: str) -> None:
    """Takes the model's chunks, the optimizer and the schedule of the learning rate."""
    import torch

    from slime.backends.common.lr_schedule import LRSchedule
    from slime.backends.megatron_utils import hooks

    model = _chunks()
    optimizer = Namespace(megatron=torch.optim.SGD(model[0].parameters(), lr=1e-3), schedule=LRSchedule(1e-3))
    args = kit.args(custom_megatron_before_train_step_hook_path=path)
    hooks.before_train_step(args, 0, 0, model, optimizer)


@contract("custom-model-provider")
def custom_model_provider(kit: Kit, path: str) -> None:
    """Makes the parts of a model that Megatron trains, for a Qwen3 of two layers."""
    import json
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    import pytest

    pytest.importorskip(
        "megatron.core", reason="--custom-model-provider-path belongs to Megatron: install megatron-core"
    )
    directory = kit.directory / "qwen3"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3))
    # A process of its own: Megatron's groups, and what it does without a GPU, concern the whole process.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(_build_with, path, str(directory)).result()


def _build_with(path: str, checkpoint: str) -> None:
    import torch
    import torch.distributed as dist

    from slime.backends.megatron_utils import compat, hooks

    compat.install()
    from slime.backends.megatron_utils.architecture import read_architecture
    from slime.backends.megatron_utils.model_config import transformer_config
    from slime.backends.megatron_utils.model_provider import build_chunks
    from slime.backends.megatron_utils.parallel import ParallelSizes, init_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_parallel(ParallelSizes(), seed=0, timeout_minutes=1)
    architecture = read_architecture(checkpoint)
    config = transformer_config(architecture, ParallelSizes(), torch.float32, torch.device("cpu"))
    provider = hooks.model_provider(Namespace(custom_model_provider_path=path))
    build_chunks(architecture, config, provider=provider)
    dist.destroy_process_group()


def _chunks() -> list[Any]:
    """What stands for a model: one chunk of one layer."""
    import torch

    return [torch.nn.Linear(4, 4)]


def _check_policy_loss(kit: Kit, args: Namespace) -> None:
    import torch

    from slime.training.losses import compute_loss

    mb, reduce = _micro_batch(kit, args)
    log_probs = torch.randn(sum(mb.response_lengths), requires_grad=True)
    loss, metrics = compute_loss(args, mb, log_probs, torch.ones_like(log_probs), reduce)
    _check_loss(loss, metrics, log_probs)


def _micro_batch(kit: Kit, args: Namespace) -> tuple[Any, Any]:
    from slime.training.reducers import make_reducer

    mb = rank_data(kit, args).micro_batch(0, 0, "cpu")
    return mb, make_reducer(mb, args.calculate_per_token_loss)


def _check_loss(loss: Any, metrics: dict[str, Any], leaf: Any) -> None:
    import torch

    assert loss.shape == () and torch.isfinite(loss), "the loss is a finite scalar"
    loss.backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all(), "it has a finite gradient"
    assert all(value.numel() == 1 for value in metrics.values()), "metrics are numbers"
