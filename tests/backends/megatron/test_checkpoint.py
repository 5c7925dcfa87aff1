"""A resumed run is the uninterrupted one, in the same layout and in another; exports are Hugging Face directories."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime.backends.common.checkpoint import AtomicDirectory, CheckpointError
from slime.backends.megatron_utils import compat
from slime.backends.megatron_utils.async_save import BackgroundSave
from slime.backends.megatron_utils.hf_files import HFTensors
from tests.backends.megatron.families import save_family
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import run_world, trainer_args

FLAGS = (
    "--weight-decay",
    "0.1",
    "--lr-decay-style",
    "linear",
    "--lr-warmup-iters",
    "2",
    "--num-steps-per-rollout",
    "2",
)
TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CHANGES = {"EP2 -> EP2": (EP2, EP2), "TP2 -> PP2": (TP2SP, PP2), "PP2 -> DP2": (PP2, {})}
BACKGROUND = "TP2 -> PP2"

STAND_INS = {
    "Tensor.cuda",
    "Tensor.type",
    "device argument",
    "device=",
    "optimizer loading",
    "random._get_cuda_rng_state",
    "random._set_cuda_rng_state",
    "token_dispatcher.maybe_move_tensor_to_cpu",
    "torch.cuda.Stream",
    "torch.cuda.current_device",
    "torch.cuda.current_stream",
    "torch.cuda.get_rng_state",
    "torch.cuda.manual_seed",
    "torch.cuda.stream",
    "torch.cuda.synchronize",
}


def runs(rank, world_size, port, path, root):
    def trainer(layout, **changes):
        args = trainer_args(path, *FLAGS, data_pad_size_multiplier=4, train_backend="megatron", **layout)
        args.load, args.no_load_optim, args.no_load_rng, args.finetune = None, False, False, False
        args.start_rollout_id = None
        vars(args).update(changes)
        return start_trainer(args, rank, world_size, port)

    results = {}
    whole = trainer({})
    for rollout_id in range(3):
        train_rollout(whole, rollout_id)
    results["uninterrupted"] = parameters_of(whole)
    stop_trainer()
    other = f"{root}/other"
    if rank == 0:
        save_family("qwen3_moe", other, seed=1)
    dist.barrier()
    direct = trainer({}, load=other)
    with HFTensors(other) as checkpoint:
        results["direct"] = all(torch.equal(checkpoint[n], t) for n, t in parameters_of(direct).items())
    stop_trainer()
    for name, (before, after) in CHANGES.items():
        save = f"{root}/{name.replace(' ', '')}"
        background = name == BACKGROUND
        first = trainer(before, save=save, save_hf=save + "/hf-{rollout_id}", async_save=background)
        for rollout_id in range(2):
            train_rollout(first, rollout_id)
        first.save_model(1)
        saved = parameters_of(first)
        if background:  # training goes on and changes what is being written
            results["tracker while writing"] = Path(save, "latest_checkpointed_iteration.txt").exists()
            train_rollout(first, 7)
            first._finish_save(wait=True)
            results["last in the background"] = first._background_save(first.args.num_rollout - 1) is not None
            results["files"] = sorted(path.name for path in Path(save, "iter_0000001").iterdir())
        stop_trainer()
        second = trainer(after, load=save)
        loaded = parameters_of(second)
        start = second.start_rollout_id
        train_rollout(second, 2)
        with HFTensors(f"{save}/hf-1") as exported:
            same = {n: torch.equal(exported[n], saved[n]) for n in exported.names()}
        results[name] = {
            "start": start,
            "steps": second.optimizer.steps_done,
            "loaded": [n for n in saved if not torch.equal(saved[n], loaded[n])],
            "exported": same,
            "end": parameters_of(second),
        }
        stop_trainer()
        if background:
            third = trainer(after, ref_load=save, load=save, finetune=True)
            results["reference"] = all(torch.equal(saved[n], t) for n, t in parameters_of(third).items())
            results["fresh"] = (third.start_rollout_id, third._resumed, third.optimizer.steps_done)
            stop_trainer()
    dist.destroy_process_group()
    results["stand-ins"] = set(compat.hits)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path, root = str(tmp_path_factory.mktemp("model")), str(tmp_path_factory.mktemp("runs"))
    save_family("qwen3_moe", path)
    return run_world(runs, 2, path, root)


@pytest.mark.integration
@pytest.mark.parametrize("change", CHANGES)
def test_resume_equals_the_uninterrupted_run(results, change):
    for rank in results:
        found = rank[change]
        assert (found["start"], found["steps"], found["loaded"]) == (2, 6, [])
        for name, expected in rank["uninterrupted"].items():
            assert (found["end"][name] - expected).abs().max() < 2e-6, name


@pytest.mark.integration
def test_the_export_holds_every_tensor_bit_for_bit(results):
    exported = results[0]["PP2 -> DP2"]["exported"]
    assert all(exported.values())
    assert set(exported) == set(results[0]["uninterrupted"])


@pytest.mark.integration
def test_exactly_these_stand_ins_for_cuda_are_needed(results):
    """A new release of megatron-core that wants more or less of them shows here."""
    assert results[0]["stand-ins"] == STAND_INS


@pytest.mark.integration
def test_load_takes_a_hugging_face_directory(results):
    assert all(rank["direct"] for rank in results)


@pytest.mark.integration
def test_a_checkpoint_in_the_background_is_published_when_it_is_complete(results):
    for rank in results:
        assert not rank["tracker while writing"]
        assert not rank["last in the background"]
        assert {"metadata.json", "meta.json", "rng.pt"} <= set(rank["files"])


@pytest.mark.integration
def test_ref_load_takes_a_torch_dist_checkpoint(results):
    for rank in results:
        assert rank["reference"]
        assert rank["fresh"] == (0, False, 0)


@pytest.mark.integration
def test_a_failed_write_in_the_background_is_an_error_on_finish(tmp_path):
    compat.install()
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        directory = AtomicDirectory(tmp_path / "iter_0000001")
        directory.prepare()
        request = AsyncRequest(lambda *_: Path("/nowhere/file").write_text(""), (0, [], None), [], preload_fn=list)
        saving = BackgroundSave()
        saving.start(request, directory, directory.publish)
        with pytest.raises(CheckpointError, match="/nowhere/file"):
            saving.finish()
        assert list(tmp_path.iterdir()) == []
        saving.finish()
    finally:
        dist.destroy_process_group()
