"""Decoder layers through torch.compile: the same losses and weights, and the first step's exact zeros."""

import shutil

import pytest
import torch

from tests.backends.trainers import ExactTrainer, make_trainer, parameters_of, run_world, train_rollout, trainer_args

FLAGS = "--ci-test --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3 --entropy-coef 0.01 --gradient-checkpointing"
FLAGS = [*FLAGS.split(), "--num-steps-per-rollout", "2", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "60"]


def train_all(rank, world_size, port, model_dir, backend):
    """Losses and trained weights of a rollout, not compiled and compiled; graphs per compiled frame."""
    out = []
    for flags in ([], ["--fsdp-compile", backend]):
        torch._dynamo.utils.counters.clear()
        args = trainer_args(model_dir, *FLAGS, *flags)
        trainer = make_trainer(ExactTrainer, args, rank, world_size, port, with_ref=True)
        metrics = train_rollout(trainer, 0)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        out.append((metrics["train/loss"], metrics["train/grad_norm"], parameters_of(trainer), graphs))
    return out


def check(results, tolerance):
    for (loss, norm, weights, none), (compiled_loss, compiled_norm, compiled_weights, graphs) in results:
        assert none == 0 and graphs > 0
        assert compiled_loss == pytest.approx(loss, rel=tolerance)
        assert compiled_norm == pytest.approx(norm, rel=tolerance)
        for name, value in weights.items():
            assert (compiled_weights[name] - value).abs().max() < tolerance, name


@pytest.mark.integration
def test_traced_on_two_ranks(tiny_model_dir):
    check(run_world(train_all, 2, tiny_model_dir, "aot_eager"), 1e-10)


@pytest.mark.system
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_to_kernels(tiny_model_dir):
    # The model's norms are in fp32; kernels add up in another order.
    check(run_world(train_all, 1, tiny_model_dir, "inductor"), 1e-6)
