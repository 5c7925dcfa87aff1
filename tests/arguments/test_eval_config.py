"""Evaluation data sets from flags and from YAML."""

import logging

import pytest

pytestmark = pytest.mark.unit


@pytest.fixture
def rows(setup) -> str:
    return setup.write_rows("eval.jsonl", [{"input": "1", "label": "1", "question": "2"}])


def test_pairs(setup, rows):
    args = setup.load(
        "--eval-interval", "2", "--eval-prompt-data", "a", rows, "b", f"{rows}@[:1]", "--rollout-top-p", "0.9"
    )
    first, second = args.eval_datasets
    assert (first.name, first.path, second.name, second.path) == ("a", rows, "b", f"{rows}@[:1]")
    assert (first.top_p, first.temperature, first.max_response_len, first.input_key) == (0.9, 1.0, 64, "input")
    assert args.eval_top_p == 0.9 and args.eval_function_path == args.rollout_function_path


def test_single_value_has_the_legacy_name(setup, rows):
    assert setup.load("--eval-interval", "2", "--eval-prompt-data", rows).eval_datasets[0].name == "aime"


def test_odd_words(one_error, rows):
    assert "must be pairs" in one_error("--eval-prompt-data", "a", rows, "b")


def test_interval_needs_data(one_error):
    assert "--eval-interval 3: needs evaluation data" in one_error("--eval-interval", "3")


def test_data_without_interval_is_warned_about(setup, rows, caplog):
    with caplog.at_level(logging.WARNING):
        setup.load("--eval-prompt-data", "a", rows)
    assert "nothing will be evaluated" in caplog.text


def test_nothing_to_do(setup, one_error, rows):
    assert "leaves nothing to do" in one_error("--num-rollout", "0")
    assert setup.load("--num-rollout", "0", "--eval-interval", "1", "--eval-prompt-data", "a", rows)


def test_missing_file_and_key(one_error, rows):
    words = ("--eval-interval", "1", "--eval-prompt-data", "a")
    assert "--eval-prompt-data /nowhere.jsonl: is not a file" in one_error(*words, "/nowhere.jsonl")
    assert "--eval-label-key (evaluation a) answer: is no key" in one_error(*words, rows, "--eval-label-key", "answer")


def test_reward_key_defaults_to_the_rollouts(setup, rows):
    args = setup.load("--reward-key", "score", "--eval-interval", "1", "--eval-prompt-data", "a", rows)
    assert args.eval_reward_key == "score" and args.eval_datasets[0].reward_key == "score"


class TestYaml:
    def load(self, setup, content: str, *words: str):
        return setup.load(
            "--eval-interval", "1", "--eval-config", setup.write("eval.yaml", content), *words
        ).eval_datasets

    def test_precedence(self, setup, rows):
        first, second = self.load(
            setup,
            f"""
            eval:
              defaults: {{temperature: 0.6, n_samples_per_eval_prompt: 2, top_p: 0.5}}
              datasets:
                - {{name: a, path: {rows}, temperature: 0, prompt_key: question, rm_type: math}}
                - {{name: b, path: {rows}, stop: END, metadata_overrides: {{x: 1}}}}
            """,
            *("--eval-top-p", "0.9", "--eval-top-k", "7", "--rollout-max-response-len", "32"),
        )
        assert (first.temperature, first.n_samples_per_eval_prompt, first.top_p, first.top_k) == (0.0, 2, 0.5, 7)
        assert (first.input_key, first.rm_type, first.max_response_len) == ("question", "math", 32)
        assert (second.temperature, second.stop, second.metadata_overrides) == (0.6, ["END"], {"x": 1})

    def test_the_longest_context_holds_for_every_request(self, setup, rows):
        args = setup.load(
            *("--eval-interval", "1", "--eval-max-context-len", "100", "--eval-config"),
            setup.write("eval.yaml", f"datasets: [{{name: a, path: {rows}, max_context_len: 200}}]"),
        )
        assert args.eval_max_context_len == args.eval_datasets[0].max_context_len == 200

    def test_null_takes_an_inherited_value_away(self, setup, rows):
        labels = setup.write_rows("plain.jsonl", [{"input": "1"}])
        first, second = self.load(
            setup,
            f"""
            defaults: {{label_key: label, stop: END}}
            datasets: [{{name: a, path: {rows}, temperature: null}}, {{name: b, path: {labels}, label_key: null}}]
            """,
        )
        assert (first.label_key, first.stop, first.temperature) == ("label", ["END"], 1.0)
        assert (second.label_key, second.stop) == (None, ["END"])

    def test_mapping_without_the_top_key(self, setup, rows):
        assert [d.name for d in self.load(setup, f"datasets: {{a: {{path: {rows}}}, b: {{path: {rows}}}}}")] == [
            "a",
            "b",
        ]

    @pytest.mark.parametrize(
        "content, message",
        [
            ("datasets: [{name: a, path: P, temprature: 1}]", "did you mean temperature?"),
            ("datasets: [{name: a, path: P}]\ndefault: {}", "did you mean defaults?"),
            ("datasets: [{name: a}]", "data set 1 (a): has no path"),
            ("datasets: [{name: a, path: P}, {name: a, path: P}]", "the name a is given twice"),
            ("datasets: [{name: a, path: P, top_k: x}]", "top_k x: must be a whole number"),
            ("datasets: [{name: a, path: P, temperature: -1}]", "must not be negative"),
            ("datasets: [{name: a, path: P, multimodal_keys: {smell: x}}]", "must map image, video, audio to columns"),
            ("datasets: [{name: a, path: P, multimodal_keys: {image: x}}]", "the embedded engine takes text only"),
            ("datasets: [{name: a, path: P, rm_type: maths}]", "rm_type maths: must be one of math, dapo"),
            ("datasets: [{name: a, path: P, rm_type: remote_rm}]", "rm_type (evaluation a) remote_rm: needs --rm-url"),
            ("datasets: [{name: a, path: P, rm_type: boxed_dapo}]", "add reward_key: score"),
            ("datasets: [{name: a, path: P, min_eval_samples: 0}]", "min_eval_samples 0: must be greater than 0"),
            ("datasets:\n  a: {path: P}\n  a: {path: P}", "a is given twice"),
            ("datasets: [{name: a, path: P, top_p: 1, top_p: 0.5}]", "top_p is given twice"),
            ("datasets: [{name: a, path: P, top_p: 2}]", "top_p 2: must be above 0 and at most 1"),
            ("datasets: [{name: a, path: P, max_response_len: 600}]", "(evaluation a) 600: leaves no room"),
            ("datasets: [{name: ' ', path: P}]", "must not be empty: metrics are logged as eval/{name}"),
            ("datasets: [a]", "must be a mapping"),
            ("datasets: 3", "must be a list"),
            ("other: 3", "must hold `datasets`"),
            ("a: [", "is not valid YAML"),
            ("datasets: [{name: a, path: P, custom_rm_path: nowhere_at_all.fn}]", "there is no module nowhere_at_all"),
        ],
    )
    def test_mistakes(self, content, message, setup, rows):
        file = setup.write("eval.yaml", content.replace("P", rows))
        assert message in setup.errors("--eval-interval", "1", "--eval-config", file)

    def test_missing_file(self, setup):
        assert "cannot be read" in setup.errors("--eval-interval", "1", "--eval-config", "/nowhere.yaml")
