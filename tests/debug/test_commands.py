"""Rewards replayed over a dump, and dumps shown."""

import pytest
import torch

from slime.debug import replay_reward, show_dump
from slime.observability.dumps import load_rollout_dump, save_rollout_dump, save_tokenizer
from slime.utils.types import Sample

pytestmark = pytest.mark.unit


@pytest.fixture
def dump(tmp_path):
    samples = []
    for i in range(6):
        sample = Sample(
            group_index=i // 2, index=i, prompt="q", response=f"so\n#### {i}", label="3", tokens=[1, 2, 3, 4],
            response_length=3, rollout_log_probs=[-0.5] * 3, reward=0.0, weight_versions=["2"],
            status=Sample.Status.TRUNCATED if i == 5 else Sample.Status.COMPLETED,
        )  # fmt: skip
        samples.append(sample)
    return str(save_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 4, samples))


def test_a_built_in_reward_is_replayed(dump, tmp_path, capsys):
    output = tmp_path / "new.pt"
    assert replay_reward.main([dump, "--rm-type", "math", "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "6 samples, 1 with another reward" in text
    assert "dump  mean 0.0000" in text and "now   mean 0.1667" in text
    assert "sample 3: 0.0 -> 1" in text and "so\\n#### 3" in text
    assert [s.reward for s in load_rollout_dump(str(output), 0)] == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--custom-rm-path tests.rollout.hooks.reward_group --group-rm", 0, "6 samples, 3 with another reward"),
        ("--custom-rm-path tests.rollout.hooks.reward_length --reward-key score", 0, "now   mean 3.0000  (3: 6)"),
        ("--custom-rm-path tests.rollout.hooks.reward_raises", 1, "(--custom-rm-path) raised ZeroDivisionError"),
        ("--custom-rm-path tests.rollout.hooks.reward_hangs --rm-timeout-secs 0.2", 1, "took longer than"),
        ("", 1, "pass --rm-type or --custom-rm-path"),
        ("--rm-typ math", 2, "did you mean --rm-type"),
    ],
)
def test_users_functions_and_mistakes(dump, capsys, flags, code, message):
    assert replay_reward.main([dump, *flags.split()]) == code
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def test_a_rollout_is_shown(dump, capsys):
    assert show_dump.main([dump, "--status", "truncated", "--tokens"]) == 0
    text = capsys.readouterr().out
    assert "rollout 4: 6 samples of 3 prompts (5 completed, 1 truncated)" in text
    assert "sample 5 of prompt 2: truncated" in text and "sample 4" not in text
    assert "2/1/-0.500 3/1/-0.500 4/1/-0.500" in text and "prompt tokens: [1]" in text
    assert show_dump.main(["nowhere.pt"]) == 1


@pytest.mark.parametrize("content", [b"junk", b"", b"PK\x03\x04cut"])
def test_a_file_that_is_no_dump(tmp_path, capsys, content):
    path = tmp_path / "0.pt"
    path.write_bytes(content)
    for command, flags in ((show_dump, []), (replay_reward, ["--rm-type", "math"])):
        assert command.main([str(path), *flags]) == 1
        error = capsys.readouterr().err
        assert f"{path} is no dump, or was cut" in error and error.count("\n") == 1


def test_train_data_is_no_rollout(tmp_path, capsys):
    torch.save({"rollout_id": 0, "rank": 1, "rollout_data": {}}, tmp_path / "0_0.pt")
    assert replay_reward.main([str(tmp_path / "0_0.pt"), "--rm-type", "math"]) == 1
    assert "0_0.pt is no rollout dump; --save-debug-rollout-data writes those" in capsys.readouterr().err


def test_train_data_is_shown(tmp_path, capsys):
    path = tmp_path / "0_0.pt"
    data = {"log_probs": [torch.tensor([-1.0, -3.0])], "response_lengths": [2], "prompt": ["hello"]}
    torch.save({"rollout_id": 0, "rank": 1, "rollout_data": data}, path)
    assert show_dump.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "rollout 0, rank 1" in text and "log_probs" in text and "2 numbers, mean -2" in text and "hello" in text


def test_the_tokenizer_of_a_dump(tiny_model_dir, tmp_path):
    from slime.utils.processing_utils import load_tokenizer

    save_tokenizer(tiny_model_dir, str(tmp_path))
    assert not list((tmp_path / "tokenizer").glob("*.safetensors"))
    copied = load_tokenizer(str(tmp_path / "tokenizer"))
    assert copied.encode("what is the sum") == load_tokenizer(tiny_model_dir).encode("what is the sum")
