"""From words and YAML to values; messages; precedence."""

import pytest
import yaml

from slime.arguments import parser
from slime.arguments.entry import config_to_yaml, load_args
from slime.arguments.families import FLAGS
from slime.arguments.problems import ConfigError
from slime.utils.arguments import parse_args

pytestmark = pytest.mark.unit


def test_every_flag_is_an_attribute_after_validation(setup):
    args = vars(setup.load())
    assert {flag.dest for flag in FLAGS} - set(args) == {"offload"}
    assert args["use_critic"] is False and args["eval_datasets"] == []


@pytest.mark.parametrize(
    "typo, meant",
    [
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--lr-decay", "--lr-decay-style"),
        ("--n_samples_per_prompt", "--n-samples-per-prompt"),
        ("--no-offload-trian", "--no-offload-train"),
        ("--sglang-page-sizes", "--sglang-page-size"),
    ],
)
def test_unknown_flag_gets_a_suggestion(typo, meant, one_error):
    assert one_error(typo, "4") == f"  {typo}: unknown flag\n    fix: did you mean {meant}?"


def test_flags_are_never_abbreviated(one_error):
    assert "did you mean --eval-interval?" in one_error("--eval-inter", "3")


@pytest.mark.parametrize(
    "flag", ["--decoder-first-pipeline-num-layers", "--no-bias-swiglu-fusion", "--moe-layer-freq"]
)
def test_flags_of_megatron_where_it_is_not_installed(flag, monkeypatch):
    monkeypatch.setattr(parser, "MEGATRON_FLAGS", ())
    assert 'is not installed, so its flags are not known here\n    fix: pip install "slime[megatron]"' in str(
        parser.unknown_flag(flag)
    )


def test_stray_words_are_named(setup):
    assert "train.jsonl: is not a flag" in setup.errors("--colocate", "train.jsonl")


@pytest.mark.parametrize(
    "words, rule",
    [
        (("--advantage-estimator", "gpro"), "did you mean grpo?"),
        (("--loss-type", "sft"), "must be one of policy_loss, sft_loss, custom_loss"),
        (("--rm-type", "boxed_mth"), "did you mean boxed_math?"),
        (("--seed", "1.5"), "must be a whole number"),
        (("--lr", "fast"), "must be a number"),
        (("--lr", "nan"), "must be a finite number"),
        (("--train-env-vars", "{'A': 1}"), "must be a JSON object"),
        (("--train-env-vars", "[1]"), "must be a JSON object"),
        (("--custom-rm-path", "my_reward.py"), "there is no module my_reward"),
        (("--custom-rm-path", "reward"), "must be an import path"),
        (("--custom-rm-path", "a/b.py:fn"), "must be an import path"),
    ],
)
def test_wrong_value(words, rule, one_error):
    message = one_error(*words)
    assert f"{words[0]} {words[1]}:" in message and rule in message


def test_missing_value(setup):
    assert "--lr: expected one argument" in setup.errors("--lr")
    assert "fix: a value that begins with - is written --lr=VALUE" in setup.errors("--lr", "-1e-3")
    assert "--lr -0.001: must not be negative" in setup.errors("--lr=-1e-3")


def test_value_of_a_switch(one_error):
    assert "--ci-test: takes no value\n    fix: write --ci-test alone" in one_error("--ci-test=1")


def test_all_mistakes_are_reported_at_once(setup):
    message = setup.errors("--sede", "1", "--lr", "x", "--release-train", "--loss-type", "sft")
    assert [line.split()[0] for line in message.splitlines() if not line.startswith("    ")] == [
        "--sede:",
        "--lr",
        "--release-train:",
        "--loss-type",
    ]


def test_values_are_typed(setup):
    args = setup.load(
        *("--lr=1e-4", "--rollout-stop", "###", "END", "--rollout-stop-token-ids", "3", "4"),
        *("--train-env-vars", '{"A": "1"}', "--no-offload-train", "--rollout-top-k", "-1"),
    )
    assert args.lr == 1e-4
    assert args.rollout_stop == ["###", "END"] and args.rollout_stop_token_ids == [3, 4]
    assert args.train_env_vars == {"A": "1"}
    assert args.offload_train is False and args.offload_rollout is True
    assert args.rollout_top_k == -1


@pytest.mark.parametrize(
    "given, meant",
    [("reinforce++", "reinforce_plus_plus"), ("reinforce++-baseline", "reinforce_plus_plus_baseline")],
)
def test_algorithm_aliases(given, meant, setup):
    assert setup.load("--advantage-estimator", given, "--normalize-advantages").advantage_estimator == meant


def test_flag_aliases(setup):
    args = setup.load(
        "--output-dir", setup.root / "out", "--use-dynamic-batch-size", "--fsdp-max-tokens-per-gpu", "256"
    )
    assert args.save == str(setup.root / "out") and args.max_tokens_per_gpu == 256


