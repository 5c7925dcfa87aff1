"""On a GPU: what leaves its memory, adapters over a bf16 base, a teacher and a critic that come and go."""

import gc
import math

import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.backends.fsdp_utils.critic import FSDPCriticRayActor
from slime.ray.roles import role_args
from tests.backends.trainers import make_trainer, run_world, train_rollout, trainer_args
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.system, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FLAGS = "--device cuda --num-steps-per-rollout 2 --gradient-checkpointing --ci-test".split()
VARIANTS = {
    "plain": (),
    "moments": ("--optimizer", "cpu_adam"),
    "activations": ("--fsdp-offload-activations",),
    "adapters": ("--lora-rank", "8"),
    "reduced once": ("--fsdp-reduce-grads-once",),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("cuda-memory"))
    save_tiny_model(path, head_dim=64, hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    return path


def train_variants(rank, world_size, port, model_dir):
    """{variant: (metrics of the second rollout, GB held after it, GB held while offloaded)}."""
    out = {}
    for name, flags in VARIANTS.items():
        gc.collect()
        base = torch.cuda.memory_allocated()
        trainer = make_trainer(FSDPTrainRayActor, trainer_args(model_dir, *FLAGS, *flags), rank, world_size, port)
        train_rollout(trainer, 0)
        trainer.offload()
        away = torch.cuda.memory_allocated() - base
        trainer.onload()
        metrics = train_rollout(trainer, 1)
        out[name] = metrics, (torch.cuda.memory_allocated() - base) / 1e9, away / 1e9
        del trainer
    return out


def test_memory(model_dir):
    (results,) = run_world(train_variants, 1, model_dir)
    _, plain, _ = results["plain"]
    for name, (metrics, held, away) in results.items():
        assert math.isfinite(metrics["train/loss"]) and metrics["train/skipped_steps"] == 0, name
        assert away < 0.1, (name, away, held)  # cuBLAS keeps a workspace of 0.07
    assert results["moments"][1] < 0.45 * plain  # 4 of 12 bytes per parameter
    assert results["adapters"][1] < 0.3 * plain  # 2 of 12
    grad_norm = results["plain"][0]["train/grad_norm"]
    for name in ("moments", "activations", "reduced once"):
        assert results[name][0]["train/grad_norm"] == pytest.approx(grad_norm, rel=0.02), name


def take_turns(rank, world_size, port, model_dir):
    """PPO's two roles and a teacher on one GPU, each offloaded while the other works."""
    flags = (*FLAGS, "--advantage-estimator", "ppo", "--use-opd", "--opd-teacher-load", model_dir)
    args = trainer_args(model_dir, *flags)
    critic = make_trainer(FSDPCriticRayActor, role_args(args, "critic"), rank, world_size, port, role="critic")
    critic.offload()
    base = torch.cuda.memory_allocated()
    actor = make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
    held = torch.cuda.memory_allocated() - base
    out = []
    for rollout_id in range(2):
        actor.offload()
        critic.onload()
        of_critic = train_rollout(critic, rollout_id)
        values = critic.take_values()["values"]
        critic.offload()
        actor.onload()
        actor.train_on, original = _with_values(actor, values), actor.train_on
        out.append(of_critic | {f"policy/{k}": v for k, v in train_rollout(actor, rollout_id).items()})
        actor.train_on = original
    return out, held / sum(4 * p.numel() for p in actor.model.parameters())


def _with_values(actor, values):
    train_on = actor.train_on

    def with_values(rollout_id, data):
        data.set_flat("values", [torch.tensor(value, device=actor.device) for value in values])
        return train_on(rollout_id, data)

    return with_values


def test_policy_critic_and_teacher_take_turns(model_dir):
    ((rollouts, held),) = run_world(take_turns, 1, model_dir)
    assert held < 1.2  # the teacher is away
    for metrics in rollouts:
        assert metrics["train/value_loss"] > 0 and metrics["train/skipped_steps"] == 0
        assert math.isfinite(metrics["policy/train/pg_loss"])
    assert rollouts[0]["rollout/values"] == 0 and rollouts[1]["rollout/values"] != 0
    assert rollouts[0]["policy/train/opd_reverse_kl"] != rollouts[1]["policy/train/opd_reverse_kl"]
