"""`slime data check` finds every row that a run would trip over."""

import pytest

from slime.cli import main
from tests.data.support import write_jsonl

pytestmark = pytest.mark.unit


def test_every_bad_row_is_listed(tmp_path, capsys):
    rows = [
        {"input": "a", "label": 1},
        '{"input": ',
        {"question": "b"},
        {"input": "c"},
        {"input": "a", "label": 1, "metadata": {"rm_type": "maths"}},
        {"input": "<image> d", "label": 1},
        {"input": "<image> e", "label": 1, "pic": "x.png"},
        {"input": "f", "label": 1, "metadata": {"rm_type": "ifbench", "instruction_id_list": ["a:b"], "kwargs": [{}]}},
        {"input": "g", "label": 1, "metadata": {"rm_type": "ifbench"}},
        {"input": "h", "label": 1, "metadata": "{"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    words = ["data", "check", path, "--label-key", "label", "--multimodal-keys", '{"image": "pic"}']
    assert main([*words, "--rm-type", "math"]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = {int(line.split(":")[1]): line for line in lines[:-1]}
    assert sorted(found) == [2, 3, 4, 5, 6, 8, 9, 10]
    for line, words in {
        2: "not valid JSON",
        3: "there is no 'input' (--input-key); the row has ['question']",
        4: "there is no 'label' (--label-key)",
        5: "'metadata.rm_type' 'maths' is unknown",
        6: "'input': the text has 1 <image> placeholders for 0 image items",
        8: "'metadata.instruction_id_list' names 'a:b'",
        9: "'metadata' needs instruction_id_list",
        10: "'metadata' is not valid JSON",
    }.items():
        assert words in found[line]
    assert "10 rows, 8 with problems" in lines[-1] and "1 repeated prompts" in lines[-1]


def test_good_files_and_tokens(tmp_path, tiny_model_dir, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "what is " * n} for n in (1, 1, 9)])
    words = [f"{path}@[1:]", "--hf-checkpoint", tiny_model_dir, "--rollout-max-prompt-len", "5"]
    assert main(["data", "check", path, *words]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "3 rows, 0 with problems" in first and "longest 18 tokens" in first and "1 repeated prompts" in first
    assert "2 rows, 0 with problems" in second and "1 would be dropped as too long" in second


def test_labels_that_rewards_need_and_unreadable_files(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "a"}] * 3)
    assert main(["data", "check", path, str(tmp_path / "none.jsonl"), "--rm-type", "f1", "--max-problems", "1"]) == 1
    out = capsys.readouterr().out
    assert f"{path}:1: --rm-type f1 needs a label" in out and "and 2 more" in out and "no such file" in out
