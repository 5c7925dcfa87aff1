"""Two ranks in fp32: exact zeros of the first step, skipped steps, gathering of odd shapes, host copies."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from slime.backends.common.checks import InvariantError
from slime.backends.common.host_memory import HostCopy, swapped
from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.backends.fsdp_utils.model import local_tensor
from slime.backends.fsdp_utils.weights import ShardedWeights
from tests.backends.trainers import make_trainer, parameters_of, run_world, train_rollout, trainer_args

KL = ("--ci-test", "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "low_var_kl")
PACKED = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "60")
FIRST_STEPS = {
    "one step": KL,
    "one step, packed": (*KL, *PACKED),
    "four steps": (*KL, "--num-steps-per-rollout", "4"),
    "two steps, packed, checkpointed": (*KL, *PACKED, "--num-steps-per-rollout", "2", "--gradient-checkpointing"),
    "KL in the reward": ("--ci-test", "--kl-coef", "0.1", "--num-steps-per-rollout", "2"),
}


class Recorder(FSDPTrainRayActor):
    """Keeps every optimizer step's metrics."""

    def _train_step(self, rollout_id, data, step):
        metrics = super()._train_step(rollout_id, data, step)
        self.recorded.append(metrics)
        return metrics


def first_steps(rank, world_size, port, model_dir):
    """{case: [[metrics of each step] of rollouts 0 and 1]}"""
    out = {}
    for name, flags in FIRST_STEPS.items():
        trainer = make_trainer(Recorder, trainer_args(model_dir, *flags), rank, world_size, port, with_ref=True)
        out[name] = []
        for rollout_id in range(2):
            trainer.recorded = []
            train_rollout(trainer, rollout_id)
            out[name].append(trainer.recorded)
    return out


def moved_reference(rank, world_size, port, model_dir):
    """The error of --ci-test when the reference is not the policy."""
    trainer = make_trainer(
        FSDPTrainRayActor, trainer_args(model_dir, "--ci-test"), rank, world_size, port, with_ref=True
    )
    with swapped(trainer.trained, trainer.reference), torch.no_grad():
        for parameter in trainer.model.parameters():
            local_tensor(parameter).mul_(1.01)
        trainer.reference.save()
    with pytest.raises(InvariantError) as error:
        train_rollout(trainer, 0)
    return str(error.value)


def skipped(rank, world_size, port, model_dir):
    """A gradient that is not finite on one rank only."""
    trainer = make_trainer(FSDPTrainRayActor, trainer_args(model_dir), rank, world_size, port)
    train_rollout(trainer, 0)
    before = parameters_of(trainer)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if rank == 1:
        local_tensor(next(iter(trainer.model.parameters())).grad)[0, 0] = math.inf
    metrics = trainer.optimizer.step()
    same = all(torch.equal(value, before[name]) for name, value in parameters_of(trainer).items())
    return metrics["skipped_steps"], metrics["grad_norm"], trainer.optimizer.steps_done, same


class Odd(nn.Module):
    """Rows that two ranks cannot share evenly; rank 1 gets none of the last two."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(7, 1), nn.Linear(2, 4)

    def hf_parameters(self):
        return dict(self.named_parameters())


def odd_shapes(rank, world_size, port):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = Odd()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    weights = ShardedWeights(model, torch.bfloat16, mesh, torch.device("cpu"))
    specs = weights.tensor_specs()
    out = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
    weights.gather(specs, out if rank == 0 else None)
    dist.barrier()
    return rank != 0 or all(torch.equal(t, full[s.name].bfloat16()) for s, t in zip(specs, out, strict=True))


def everything(rank, world_size, port, model_dir):
    out = {
        "first steps": first_steps(rank, world_size, port, model_dir),
        "moved reference": moved_reference(rank, world_size, port, model_dir),
        "skipped": skipped(rank, world_size, port, model_dir),
        "odd shapes": odd_shapes(rank, world_size, port),
    }
    torch.distributed.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def results(tiny_model_dir):
    return run_world(everything, 2, tiny_model_dir)


@pytest.mark.integration
@pytest.mark.parametrize("case", FIRST_STEPS)
def test_the_first_step_has_not_moved(results, case):
    for result in results:
        rollouts = result["first steps"][case]
        for steps in rollouts:
            assert steps[0]["ppo_kl"] == 0 and steps[0]["pg_clipfrac"] == 0
            assert all(step["ppo_kl"] != 0 for step in steps[1:])
        if "kl_loss" in rollouts[0][0]:
            assert rollouts[0][0]["kl_loss"] == 0
            assert all(step["kl_loss"] > 0 for steps in rollouts for step in steps if step is not rollouts[0][0])


@pytest.mark.integration
def test_a_moved_reference_is_found(results):
    for result in results:
        assert "log_probs must equal ref_log_probs" in result["moved reference"]
        assert "sample 10" in result["moved reference"]


@pytest.mark.integration
def test_one_rank_s_infinite_gradient_skips_the_step_on_all(results):
    for result in results:
        assert result["skipped"] == (1.0, math.inf, 1, True)


@pytest.mark.integration
def test_gathering_shapes_that_do_not_divide(results):
    assert all(result["odd shapes"] for result in results)


# -- host copies ------------------------------------------------------------------------------------------------------


@pytest.mark.unit
def test_host_copy_gives_memory_back_and_restores_all_views():
    base = torch.arange(12.0)
    matrix, tied, other = base[:8].view(2, 4), base[2:4], torch.arange(3, dtype=torch.bfloat16)
    copy = HostCopy([matrix, tied, other])
    assert len(copy.tensors) == 2  # one storage for base
    copy.release()
    assert base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    copy.restore()
    assert base.tolist() == list(range(12)) and matrix[1].tolist() == [4, 5, 6, 7]
    assert tied.tolist() == [2, 3] and other.tolist() == [0, 1, 2]


@pytest.mark.unit
def test_swapped_puts_the_own_values_back_after_an_error():
    tensor = torch.zeros(3)
    own, other = HostCopy([tensor]), HostCopy([tensor])
    tensor.fill_(7)
    other.save()
    tensor.fill_(1)
    with pytest.raises(RuntimeError), swapped(own, other):
        assert tensor.tolist() == [7, 7, 7]
        raise RuntimeError
    assert tensor.tolist() == [1, 1, 1]
