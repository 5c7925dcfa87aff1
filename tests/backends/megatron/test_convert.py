"""The conversion tools as users run them: there and back again is the checkpoint, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.hf_files import HFTensors
from tests.backends import trainers
from tests.backends.megatron.families import save_family
from tests.tiny_model import save_tiny_model

TOOLS = Path(__file__).parents[3] / "tools"


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, cwd=TOOLS.parent)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.integration
def test_round_trip(tmp_path):
    origin, middle, back = str(tmp_path / "hf"), str(tmp_path / "torch_dist"), str(tmp_path / "back")
    save_family("deepseek_v3", origin)
    run(f"{TOOLS}/convert_hf_to_torch_dist.py", "--hf-checkpoint", origin, "--save", middle, "--dtype", "float32")
    source = f"{middle}/iter_0000000"
    flags = ("--input-dir", source, "--output-dir", back, "--origin-hf-dir", origin, "--dtype", "float32")
    run(f"{TOOLS}/convert_torch_dist_to_hf.py", *flags)
    with HFTensors(origin) as before, HFTensors(back) as after:
        assert set(before.names()) == set(after.names())
        for name in before.names():
            assert torch.equal(before[name], after[name]), name
    assert (tmp_path / "back" / "config.json").read_text() == (tmp_path / "hf" / "config.json").read_text()


def fsdp_checkpoint(rank, world_size, port, path, save):
    """Weights after a rollout, as the trainer saved them."""
    from slime.backends.fsdp_utils.actor import FSDPTrainRayActor

    trainer = trainers.make_trainer(FSDPTrainRayActor, trainers.trainer_args(path, save=save), rank, world_size, port)
    trainers.train_rollout(trainer, 0)
    trainer.save_model(0)
    return trainers.parameters_of(trainer)


@pytest.mark.integration
def test_fsdp_checkpoint_to_hf(tmp_path):
    origin, save, out = str(tmp_path / "hf"), str(tmp_path / "run"), str(tmp_path / "out")
    save_tiny_model(origin, tie_word_embeddings=False)
    trained = trainers.run_world(fsdp_checkpoint, 1, origin, save)[0]
    flags = ("--input-dir", f"{save}/iter_0000001", "--output-dir", out, "--origin-hf-dir", origin)
    run(f"{TOOLS}/convert_fsdp_to_hf.py", *flags, "--dtype", "float32")
    with HFTensors(out) as written:
        assert set(written.names()) == set(trained)
        for name, tensor in trained.items():
            assert torch.equal(written[name], tensor), name
