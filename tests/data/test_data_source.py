"""Data source: order over epochs, buffer, and resume that loses and repeats nothing."""

import numpy as np
import pytest

from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, open_data_source
from slime.rollout.errors import HookFailure
from slime.utils import state_file
from slime.utils.misc import flatten
from slime.utils.types import Sample
from tests.rollout.support import make_args, write_prompts


@pytest.fixture
def args_of(tmp_path):
    def build(**overrides):
        return make_args(prompt_data=write_prompts(tmp_path / "p.jsonl", overrides.pop("rows", 5)), **overrides)

    return build


def taken(groups):
    return [(s.group_index, s.index, s.metadata["row"]) for s in flatten(groups)]


@pytest.mark.unit
def test_counts_and_wraps_over_epochs(args_of):
    source = RolloutDataSource(args_of(n_samples_per_prompt=2))
    assert taken(source.get_samples(2)) == [(0, 0, 0), (0, 1, 0), (1, 2, 1), (1, 3, 1)]
    assert [row for _, _, row in taken(source.get_samples(4))][::2] == [2, 3, 4, 0]
    assert (source.epoch_id, source.sample_offset, len(source)) == (1, 1, 5)
    assert [row for _, _, row in taken(source.get_samples(11))][::2] == [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert source.epoch_id == 3


@pytest.mark.unit
def test_samples_of_a_prompt_share_nothing(args_of):
    (group,) = RolloutDataSource(args_of()).get_samples(1)
    group[0].metadata["x"] = 1
    group[0].tokens.append(1)
    assert "x" not in group[1].metadata and group[1].tokens == []


@pytest.mark.unit
def test_shuffled_epochs_each_see_every_prompt_once(args_of):
    source = RolloutDataSource(args_of(rollout_shuffle=True, n_samples_per_prompt=1, rows=9))
    epochs = [[row for _, _, row in taken(source.get_samples(9))] for _ in range(3)]
    assert all(sorted(epoch) == list(range(9)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.unit
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("before", [1, 4, 5, 7, 13])
def test_resume_continues_exactly(args_of, tmp_path, shuffle, before):
    args = args_of(rollout_shuffle=shuffle, save=str(tmp_path), load=str(tmp_path))
    source = RolloutDataSourceWithBuffer(args)
    source.get_samples(before)
    source.save(3)
    expected = taken(source.get_samples(9))
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(3)
    assert taken(resumed.get_samples(9)) == expected


@pytest.mark.unit
def test_buffer_is_saved_and_served_first(args_of, tmp_path):
    args = args_of(save=str(tmp_path), load=str(tmp_path))
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(3)
    unfinished = groups[1][0]
    unfinished.append_response_tokens(
        args,
        tokens=[4, 5],
        log_probs=[-0.25, -0.5],
        text="é",
        meta_info={"weight_version": "7", "finish_reason": {"type": "abort"}},
    )
    unfinished.rollout_routed_experts = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    unfinished.metadata["nested"] = {"t": (1, 2.5, None), "b": b"\x00\xff"}
    source.add_samples([groups[1], [groups[2], [Sample(index=9, metadata={"row": 2})]]])
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    assert resumed.get_buffer_length() == 2
    back = resumed.get_samples(3)
    assert back[0][0].to_dict().keys() == unfinished.to_dict().keys()
    for key, value in unfinished.to_dict().items():
        np.testing.assert_array_equal(back[0][0].to_dict()[key], value) if key == "rollout_routed_experts" else None
        if key != "rollout_routed_experts":
            assert back[0][0].to_dict()[key] == value, key
    assert back[0][0].aborted and back[0][1].status == Sample.Status.PENDING
    assert isinstance(back[1][0], list) and back[1][1][0].index == 9
    assert back[2][0].group_index == 3 and resumed.get_buffer_length() == 0


@pytest.mark.unit
def test_buffer_filter_path(args_of):
    source = RolloutDataSourceWithBuffer(args_of(buffer_filter_path="tests.rollout.hooks.buffer_newest"))
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert [g[0].group_index for g in source.get_samples(2)] == [1, 2]
    assert [g[0].group_index for g in source.get_samples(2)] == [0, 3]
    with pytest.raises(TypeError, match="list of groups"):
        source.add_samples([Sample()])


@pytest.mark.unit
def test_a_missing_state_beside_others_is_an_error(args_of, tmp_path, caplog):
    args = args_of(save=str(tmp_path), load=str(tmp_path))
    source = RolloutDataSourceWithBuffer(args)
    source.load(4)
    assert "starting with the first prompt" in caplog.text
    source.save(4)
    with pytest.raises(FileNotFoundError, match=r"global_dataset_state_dict_5\.pt"):
        source.load(5)


@pytest.mark.unit
def test_prompts_that_fill_the_context_are_dropped(tmp_path, tiny_model_dir):
    args = make_args(
        prompt_data=write_prompts(tmp_path / "p.jsonl"), hf_checkpoint=tiny_model_dir, rollout_max_context_len=10
    )
    assert len(RolloutDataSource(args)) == 12
    args.rollout_max_context_len = 9
    with pytest.raises(ValueError, match="no prompt left"):
        RolloutDataSource(args)


@pytest.mark.unit
def test_without_a_data_set_samples_are_empty():
    source = RolloutDataSourceWithBuffer(make_args(rollout_global_dataset=False))
    assert [[s.index for s in g] for g in source.get_samples(2)] == [[0, 1], [2, 3]]


@pytest.mark.unit
def test_state_file_is_torch_format_and_safe(tmp_path):
    import pickle
    import zipfile

    import torch

    value = {"a": [1, 2.5, None, True, "é"], "b": {"c": (1, b"\xff")}}
    state_file.save(str(tmp_path / "s.pt"), value)
    assert state_file.load(str(tmp_path / "s.pt")) == value
    assert torch.load(tmp_path / "s.pt", weights_only=True) == value
    torch.save({"sample_offset": 3, "metadata": {}}, tmp_path / "old.pt")
    assert state_file.load(str(tmp_path / "old.pt")) == {"sample_offset": 3, "metadata": {}}
    torch.save({"t": torch.zeros(2)}, tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match="only plain values"):
        state_file.load(str(tmp_path / "tensor.pt"))
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(len))
    with pytest.raises(ValueError, match=r"builtins\.len, only plain values"):
        state_file.load(str(tmp_path / "evil.pt"))
    with pytest.raises(TypeError, match=r"state\['x'\]\[1\] is a object"):
        state_file.save(str(tmp_path / "s.pt"), {"x": [1, object()]})
    assert state_file.load(str(tmp_path / "s.pt")) == value


@pytest.mark.unit
def test_a_failed_write_leaves_the_old_state(tmp_path, monkeypatch):
    import os

    path = str(tmp_path / "s.pt")
    state_file.save(path, 1)

    def disk_full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        state_file.save(path, 2)
    assert state_file.load(path) == 1 and os.listdir(tmp_path) == ["s.pt"]


class CannotBeBuilt:
    def __init__(self, args):
        raise OSError("the service is down")


class OldForm:
    """As data sources were before `__len__` was asked of them."""

    def __init__(self, args):
        self.args = args

    def get_samples(self, num_samples):
        return [[Sample()]] * num_samples

    def add_samples(self, samples): ...

    def save(self, rollout_id): ...

    def load(self, rollout_id=None): ...


class Forgot(OldForm):
    save = None


@pytest.mark.unit
def test_a_users_class_is_named_when_it_does_not_fit():
    args = make_args()
    here = "tests.data.test_data_source."
    for num_rollout, name, message in (
        (1, "CannotBeBuilt", r"failed: OSError: the service is down \(.*test_data_source.py:\d+\)"),
        (1, "Forgot", "has no method save"),
        (None, "OldForm", "has no __len__, which --num-epoch needs"),
    ):
        args.num_rollout, args.data_source_path = num_rollout, here + name
        with pytest.raises(HookFailure, match=f"--data-source-path {here}{name} {message}"):
            open_data_source(args)
    args.num_rollout = 1
    assert len(open_data_source(args).get_samples(2)) == 2
