"""Checkpoints: resume to the same bits, survive kills and a full disk, load in transformers."""

import os
import random
import re
import resource
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slime.backends.common.checkpoint import TRACKER, CheckpointError
from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.backends.fsdp_utils.checkpoint import latest_checkpoint
from tests.backends.trainers import make_trainer, parameters_of, run_world, start_world, train_rollout, trainer_args

pytestmark = pytest.mark.integration

# A schedule, so that resuming at the wrong step shows.
FLAGS = "--num-steps-per-rollout 2 --lr-decay-style linear --lr-warmup-iters 2".split()


def state_of(trainer):
    """All that a run continues from; collective."""
    moments = {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, state in trainer.optimizer.state_by_name().items()
        for key, value in state.items()
    }
    draws = (torch.rand(3), np.random.rand(3).tolist(), random.random())
    return {"params": parameters_of(trainer), "moments": moments, "draws": draws, "progress": vars(trainer.progress)}


def assert_same(a, b):
    for key in ("params", "moments"):
        assert a[key].keys() == b[key].keys()
        assert [name for name in a[key] if not torch.equal(a[key][name], b[key][name])] == []
    assert torch.equal(a["draws"][0], b["draws"][0]) and a["draws"][1:] == b["draws"][1:]


def straight_and_first_half(rank, world_size, port, model_dir, root):
    trainer = make_trainer(FSDPTrainRayActor, trainer_args(model_dir, *FLAGS), rank, world_size, port)
    seed_everything(rank)
    train_rollout(trainer, 0)
    train_rollout(trainer, 1)
    straight = state_of(trainer)

    hf = str(root / "hf_{rollout_id}")
    args = trainer_args(model_dir, *FLAGS, "--save", str(root / "run"), "--save-hf", hf)
    trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
    assert trainer.start_rollout_id == 0
    seed_everything(rank)
    train_rollout(trainer, 0)
    trainer.save_model(0)
    saved = parameters_of(trainer)
    trainer.dispose()
    return straight, saved


def seed_everything(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def second_half(rank, world_size, port, model_dir, root):
    args = trainer_args(model_dir, *FLAGS, "--load", str(root / "run"))
    trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
    assert trainer.start_rollout_id == 1
    train_rollout(trainer, 1)
    out = state_of(trainer)
    trainer.dispose()
    return out


def load_variants(rank, world_size, port, model_dir, root):
    """Loads of a checkpoint that two ranks wrote."""
    out = {}
    for name, flags in {"all": (), "finetune": ("--finetune",), "no optim": ("--no-load-optim",)}.items():
        args = trainer_args(model_dir, *FLAGS, "--load", str(root / "run"), *flags)
        trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port, with_ref=True)
        # The reference stays what the run started from.
        trainer.reference.load()
        reference = parameters_of(trainer)
        trainer._resume()
        optimizer = trainer.optimizer
        moments = sum(float(s["exp_avg"].abs().sum()) for s in optimizer.state_by_name().values())
        start = (trainer.start_rollout_id, optimizer.steps_done, moments > 0)
        out[name] = (parameters_of(trainer), reference, start)
    bare = trainer_args(model_dir, *FLAGS, "--save", str(root / "bare"), "--no-save-optim")
    make_trainer(FSDPTrainRayActor, bare, rank, world_size, port).save_model(0)
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        args = trainer_args(model_dir, *FLAGS, "--load", str(root / "bare"))
        make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
    trainer.dispose()
    return out


@pytest.fixture(scope="module")
def halves(tiny_model_dir, tmp_path_factory):
    """(directory, [(state after two rollouts, parameters saved after one)] by rank)."""
    root = tmp_path_factory.mktemp("checkpoints")
    return root, run_world(straight_and_first_half, 2, tiny_model_dir, root)


def test_a_resumed_run_ends_in_the_same_bits(tiny_model_dir, halves):
    root, results = halves
    resumed = run_world(second_half, 2, tiny_model_dir, root)
    for (straight, _), again in zip(results, resumed, strict=True):
        assert_same(straight, again)
        assert straight["progress"]["global_step"] == again["progress"]["global_step"] == 4
        assert straight["progress"]["micro_step"] == again["progress"]["micro_step"]


def test_layout(halves):
    root, _ = halves
    path = root / "run" / "iter_0000001"
    assert sorted(p.name for p in path.iterdir()) == ["meta.json", "model", "optimizer", "rng.pt"]
    assert (root / "run" / TRACKER).read_text() == "1\n"
    assert sorted(p.name for p in (root / "run").iterdir()) == ["iter_0000001", TRACKER]
    keys = torch.distributed.checkpoint.FileSystemReader(path / "model").read_metadata().state_dict_metadata
    assert "model_state.model.model.embed_tokens.weight" in keys


def test_another_number_of_ranks_and_partial_loads(tiny_model_dir, halves):
    root, results = halves
    initial = run_world(initial_parameters, 1, tiny_model_dir)[0]
    (variants,) = run_world(load_variants, 1, tiny_model_dir, root)
    for params, reference, _ in variants.values():
        assert all(torch.equal(params[name], value) for name, value in results[0][1].items())
        assert all(torch.equal(reference[name], value) for name, value in initial.items())
    assert {name: variant[2] for name, variant in variants.items()} == {
        "all": (1, 2, True),
        "finetune": (0, 0, False),
        "no optim": (1, 2, False),
    }


