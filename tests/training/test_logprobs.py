from itertools import pairwise

import pytest
import torch

from slime.training.kept_tokens import KeptTokens
from slime.training.logprobs import log_probs_from_logits, token_log_probs
from tests.training import reference

pytestmark = pytest.mark.unit


def inputs(rows=7, width=5, vocab=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)], targets


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, None])
def test_values_against_reference(temperature, chunk_size):
    (hidden, weight, bias), targets = inputs()
    logits = (hidden @ weight.T + bias).tolist()
    options = {"temperature": temperature, "with_entropy": True, "chunk_size": chunk_size}
    for log_probs, entropy in (
        token_log_probs(hidden, weight, targets, bias=bias, **options),
        log_probs_from_logits(hidden @ weight.T + bias, targets, **options),
    ):
        want = [reference.log_softmax(row, temperature)[t] for row, t in zip(logits, targets.tolist(), strict=True)]
        torch.testing.assert_close(log_probs, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)
        want = [reference.entropy(row, temperature) for row in logits]
        torch.testing.assert_close(entropy, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_gradcheck(entropy_grad):
    (hidden, weight, bias), targets = inputs(rows=4, width=3, vocab=6)

    def from_hidden(hidden, weight, bias):
        out = token_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=0.7,
            with_entropy=True,
            entropy_grad=entropy_grad,
            chunk_size=3,
        )
        return out if entropy_grad else out[0]

    def from_logits(logits):
        out = log_probs_from_logits(logits, targets, 0.7, with_entropy=True, entropy_grad=entropy_grad, chunk_size=3)
        return out if entropy_grad else out[0]

    assert torch.autograd.gradcheck(from_hidden, (hidden, weight, bias))
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(from_logits, (logits,))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_low_precision_against_float64(dtype, tolerance):
    (hidden, weight, bias), targets = inputs(rows=33, width=16, vocab=40, dtype=dtype)
    log_probs, entropy = token_log_probs(
        hidden, weight, targets, bias=bias, temperature=1.3, with_entropy=True, entropy_grad=True, chunk_size=8
    )
    assert log_probs.dtype == entropy.dtype == torch.float32
    (log_probs.sum() + 0.3 * entropy.sum()).backward()

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    full = torch.log_softmax((exact[0] @ exact[1].T + exact[2]) / 1.3, -1)
    want_entropy = -(full.exp() * full).sum(-1)
    want = full.gather(-1, targets[:, None]).squeeze(-1)
    (want.sum() + 0.3 * want_entropy.sum()).backward()
    scale = 5 if dtype == torch.bfloat16 else 1
    torch.testing.assert_close(log_probs.double(), want, rtol=tolerance, atol=tolerance * scale)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=tolerance, atol=tolerance * scale)
    for got, true in zip((hidden, weight, bias), exact, strict=True):
        assert got.grad.dtype == dtype
        error = (got.grad.double() - true.grad).norm() / true.grad.norm()
        assert error < tolerance, error


def test_entropy_has_a_gradient_only_when_asked():
    (hidden, weight, _), targets = inputs()
    assert token_log_probs(hidden, weight, targets)[1] is None
    assert not token_log_probs(hidden, weight, targets, with_entropy=True)[1].requires_grad
    assert token_log_probs(hidden, weight, targets, with_entropy=True, entropy_grad=True)[1].requires_grad


def test_same_values_with_and_without_graph_or_entropy():
    """The log-prob pass and the training pass must agree bit for bit."""
    (hidden, weight, bias), targets = inputs(dtype=torch.float32)
    with torch.no_grad():
        first = token_log_probs(hidden, weight, targets, temperature=0.9, bias=bias)[0]
    second = token_log_probs(
        hidden, weight, targets, temperature=0.9, bias=bias, with_entropy=True, entropy_grad=True
    )[0]
    assert torch.equal(first, second)


