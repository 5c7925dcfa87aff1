"""Evaluation over several data sets, and supervised rollouts."""

import pytest

from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.errors import RolloutError
from slime.rollout.rm_hub.text_rewards import f1_score
from slime.rollout.sft_rollout import generate_rollout as sft_rollout
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.misc import flatten
from slime.utils.processing_utils import load_tokenizer
from tests.data.support import write_jsonl
from tests.rollout.support import ScriptedEngine, make_args, write_prompts

HOOKS = "tests.rollout.hooks."


@pytest.mark.integration
def test_eval_of_two_data_sets(cluster_of, rollout_args, tmp_path):
    cluster = cluster_of()
    short = EvalDatasetConfig(
        name="short",
        path=write_prompts(tmp_path / "a.jsonl", 3),
        label_key="label",
        n_samples_per_eval_prompt=2,
        temperature=0.0,
        max_response_len=4,
        min_new_tokens=1,
        rm_type="random",
        metadata_overrides={"source": "a"},
    )
    long = EvalDatasetConfig(
        name="long",
        path=write_prompts(tmp_path / "b.jsonl", 5),
        max_response_len=50,
        max_context_len=15,
        custom_rm_path=HOOKS + "reward_length",
        reward_key="score",
        custom_generate_function_path=None,
    )
    args = rollout_args(eval_datasets=[short, long], custom_rm_path=None, sglang_router_port=cluster.port)
    output = call_rollout_fn(generate_rollout, args, 4, None, evaluation=True)
    assert list(output.data) == ["short", "long"]
    samples = output.data["short"]["samples"]
    assert [(s.group_index, s.index, s.metadata["row"]) for s in samples] == [(i // 2, i, i // 2) for i in range(6)]
    assert all(s.metadata["source"] == "a" and s.response_length <= 4 for s in samples)
    assert output.data["short"]["truncated"] == [s.truncated for s in samples]
    assert output.data["long"]["rewards"] == [float(s.response_length) for s in output.data["long"]["samples"]]
    assert all(len(s.tokens) <= 15 for s in output.data["long"]["samples"])
    greedy = [r for r in cluster.requests if r["sampling_params"]["temperature"] == 0.0]
    assert len(greedy) == 6 and all(r["sampling_params"]["min_new_tokens"] == 1 for r in greedy)


@pytest.mark.integration
def test_eval_passes_the_flag_to_generate_and_hooks(cluster_of, rollout_args, tmp_path):
    from tests.rollout import hooks

    hooks.CALLS.clear()
    config = EvalDatasetConfig(name="a", path=write_prompts(tmp_path / "a.jsonl", 2))
    args = rollout_args(
        eval_datasets=[config],
        custom_generate_function_path=HOOKS + "generate_pieces",
        custom_rm_path=HOOKS + "reward_sync",
        rollout_sample_hook_path=[HOOKS + "sample_hook"],
        sglang_router_port=cluster_of().port,
    )
    data = generate_rollout(args, 9, None, evaluation=True).data
    assert hooks.CALLS == [True, True]
    assert [s.metadata["hook"] for s in data["a"]["samples"]] == [[9, True, 0.25]] * 4


@pytest.mark.integration
def test_data_sets_are_evaluated_at_the_same_time(cluster_of, rollout_args, tmp_path):
    running = []
    engine = ScriptedEngine(token_seconds=0.05, hang_when=lambda payload: running.append(len(engine.running)))
    configs = [
        EvalDatasetConfig(name=name, path=write_prompts(tmp_path / f"{name}.jsonl", 3), temperature=temperature)
        for name, temperature in (("a", 0.25), ("b", 0.5), ("c", 0.75))
    ]
    args = rollout_args(eval_datasets=configs, rm_type="random", sglang_router_port=cluster_of(engine).port)
    generate_rollout(args, 0, None, evaluation=True)
    assert max(running) == 9


@pytest.mark.integration
def test_rewards_and_sampling_of_a_data_set_beat_those_of_the_run(cluster_of, rollout_args, tmp_path):
    path = write_prompts(tmp_path / "a.jsonl", 3)
    configs = [
        EvalDatasetConfig(name="run", path=path),
        EvalDatasetConfig(name="type", path=path, rm_type="f1", label_key="label", stop=["t5"], stop_token_ids=[7]),
        EvalDatasetConfig(name="own", path=path, custom_rm_path=HOOKS + "reward_sync", min_eval_samples=7),
    ]
    cluster = cluster_of()
    args = rollout_args(
        eval_datasets=configs,
        custom_rm_path=HOOKS + "reward_group",
        group_rm=True,
        sglang_router_port=cluster.port,
    )
    data = generate_rollout(args, 0, None, evaluation=True).data
    assert data["run"]["rewards"] == [0.0] * 3  # the first of each group, from the run's group function
    assert [s.reward for s in data["type"]["samples"]] == [
        f1_score(s.response, s.label) for s in data["type"]["samples"]
    ]
    assert data["own"]["rewards"] == [0.25] * 9 and len({s.index for s in data["own"]["samples"]}) == 9
    stops = [r["sampling_params"] for r in cluster.requests if r["sampling_params"]["stop"]]
    assert len(stops) == 3 and all(p["stop"] == ["t5"] and p["stop_token_ids"] == [7] for p in stops)


@pytest.mark.integration
def test_dict_rewards_need_a_key(cluster_of, rollout_args, tmp_path):
    port = cluster_of().port
    for key, message in (("points", "reward key 'points' is not in"), (None, "no reward key is given")):
        config = EvalDatasetConfig(name="a", path=write_prompts(tmp_path / "a.jsonl", 1), reward_key=key)
        args = rollout_args(eval_datasets=[config], custom_rm_path=HOOKS + "reward_length", sglang_router_port=port)
        with pytest.raises(RolloutError, match=rf"evaluation a: {message}.*\['other', 'score'\]"):
            generate_rollout(args, 0, None, evaluation=True)


@pytest.mark.integration
def test_media_go_to_the_engine_beside_the_tokens(cluster_of, rollout_args, tmp_path):
    rows = [{"input": "what is <image> ?", "pics": ["https://x/a.png"]}, {"input": "what is a ?"}]
    path = write_jsonl(tmp_path / "m.jsonl", rows)
    config = EvalDatasetConfig(name="a", path=path, rm_type="random", multimodal_keys={"image": "pics"})
    cluster = cluster_of()
    args = rollout_args(eval_datasets=[config], sglang_router_port=cluster.port)
    samples = generate_rollout(args, 0, None, evaluation=True).data["a"]["samples"]
    assert [s.multimodal_inputs for s in samples] == [{"image": ["https://x/a.png"]}, None]
    assert sorted(str(r.get("image_data")) for r in cluster.requests) == ["None", "['https://x/a.png']"]
    rows[0]["pics"] = [str(tmp_path / "none.png")]
    config.path, config.name = write_jsonl(tmp_path / "n.jsonl", rows), "b"
    with pytest.raises(RolloutError, match=r"--multimodal-keys media failed for sample 0 .*none\.png"):
        generate_rollout(args, 0, None, evaluation=True)


@pytest.mark.unit
def test_sft_from_prompt_and_label(tmp_path, tiny_model_dir):
    args = make_args(
        hf_checkpoint=tiny_model_dir, prompt_data=write_prompts(tmp_path / "p.jsonl"), n_samples_per_prompt=1
    )
    output = sft_rollout(args, 0, RolloutDataSource(args))
    tokenizer = load_tokenizer(tiny_model_dir)
    assert len(output.samples) == 4
    for sample in flatten(output.samples):
        assert tokenizer.decode(sample.tokens) == f"{sample.prompt} {sample.label} <|im_end|>"
        assert sample.loss_mask == [1, 1] and sample.response_length == 2 and sample.reward is None


@pytest.mark.unit
def test_sft_from_messages_and_errors(tmp_path, tiny_model_dir):
    def run(rows, **overrides):
        args = make_args(
            hf_checkpoint=tiny_model_dir,
            prompt_data=write_jsonl(tmp_path / "m.jsonl", rows),
            label_key=None,
            rollout_batch_size=1,
            n_samples_per_prompt=1,
            **overrides,
        )
        return sft_rollout(args, 0, RolloutDataSource(args)).samples[0][0]

    chat = [
        {"role": "user", "content": "what is 1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2 + 2"},
        {"role": "assistant", "content": "4"},
    ]
    sample = run([{"input": chat}])
    tokenizer = load_tokenizer(tiny_model_dir)
    kept = [t for t, keep in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if keep]
    assert tokenizer.decode(kept) == "2 <|im_end|> 4 <|im_end|>"
    assert sample.loss_mask[0] == 1 and len(sample.loss_mask) == sample.response_length
    cut = run([{"input": chat}], rollout_max_context_len=len(sample.tokens) - 1)
    assert len(cut.tokens) == len(sample.tokens) - 1 and len(cut.loss_mask) == cut.response_length
    with pytest.raises(RolloutError, match="sample 0 of group 0: a conversation without an assistant message"):
        run([{"input": chat[:1]}])
    with pytest.raises(RolloutError, match="no answer: pass --label-key"):
        run([{"input": "what"}])
