"""Learning-rate schedules against values worked out by hand, weight decay groups, clipping, skipped steps."""

import math

import pytest
import torch

from slime.backends.common.lr_schedule import LRSchedule, schedule_from_args
from slime.backends.fsdp_utils.optimizer import Optimizer
from tests.backends.trainers import trainer_args

pytestmark = pytest.mark.unit


def rates(steps: int, **options) -> list[float]:
    schedule = LRSchedule(max_lr=1.0, **options)
    return [schedule.lr(step) for step in range(steps)]


def test_constant_with_warmup():
    assert rates(6, init_lr=0.2, warmup_iters=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates(3) == [1.0, 1.0, 1.0]


def test_linear_counts_warmup_in_the_decay():
    got = rates(9, min_lr=0.1, warmup_iters=2, decay_iters=6, style="linear")
    assert got == pytest.approx([0.0, 0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1])


def test_cosine():
    got = rates(7, min_lr=0.2, warmup_iters=1, decay_iters=5, style="cosine")
    half = math.sqrt(0.5)
    assert got == pytest.approx([0.0, 1.0, 0.6 + 0.4 * half, 0.6, 0.6 - 0.4 * half, 0.2, 0.2])


@pytest.mark.parametrize(
    ("style", "last"),
    [
        ("linear", [0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
        ("exponential", [2 * 0.5**0.25 - 1, math.sqrt(2) - 1, 2 * 0.5**0.75 - 1, 0.0]),
        ("minus_sqrt", [0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]),
    ],
)
def test_wsd_is_constant_until_its_final_decay(style, last):
    got = rates(12, warmup_iters=2, decay_iters=10, style="WSD", wsd_decay_iters=4, wsd_decay_style=style)
    assert got == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, *last, 0.0])


def test_schedule_from_flags(tiny_model_dir):
    # 4 prompts x 2 samples in steps of 4, 4 rollouts: 8 steps.
    flags = "--lr-decay-style linear --lr-warmup-fraction 0.25 --min-lr 1e-4 --num-steps-per-rollout 2".split()
    schedule = schedule_from_args(trainer_args(tiny_model_dir, *flags), total_steps=8)
    assert (schedule.warmup_iters, schedule.decay_iters) == (2, 8)
    assert [schedule.lr(i) for i in (0, 1, 2, 5, 8)] == pytest.approx([0, 5e-4, 1e-3, 5.5e-4, 1e-4])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"style": "linear", "warmup_iters": 5, "decay_iters": 5}, "--lr-warmup-iters"),
        ({"style": "WSD", "decay_iters": 5}, "--lr-wsd-decay-iters"),
        ({"style": "WSD", "decay_iters": 5, "wsd_decay_iters": 6}, "--lr-wsd-decay-iters"),
    ],
)
def test_contradictions_name_the_flag(options, named):
    with pytest.raises(ValueError, match=named):
        LRSchedule(1.0, **options)


def test_a_decay_without_an_end_names_the_flag(tiny_model_dir):
    args = trainer_args(tiny_model_dir, lr_decay_style="cosine")
    with pytest.raises(ValueError, match="--lr-decay-iters"):
        schedule_from_args(args, None)


def make_optimizer(parameters, **changes) -> Optimizer:
    options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "clip_grad": 1.0, "group": None}
    return Optimizer(parameters, LRSchedule(0.1, warmup_iters=4), **{**options, **changes})


def filled(shape, gradient: float, value: float = 1.0) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.full(shape, value))
    parameter.grad = torch.full(shape, gradient)
    return parameter


def test_norm_is_reported_before_clipping_and_gradients_are_clipped():
    parameters = {"w": filled((4, 4), 3.0), "b": filled((9,), 4.0)}
    seen = []
    optimizer = make_optimizer(parameters)
    optimizer.adam.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in parameters.values()))
    out = optimizer.step()
    norm = math.sqrt(16 * 9 + 9 * 16)
    assert out["grad_norm"] == pytest.approx(norm)
    assert [g.flatten()[0].item() for g in seen] == pytest.approx([3 / norm, 4 / norm], rel=1e-5)
    assert all(p.grad is None for p in parameters.values())


def test_no_clipping_below_the_threshold_or_at_zero():
    for clip_grad in (0.0, 100.0):
        parameters = {"w": filled((2, 2), 3.0)}
        seen = []
        optimizer = make_optimizer(parameters, clip_grad=clip_grad)
        optimizer.adam.register_step_pre_hook(lambda *_, p=parameters, s=seen: s.append(p["w"].grad.clone()))
        optimizer.step()
        assert torch.equal(seen[0], torch.full((2, 2), 3.0))


def test_decay_spares_norm_weights_and_biases():
    parameters = {"w": filled((2, 2), 0.0), "norm": filled((2,), 0.0)}
    optimizer = make_optimizer(parameters, weight_decay=0.5)
    optimizer.step()  # the warmup's first rate is 0
    optimizer.adam.zero_grad()
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert parameters["w"].flatten()[0].item() == pytest.approx(1 - 0.5 * 0.1 / 4)
    assert torch.equal(parameters["norm"], torch.ones(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    parameters = {"w": filled((2, 2), 1.0), "b": filled((2,), 1.0)}
    optimizer = make_optimizer(parameters)
    optimizer.step()
    state = {name: {k: v.clone() for k, v in s.items()} for name, s in optimizer.state_by_name().items()}
    values = {name: p.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    parameters["b"].grad[1] = bad
    out = optimizer.step()
    assert out["skipped_steps"] == 1 and optimizer.steps_done == 1
    assert optimizer.lr == pytest.approx(0.1 / 4)
    assert all(torch.equal(p, values[name]) and p.grad is None for name, p in parameters.items())
    for name, now in optimizer.state_by_name().items():
        assert all(torch.equal(now[key], state[name][key]) for key in now)
    parameters["w"].grad = torch.ones(2, 2)
    assert optimizer.step()["skipped_steps"] == 0
