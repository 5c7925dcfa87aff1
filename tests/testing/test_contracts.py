"""The contracts accept every historical form of a hook, and name the flag of one that breaks its contract."""

import subprocess
import sys

import pytest

from slime.testing.contracts import BUILT_IN, CONTRACTS
from slime.testing.kit import kit
from slime.testing.plugin import flag_of, hook_of, parse

pytestmark = pytest.mark.integration
FORMS = "tests.testing.forms."

GOOD = {
    "rollout-function": "rollout_now rollout_legacy_list rollout_without_evaluation",
    "eval-function": "eval_dict eval_output",
    "custom-generate-function": "generate_three generate_with_evaluation generate_list",
    "rollout-sample-hook": "sample_hook_plain sample_hook_keywords",
    "custom-rm": "rm_single rm_without_kwargs rm_sync rm_group",
    "custom-reward-post-process": "post_process",
    "dynamic-sampling-filter": "filter_bool filter_output",
    "buffer-filter": "buffer_newest",
    "rollout-sample-filter": "sample_filter",
    "rollout-all-samples-process": "all_samples",
    "data-source": "Source",
    "custom-convert-samples-to-train-data": "convert",
    "custom-rollout-log-function": "log_rollout",
    "custom-eval-rollout-log-function": "log_eval",
    "rollout-data-postprocess": "postprocess_one postprocess_two postprocess_three",
    "custom-advantage-function": "advantage",
    "custom-loss-function": "loss",
    "custom-tis-function": "",
    "custom-pg-loss-reducer-function": "reducer",
    "custom-megatron-init": "megatron_init",
    "custom-model-provider": "provider",
    "custom-megatron-before-log-prob-hook": "before_log_prob",
    "custom-megatron-before-train-step-hook": "before_train_step",
    "slime-router-middleware": "Middleware AsgiMiddleware",
    "custom-update-weight-post-write": "post_write",
}
BAD = [
    ("rollout-function", "rollout_too_few", "as many groups as --rollout-batch-size"),
    ("rollout-function", "rollout_raises", "--rollout-function-path .*rollout_raises failed: KeyError"),
    ("eval-function", "eval_missing_rewards", "a reward per sample"),
    ("custom-generate-function", "generate_pending", "the status is set"),
    ("custom-generate-function", "generate_nothing", "--custom-generate-function-path .*returned None"),
    ("custom-generate-function", "generate_changes_params", "sampling parameters are left"),
    ("rollout-sample-hook", "sample_hook_raises", "--rollout-sample-hook-path .*failed for sample 0.*hook broke"),
    ("rollout-sample-hook", "sample_hook_text", "--rollout-sample-hook-path .*returned 'x', not a Sample or None"),
    ("custom-rm", "rm_none", r"rm_none \(--custom-rm-path\) returned None, not a number"),
    ("custom-rm", "rm_group_short", r"rm_group_short \(--custom-rm-path\) returned .*not a list of 2 rewards"),
    ("custom-reward-post-process", "post_process_short", "--custom-reward-post-process-path .* 1 raw and 1 processed"),
    ("dynamic-sampling-filter", "filter_none", "--dynamic-sampling-filter-path .*returned a NoneType"),
    ("dynamic-sampling-filter", "filter_changes", "the samples are left alone"),
    ("buffer-filter", "buffer_keeps", "taken or left, not both"),
    ("buffer-filter", "buffer_all", "--buffer-filter-path .*returned 3 groups, asked for at most 2"),
    ("rollout-sample-filter", "sample_filter_text", "remove_sample is a bool"),
    ("rollout-all-samples-process", "all_samples_old", "--rollout-all-samples-process-path .*failed: TypeError"),
    ("data-source", "ForgetfulSource", "the state was restored"),
    ("custom-convert-samples-to-train-data", "convert_without_tokens", "--custom-convert-samples.* has no"),
    ("custom-rollout-log-function", "log_rollout_number", "returns True"),
    ("custom-rollout-log-function", "log_rollout_raises", "--custom-rollout-log-function-path .*KeyError: 'tracker'"),
    ("custom-rollout-log-function", "log_rollout_changes", "the samples are left alone"),
    ("custom-eval-rollout-log-function", "log_rollout", "--custom-eval-rollout-log-function-path .*TypeError"),
    ("rollout-data-postprocess", "postprocess_short", "advantages"),
    ("custom-advantage-function", "advantage_without_returns", "--custom-advantage-function-path .*'returns'"),
    ("custom-loss-function", "loss_vector", "finite scalar"),
    ("custom-tis-function", "tis_short", "tis_short: pg_loss has the shape"),
    ("custom-pg-loss-reducer-function", "reducer_raises", "--custom-pg-loss-reducer-function-path .*no reducer"),
    ("custom-megatron-before-log-prob-hook", "before_train_step", "-before-log-prob-hook-path .*failed: TypeError"),
    ("custom-megatron-init", "before_log_prob", "--custom-megatron-init-path .*failed: TypeError"),
    ("custom-megatron-before-train-step-hook", "megatron_init", "-before-train-step-hook-path .*failed: TypeError"),
    ("custom-model-provider", "stock_provider", "--custom-model-provider-path returned a Linear, not a PolicyGPT"),
    ("slime-router-middleware", "DroppingMiddleware", "status 200, not 204"),
    ("slime-router-middleware", "RaisingMiddleware", "--slime-router-middleware-paths .*KeyError: 'nothing'"),
    ("custom-update-weight-post-write", "post_write_raises", "--custom-update-weight-post-write-path .*no space"),
]


