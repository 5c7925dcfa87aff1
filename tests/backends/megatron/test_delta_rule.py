"""The gated delta rule and its convolution over packed sequences, against their definitions token by token."""

import pytest
import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.delta_rule import causal_conv, gated_delta_rule

pytestmark = pytest.mark.unit
# Less than a chunk, one, a chunk and a token, several; in no order.
LENGTHS = [5, 130, 1, 64, 65, 200, 3]
HEADS, KEYS, VALUES = 2, 6, 10


def recurrence(query, key, value, log_decay, beta):
    """arXiv 2412.06464, eq. 10, for one sequence of one head."""
    state = torch.zeros(key.shape[-1], value.shape[-1], dtype=value.dtype)
    identity, out = torch.eye(key.shape[-1], dtype=value.dtype), []
    for q, k, v, g, b in zip(query, key, value, log_decay, beta, strict=True):
        q, k = (x / (x @ x + 1e-6).sqrt() for x in (q, k))
        state = g.exp() * (identity - b * torch.outer(k, k)) @ state + b * torch.outer(k, v)
        out.append(state.T @ q * len(q) ** -0.5)
    return torch.stack(out)


def inputs(lengths, dtype=torch.float64):
    torch.manual_seed(0)
    tokens = sum(lengths)
    query, key = torch.randn(2, tokens, HEADS, KEYS, dtype=dtype)
    value = torch.randn(tokens, HEADS, VALUES, dtype=dtype)
    log_decay, beta = -torch.rand(tokens, HEADS, dtype=dtype), torch.rand(tokens, HEADS, dtype=dtype)
    return [x.requires_grad_() for x in (query, key, value, log_decay, beta)]


def by_definition(lengths, *packed):
    parts = zip(*(x.split(lengths) for x in packed), strict=True)
    rows = [torch.stack([recurrence(*(x[:, h] for x in part)) for h in range(HEADS)], 1) for part in parts]
    return torch.cat(rows)


def test_values_and_gradients_are_those_of_the_recurrence():
    packed = inputs(LENGTHS)
    weights = torch.randn(sum(LENGTHS), HEADS, VALUES, dtype=torch.float64)
    results = []
    for out in (gated_delta_rule(*packed, LENGTHS), by_definition(LENGTHS, *packed)):
        results.append((out, *torch.autograd.grad((out * weights).sum(), packed)))
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).abs().max() < 1e-11 * expected.abs().max()


def test_single_precision_stays_close():
    packed = inputs(LENGTHS, torch.float32)
    expected = gated_delta_rule(*(x.double() for x in packed), LENGTHS)
    assert (gated_delta_rule(*packed, LENGTHS) - expected).abs().max() < 1e-5


def test_sequences_do_not_see_each_other():
    """Neither values nor gradients of a sequence change with what is packed before and after it."""
    packed = inputs(LENGTHS)
    out = gated_delta_rule(*packed, LENGTHS).split(LENGTHS)
    for i in range(len(LENGTHS)):
        alone = gated_delta_rule(*(x.split(LENGTHS)[i] for x in packed), LENGTHS[i : i + 1])
        assert torch.allclose(out[i], alone, rtol=1e-12, atol=1e-13)
        gradient = torch.autograd.grad(out[i].sum(), packed[2], retain_graph=True)[0].split(LENGTHS)
        assert [j for j, part in enumerate(gradient) if part.any()] == [i]


def test_strong_decay_does_not_overflow():
    query, key, value, log_decay, beta = inputs([150], torch.float32)
    out = gated_delta_rule(query, key, value, log_decay * 100, beta, [150])
    gradients = torch.autograd.grad(out.sum(), (query, key, value, log_decay, beta))
    assert all(x.isfinite().all() for x in (out, *gradients))


def test_convolution():
    torch.manual_seed(0)
    channels, width = 5, 4
    weight = torch.randn(channels, width, dtype=torch.float64, requires_grad=True)
    row = torch.randn(sum(LENGTHS), channels, dtype=torch.float64, requires_grad=True)
    expected = []
    for x in row.split(LENGTHS):
        before = F.pad(x, (0, 0, width - 1, 0))
        expected.append(sum(weight[:, k] * before[k : k + len(x)] for k in range(width)))
    pairs = []
    for out in (causal_conv(row, weight, LENGTHS), torch.cat(expected)):
        pairs.append((out, *torch.autograd.grad((out**2).sum(), (row, weight))))
    for ours, theirs in zip(*pairs, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