def initial_parameters(rank, world_size, port, model_dir):
    return parameters_of(make_trainer(FSDPTrainRayActor, trainer_args(model_dir), rank, world_size, port))


def test_hf_export_loads_in_transformers(halves):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root, results = halves
    path = root / "hf_0"
    model = AutoModelForCausalLM.from_pretrained(path)
    state = dict(model.named_parameters())
    assert state.keys() == results[0][1].keys()
    for name, value in results[0][1].items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name
    assert AutoTokenizer.from_pretrained(path)("what is 7")["input_ids"]
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


# -- kills --------------------------------------------------------------------------------------------------------

# (audit event, pattern in the path) at which the process is killed while it saves rollout 1.
KILLS = {
    "first write": ("open", "iter_0000002.tmp/model/"),
    "optimizer half written": ("open", "iter_0000002.tmp/optimizer/"),
    "before the rename": ("os.rename", "iter_0000002.tmp$"),
    "before the tracker": ("os.rename", f"{TRACKER}.tmp$"),
}


def save_twice_and_die(rank, world_size, port, model_dir, root, kill, rollout_ids):
    args = trainer_args(model_dir, "--save", str(root))
    trainer = make_trainer(FSDPTrainRayActor, args, rank, world_size, port)
    first, second = rollout_ids
    train_rollout(trainer, first)
    trainer.save_model(first)
    torch.save(parameters_of(trainer), root / "expected.pt")
    train_rollout(trainer, 1)
    event, pattern = kill

    def hook(name, arguments):
        if name == event and not isinstance(arguments[0], int) and re.search(pattern, os.fsdecode(arguments[0])):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    trainer.save_model(second)


def loaded_and_saved_again(rank, world_size, port, model_dir, root):
    trainer = make_trainer(
        FSDPTrainRayActor,
        trainer_args(model_dir, "--save", str(root), "--load", str(root)),
        rank,
        world_size,
        port,
    )
    out = trainer.start_rollout_id, parameters_of(trainer)
    trainer.save_model(trainer.start_rollout_id)
    trainer.dispose()
    return out


def die_while_saving(model_dir, root, kill, rollout_ids):
    (process,), _, _store = start_world(save_twice_and_die, 1, model_dir, root, kill, rollout_ids)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS.keys())
def test_killed_while_saving(tiny_model_dir, tmp_path, kill):
    die_while_saving(tiny_model_dir, tmp_path, kill, (0, 1))
    start, params = run_world(loaded_and_saved_again, 1, tiny_model_dir, tmp_path)[0]
    assert start == 1
    expected = torch.load(tmp_path / "expected.pt")
    assert all(torch.equal(params[name], value) for name, value in expected.items())
    assert latest_checkpoint(str(tmp_path)) == tmp_path / "iter_0000002"
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_killed_while_replacing_a_checkpoint(tiny_model_dir, tmp_path):
    """The same iteration written again: between the two renames only the set-aside one is there."""
    die_while_saving(tiny_model_dir, tmp_path, ("os.rename", "iter_0000001.tmp$"), (0, 0))
    assert not (tmp_path / "iter_0000001").exists()
    start, params = run_world(loaded_and_saved_again, 1, tiny_model_dir, tmp_path)[0]
    assert start == 1
    expected = torch.load(tmp_path / "expected.pt")
    assert all(torch.equal(params[name], value) for name, value in expected.items())


# -- disk full ----------------------------------------------------------------------------------------------------


def save_with_a_limit_on_rank_1(rank, world_size, port, model_dir, root):
    trainer = make_trainer(FSDPTrainRayActor, trainer_args(model_dir, "--save", str(root)), rank, world_size, port)
    train_rollout(trainer, 0)
    trainer.save_model(0)
    train_rollout(trainer, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    with pytest.raises(CheckpointError) as error:
        trainer.save_model(1)
    left = sorted(p.name for p in Path(root).iterdir()) if rank == 0 else None
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    tracker = (Path(root) / TRACKER).read_text()
    trainer.save_model(1)
    trainer.dispose()
    return str(error.value), left, tracker


def test_a_full_disk_on_one_rank_stops_all_and_spoils_nothing(tiny_model_dir, tmp_path):
    results = run_world(save_with_a_limit_on_rank_1, 2, tiny_model_dir, tmp_path)
    for message, _, tracker in results:
        assert (
            "iter_0000002" in message
            and "File too large" in message
            and " MB free there)" in message
            and "Earlier checkpoints" in message
        )
        assert tracker == "1\n"
    assert results[0][1] == ["iter_0000001", TRACKER]
    assert latest_checkpoint(str(tmp_path)) == tmp_path / "iter_0000002"


# -- tracker ------------------------------------------------------------------------------------------------------


def test_latest_checkpoint(tmp_path):
    assert latest_checkpoint(None) is None
    assert latest_checkpoint(str(tmp_path)) is None
    (tmp_path / TRACKER).write_text("7\n")
    with pytest.raises(CheckpointError, match="iter_0000007"):
        latest_checkpoint(str(tmp_path))
    (tmp_path / TRACKER).write_text("seven")
    with pytest.raises(CheckpointError, match="seven"):
        latest_checkpoint(str(tmp_path))
