"""The rules across flags on algorithms."""

import logging

import pytest

pytestmark = pytest.mark.unit


class TestAlgorithm:
    def test_clip_defaults(self, setup, one_error):
        assert setup.load("--eps-clip", "0.3").eps_clip_high == 0.3
        assert "must be at least --eps-clip 0.3" in one_error("--eps-clip", "0.3", "--eps-clip-high", "0.2")

    def test_single_samples_are_not_divided_by_their_deviation(self, setup, caplog):
        with caplog.at_level(logging.WARNING):
            args = setup.load("--n-samples-per-prompt", "1")
        assert args.grpo_std_normalization is False
        assert "all advantages are 0" in caplog.text

    @pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
    def test_reinforce_plus_plus_needs_whitening(self, name, one_error):
        assert "requires --normalize-advantages" in one_error("--advantage-estimator", name)

    def test_kl_in_one_place(self, setup, one_error):
        words = ("--ref-load", setup.model, "--kl-coef", "0.1", "--use-kl-loss", "--kl-loss-coef", "0.1")
        assert "excludes --kl-loss-coef 0.1" in one_error(*words)

    @pytest.mark.parametrize("words", [("--kl-loss-coef", "0.1"), ("--use-unbiased-kl",)])
    def test_kl_loss_terms_need_the_loss(self, words, one_error):
        assert "has no effect without --use-kl-loss" in one_error(*words)

    @pytest.mark.parametrize("words", [("--use-kl-loss",), ("--kl-coef", "0.1")])
    def test_kl_needs_a_reference(self, words, setup, one_error):
        assert "--ref-load: is required with" in one_error(*words)
        assert "is not a directory" in one_error(*words, "--ref-load", "/nowhere")
        assert setup.load(*words, "--ref-load", setup.model).ref_load == setup.model

    @pytest.mark.parametrize(
        ("words", "warns"),
        [([], True), (["--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"], False)],
    )
    def test_kl_in_rewards_that_have_none(self, setup, caplog, words, warns):
        with caplog.at_level(logging.WARNING):
            setup.load("--kl-coef", "0.1", "--ref-load", setup.model, *words)
        assert ("--kl-coef 0.1 changes nothing with --advantage-estimator grpo" in caplog.text) is warns

    def test_custom_loss(self, setup, one_error, monkeypatch):
        setup.write("my_loss.py", "def loss(args, batch, logits, reduce): ...\n")
        monkeypatch.syspath_prepend(str(setup.root))
        assert "needs --custom-loss-function-path" in one_error("--loss-type", "custom_loss")
        assert "has no effect with --loss-type policy_loss" in one_error("--custom-loss-function-path", "my_loss.loss")
        assert setup.load("--loss-type", "custom_loss", "--custom-loss-function-path", "my_loss.loss")

    def test_sft_computes_no_advantages(self, setup):
        assert setup.load("--loss-type", "sft_loss").compute_advantages_and_returns is False

    def test_schedule(self, setup, one_error):
        assert "needs --lr-wsd-decay-iters" in one_error("--lr-decay-style", "WSD")
        assert "has no effect without --lr-decay-style WSD" in one_error("--lr-wsd-decay-iters", "3")
        assert "excludes --lr-warmup-iters" in one_error("--lr-warmup-fraction", "0.1", "--lr-warmup-iters", "3")
        assert "must not exceed --lr" in one_error("--min-lr", "1")


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--ref-update-interval", "2"], "--ref-update-interval 2: has no effect without a reference model"),
        (["--keep-old-actor", "--use-rollout-logprobs"], "--keep-old-actor: excludes --use-rollout-logprobs"),
        (["--freeze-params-name-list", "lm_head["], "--freeze-params-name-list lm_head[: is no regular expression"),
        (["--opd-teacher-load", "x"], "--opd-teacher-load x: has no effect without --use-opd"),
        (["--use-opd", "--opd-type", "megatron"], "--opd-type trainer: needs --opd-teacher-load"),
        (["--opd-teacher-ckpt-step", "3"], "--opd-teacher-ckpt-step 3: has no effect without --use-opd"),
        (["--use-opd", "--opd-teacher-load", "/nowhere"], "--opd-teacher-load /nowhere: is not a directory"),
    ],
)
def test_copies(one_error, flags, expected):
    assert expected in one_error(*flags)


def test_a_teacher_has_the_policy_s_vocabulary(setup, one_error):
    student, teacher = setup.write_model("student", vocab_size=100), setup.write_model("teacher", vocab_size=90)
    flags = ("--hf-checkpoint", student, "--use-opd", "--opd-teacher-load")
    assert "vocabulary of 90 is not the 100" in one_error(*flags, teacher)
    assert setup.load(*flags, student).opd_type == "trainer"
    remote = ("--use-opd", "--opd-teacher-url", "http://127.0.0.1:1", "--opd-teacher-ckpt-step", "3")
    assert "--opd-teacher-ckpt-step 3: has no effect without --opd-teacher-load" in one_error(*remote)
    message = one_error(*flags, student, "--opd-teacher-ckpt-step", "3")
    assert f"--opd-teacher-ckpt-step 3: --opd-teacher-load {student} holds no torch_dist checkpoints" in message