@pytest.fixture
def parts(tmp_path_factory, tmp_path):
    with kit(tmp_path) as parts:
        tokenizer = tmp_path_factory.getbasetemp() / "contract-tokenizer"
        if not tokenizer.exists():
            with kit(tokenizer.parent) as builder:
                (tokenizer.parent / "tokenizer").rename(tokenizer) if builder.tokenizer_dir else None
        parts.tokenizer_dir = str(tokenizer)
        yield parts


def test_every_hook_has_a_contract():
    from slime.arguments.families import FLAGS
    from slime.arguments.flag import function_path

    hooks = {hook_of(flag.name) for flag in FLAGS if flag.type is function_path and not flag.pending}
    assert hooks <= CONTRACTS.keys()
    assert CONTRACTS.keys() == GOOD.keys() == {hook for hook, _, _ in BAD}
    assert {flag_of(hook) for hook in CONTRACTS} <= {flag.name for flag in FLAGS}


@pytest.mark.parametrize(("hook", "form"), [(hook, form) for hook, forms in GOOD.items() for form in forms.split()])
def test_historical_forms(parts, hook, form):
    CONTRACTS[hook](parts, FORMS + form)


def test_a_run_accepts_the_parameters_of_every_form():
    from slime.arguments.problems import Problems
    from slime.arguments.validation.functions import check_path
    from slime.arguments.validation.signatures import CALLS

    problems = Problems()
    for hook, path in [(h, FORMS + form) for h, forms in GOOD.items() for form in forms.split()] + BUILT_IN:
        check_path(flag_of(hook), path, problems)
    assert problems == [] and CALLS.keys() == CONTRACTS.keys()


@pytest.mark.parametrize(("hook", "form", "message"), BAD)
def test_broken_contracts_are_told(parts, hook, form, message):
    with pytest.raises(Exception, match=message):
        CONTRACTS[hook](parts, FORMS + form)


def test_the_command(tmp_path):
    from slime.observability.dumps import save_rollout_dump
    from slime.utils.types import Sample

    samples = [
        Sample(
            group_index=0,
            index=i,
            tokens=[1, 2, 3],
            response_length=2,
            reward=float(i),
            status=Sample.Status.COMPLETED,
        )
        for i in range(2)
    ]
    dump = save_rollout_dump(str(tmp_path / "{rollout_id}.pt"), 0, samples)
    command = [sys.executable, "-m", "slime.cli", "test-hooks", "--custom-rm-path", FORMS + "rm_single"]
    command += ["--dynamic-sampling-filter-path", FORMS + "filter_none", "--samples", str(dump)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "1 failed, 1 passed" in result.stdout
    assert "--dynamic-sampling-filter-path" in result.stdout


def test_a_hook_that_does_not_exist():
    with pytest.raises(pytest.UsageError, match=r"--contract custom-x=y: write HOOK=PATH with one of .*custom-rm"):
        parse("custom-x=y")
