"""The rollout loop against real HTTP servers: router and engines that speak the protocol."""

import time

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.errors import HookFailure, RewardError, RolloutError
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.misc import flatten
from tests.rollout import hooks
from tests.rollout.support import ScriptedEngine

HOOKS = "tests.rollout.hooks."
pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _clear_calls():
    hooks.CALLS.clear()


def run(args, cluster, rollout_id=0, source=None):
    args.sglang_router_port = cluster.port
    source = source or RolloutDataSourceWithBuffer(args)
    return generate_rollout(args, rollout_id, source), source


def test_batch_is_full_ordered_rewarded_and_spread(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(custom_rm_path=HOOKS + "reward_parity")
    output, _ = run(args, cluster)
    assert [[s.index for s in g] for g in output.samples] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all(len(engine.requests) == 4 for engine in cluster.engines)
    for sample in flatten(output.samples):
        assert sample.reward in (0.0, 1.0)
        assert len(sample.rollout_log_probs) == sample.response_length > 0
        assert len(sample.tokens) == 9 + sample.response_length
        assert sample.rollout_log_probs == [-0.5 - t / 100 for t in sample.tokens[9:]]
        assert sample.weight_versions == ["1"] and sample.weight_version_spans == [("1", 0, sample.response_length)]
        assert sample.loss_mask is None


def test_requests_carry_the_documented_fields_and_distinct_seeds(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(custom_rm_path=HOOKS + "reward_parity", rollout_stop=["?"], rollout_temperature=0.7)
    run(args, cluster)
    for request in cluster.requests:
        assert request["return_logprob"] is True and len(request["input_ids"]) == 9
        params = request["sampling_params"]
        assert params["no_stop_trim"] is True and params["spaces_between_special_tokens"] is False
        assert params["temperature"] == 0.7 and params["stop"] == ["?"] and params["max_new_tokens"] == 8
    assert sorted(r["sampling_params"]["sampling_seed"] for r in cluster.requests) == list(range(42, 50))


def test_same_seed_same_samples(cluster_of, rollout_args):
    cluster = cluster_of()
    runs = []
    for seed in (1, 1, 2):
        output, _ = run(rollout_args(custom_rm_path=HOOKS + "reward_parity", rollout_seed=seed), cluster)
        runs.append([s.tokens for s in flatten(output.samples)])
    assert runs[0] == runs[1] != runs[2]


def test_dynamic_sampling_drops_counts_and_refills(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity",
        dynamic_sampling_filter_path=HOOKS + "filter_odd_groups",
        rollout_all_samples_process_path=HOOKS + "all_samples",
        rollout_sample_filter_path=HOOKS + "remove_first",
    )
    output, source = run(args, cluster)
    assert len(output.samples) == 4
    assert all(g[0].group_index % 2 == 0 and g[0].remove_sample and not g[1].remove_sample for g in output.samples)
    dropped = output.metrics["rollout/dynamic_filter/drop_odd"]
    ((_, seen, passed),) = hooks.CALLS
    assert dropped >= 1 and seen >= 4 + dropped and passed is source


def test_a_filter_that_lets_nothing_pass_is_reported(cluster_of, rollout_args, caplog):
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity", dynamic_sampling_filter_path=HOOKS + "filter_late", rows=40
    )
    output, _ = run(args, cluster_of())
    assert output.metrics["rollout/dynamic_filter/drop_early"] == 20
    (warning,) = [record.getMessage() for record in caplog.records if "has dropped all" in record.getMessage()]
    assert "filter_late has dropped all of 16 groups {'early': 16}" in warning


def test_bool_filter_and_failing_filter(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(custom_rm_path=HOOKS + "reward_parity", dynamic_sampling_filter_path=HOOKS + "filter_bool")
    assert len(run(args, cluster)[0].samples) == 4
    args = rollout_args(custom_rm_path=HOOKS + "reward_parity", dynamic_sampling_filter_path=HOOKS + "filter_raises")
    with pytest.raises(HookFailure, match=r"--dynamic-sampling-filter-path.*filter_raises.*filter broke"):
        run(args, cluster)


def test_fallback_groups_fill_before_new_prompts(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity",
        dynamic_sampling_filter_path=HOOKS + "filter_odd_groups_but_keep",
    )
    output, source = run(args, cluster)
    assert [g[0].group_index for g in output.samples] == [0, 1, 2, 3]
    assert source.sample_group_index == 4


def hang_on_rows_from(first_row: int):
    """The prompt `what is the sum of i and 1 ?`: input id 5 is the number i."""

    def hang(payload):
        from tests.tiny_model import WORDS

        return payload["input_ids"][5] - len(WORDS) >= first_row

    return hang


def test_surplus_is_aborted_and_lost_without_partial_rollout(cluster_of, rollout_args):
    engine = ScriptedEngine(hang_when=hang_on_rows_from(4))
    cluster = cluster_of(engine)
    args = rollout_args(custom_rm_path=HOOKS + "reward_parity", over_sampling_batch_size=8)
    output, source = run(args, cluster)
    assert [g[0].group_index for g in output.samples] == [0, 1, 2, 3]
    assert engine.aborts >= 1 and source.get_buffer_length() == 0
    assert source.get_samples(1)[0][0].group_index == 8


def test_partial_rollout_continues_aborted_samples(cluster_of, rollout_args):
    engine = ScriptedEngine(hang_when=hang_on_rows_from(4))
    cluster = cluster_of(engine)
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity",
        over_sampling_batch_size=8,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
    )
    output, source = run(args, cluster)
    first = list(flatten(output.samples))
    assert source.get_buffer_length() == 4
    waiting = {s.index: list(s.tokens) for s in flatten(source.buffer) if s.aborted}
    assert waiting and all(s.metadata["start_rollout_id"] == 0 for s in flatten(source.buffer) if s.response_length)

    engine.hang_when = lambda payload: False
    engine.version = "2"
    args = rollout_args(
        custom_rm_path=HOOKS + "reward_parity", partial_rollout=True, mask_offpolicy_in_partial_rollout=True
    )
    output, source = run(args, cluster, rollout_id=1, source=source)
    second = list(flatten(output.samples))
    assert {s.index for s in first}.isdisjoint(s.index for s in second)
    assert [s.index for s in second] == list(range(8, 16))
    for sample in second:
        before = waiting.get(sample.index)
        assert sample.reward is not None and sample.response_length <= 8
        assert len(sample.rollout_log_probs) == sample.response_length == len(sample.tokens) - 9
        if before is not None and len(before) > 9:
            assert sample.tokens[: len(before)] == before
            kept = len(before) - 9
            assert sample.loss_mask == [0] * kept + [1] * (sample.response_length - kept)
            assert sample.weight_version_spans == [("1", 0, kept), ("2", kept, sample.response_length)]
    resumed = [
        r for r in engine.requests if list(r["input_ids"]) in list(waiting.values()) and len(r["input_ids"]) > 9
    ]
    assert resumed and all(r["sampling_params"]["max_new_tokens"] == 8 - (len(r["input_ids"]) - 9) for r in resumed)


def test_samples_that_an_engine_aborted_are_continued(cluster_of, rollout_args):
    """An abort from outside (a weight update, say) must not end up in the batch without a reward."""
    engine = ScriptedEngine()
    state = {"left": 3}

    def hang(payload):
        if state["left"] and len(payload["input_ids"]) == 9:
            state["left"] -= 1
            engine_loop_abort(engine)
            return True
        return False

    def engine_loop_abort(engine):
        import asyncio

        asyncio.get_running_loop().call_later(0.2, lambda: [event.set() for event in engine.running])

    engine.hang_when = hang
    args = rollout_args(custom_rm_path=HOOKS + "reward_parity")
    output, _ = run(args, cluster_of(engine))
    assert len(output.samples) == 4
    assert all(s.reward is not None and not s.aborted for s in flatten(output.samples))


def test_fan_out_shares_the_rollout_id(cluster_of, rollout_args):
    cluster = cluster_of()
    args = rollout_args(
        custom_generate_function_path=HOOKS + "generate_pieces", custom_rm_path="tests.rollout.hooks:reward_group"
    )
    output, _ = run(args, cluster)
    assert [len(list(flatten(group))) for group in output.samples] == [4] * 4
    for group in output.samples:
        for trajectory in group:
            assert len({piece.rollout_id for piece in trajectory}) == 1
            assert {piece.index for piece in trajectory} == {trajectory[0].rollout_id}
            assert [piece.reward for piece in trajectory] == [0.0, 1.0]
    assert False in hooks.CALLS


def test_single_rewards_for_fan_out(cluster_of, rollout_args):
    args = rollout_args(
        custom_generate_function_path=HOOKS + "generate_pieces", custom_rm_path=HOOKS + "reward_parity"
    )
    output, _ = run(args, cluster_of())
    assert [piece.reward for piece in output.samples[0][0]] == [1.0, 0.0]


def test_group_rm_and_hooks(cluster_of, rollout_args):
    args = rollout_args(
        group_rm=True,
        custom_rm_path=HOOKS + "reward_group",
        rollout_sample_hook_path=[HOOKS + "sample_hook", HOOKS + "sample_hook_async"],
    )
    output, _ = run(args, cluster_of(), rollout_id=7)
    assert sorted(hooks.CALLS) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for group in output.samples:
        assert [s.reward for s in group] == [0.0, 1.0]
        assert [s.metadata["hook"] for s in group] == [[7, False, 0.0], [7, False, 1.0]]
        assert all(s.metadata["hook2"] for s in group)


def test_custom_generate_in_its_oldest_form(cluster_of, rollout_args):
    args = rollout_args(
        custom_generate_function_path=HOOKS + "generate_old_form", custom_rm_path=HOOKS + "reward_sync"
    )
    output, _ = run(args, cluster_of())
    assert all(s.reward == 0.25 and s.tokens == [1, 2] for s in flatten(output.samples))


@pytest.mark.parametrize(
    "hook, message",
    [
        (
            "generate_raises",
            r"--custom-generate-function-path .*generate_raises failed for sample \d+ of group \d+: KeyError",
        ),
        ("generate_no_tokens", r"generate_no_tokens: sample \d+ of group \d+ has no tokens to train on"),
        ("generate_wrong_mask", r"generate_wrong_mask: sample \d+ .* response_length 1 but lengths {'loss_mask': 2}"),
    ],
)
def test_custom_generate_errors_name_flag_and_sample(cluster_of, rollout_args, hook, message):
    args = rollout_args(custom_generate_function_path=HOOKS + hook, custom_rm_path=HOOKS + "reward_sync")
    with pytest.raises(HookFailure, match=message):
        run(args, cluster_of())


@pytest.mark.parametrize(
    "hook, message",
    [
        ("reward_raises", "raised ZeroDivisionError: no judge today"),
        ("reward_hangs", "took longer than --rm-timeout-secs 0.5"),
        ("reward_blocks", "took longer than --rm-timeout-secs 0.5 and blocks the event loop"),
        ("reward_blocks_in_sync", "took longer than --rm-timeout-secs 0.5"),
        ("reward_none", "returned None, not a number or a dict"),
    ],
)
def test_broken_rewards_stop_the_run_with_a_name(cluster_of, rollout_args, hook, message):
    cluster = cluster_of()
    args = rollout_args(custom_rm_path=HOOKS + hook, rm_timeout_secs=0.5)
    started = time.monotonic()
    with pytest.raises(RewardError, match=rf"{hook}.*{message}.*sample \d of group \d") as error:
        run(args, cluster)
    assert time.monotonic() - started < 15
    assert error.value.sample_index in range(8) and error.value.group_index in range(4)
    args = rollout_args(custom_rm_path=HOOKS + "reward_sync")
    assert len(run(args, cluster)[0].samples) == 4


def test_refused_request_names_the_sample(cluster_of, rollout_args):
    from aiohttp import web

    class Refusing(ScriptedEngine):
        async def generate(self, request):
            return web.json_response({"error": {"message": "the prompt has 9 tokens"}}, status=400)

    args = rollout_args(custom_rm_path=HOOKS + "reward_sync")
    with pytest.raises(
        RolloutError, match=r"refused sample \d of group \d \(9 input.*the prompt has 9 tokens.*max-prompt-len"
    ):
        run(args, cluster_of(Refusing()))


def test_state_is_per_args_object(rollout_args):
    first, second = rollout_args(), rollout_args(rollout_temperature=0.5)
    assert GenerateState(first) is GenerateState(first)
    assert GenerateState(second) is not GenerateState(first)
    assert GenerateState(second).sampling_params["temperature"] == 0.5


def test_response_fills_the_context_and_no_more(cluster_of, rollout_args):
    args = rollout_args(custom_rm_path=HOOKS + "reward_sync", rollout_max_context_len=12)
    output, _ = run(args, cluster_of())
    assert all(len(s.tokens) <= 12 for s in flatten(output.samples))


def test_partial_rollout_with_a_bound_waits_for_what_is_due(cluster_of, rollout_args):
    """Slow rows would be passed over for ever; with the bound a rollout waits for them in time."""
    engine = ScriptedEngine(token_seconds=0.002)
    engine.slow_when = lambda payload: payload["input_ids"][5] % 5 == 0
    cluster = cluster_of(engine)
    oldest = {}
    for limit in (None, 1):
        args = rollout_args(
            custom_rm_path=HOOKS + "reward_sync", rows=30, rollout_batch_size=2, over_sampling_batch_size=6,
            partial_rollout=True, max_weight_staleness=limit, rollout_max_response_len=60,
        )  # fmt: skip
        source, ages, seen = None, [], []
        for rollout_id in range(8):
            engine.version = str(rollout_id + 1)
            output, source = run(args, cluster, rollout_id, source)
            assert len(output.samples) == 2
            for sample in flatten(output.samples):
                seen.append(sample.index)
                ages += [rollout_id + 1 - int(version) for version, _, _ in sample.weight_version_spans]
        waiting = [s.index for s in flatten(source.buffer)]
        assert sorted(seen + waiting) == list(range(source.sample_index))
        oldest[limit] = max(ages)
    assert oldest[1] <= 1 < oldest[None]


def test_requests_go_to_the_attention_rank_with_the_fewest_in_flight(cluster_of, rollout_args):
    """Eight at once over four ranks: two each; nothing stays counted."""
    cluster = cluster_of()
    args = rollout_args(custom_rm_path=HOOKS + "reward_parity")
    args.sglang_dp_size = 4  # one of SGLang's own arguments, which exist where it is installed
    run(args, cluster)
    assert sorted(request["routed_dp_rank"] for request in cluster.requests) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert GenerateState(args).dp_counts == [0] * 4
    alone = cluster_of()
    run(rollout_args(custom_rm_path=HOOKS + "reward_parity"), alone)
    assert all("routed_dp_rank" not in request for request in alone.requests)
