"""Sample: appended tokens stay aligned."""

import pytest

from slime.utils.types import Sample

pytestmark = pytest.mark.unit


def meta(version="1", reason="stop", **more):
    return {"weight_version": version, "finish_reason": {"type": reason}, **more}


def test_tokens_that_sampling_kept_stay_aligned():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(None, tokens=[9], trainable=False)
    kept = meta(output_token_sampling_mask=[[3, 5], [4]])
    sample.append_response_tokens(None, tokens=[3, 4], log_probs=[-1.0, -2.0], meta_info=kept)
    sample.append_response_tokens(None, tokens=[8], trainable=False)
    sample.append_response_tokens(
        None, tokens=[7], log_probs=[-1.0], meta_info=meta(output_token_sampling_mask=[[7, 6]])
    )
    assert sample.rollout_top_p_token_ids == [3, 5, 4, 7, 6]
    assert sample.rollout_top_p_token_offsets == [0, 0, 2, 3, 3, 5]
    with pytest.raises(ValueError, match="1 tokens but 2 sets"):
        sample.append_response_tokens(None, tokens=[7], log_probs=[-1.0], meta_info=kept)


def test_generation_tool_output_generation():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(
        None, tokens=[3, 4], log_probs=[-1.0, -2.0], text="ab", meta_info=meta(prompt_tokens=2, cached_tokens=1)
    )
    assert sample.loss_mask is None and sample.status == Sample.Status.COMPLETED
    sample.append_response_tokens(None, tokens=[5], trainable=False, text="c")
    sample.append_response_tokens(
        None, tokens=[6], log_probs=[-3.0], text="d", meta_info=meta("2", "length", prompt_tokens=5, cached_tokens=4)
    )
    assert sample.tokens == [1, 2, 3, 4, 5, 6] and sample.response == "abcd" and sample.response_length == 4
    assert sample.loss_mask == [1, 1, 0, 1] and sample.effective_response_length == 3
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0, -3.0]
    assert sample.weight_versions == ["1", "2"]
    assert sample.weight_version_spans == [("1", 0, 2), ("2", 3, 4)]
    assert sample.prefix_cache_info == {"cached_tokens": 5, "prompt_tokens": 7}
    assert sample.truncated


def test_version_change_in_mid_request():
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    sample = Sample(tokens=[1], response_length=0)
    sample.append_response_tokens(None, tokens=[2, 3, 4], meta_info=meta("2", "abort", weight_versions=spans))
    assert sample.weight_version_spans == [("1", 0, 1), ("2", 1, 3)] and sample.aborted
    assert sample.rollout_log_probs is None


def test_the_status_can_be_left_alone():
    sample = Sample()
    sample.append_response_tokens(None, tokens=[1], meta_info=meta(), update_terminal_info=False)
    assert sample.status == Sample.Status.PENDING


def test_misaligned_log_probs_are_refused():
    with pytest.raises(ValueError, match="sample 5: 2 tokens but 1 log-probs"):
        Sample(index=5).append_response_tokens(None, tokens=[1, 2], log_probs=[0.0])


def test_round_trip_keeps_unknown_keys_and_its_input():
    sample = Sample(index=1, status=Sample.Status.ABORTED, weight_version_spans=[("1", 0, 2)])
    data = {**sample.to_dict(), "later_field": 3}
    copy = dict(data)
    back = Sample.from_dict(data)
    assert data == copy and back.later_field == 3 and back.aborted and back.weight_version_spans == [("1", 0, 2)]
