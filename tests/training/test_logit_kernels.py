"""The logits' Triton kernels against float64, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.training import logit_kernels, logprobs
from slime.training.kept_tokens import KeptTokens

pytestmark = pytest.mark.integration

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, VOCAB = 7, 301
ELSEWHERE = slice(3, 5)
"""Rows whose target is in another part of the vocabulary."""


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(logit_kernels, "BLOCK", 64)


def problem(scale, temperature):
    """(logits, targets, log-softmax in float64)"""
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB) * scale
    logits[1, :100] = -torch.inf  # a block and more that could not be sampled
    logits[2, 5:] = -torch.inf
    targets = torch.tensor([7, 200, 3, -1, VOCAB, 0, VOCAB - 1])
    return logits.to(DEVICE), targets.to(DEVICE), torch.log_softmax(logits.double() / temperature, -1)


def summary(logits, targets, temperature):
    out = [torch.empty(ROWS, device=DEVICE) for _ in range(3)]
    logit_kernels.summarise(logits, targets, temperature, *out)
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [1, 30])
def test_summary(scale, temperature):
    logits, targets, full = problem(scale, temperature)
    log_probs, entropy, log_sums = (x.double().cpu() for x in summary(logits, targets, temperature))
    want = full.gather(-1, targets.cpu().clamp(0, VOCAB - 1)[:, None]).squeeze(-1)
    want[ELSEWHERE] = 0
    assert (log_probs - want).abs().max() < 1e-6 * scale
    assert (entropy - torch.special.entr(full.exp()).sum(-1)).abs().max() < 2e-6
    assert (log_sums - (logits.cpu().double() / temperature).logsumexp(-1)).abs().max() < 1e-6 * scale
    bare = torch.empty(ROWS, device=DEVICE)
    logit_kernels.summarise(logits, targets, temperature, bare, None, torch.empty_like(bare))
    assert torch.equal(bare.cpu().double(), log_probs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradient(with_entropy, temperature):
    logits, targets, full = problem(3, temperature)
    _, entropy, log_sums = summary(logits, targets, temperature)
    weights, entropy_weights = torch.randn(2, ROWS, dtype=torch.float64)
    hits = torch.nn.functional.one_hot(targets.cpu().clamp(0, VOCAB - 1), VOCAB).double()
    hits[ELSEWHERE] = 0
    probs = full.exp()
    want = weights[:, None] * (hits - probs)
    if with_entropy:
        surprise = torch.special.entr(probs) - probs * torch.special.entr(probs).sum(-1, keepdim=True)
        want += entropy_weights[:, None] * surprise
    more = (entropy, entropy_weights.float().to(DEVICE)) if with_entropy else (None, None)
    got = logit_kernels.gradient_(logits, targets, temperature, log_sums, weights.float().to(DEVICE), *more)
    assert got is logits
    assert (got.cpu().double() - want / temperature).abs().max() < 5e-6


def test_nothing_that_could_be_sampled():
    logits = torch.full((ROWS, VOCAB), -torch.inf, device=DEVICE)
    _, _, log_sums = summary(logits, torch.zeros(ROWS, dtype=torch.int64, device=DEVICE), 1.0)
    assert bool((log_sums == -torch.inf).all())


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_log_probs_of_hidden_states_are_those_without_kernels(entropy_grad, monkeypatch):
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, device=DEVICE) for shape in ((9, 16), (VOCAB, 16), (VOCAB,)))
    targets = torch.randint(0, VOCAB, (9,), device=DEVICE)
    kept = KeptTokens(torch.randint(0, VOCAB, (9 * 20,)), torch.arange(10) * 20)
    results = {}
    for kernels in (False, True):
        monkeypatch.setattr(logprobs, "has_kernels", lambda _, kernels=kernels: kernels)
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        options = {"temperature": 0.7, "with_entropy": True, "entropy_grad": entropy_grad, "chunk_size": 4}
        picked, entropy = logprobs.token_log_probs(leaves[0], leaves[1], targets, bias=leaves[2], kept=kept, **options)
        (picked.sum() + (entropy.sum() if entropy_grad else 0)).backward()
        results[kernels] = (picked.detach(), entropy.detach(), *(leaf.grad for leaf in leaves))
    for got, want in zip(results[True], results[False], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
