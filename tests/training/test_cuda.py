"""The same numbers on a GPU as on the CPU."""

import pytest
import torch

from slime.training.advantages import compute_advantages
from slime.training.context_parallel import ContextParallel, local_row
from slime.training.kept_tokens import KeptTokens
from slime.training.logprobs import token_log_probs
from slime.training.losses import compute_loss
from slime.training.reducers import make_reducer
from tests.training.batches import make_args, random_batch, random_tokens, rank_data
from tests.training.problem import ALGORITHMS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def losses(args, device):
    """Loss, gradient and metrics of the algorithm on one micro-batch with samples and one without."""
    batch = random_batch(4)
    names = ("log_probs", "ref_log_probs", "advantages")
    columns = {name: random_tokens(i, batch, 0.3) for i, name in enumerate(names)}
    out = []
    for data in rank_data(batch, columns, dp_size=4, micro_batch_size=1):
        for index in range(len(data.steps[0])):
            mb = data.micro_batch(0, index, device)
            current = torch.linspace(-1, 0.5, len(mb.loss_masks), dtype=torch.float64, device=device).requires_grad_()
            loss, metrics = compute_loss(args, mb, current, current.detach(), make_reducer(mb, False))
            loss.backward()
            out += [current.grad.cpu(), *(value.cpu() for _, value in sorted(metrics.items()))]
    return out


@pytest.mark.parametrize("name", ALGORITHMS)
def test_losses(name):
    args = make_args(**ALGORITHMS[name])
    for got, want in zip(losses(args, "cuda"), losses(args, "cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "ppo", "on_policy_distillation"])
def test_advantages(estimator):
    batch = random_batch(5)
    names = ("log_probs", "ref_log_probs", "values", "teacher_log_probs")
    columns = {name: random_tokens(i, batch) for i, name in enumerate(names)}
    args = make_args(advantage_estimator=estimator, kl_coef=0.1, gamma=0.9, lambd=0.9, normalize_advantages=True)
    results = {}
    for device in ("cpu", "cuda"):
        (data,) = rank_data(batch, {key: [x.to(device) for x in values] for key, values in columns.items()})
        compute_advantages(args, data)
        results[device] = torch.cat(data["advantages"]).cpu()
    torch.testing.assert_close(results["cuda"], results["cpu"], rtol=1e-6, atol=1e-6)


def test_kept_tokens_of_a_context_parallel_row():
    batch = random_batch(3)
    lengths = batch["response_lengths"]
    batch["rollout_top_p_token_ids"] = [list(range(3 * n)) for n in lengths]
    batch["rollout_top_p_token_offsets"] = [list(range(0, 3 * n + 1, 3)) for n in lengths]
    (data,) = rank_data(batch)
    rows = {device: local_row(data.micro_batch(0, 0, device), ContextParallel(1, 2)) for device in ("cpu", "cuda")}
    assert torch.equal(rows["cuda"].kept.ids.cpu(), rows["cpu"].kept.ids)
    assert torch.equal(rows["cuda"].labels.cpu(), rows["cpu"].labels)


@pytest.mark.parametrize("with_kept", [False, True])
def test_bf16_log_probs_against_float64(with_kept):
    rows, width, vocab = 300, 64, 1000
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocab, width, device="cuda") / 8).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    kept = None
    if with_kept:
        ids = torch.randint(0, vocab, (rows, 50), device="cuda")
        kept = KeptTokens(ids.flatten(), torch.arange(rows + 1) * 50)
    log_probs, entropy = token_log_probs(
        hidden, weight, targets, temperature=0.8, with_entropy=True, entropy_grad=True, chunk_size=64, kept=kept
    )
    (log_probs.sum() + 0.1 * entropy.sum()).backward()

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    if with_kept:
        allowed = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True).scatter_(1, targets[:, None], True)
        logits = logits.masked_fill(~allowed, -1e9)
    full = torch.log_softmax(logits / 0.8, -1)
    want = full.gather(-1, targets[:, None]).squeeze(-1)
    want_entropy = -(full.exp() * full).sum(-1)
    (want.sum() + 0.1 * want_entropy.sum()).backward()
    torch.testing.assert_close(log_probs.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=2e-2, atol=2e-2)
    for got, true in zip((hidden, weight), exact, strict=True):
        assert (got.grad.double() - true.grad).norm() / true.grad.norm() < 2e-2
