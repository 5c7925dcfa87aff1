"""What SGLang asks of the other flags, whether it is installed here or not."""

import pytest

from slime.backends.sglang_utils import compat

pytestmark = pytest.mark.unit
SGLANG = ("--rollout-engine", "sglang")
DETERMINISTIC = "--sglang-enable-deterministic-inference"
REPLAY = ("--use-rollout-top-p-replay", "--rollout-top-p", "0.9")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(compat, "installed_version", lambda: "0.5.23")


def test_top_p_replay_needs_a_bound_on_what_is_returned(setup, one_error):
    assert setup.load(*SGLANG, *REPLAY, "--rollout-top-k", "50").use_rollout_top_p_replay
    assert "add a --rollout-top-k" in one_error(*SGLANG, *REPLAY)


def test_top_p_replay_stays_within_the_server_s_bound(setup, one_error):
    if "--sglang-sampling-mask-max-tokens" not in _flags():
        pytest.skip("the flag comes with SGLang 0.5.20 and newer")
    assert "--rollout-top-k 5000" in one_error(*SGLANG, *REPLAY, "--rollout-top-k", "5000")
    raised = ("--sglang-sampling-mask-max-tokens", "8192")
    assert setup.load(*SGLANG, *REPLAY, "--rollout-top-k", "5000", *raised).rollout_top_k == 5000
    drafts = ("--sglang-speculative-algorithm", "NGRAM")
    refusal = setup.errors(*SGLANG, *REPLAY, "--rollout-top-k", "50", *drafts)
    assert "a draft token has no set" in refusal and "no verification of draft tokens on CPU" in refusal


def test_deterministic_inference_of_sglang_needs_a_gpu(setup, one_error):
    assert setup.load(DETERMINISTIC).sglang_enable_deterministic_inference  # the embedded engine always is
    refusal = one_error(*SGLANG, DETERMINISTIC)
    assert "needs a GPU" in refusal and "--rollout-engine embedded" in refusal


@pytest.mark.parametrize("name", ["tp-size", "tp_size", "tensor-parallel-size"])
def test_what_slime_sets_is_named_under_every_name_of_sglang(one_error, name):
    if name.startswith("tensor") and not _flags():
        pytest.skip("the name comes with SGLang")
    refusal = one_error(*SGLANG, f"--sglang-{name}", "2")
    assert "slime sets this itself\n    fix: use --rollout-num-gpus-per-engine" in refusal


def test_stages_of_an_engine_take_no_weights_over_a_process_group(setup, one_error):
    if "--sglang-pp-size" not in _flags():
        pytest.skip("the flag comes with SGLang")
    stages = (*SGLANG, "--rollout-num-gpus-per-engine", "2", "--sglang-pp-size", "2")
    alone = ("--rollout-num-gpus", "2")
    assert "--sglang-pp-size 2: cannot take weights" in one_error(*stages, *alone, colocate=False)
    disk = ("--update-weight-transport", "disk", "--update-weight-disk-dir", str(setup.root / "disk"))
    for flags, colocate in ((alone + disk, False), ((), True)):
        assert setup.load(*stages, *flags, colocate=colocate).sglang_pp_size == 2


def _flags() -> set[str]:
    from slime.arguments.parser import SERVER_FLAGS

    return {flag.name for flag in SERVER_FLAGS}
