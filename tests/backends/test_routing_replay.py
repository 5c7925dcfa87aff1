"""Training with replayed routing: the recorded one, or the engine's, on one rank and over context-parallel ranks."""

import numpy as np
import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.training.rollout_data import RankData
from tests.backends.trainers import make_trainer, parameters_of, rollout_batch, rollout_parts, run_world, trainer_args
from tests.tiny_model import save_tiny_moe

pytestmark = pytest.mark.integration

LAYERS, EXPERTS, TOP_K = 2, 4, 2
# Steps so large that the router sends tokens elsewhere.
STEPS = "--num-steps-per-rollout 2 --lr 3e-2 --use-dynamic-batch-size --max-tokens-per-gpu 40 --ci-test".split()
REPLAY = (*STEPS, "--use-routing-replay", "--gradient-checkpointing")


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("moe"))
    save_tiny_moe(path, num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    return path


def with_routing(batch, seed=7):
    """Random experts for all tokens of a sample but its last, as an engine gives them."""
    rng = np.random.default_rng(seed)
    shape = (LAYERS, TOP_K)
    batch["rollout_routed_experts"] = [
        rng.random((n - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int32).reshape(n - 1, *shape)
        for n in batch["total_lengths"]
    ]
    return batch


class Recorder(FSDPTrainRayActor):
    """Keeps each step's metrics."""

    def _train_step(self, rollout_id, data, step):
        self.steps.append(super()._train_step(rollout_id, data, step))
        return self.steps[-1]


def train(rank, world_size, port, model_dir, cases):
    """{name: (metrics of the steps, parameters)} of one rollout."""
    out = {}
    for name, (flags, of_engine) in cases.items():
        args = trainer_args(model_dir, *flags, "--actor-num-gpus-per-node", str(world_size))
        trainer = make_trainer(Recorder, args, rank, world_size, port, with_ref=True)
        trainer.steps = []
        batch = with_routing(rollout_batch(0)) if of_engine else rollout_batch(0)
        parts = rollout_parts(args, batch, world_size // trainer.cp.size)
        trainer.train_on(0, RankData(parts[trainer.dp_rank]))
        out[name] = (trainer.steps, parameters_of(trainer))
    trainer.dispose()
    return out


@pytest.fixture(scope="module")
def alone(moe_dir):
    cases = {
        "free": ((*STEPS, "--gradient-checkpointing"), False),
        "recorded": (REPLAY, False),
        "kept": ((*STEPS, "--use-routing-replay"), False),
        "engine": ((*STEPS, "--use-rollout-routing-replay"), True),
    }
    return run_world(train, 1, moe_dir, cases)[0]


def test_the_first_step_is_exact_and_the_second_takes_the_recorded_experts(alone):
    (first, second), parameters = alone["recorded"]
    free_first, free_second = alone["free"][0]
    assert first["ppo_kl"] == 0 == first["pg_clipfrac"]
    assert first["loss"] == free_first["loss"] and first["grad_norm"] == free_first["grad_norm"]
    assert second["grad_norm"] != free_second["grad_norm"]
    # Layers that are computed again in backward take the same experts: nothing changes by it.
    for name, value in alone["kept"][1].items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-6)


def test_the_engine_s_experts_are_taken_in_all_passes(alone):
    (first, second), _ = alone["engine"]
    assert first["ppo_kl"] == 0 == first["pg_clipfrac"]
    assert second["ppo_kl"] != 0
    assert first["grad_norm"] != alone["recorded"][0][0]["grad_norm"]


def test_ranks_that_share_sequences_replay_the_same(moe_dir, alone):
    more = ("--context-parallel-size", "2")
    cases = {
        "recorded": ((*REPLAY, *more), False),
        "engine": ((*STEPS, "--use-rollout-routing-replay", *more), True),
    }
    for result in run_world(train, 2, moe_dir, cases):
        for name, (steps, parameters) in result.items():
            expected_steps, expected = alone[name]
            assert [s["grad_norm"] for s in steps] == pytest.approx([s["grad_norm"] for s in expected_steps], rel=1e-3)
            for key, value in expected.items():
                torch.testing.assert_close(parameters[key], value, rtol=1e-3, atol=2e-4)


def missing(rank, world_size, port, model_dir):
    args = trainer_args(model_dir, *STEPS, "--use-rollout-routing-replay")
    trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
    with pytest.raises(ValueError) as error:
        trainer.train_on(0, RankData(rollout_parts(args, rollout_batch(0), 1)[0]))
    trainer.dispose()
    return str(error.value)


def test_samples_without_the_engine_s_routing_are_refused(moe_dir):
    assert "have no rollout_routed_experts" in run_world(missing, 1, moe_dir)[0]
