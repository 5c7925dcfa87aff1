"""PPO's critic in every layout equals the FSDP trainer's; it is resumed in another layout."""

import pytest
import torch
import torch.distributed as dist

from slime.backends.megatron_utils.critic import MegatronCriticRayActor
from slime.ray.roles import role_args
from slime.training.rollout_data import RankData
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer
from tests.backends.test_critic import PPO, ExactCritic, full_parameters, log_probs_of
from tests.backends.trainers import make_trainer, rollout_batch, rollout_parts, run_world, trainer_args
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.integration

FLAGS = (*PPO, "--num-steps-per-rollout", "2", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "60")
FLAGS += ("--kl-coef", "0.1", "--ci-test")
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "one rank": (1, {}),
    "DP2": (2, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2+SP": (2, TP2SP),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "TP2+SP PP2": (4, TP2SP | {"pipeline_model_parallel_size": 2}),
}


def critic_args(path, *flags, **changes):
    return role_args(trainer_args(path, *FLAGS, *flags, **changes), "critic")


def train(critic, seed: int) -> tuple[dict, dict]:
    """(metrics, values by sample)"""
    batch = rollout_batch(seed)
    # transformers gives the padding token's embedding no gradient.
    batch["tokens"] = [[max(token, 1) for token in tokens] for tokens in batch["tokens"]]
    shared = log_probs_of(batch)
    parts = rollout_parts(critic.args, batch, dist.get_world_size(critic.dp_group))
    data = RankData(parts[critic.dp_rank])
    for key, values in shared.items():
        data.set_flat(key, [values[index - 100] for index in data["sample_indices"]])
    metrics = critic.train_on(seed, data)
    return metrics, dict(zip(data["sample_indices"], critic.take_values()["values"], strict=True))


def fsdp(rank, world_size, port, path):
    critic = make_trainer(ExactCritic, critic_args(path), rank, world_size, port, role="critic")
    rollouts = [train(critic, seed) for seed in range(2)]
    return rollouts, full_parameters(critic)


def megatron(rank, world_size, port, path, layouts, root):
    out = {}
    for name, layout in layouts.items():
        changes = dict(layout, data_pad_size_multiplier=4, make_vocab_size_divisible_by=12)

        def start(changes=changes, **more):
            args = critic_args(path, **changes, **more)
            return start_trainer(args, rank, world_size, port, kind=MegatronCriticRayActor, role="critic")

        critic = start()
        rollouts = [train(critic, seed) for seed in range(2)]
        out[name] = (rollouts, parameters_of(critic))
        stop_trainer()
        if name in ("PP2", "TP2+SP"):  # saved by the first, resumed by the other
            where = {"critic_save": str(root)} if name == "TP2+SP" else {"critic_load": str(root)}
            critic = start(**where, finetune=False, no_load_optim=False, no_load_rng=True)
            if name == "TP2+SP":
                train(critic, 0)
                critic.save_model(0)
            else:
                out["resumed"] = ([rollouts[0], train(critic, 1)], parameters_of(critic))
            stop_trainer()
    dist.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    root = tmp_path_factory.mktemp("checkpoints")
    save_tiny_model(path, tie_word_embeddings=True)
    ranks = []
    for size in (1, 2, 4):
        fitting = {name: layout for name, (world, layout) in LAYOUTS.items() if world == size}
        ranks += run_world(megatron, size, path, fitting, root)
    return run_world(fsdp, 1, path)[0], ranks


@pytest.mark.parametrize("layout", [*LAYOUTS, "resumed"])
def test_values_losses_and_parameters_equal_fsdp(results, layout):
    (expected, parameters), ranks = results
    found = [rank[layout] for rank in ranks if layout in rank]
    assert found
    values: dict = {}
    for rollouts, theirs in found:
        values |= rollouts[-1][1]
        for (metrics, _), (ours, _) in zip(rollouts, expected, strict=True):
            for key in ("value_loss", "grad_norm", "value_clipfrac"):
                assert metrics[f"train/{key}"] == pytest.approx(ours[f"train/{key}"], rel=1e-5, abs=1e-7)
        assert theirs.keys() == parameters.keys()
        for name, value in parameters.items():
            assert (theirs[name] - value).abs().max() < 2e-6, name
    last = expected[-1][1]
    assert values.keys() == last.keys() and any(v.any() for v in last.values())
    for index, ours in last.items():
        assert torch.tensor(values[index]).double() == pytest.approx(ours, abs=1e-5)
