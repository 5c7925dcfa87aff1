"""Rules of losses, advantages and off-policy corrections."""

import pytest

pytestmark = pytest.mark.unit
MIS = ("--use-tis", "--custom-tis-function-path", "slime.training.mis:mis_function")


def test_what_is_accepted(setup):
    args = setup.load("--use-tis", "--tis-clip", "3", "--tis-clip-low", "0.5", "--use-opsm", "--opsm-delta", "0.01")
    assert args.use_tis and (args.tis_clip, args.tis_clip_low, args.opsm_delta) == (3.0, 0.5, 0.01)
    args = setup.load(*MIS, "--mis-upper-bound", "4", "--mis-level", "geometric", "--mis-mode", "mask")
    assert args.mis_lower_bound == 0.5 and args.custom_tis_function_path == "slime.training.mis.mis_function"
    assert setup.load("--use-rollout-top-p-replay", "--rollout-top-p", "0.9").use_rollout_top_p_replay
    assert setup.load("--get-mismatch-metrics", "--use-rollout-logprobs").get_mismatch_metrics


@pytest.mark.parametrize("path", ["slime.backends.megatron_utils.loss." + n for n in ("icepop", "vanilla_tis")])
def test_built_in_functions_are_found_without_torch(path, setup):
    assert setup.load("--use-tis", "--custom-tis-function-path", f"{path}_function").use_tis


def test_mis_settings_can_stand_in_yaml(setup):
    args = setup.load(*MIS, *setup.yaml("mis_level: sequence\nmis_veto_threshold: 1.0e-4\n"))
    assert (args.mis_level, args.mis_veto_threshold) == ("sequence", 1e-4)


@pytest.mark.parametrize(
    "words, expected",
    [
        (("--use-tis", "--use-rollout-logprobs"), "excludes --use-tis"),
        (("--use-tis", "--tis-clip", "0"), "--tis-clip 0.0: must be greater than 0"),
        (("--use-tis", "--tis-clip-low", "3"), "--tis-clip-low 3.0: must not exceed --tis-clip 2.0"),
        (("--tis-clip", "3"), "has no effect without --use-tis"),
        ((*MIS, "--mis-lower-bound", "3"), "--mis-lower-bound 3.0: must not exceed --mis-upper-bound 2.0"),
        ((*MIS, "--mis-mode", "masked"), "did you mean mask?"),
        (("--use-tis", "--mis-level", "sequence"), "has no effect without a correction that reads it"),
        (("--opsm-delta", "1"), "has no effect without --use-opsm"),
        (("--use-tis", "--custom-tis-function-path", "slime.training.mis.mis"), "did you mean"),
        (("--use-rollout-top-p-replay",), "has no effect without --rollout-top-p below 1 or --rollout-top-k"),
        (("--disable-compute-advantages-and-returns",), "leaves --loss-type policy_loss without advantages"),
        (("--advantage-estimator", "on_policy_distillation", "--use-opd"), "counts the teacher twice"),
        (("--advantage-estimator", "cispo", "--eps-clip-c", "3"), "has no effect with --advantage-estimator cispo"),
    ],
)
def test_what_is_refused(words, expected, one_error):
    assert expected in one_error(*words)


def test_remote_teacher(setup, one_error):
    words = ("--use-opd", "--opd-teacher-url", "http://127.0.0.1:30000")
    args = setup.load(*words, "--rollout-sample-hook-path", "tests.testing.forms.sample_hook_plain")
    assert args.opd_type == "sglang"
    assert args.rollout_sample_hook_path == [
        "slime.rollout.teacher.teacher_log_probs",
        "tests.testing.forms.sample_hook_plain",
    ]
    assert "gives log-probs of temperature 1" in one_error(*words, "--rollout-temperature", "0.7")
    assert "has no effect without --use-opd" in one_error(*words[1:])
    assert "must start with http://" in one_error("--use-opd", "--opd-teacher-url", "localhost:3000")


def test_nothing_of_this_works_on_other_losses(setup):
    message = setup.errors("--loss-type", "sft_loss", "--use-tis", "--use-opsm", "--get-mismatch-metrics")
    assert message.count("has no effect with --loss-type sft_loss") == 3
    terms = ("--use-kl-loss", "--entropy-coef", "0.01", "--eps-clip-c", "3", "--ref-load", str(setup.model))
    assert setup.errors("--loss-type", "sft_loss", *terms).count("has no effect with --loss-type sft_loss") == 3
