"""Every algorithm's step in every kind of layout equals the FSDP trainer's."""

import pytest
import torch
import torch.distributed as dist

from slime.training.rollout_data import RankData
from tests.backends.megatron.test_exactness import CP2, PACKED, PP2, READABLE, TP2SP, gradients_of
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer
from tests.backends.trainers import make_trainer, rollout_batch, rollout_parts, run_world, trainer_args
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.integration

ALGORITHMS = {
    "gspo": ("--advantage-estimator", "gspo", "--eps-clip", "3e-4"),
    "cispo": ("--advantage-estimator", "cispo", "--entropy-coef", "0.01"),
    "ppo": ("--advantage-estimator", "ppo", "--gamma", "0.9", "--lambd", "0.8", "--kl-coef", "0.1"),
    "tis": ("--use-tis", "--eps-clip-c", "3"),
    "opsm": ("--use-opsm", "--normalize-advantages"),
    "sft": ("--loss-type", "sft_loss"),
}
LAYOUTS = {"DP2": {}, "TP2+SP": TP2SP, "PP2": PP2, "CP2": CP2}


def data_of(trainer, algorithm: str) -> RankData:
    dp_size = dist.get_world_size(trainer.dp_group)
    data = RankData(rollout_parts(trainer.args, rollout_batch(0), dp_size)[trainer.dp_rank])
    if algorithm == "ppo":
        generators = [torch.Generator().manual_seed(index) for index in data["sample_indices"]]
        lengths = zip(data["response_lengths"], generators, strict=True)
        data.set_flat("values", [torch.randn(n, generator=g) for n, g in lengths])
    return data


def results_of(trainer, algorithm, parameters):
    before = {name: value.clone() for name, value in parameters(trainer).items()}
    metrics = trainer.train_on(0, data_of(trainer, algorithm))
    return metrics, gradients_of(before, parameters(trainer))


def flags_of(algorithm):
    return *READABLE, *PACKED, *ALGORITHMS[algorithm]


def megatron(rank, world_size, port, path):
    out = {}
    for layout, changes in LAYOUTS.items():
        for algorithm in ALGORITHMS:
            changes = {**changes, "data_pad_size_multiplier": 4, "make_vocab_size_divisible_by": 12}
            args = trainer_args(path, *flags_of(algorithm), **changes)
            trainer = start_trainer(args, rank, world_size, port, with_ref=algorithm == "ppo")
            out[layout, algorithm] = results_of(trainer, algorithm, parameters_of)
            stop_trainer()
    dist.destroy_process_group()
    return out


def fsdp(rank, world_size, port, path):
    from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
    from tests.backends import trainers

    out = {}
    for algorithm in ALGORITHMS:
        args, with_ref = trainer_args(path, *flags_of(algorithm)), algorithm == "ppo"
        trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port, with_ref=with_ref)
        out[algorithm] = results_of(trainer, algorithm, trainers.parameters_of)
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    save_tiny_model(path)
    return run_world(fsdp, 1, path)[0], run_world(megatron, 2, path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_step_equals_fsdp(results, algorithm, layout):
    expected, ranks = results
    metrics, gradients = expected[algorithm]
    largest = max(g.abs().max().item() for g in gradients.values())
    assert largest > 0
    for rank in ranks:
        ours, theirs = rank[layout, algorithm]
        for key in (key for key in metrics if key.startswith("train/")):
            assert ours[key] == pytest.approx(metrics[key], rel=1e-5, abs=1e-7), key
        for name, gradient in gradients.items():
            assert (theirs[name] - gradient).abs().max().item() < 1e-5 * largest, name
