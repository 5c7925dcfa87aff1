"""Sharded, packed, cut into micro-batches: the trained parameters are those of a plain float64 implementation."""

import pytest

from tests.backends.reference import ReferenceTrainer
from tests.backends.trainers import (
    ExactTrainer,
    make_trainer,
    parameters_of,
    rollout_batch,
    run_world,
    train_rollout,
    trainer_args,
)

pytestmark = pytest.mark.integration

TWO_STEPS = ("--num-steps-per-rollout", "2", "--rollout-temperature", "0.7")
KL = (*TWO_STEPS, "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--entropy-coef", "0.01")
CASES = {
    "one sample per micro-batch": TWO_STEPS,
    "KL, entropy, packed under a token cap": (*KL, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "40"),
    "per token, checkpointed": (
        *KL,
        "--calculate-per-token-loss",
        "--gradient-checkpointing",
        "--micro-batch-size",
        "3",
    ),
}


def train_all(rank, world_size, port, model_dir):
    """Two rollouts of every case with fresh trainers; losses and final parameters."""
    out = {}
    for name, flags in CASES.items():
        args = trainer_args(model_dir, *flags)
        trainer = make_trainer(ExactTrainer, args, rank, world_size, port, with_ref=True)
        metrics = [train_rollout(trainer, rollout_id) for rollout_id in range(2)]
        out[name] = ([m["train/loss"] for m in metrics], parameters_of(trainer))
    trainer.dispose()
    return out


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_equal_the_reference(tiny_model_dir, world_size):
    results = run_world(train_all, world_size, tiny_model_dir)
    for name, flags in CASES.items():
        args = trainer_args(tiny_model_dir, *flags)
        reference = ReferenceTrainer(args)
        losses = [reference.train(rollout_batch(seed)) for seed in range(2)]
        for result in results:
            got_losses, got = result[name]
            assert got_losses == pytest.approx([sum(x) / len(x) for x in losses], rel=1e-10), name
            assert got.keys() == reference.params.keys()
            for key, value in reference.params.items():
                error = (got[key] - value.detach()).abs().max().item()
                assert error < 1e-10, (name, key, error)
