"""What saves device memory changes no number: moments in host memory, offloaded activations, sharded gradients."""

import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.backends.fsdp_utils.model import local_tensor
from tests.backends.trainers import make_trainer, parameters_of, run_world, train_rollout, trainer_args

pytestmark = pytest.mark.integration

COMMON = ("--num-steps-per-rollout", "2", "--clip-grad", "0.1", "--deterministic-mode")
VARIANTS = {
    "plain": (),
    "moments on the host": ("--optimizer", "cpu_adam"),
    "activations on the host": ("--fsdp-offload-activations",),
    "inputs of layers on the host": ("--fsdp-offload-activations", "--gradient-checkpointing"),
    "everything on the host": ("--fsdp-cpu-offload",),
    "reduced once": ("--fsdp-reduce-grads-once",),
}


class Watched(FSDPTrainRayActor):
    """Counts tensors that autograd hands to the host, and gradients of whole parameters on a rank."""

    def _loss(self, batch, samples):
        shards = sum(local_tensor(p).numel() for p in self.model.parameters())
        held = sum(local_tensor(p.grad).numel() for p in self.model.parameters() if p.grad is not None)
        self.held = max(getattr(self, "held", 0.0), held / shards)
        return super()._loss(batch, samples)


def run(rank, world_size, port, model_dir, root):
    out = {}
    for name, flags in VARIANTS.items():
        trainer = make_trainer(Watched, trainer_args(model_dir, *COMMON, *flags), rank, world_size, port)
        for rollout_id in range(2):
            metrics = train_rollout(trainer, rollout_id)
        moments = {
            f"{k}.{key}": local_tensor(v).clone()
            for k, s in trainer.optimizer.state_by_name().items()
            for key, v in s.items()
        }
        out[name] = parameters_of(trainer), moments, metrics["train/grad_norm"], trainer.held
    # A checkpoint of one kind is resumed by the other.
    save = trainer_args(model_dir, *COMMON, "--optimizer", "cpu_adam", "--save", str(root))
    first = make_trainer(FSDPTrainRayActor, save, rank, world_size, port)
    train_rollout(first, 0)
    first.save_model(0)
    for name, flags in {"adam": (), "cpu_adam": ("--optimizer", "cpu_adam")}.items():
        load = trainer_args(model_dir, *COMMON, *flags, "--load", str(root))
        resumed = make_trainer(FSDPTrainRayActor, load, rank, world_size, port)
        train_rollout(resumed, 1)
        out[name] = parameters_of(resumed)
    torch.distributed.destroy_process_group()
    return out


@pytest.fixture(scope="module", params=[1, 2])
def results(request, tiny_model_dir, tmp_path_factory):
    return request.param, run_world(run, request.param, tiny_model_dir, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("plain", "reduced once")])
def test_the_host_computes_the_same_bits(results, name):
    for result in results[1]:
        for got, expected in zip(result[name][:2], result["plain"][:2], strict=True):
            assert got.keys() == expected.keys()
            assert [key for key, value in expected.items() if not torch.equal(got[key], value)] == []


def test_gradients_are_held_in_shards(results):
    world_size, ranks = results
    for result in ranks:
        parameters, _, norm, held = result["reduced once"]
        assert norm == pytest.approx(result["plain"][2], rel=1e-4)
        assert all(torch.allclose(parameters[k], v, atol=1e-5) for k, v in result["plain"][0].items())
        assert result["plain"][3] == 1
        assert held == (1 if world_size == 1 else 0)  # summed up unsharded: no sharded gradient before the last


def test_either_optimizer_resumes_the_other_s_checkpoint(results):
    for result in results[1]:
        for name in ("adam", "cpu_adam"):
            assert [k for k, v in result["plain"][0].items() if not torch.equal(result[name][k], v)] == []