def test_function_paths_take_both_spellings(setup, monkeypatch):
    setup.write("my_rewards.py", "async def score(args, sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(setup.root))
    for spelling in ("my_rewards.score", "my_rewards:score"):
        assert setup.load("--custom-rm-path", spelling).custom_rm_path == "my_rewards.score"


def test_repeatable_flag_collects(setup, monkeypatch):
    setup.write("my_hooks.py", "def a(args, sample): ...\ndef b(args, sample): ...\n")
    monkeypatch.syspath_prepend(str(setup.root))
    args = setup.load("--rollout-sample-hook-path", "my_hooks.a", "--rollout-sample-hook-path", "my_hooks:b")
    assert args.rollout_sample_hook_path == ["my_hooks.a", "my_hooks.b"]
    assert setup.load().rollout_sample_hook_path == []


class TestYaml:
    def test_overrides_defaults_and_the_command_line_beats_it(self, setup):
        yaml_flags = setup.yaml("lr: 1e-3\nseed: 7\nuse-kl-loss: true\n")
        args = setup.load(*yaml_flags, "--seed", "9", "--ref-load", setup.model)
        assert (args.lr, args.seed, args.use_kl_loss) == (1e-3, 9, True)

    def test_explicit_default_on_the_command_line_beats_it(self, setup):
        assert setup.load(*setup.yaml("seed: 7"), "--seed", "1234").seed == 1234

    @pytest.mark.parametrize("word, value", [("true", True), ("'false'", False), ("no", False), ("'yes'", True)])
    def test_bools(self, word, value, setup):
        assert setup.load(*setup.yaml(f"rollout_shuffle: {word}")).rollout_shuffle is value

    def test_bools_that_are_none(self, setup, one_error):
        assert "must be true or false" in one_error(*setup.yaml("rollout_shuffle: maybe"))

    def test_negative_flags_in_both_forms(self, setup):
        assert setup.load(*setup.yaml("disable_grpo_std_normalization: true")).grpo_std_normalization is False
        assert setup.load(*setup.yaml("grpo_std_normalization: false")).grpo_std_normalization is False
        assert setup.load(*setup.yaml("no_offload_train: true")).offload_train is False

    def test_switching_off_a_pending_feature_is_fine(self, setup):
        assert setup.load(*setup.yaml("use_tis: false\nmoe_grouped_gemm_: null\n".splitlines()[0])).use_tis is False

    def test_types(self, setup):
        args = setup.load(*setup.yaml("wandb_group: 12\nrollout_stop: END\ntrain_env_vars: {A: b}\nseed: 5.0"))
        assert args.wandb_group == "12" and args.rollout_stop == ["END"]
        assert args.train_env_vars == {"A": "b"} and args.seed == 5

    def test_new_keys_become_attributes(self, setup):
        args = setup.load(*setup.yaml("search_url: http://localhost:1\nmax_turns: 4\ntools: {a: [1, 2]}"))
        assert (args.search_url, args.max_turns, args.tools) == ("http://localhost:1", 4, {"a": [1, 2]})

    @pytest.mark.parametrize(
        "key, meant", [("rollout_batchsize", "--rollout-batch-size"), ("use_klloss", "--use-kl-loss")]
    )
    def test_near_misses_are_mistakes(self, key, meant, setup, one_error):
        assert f"did you mean {meant}?" in one_error(*setup.yaml(f"{key}: 1"))

    @pytest.mark.parametrize(
        "content, rule",
        [
            ("- a\n- b\n", "must hold a mapping"),
            ("a: [1\n", "is not valid YAML"),
            ("lr: 1e-3\nseed: 1\nlr: 2e-3\n", "lr is given twice in"),
            ("use_critic: true\n", "is computed from other flags"),
            ("lr: null\n", "must have a value"),
            ("lr: [1]\n", "must be a number"),
            ("seed: true\n", "must be a whole number"),
            ("a b: 1\n", "is no name that an attribute can have"),
        ],
    )
    def test_mistakes(self, content, rule, setup, one_error):
        assert rule in one_error(*setup.yaml(content))

    def test_missing_and_empty_files(self, setup, one_error):
        assert "cannot be read" in one_error("--custom-config-path", "/nowhere.yaml")
        assert setup.load(*setup.yaml("")).seed == 1234


class TestPrintConfig:
    def test_prints_yaml_and_exits(self, setup, capsys):
        with pytest.raises(SystemExit) as exit_:
            parse_args(setup.argv("--print-config", "--wandb-key", "secret-key"))
        assert exit_.value.code == 0
        out = capsys.readouterr().out
        assert yaml.safe_load(out)["global_batch_size"] == 32
        assert "secret-key" not in out and "release_train" not in out

    def test_its_output_is_a_custom_config(self, setup):
        data = setup.write_rows("eval.jsonl", [{"input": "1", "label": "1"}])
        args = setup.load("--eval-prompt-data", "sums", data, "--eval-interval", "1", *setup.yaml("max_turns: 3"))
        again = load_args(["--custom-config-path", setup.write("again.yaml", config_to_yaml(args))])
        args.custom_config_path = again.custom_config_path
        assert vars(again) == vars(args)


def test_errors_exit_with_code_2(setup, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_args(setup.argv("--sede", "1"))
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("1 configuration error:\n  --sede: unknown flag\n    fix: did you mean")


def test_help_is_grouped(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_args(["--help"])
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    assert out.index("Cluster and devices:") < out.index("Algorithm:") < out.index("Megatron:")


def test_backend_by_environment_is_refused(setup, monkeypatch):
    monkeypatch.setenv("SLIME_BACKEND", "fsdp")
    with pytest.raises(ConfigError, match="use --train-backend"):
        setup.load()
