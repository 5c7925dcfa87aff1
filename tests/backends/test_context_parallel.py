"""Sequences spread over ranks train the same parameters as whole ones, whatever the algorithm and the packing."""

import pytest
import torch

from tests.backends.trainers import ExactTrainer, make_trainer, parameters_of, run_world, train_rollout, trainer_args

pytestmark = pytest.mark.integration

PACKED = "--use-dynamic-batch-size --max-tokens-per-gpu 40 --num-steps-per-rollout 2".split()
KL = "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3 --entropy-coef 0.01 --rollout-temperature 0.7".split()
CASES = {
    "grpo, one sample per micro-batch": ("--num-steps-per-rollout", "2", *KL),
    "gspo, packed": ("--advantage-estimator", "gspo", *PACKED, *KL),
    "cispo, packed, per token": ("--advantage-estimator", "cispo", "--calculate-per-token-loss", *PACKED),
    "whitened, checkpointed": (
        *("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages", "--kl-coef", "0.1"),
        *("--gradient-checkpointing", "--micro-batch-size", "3"),
    ),
    "sft": ("--loss-type", "sft_loss", "--calculate-per-token-loss", "--micro-batch-size", "4"),
}


def train_all(rank, world_size, port, model_dir, sizes):
    """{(context-parallel size, case): (metrics of two rollouts, parameters)}"""
    out = {}
    for size in sizes:
        parallel = ("--actor-num-gpus-per-node", str(world_size), "--context-parallel-size", str(size))
        for name, flags in CASES.items():
            args = trainer_args(model_dir, *flags, *parallel)
            trainer = make_trainer(ExactTrainer, args, rank, world_size, port, with_ref="--loss-type" not in flags)
            metrics = [train_rollout(trainer, rollout_id) for rollout_id in range(2)]
            out[size, name] = (metrics, parameters_of(trainer))
    trainer.dispose()
    return out


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    return run_world(train_all, 1, tiny_model_dir, [1])[0]


@pytest.mark.parametrize(("world_size", "sizes"), [(2, [2]), (4, [2, 4])], ids=["CP 2", "DP 2 x CP 2 and CP 4"])
def test_parameters_do_not_depend_on_the_ranks(tiny_model_dir, expected, world_size, sizes):
    results = run_world(train_all, world_size, tiny_model_dir, sizes)
    for result in results:
        for (size, name), (metrics, parameters) in result.items():
            want_metrics, want = expected[1, name]
            for got, reference in zip(metrics, want_metrics, strict=True):
                keys = [key for key in reference if key.startswith(("train/", "rollout/"))]
                assert {key: got[key] for key in keys} == pytest.approx(
                    {key: reference[key] for key in keys}, rel=1e-9, abs=1e-13
                ), (size, name)
            errors = {key: (parameters[key] - value).abs().max().item() for key, value in want.items()}
            assert max(errors.values()) < 1e-12, (size, name, errors)


def resume(rank, world_size, port, model_dir, root):
    """Two rollouts straight, and the second again from a checkpoint, with the group's sizes changed in between."""
    flags = ("--actor-num-gpus-per-node", str(world_size))
    both = {"straight": "2", "changed": "1"}
    args = trainer_args(model_dir, *flags, "--context-parallel-size", "2", "--save", root)
    trainer = make_trainer(ExactTrainer, args, rank, world_size, port)
    train_rollout(trainer, 0)
    trainer.save_model(0)
    train_rollout(trainer, 1)
    out = {"saved": parameters_of(trainer)}
    for name, size in both.items():
        args = trainer_args(model_dir, *flags, "--context-parallel-size", size, "--load", root)
        trainer = make_trainer(ExactTrainer, args, rank, world_size, port)
        assert trainer.start_rollout_id == 1
        train_rollout(trainer, 1)
        out[name] = parameters_of(trainer)
    trainer.dispose()
    return out


def test_a_resumed_run_ends_in_the_same_bits(tiny_model_dir, tmp_path):
    for result in run_world(resume, 2, tiny_model_dir, str(tmp_path)):
        for key, value in result["saved"].items():
            assert torch.equal(result["straight"][key], value), key
            torch.testing.assert_close(result["changed"][key], value, rtol=0, atol=1e-12)
