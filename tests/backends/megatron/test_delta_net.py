"""Models with gated delta nets: checkpoints move between layouts, and whoever would mix sequences refuses them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.hf_files import HFTensors
from slime.convert import main
from slime.modeling.hf import empty_causal_lm, load_causal_lm
from tests.backends.megatron.families import save_family
from tests.backends.megatron.worlds import parameters_of, start_trainer, stop_trainer, train_rollout
from tests.backends.trainers import run_world, trainer_args

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
DRAFTS = {"mtp.fc.weight": (32, 64), "mtp.layers.0.self_attn.q_proj.weight": (96, 32), "mtp.norm.weight": (32,)}


def runs(rank, world_size, port, path, save):
    """Parameters after two rollouts over tensor-parallel ranks, and with the second one over pipeline stages."""

    def trainer(layout, **changes):
        resumed = {"finetune": False, "no_load_optim": False, "no_load_rng": False, "start_rollout_id": None}
        changes = {"data_pad_size_multiplier": 4, "load": None, **resumed, **layout, **changes}
        args = trainer_args(path, "--train-backend", "megatron", **changes)
        return start_trainer(args, rank, world_size, port)

    whole = trainer(TP2SP, save=save, save_hf=save + "/hf")
    train_rollout(whole, 0)
    whole.save_model(0)
    saved = parameters_of(whole)
    train_rollout(whole, 1)
    expected = parameters_of(whole)
    stop_trainer()
    moved = trainer(PP2, load=save)
    loaded = parameters_of(moved)
    train_rollout(moved, 1)
    end = parameters_of(moved)
    stop_trainer()
    dist.destroy_process_group()
    return saved, loaded, expected, end


@pytest.mark.integration
def test_checkpoints_move_between_layouts_and_drafts_are_kept(tmp_path):
    origin, save, back = str(tmp_path / "hf"), str(tmp_path / "run"), str(tmp_path / "back")
    save_family("qwen3_next", origin)
    file = Path(origin) / "model.safetensors"
    drafts = {name: torch.randn(shape) for name, shape in DRAFTS.items()}
    save_file(load_file(file) | drafts, file, metadata={"format": "pt"})
    ranks = run_world(runs, 2, origin, save)
    for saved, loaded, expected, end in ranks:
        assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []
        for name in expected:
            assert (end[name] - expected[name]).abs().max() < 2e-6, name
            assert not torch.equal(end[name], loaded[name]), name
    flags = ["--input-dir", f"{save}/iter_0000000", "--output-dir", back, "--origin-hf-dir", origin]
    assert main(["torch-dist-to-hf", *flags, "--dtype", "float32"]) == 0
    for path in (f"{save}/hf", back):
        with HFTensors(path) as written:
            assert set(written.names()) == set(ranks[0][0]) | set(drafts)
            assert all(torch.equal(written[name], t) for name, t in {**ranks[0][0], **drafts}.items())


@pytest.mark.unit
def test_other_models_of_transformers_refuse_them(tmp_path):
    save_family("qwen3_next", str(tmp_path))
    for load in (load_causal_lm, empty_causal_lm):
        with pytest.raises(ValueError, match="from one sequence into the next"):
            load(str(tmp_path), torch.float32)
