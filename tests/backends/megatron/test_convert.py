"""Conversion as users run it: there and back again is the checkpoint, bit for bit, in little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.hf_files import INDEX, HFTensors
from slime.convert import COMMANDS, main
from tests.backends import trainers
from tests.backends.megatron.families import CASES, save_family
from tests.backends.megatron.published import CONFIGS
from tests.backends.megatron.test_architecture import script_words
from tests.backends.megatron.test_drafts import save_mimo
from tests.tiny_model import save_tiny_model

TOOLS = Path(__file__).parents[3] / "tools"
MEASURED = """
import sys, threading
from slime.convert import main

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

main(sys.argv[1].split())  # imports everything
peak, done = [0], threading.Event()
before = anonymous()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())

thread = threading.Thread(target=watch)
thread.start()
main(sys.argv[2].split())
done.set()
thread.join()
print("kilobytes:", peak[0] - before)
"""


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, cwd=TOOLS.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def same(before: Path, after: Path) -> None:
    with HFTensors(str(before)) as expected, HFTensors(str(after)) as found:
        assert set(expected.names()) == set(found.names())
        for name in expected.names():
            assert torch.equal(expected[name], found[name]), name


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_round_trip(tmp_path, case):
    origin, middle, back = tmp_path / "hf", tmp_path / "torch_dist", tmp_path / "back"
    save_family(case, str(origin))
    flags = ["--hf-checkpoint", str(origin), "--save", str(middle), "--dtype", "float32"]
    assert main(["hf-to-torch-dist", *flags]) == 0
    flags = ["--input-dir", f"{middle}/iter_0000000", "--output-dir", str(back), "--origin-hf-dir", str(origin)]
    assert main(["torch-dist-to-hf", *flags, "--dtype", "float32", "--chunk-size", "20000"]) == 0
    same(origin, back)
    assert (back / INDEX).is_file()
    assert (back / "config.json").read_text() == (origin / "config.json").read_text()


@pytest.mark.integration
def test_draft_layers_are_converted_too(tmp_path):
    origin, middle, back = tmp_path / "hf", tmp_path / "torch_dist", tmp_path / "back"
    save_mimo(str(origin))
    before = load_file(origin / "model.safetensors")
    assert main(["hf-to-torch-dist", "--hf-checkpoint", str(origin), "--save", str(middle), "--dtype", "float32"]) == 0
    # What comes back is the checkpoint's, not the origin's.
    zeros = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    save_file(zeros, origin / "model.safetensors", metadata={"format": "pt"})
    flags = ["--input-dir", f"{middle}/iter_0000000", "--output-dir", str(back), "--origin-hf-dir", str(origin)]
    assert main(["torch-dist-to-hf", *flags, "--dtype", "float32"]) == 0
    with HFTensors(str(back)) as found:
        assert set(found.names()) == set(before)
        assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def large_model(path: Path) -> int:
    """A model of 134 MB; its size in kilobytes."""
    import transformers

    config = transformers.Qwen3Config(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=4096,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(path, max_shard_size="20MB")
    return sum(p.numel() for p in model.parameters()) * 4 // 1024


@pytest.mark.integration
def test_memory_does_not_grow_with_the_model(tmp_path):
    save_family("qwen3", str(tmp_path / "tiny"))
    kilobytes = large_model(tmp_path / "large")
    there = "hf-to-torch-dist --hf-checkpoint {0}/{1} --save {0}/{1}-middle --dtype float32"
    back = "torch-dist-to-hf --input-dir {0}/{1}-middle/iter_0000000 --output-dir {0}/{1}-back --origin-hf-dir {0}/{1}"
    back += " --dtype float32 --chunk-size 10000000"
    for command in (there, back):
        words = [command.format(tmp_path, name) for name in ("tiny", "large")]
        assert int(run("-c", MEASURED, *words).split("kilobytes:")[1]) < 0.6 * kilobytes
    same(tmp_path / "large", tmp_path / "large-back")


@pytest.mark.unit
def test_mistakes_are_named(tmp_path, capsys):
    assert main(["hf-to-torchdist"]) == 2
    assert "did you mean hf-to-torch-dist?" in capsys.readouterr().err
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    with pytest.raises(SystemExit):
        main(["hf-to-torch-dist", "--hf-checkpoint", str(tmp_path), "--save", str(tmp_path / "x")])
    assert "has no config.json" in capsys.readouterr().err
    flags = ["--input-dir", str(tmp_path), "--output-dir", str(tmp_path / "x"), "--origin-hf-dir", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["torch-dist-to-hf", *flags])
    assert "holds no torch_dist checkpoint" in capsys.readouterr().err


@pytest.mark.unit
@pytest.mark.parametrize(
    ("shape", "changes", "named"),
    [
        ("qwen3-4B", {}, "has neither model.safetensors"),  # all else is right
        ("qwen3-8B", {}, "--hidden-size 4096: contradicts --hf-checkpoint"),
        ("qwen3-4B --hiden-size 2560", {}, "did you mean --hidden-size?"),
        ("qwen3-4B", {"quantization_config": {"quant_method": "fp8"}}, "slime convert fp8-to-bf16"),
    ],
)
def test_model_flags_are_compared_with_the_checkpoint(tmp_path, capsys, shape, changes, named):
    """`tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" --hf-checkpoint ... --save ...`"""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-4B"] | changes))
    name, *more = shape.split()
    flags = [*script_words(name), *more, "--hf-checkpoint", str(tmp_path), "--save", str(tmp_path / "x")]
    with pytest.raises(SystemExit):
        main(["hf-to-torch-dist", *flags])
    assert named in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.unit
def test_only_what_can_be_right_is_converted_back(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-4B"]))
    (tmp_path / "metadata.json").write_text("{}")
    flags = ["--input-dir", str(tmp_path), "--output-dir", str(tmp_path / "x"), "--origin-hf-dir", str(tmp_path)]
    for more, world_size, named in ((["--vocab-size", "7"], "1", "has 151936"), ([], "2", "not with torchrun")):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(SystemExit):
            main(["torch-dist-to-hf", *flags, *more])
        assert named in capsys.readouterr().err


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
    assert not [path for path in Path(out).iterdir() if path.is_dir()]


@pytest.mark.integration
def test_every_tool_runs():
    tools = sorted(str(path) for path in TOOLS.glob("*.py"))
    program = (
        "import runpy, sys\nfor tool in sys.argv[1:]:\n    sys.argv = [tool, '--help']\n"
        "    try:\n        runpy.run_path(tool, run_name='__main__')\n    except SystemExit as end:\n"
        "        assert end.code == 0, tool\n"
    )
    assert run("-c", program, *tools).count("usage:") == len(tools) == len(COMMANDS)
