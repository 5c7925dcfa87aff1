"""AdamW in chunks, with moments of fewer bits or in host memory, against torch's own and against the formula."""

import copy

import pytest
import torch

from slime.arguments.validation.megatron import MAX_BETA_BF16
from slime.backends.megatron_utils.adam import ChunkedAdamW, HostAdamW

BF16 = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
SHAPES = [(7, 3), (40,), (5,), (2, 2), (11, 9)]
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.98), 1e-8, 0.1


def stock(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in SHAPES]
    groups = [{"params": parameters[:3], "weight_decay": DECAY}, {"params": parameters[3:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def run(optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for index, parameter in enumerate(parameters_of(optimizer)):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = None if (step, index) == (1, 2) else gradient
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters_of(optimizer)]


@pytest.mark.parametrize("chunk", [1, 30, 2**27])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_change_no_bit(monkeypatch, chunk, dtype):
    monkeypatch.setattr(ChunkedAdamW, "chunk", chunk)
    expected = run(stock(dtype), 5)
    for got, wanted in zip(run(ChunkedAdamW(stock(dtype)), 5), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("chunk", [1, 30, 2**24])
def test_on_the_host(monkeypatch, chunk):
    monkeypatch.setattr(HostAdamW, "chunk", chunk)
    for got, wanted in zip(run(HostAdamW(stock()), 5), run(stock(), 5), strict=True):
        assert (got - wanted).abs().max() < 1e-6


def formula(steps):
    """Loshchilov & Hutter (arXiv 1711.05101), Algorithm 2, in float64; moments rounded to bf16 after each step."""
    optimizer = stock()
    values = [p.detach().double() for p in parameters_of(optimizer)]
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in values]
    counts = [0] * len(values)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index, value in enumerate(values):
            gradient = torch.randn(value.shape, generator=generator).double()
            if (step, index) == (1, 2):
                continue
            counts[index] += 1
            first, second = moments[index]
            first = BETAS[0] * first + (1 - BETAS[0]) * gradient
            second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
            corrected = [m / (1 - beta ** counts[index]) for m, beta in zip((first, second), BETAS, strict=True)]
            value *= 1 - LR * (DECAY if index < 3 else 0.0)
            value -= LR * corrected[0] / (corrected[1].sqrt() + EPS)
            moments[index] = [first.bfloat16().double(), second.bfloat16().double()]
    return values


def test_moments_of_fewer_bits():
    optimizer = ChunkedAdamW(stock(), BF16)
    got = run(optimizer, 6)
    assert all(state[name].dtype == torch.bfloat16 for state in optimizer.state.values() for name in BF16)
    exact = run(stock(), 6)
    for ours, wanted, in_fp32 in zip(got, formula(6), exact, strict=True):
        # A moment next to the middle of two bf16 numbers may be rounded to either.
        assert (ours - wanted).abs().max() < 6 * LR * 2**-7
        assert ((ours - wanted).abs() < 1e-6).double().mean() > 0.9
        assert not torch.equal(ours, in_fp32)


@pytest.mark.parametrize(("beta", "reached"), [(MAX_BETA_BF16, True), (0.999, False)])
def test_the_second_moment_must_follow_the_gradients(beta, reached):
    """Of a gradient that is always 1 the second moment is 1 in the end, give or take the 20 % of the rule."""
    parameter = torch.zeros(1).requires_grad_()
    optimizer = ChunkedAdamW(torch.optim.AdamW([parameter], betas=(0.9, beta)), BF16)
    for _ in range(4000):
        parameter.grad = torch.ones(1)
        optimizer.step()
    moment = optimizer.state[parameter]["exp_avg_sq"].item()
    assert (abs(moment - 1) <= 0.2) is reached


@pytest.mark.parametrize("kind", [ChunkedAdamW, lambda optimizer: ChunkedAdamW(optimizer, BF16), HostAdamW])
def test_a_state_that_was_saved_goes_on(kind):
    straight = kind(stock())
    run(straight, 3)
    saved = copy.deepcopy(straight.state_dict())
    values = [p.detach().clone() for p in parameters_of(straight)]
    resumed = kind(stock())
    for parameter, value in zip(parameters_of(resumed), values, strict=True):
        parameter.data.copy_(value)
    resumed.load_state_dict(saved)
    for parameter, key in zip(parameters_of(resumed), saved["state"], strict=True):  # not a second time in memory
        for name in BF16:
            assert resumed.state[parameter][name] is saved["state"][key][name]
    kept = {name: x.dtype for name, x in straight.state[parameters_of(straight)[0]].items()}
    assert {name: x.dtype for name, x in resumed.state[parameters_of(resumed)[0]].items()} == kept
    for got, wanted in zip(run(resumed, 3, seed=2), run(straight, 3, seed=2), strict=True):
        assert torch.equal(got, wanted)


def test_fp32_moments_are_taken_over_as_bf16():
    saved = ChunkedAdamW(stock())
    run(saved, 3)
    narrow = ChunkedAdamW(stock(), BF16)
    narrow.load_state_dict(saved.state_dict())
    for parameter, other in zip(parameters_of(narrow), parameters_of(saved), strict=True):
        for name in BF16:
            assert torch.equal(narrow.state[parameter][name], saved.state[other][name].bfloat16())
