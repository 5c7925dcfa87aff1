import dataclasses

import numpy as np
import pytest
import torch

from slime.engine.sampler import SamplingBatch, kept_tokens, keyed_uniform, pick, sample

pytestmark = pytest.mark.unit


def batch(count: int, **overrides) -> SamplingBatch:
    values = {
        "temperature": np.ones(count, np.float32),
        "greedy": np.zeros(count, bool),
        "top_k": np.full(count, 1 << 30),
        "top_p": np.ones(count, np.float32),
        "min_p": np.zeros(count, np.float32),
        "seed": np.arange(count).astype(np.uint64),
        "position": np.zeros(count, np.int64),
        "banned": [],
    }
    for name, value in overrides.items():
        values[name] = value if name == "banned" else np.full(count, value, values[name].dtype)
    return SamplingBatch(**values)


def test_uniforms_are_uniform_and_depend_on_seed_and_position():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(100))
    u = keyed_uniform(seeds.ravel(), positions.ravel())
    assert u.min() >= 0 and u.max() < 1 and len(np.unique(u)) == len(u)
    counts = np.histogram(u, 20)[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-squared, 19 degrees of freedom, p = 1e-4
    by_seed = u.reshape(100, 200)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(by_seed[:, :-1].ravel(), by_seed[:, 1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize("width", [7, 1000, 4224, 5000])
def test_pick_is_the_inverse_cdf(width):
    torch.manual_seed(0)
    weights = torch.rand(64, width).double()
    weights[:, ::3] = 0
    u = torch.rand(64, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 2**-53
    expected = (weights.cumsum(-1) <= (u * weights.sum(-1))[:, None]).sum(-1)
    got = pick(weights, u)
    assert (weights.gather(1, got[:, None]) > 0).all()
    assert (got == expected).float().mean() > 0.98  # the last bit of a sum may move a boundary


def test_sampled_frequencies():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    count = 20000
    tokens, logprobs, _ = sample(logits.expand(count, 4), batch(count, temperature=0.8))
    expected = torch.softmax(logits.double() / 0.8, -1)
    assert (torch.bincount(tokens, minlength=4) / count - expected).abs().max() < 0.015
    assert (logprobs - expected.log()[tokens]).abs().max() < 1e-6


@pytest.mark.parametrize(
    "limits, kept",
    [
        ({"top_k": 2}, {0, 3}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.7}, {0, 3}),
        ({"top_p": 1e-6}, {0}),
        ({"min_p": 0.3}, {0, 3}),
        ({"top_k": 3, "min_p": 0.1}, {0, 1, 3}),
        ({"top_k": 1}, {0}),
    ],
)
def test_filters_keep_the_right_tokens_and_leave_logprobs_alone(limits, kept):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])  # softmax 0.64, 0.09, 0.03, 0.24
    tokens, logprobs, _ = sample(logits.expand(2000, 4), batch(2000, **limits))
    assert set(tokens.tolist()) == kept
    assert (logprobs - torch.log_softmax(logits, -1)[tokens]).abs().max() < 1e-6


@pytest.mark.parametrize("limits", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_p": 0.9, "top_k": 3}, {}])
def test_kept_tokens_are_those_that_are_sampled(limits):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    rows = batch(2000, **limits)
    tokens, _, all_logprobs = sample(logits.expand(2000, 4), rows)
    assert set(kept_tokens(all_logprobs[7], rows, 7).tolist()) == set(tokens.tolist())
    without = batch(1, **limits, banned=[(0, np.array([0]))])
    assert 0 not in kept_tokens(all_logprobs[0], without, 0)
    assert kept_tokens(all_logprobs[0], batch(1, greedy=True), 0).tolist() == [0]


def test_a_row_does_not_depend_on_the_others():
    torch.manual_seed(0)
    logits = torch.randn(6, 5000) * 3
    mixed = batch(6)
    mixed.temperature[:] = [1, 0.5, 1, 2, 1, 1]
    mixed.top_p[:] = [1, 0.9, 1, 1, 0.5, 1]
    mixed.top_k[:] = [1 << 30, 1 << 30, 10, 1 << 30, 1 << 30, 1 << 30]
    mixed.greedy[5] = True
    tokens, logprobs, _ = sample(logits, mixed)
    for i in range(6):
        names = [field.name for field in dataclasses.fields(mixed) if field.name != "banned"]
        fields = {name: getattr(mixed, name)[i : i + 1] for name in names}
        token, logprob, _ = sample(logits[i : i + 1], SamplingBatch(**fields, banned=[]))
        assert (token.item(), logprob.item()) == (tokens[i].item(), logprobs[i].item())
    assert tokens[5] == logits[5].argmax()


def test_banned_tokens_are_not_sampled_but_keep_logprobs_whole():
    logits = torch.tensor([5.0, 0.0, 0.0])
    tokens, logprobs, _ = sample(logits.expand(50, 3), batch(50, banned=[(i, np.array([0])) for i in range(49)]))
    assert 0 not in tokens[:49].tolist()
    assert (logprobs - torch.log_softmax(logits, -1)[tokens]).abs().max() < 1e-6
    greedy, _, _ = sample(logits[None], batch(1, greedy=True, banned=[(0, np.array([0]))]))
    assert greedy.item() == 1
