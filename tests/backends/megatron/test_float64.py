"""In float64 loss and gradients of a step are the same in every layout, to 1e-10: nothing but rounding differs.

Megatron's optimizer takes no float64: another stands in its place and keeps the gradients.
"""

import pytest
import torch
import torch.distributed as dist

from slime.backends.fsdp_utils.fused_cpu import fuse_for_cpu_training
from slime.backends.megatron_utils.actor import MegatronTrainRayActor
from tests.backends import trainers
from tests.backends.megatron import worlds
from tests.backends.megatron.families import save_family
from tests.backends.megatron.test_exactness import CP2, EP2, GRPO, PACKED, PP2, READABLE, TP2SP, gradients_of
from tests.backends.trainers import run_world, trainer_args
from tests.tiny_model import save_tiny_model

pytestmark = pytest.mark.integration
TOLERANCE = 1e-10
DENSE = {
    "DP2": (2, {}),
    "TP2+SP": (2, TP2SP),
    "PP2": (2, PP2),
    "CP2": (2, CP2),
    "PP4 VPP2": (4, {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}),
    "CP4": (4, {"context_parallel_size": 4}),
}
EXPERTS = {"EP2": (2, EP2), "TP2+SP EP2": (2, TP2SP | EP2 | {"expert_tensor_parallel_size": 1})}
LOSSES = {
    "grpo": GRPO,
    "gspo": ("--advantage-estimator", "gspo"),
    "cispo": ("--advantage-estimator", "cispo", "--eps-clip-high", "4"),
}


class GradientsAsWeights:
    """An optimizer whose step puts each weight's gradient, summed over all ranks, in the place of the weight."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.steps_done = 0

    def zero_grad(self):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    @torch.no_grad()
    def step(self):
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                ranks = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:  # of which each rank has the sum of its own shard
                    shards = list(bucket.grad_data.chunk(dist.get_world_size(ranks)))
                    dist.all_gather(shards, shards[dist.get_rank(ranks)].clone(), group=ranks)
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
        self.steps_done += 1
        return {"skipped_steps": 0.0}


class ExactMegatronTrainer(MegatronTrainRayActor):
    def _build_optimizer(self):
        self.optimizer = GradientsAsWeights(self.chunks)


def exact_steps(rank, world_size, port, path, layouts, losses):
    """{(layout, loss): (metrics, gradients by checkpoint name)}"""
    results = {}
    for name, layout in layouts.items():
        for loss, flags in losses.items():
            sizes = {"data_pad_size_multiplier": 4, "make_vocab_size_divisible_by": 12, "dtype": "float64"} | layout
            args = trainer_args(path, *PACKED, "--calculate-per-token-loss", *flags, **sizes)
            trainer = worlds.start_trainer(args, rank, world_size, port, kind=ExactMegatronTrainer, with_ref=True)
            metrics = worlds.train_rollout(trainer, 0)
            results[name, loss] = metrics, worlds.parameters_of(trainer)
            worlds.stop_trainer()
    dist.destroy_process_group()
    return results


class ExactFSDPTrainer(trainers.ExactTrainer):
    """With norms in float64, too: those of transformers round to float32."""

    def _load(self, path):
        model = super()._load(path)
        fuse_for_cpu_training(model)
        return model


def exact_fsdp_step(rank, world_size, port, path, flags):
    args = trainer_args(path, *READABLE, *PACKED, *flags)
    trainer = trainers.make_trainer(ExactFSDPTrainer, args, rank, world_size, port, with_ref=True)
    before = {name: value.clone() for name, value in trainers.parameters_of(trainer).items()}
    metrics = trainers.train_rollout(trainer, 0)
    return metrics, gradients_of(before, trainers.parameters_of(trainer))


def compare(path, layouts, expected, losses):
    """`expected`: {loss: (metrics, gradients)}"""
    for size in sorted({world for world, _ in layouts.values()}):
        fitting = {name: layout for name, (world, layout) in layouts.items() if world == size}
        for rank in run_world(exact_steps, size, path, fitting, losses):
            for (layout, loss), (metrics, gradients) in rank.items():
                theirs, reference = expected[loss]
                assert set(gradients) == set(reference)
                for key in ("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"):
                    value = metrics[f"train/{key}"]
                    assert value == pytest.approx(theirs[f"train/{key}"], rel=TOLERANCE, abs=1e-14), (
                        layout,
                        loss,
                        key,
                    )
                largest = max(g.abs().max().item() for g in reference.values())
                for name, gradient in reference.items():
                    error = (gradients[name] - gradient).abs().max().item()
                    assert error < TOLERANCE * largest, (layout, loss, name, error / largest)


def test_dense_layouts_equal_fsdp(tmp_path):
    path = str(tmp_path)
    save_tiny_model(path, tie_word_embeddings=True, num_hidden_layers=8)
    expected = {loss: run_world(exact_fsdp_step, 1, path, flags)[0] for loss, flags in LOSSES.items()}
    compare(path, DENSE, expected, LOSSES)


@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_next"])
def test_layouts_of_experts_equal_one_rank(tmp_path, case):
    """transformers' router and delta nets round to float32."""
    path = str(tmp_path)
    save_family(case, path)
    losses = {"grpo": (*GRPO, "--train-backend", "megatron")}
    alone = run_world(exact_steps, 1, path, {"one rank": {}}, losses)[0]
    compare(path, EXPERTS, {"grpo": alone["one rank", "grpo"]}, losses)
