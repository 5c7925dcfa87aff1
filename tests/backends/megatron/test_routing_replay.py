"""Replayed routing in Megatron's routers, with the tokens of each rank right in every layout: equal to FSDP."""

import pytest
import torch.distributed as dist

from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from slime.training.rollout_data import RankData
from tests.backends.megatron.families import save_family
from tests.backends.megatron.test_exactness import split_experts
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer
from tests.backends.test_routing_replay import Recorder
from tests.backends.trainers import make_trainer, rollout_batch, rollout_parts, run_world, trainer_args

pytestmark = pytest.mark.integration

STEPS = "--num-steps-per-rollout 2 --lr 3e-2 --use-dynamic-batch-size --max-tokens-per-gpu 60 --ci-test".split()
KINDS = {"recorded": "--use-routing-replay", "engine": "--use-rollout-routing-replay"}
LAYERS, EXPERTS, TOP_K = 4, 4, 2
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = {
    "one rank recomputed": (1, RECOMPUTED),
    "TP2+SP ETP2": (2, TP2SP | {"expert_tensor_parallel_size": 2}),
    "PP2 recomputed": (2, {"pipeline_model_parallel_size": 2} | RECOMPUTED),
    "CP2 EP2": (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


def batch_with_routing(seed=0):
    import numpy as np

    rng, batch = np.random.default_rng(7), rollout_batch(seed)
    batch["rollout_routed_experts"] = [
        rng.random((n - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int32) for n in batch["total_lengths"]
    ]
    return batch


class StepRecorder(MegatronTrainRayActor):
    """Keeps each step's metrics."""

    def _train_step(self, rollout_id, data, step):
        self.steps.append(super()._train_step(rollout_id, data, step))
        return self.steps[-1]


def megatron(rank, world_size, port, path, layouts):
    out = {}
    for layout, changes in layouts.items():
        for kind, flag in KINDS.items():
            changes = {**changes, "data_pad_size_multiplier": 4, "make_vocab_size_divisible_by": 12}
            args = trainer_args(path, *STEPS, flag, **changes)
            trainer = start_trainer(args, rank, world_size, port, kind=StepRecorder, with_ref=True)
            trainer.steps = []
            parts = rollout_parts(args, batch_with_routing(), dist.get_world_size(trainer.dp_group))
            trainer.train_on(0, RankData(parts[trainer.dp_rank]))
            out[layout, kind] = (trainer.steps, parameters_of(trainer))
            stop_trainer()
    dist.destroy_process_group()
    return out


def fsdp(rank, world_size, port, path):
    from tests.backends import trainers

    out = {}
    for kind, flag in {**KINDS, "free": "--ci-test"}.items():
        args = trainer_args(path, *STEPS, flag)
        trainer = make_trainer(Recorder, args, rank, world_size, port, with_ref=True)
        trainer.steps = []
        trainer.train_on(0, RankData(rollout_parts(args, batch_with_routing(), 1)[0]))
        out[kind] = (trainer.steps, split_experts(trainers.parameters_of(trainer)))
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("experts"))
    save_family("qwen3_moe", path)
    ranks = []
    for size in (1, 2):
        fitting = {name: layout for name, (world, layout) in LAYOUTS.items() if world == size}
        ranks += run_world(megatron, size, path, fitting)
    return run_world(fsdp, 1, path)[0], ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_steps_equal_fsdp(results, layout, kind):
    expected, ranks = results
    steps, parameters = expected[kind]
    found = [rank[layout, kind] for rank in ranks if (layout, kind) in rank]
    assert found
    for ours, theirs in found:
        assert ours[0]["ppo_kl"] == 0 == ours[0]["pg_clipfrac"]
        for mine, wanted in zip(ours, steps, strict=True):
            for key in ("loss", "grad_norm", "ppo_kl"):
                assert mine[key] == pytest.approx(wanted[key], rel=2e-4, abs=1e-6), key
        for name, value in parameters.items():
            assert (theirs[name] - value).abs().max() < 1e-4, name


def test_the_replayed_second_step_is_another_one_than_the_free(results):
    expected, _ = results
    norms = {kind: steps[1]["grad_norm"] for kind, (steps, _) in expected.items()}
    assert abs(norms["recorded"] / norms["free"] - 1) > 1e-2 and abs(norms["recorded"] / norms["engine"] - 1) > 1e-2