def test_no_rows_still_reach_all_parameters():
    (hidden, weight, bias), _ = inputs()
    log_probs, entropy = token_log_probs(
        hidden[:0], weight, torch.empty(0, dtype=torch.int64), bias=bias, with_entropy=True, entropy_grad=True
    )
    (log_probs.sum() + entropy.sum()).backward()
    for tensor in (hidden, weight, bias):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_frozen_head():
    (hidden, weight, _), targets = inputs()
    token_log_probs(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_extreme_logits_are_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [float("-inf"), 0.0, 1.0]], requires_grad=True)
    log_probs, entropy = log_probs_from_logits(logits, torch.tensor([1, 2]), with_entropy=True, entropy_grad=True)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.isfinite().all() and entropy.isfinite().all() and logits.grad.isfinite().all()
    assert log_probs[0] == -2e4 and entropy[0] == 0


def test_backward_holds_no_full_logits():
    """Peak memory of forward and backward stays far below one tokens x vocabulary fp32 tensor."""
    rows, width, vocab, chunk = 2048, 8, 2048, 64
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        log_probs, entropy = token_log_probs(
            hidden, weight, targets, with_entropy=True, entropy_grad=True, chunk_size=chunk
        )
        (log_probs.sum() + entropy.sum()).backward()
    largest = max(event.cpu_memory_usage for event in profile.function_events)
    assert largest <= 3 * chunk * vocab * 4, largest


def kept_tokens(rows=7, vocab=11, seed=0):
    """Random sets (one is empty), as lists and as the trainer has them."""
    generator = torch.Generator().manual_seed(seed)
    sets = [torch.randperm(vocab, generator=generator)[: r % 5].tolist() for r in range(rows)]
    offsets = torch.tensor([0] + [len(s) for s in sets]).cumsum(0)
    return sets, KeptTokens(torch.tensor([i for s in sets for i in s]), offsets)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_top_p_replay_renormalises_over_the_kept_tokens_and_the_target(temperature, chunk_size):
    (hidden, weight, bias), targets = inputs()
    sets, kept = kept_tokens()
    logits = hidden @ weight.T + bias
    options = {"temperature": temperature, "with_entropy": True, "chunk_size": chunk_size, "kept": kept}
    for log_probs, entropy in (
        token_log_probs(hidden, weight, targets, bias=bias, **options),
        log_probs_from_logits(logits, targets, **options),
    ):
        for row, target in enumerate(targets.tolist()):
            candidates = sorted({*sets[row], target})
            among = logits[row, candidates].tolist()
            want = reference.log_softmax(among, temperature)[candidates.index(target)]
            assert log_probs[row].item() == pytest.approx(want, rel=1e-12, abs=1e-12)
            assert entropy[row].item() == pytest.approx(reference.entropy(among, temperature), rel=1e-12, abs=1e-12)


def test_top_p_replay_gradient():
    (hidden, weight, bias), targets = inputs(rows=4, width=3, vocab=6)
    _, kept = kept_tokens(4, 6)
    options = {"temperature": 0.7, "with_entropy": True, "entropy_grad": True, "chunk_size": 3, "kept": kept}
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_log_probs(h, w, targets, bias=b, **options), (hidden, weight, bias)
    )
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: log_probs_from_logits(x, targets, **options), (logits,))


def test_keeping_everything_changes_nothing():
    (hidden, weight, _), targets = inputs(dtype=torch.float32)
    everything = KeptTokens(torch.arange(11).repeat(7), torch.arange(8) * 11)
    want = token_log_probs(hidden, weight, targets)[0]
    assert torch.equal(token_log_probs(hidden, weight, targets, kept=everything)[0], want)


def test_kept_tokens_of_some_rows():
    sets, kept = kept_tokens()
    joined = KeptTokens.join([kept.ids[:3], kept.ids[3:]], [kept.offsets[:4], kept.offsets[3:] - 3], "cpu")
    assert torch.equal(joined.ids, kept.ids) and torch.equal(joined.offsets, kept.offsets)
    part = kept.select(torch.tensor([4, 0, 2, 6]))
    bounds = part.offsets.tolist()
    assert [part.ids[a:b].tolist() for a, b in pairwise(bounds)] == [sets[i] for i in (4, 0, 2, 6)]
    assert len(kept.select(torch.zeros(0, dtype=torch.int64)).offsets) == 1
