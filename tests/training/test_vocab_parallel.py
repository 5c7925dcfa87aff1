"""Log-probs over a cut vocabulary equal those over the whole, with their gradients, in float64."""

import pytest
import torch
import torch.distributed as dist

from slime.training.kept_tokens import KeptTokens
from slime.training.logprobs import token_log_probs
from slime.training.vocab_parallel import vocab_parallel_log_probs
from tests.backends.trainers import run_world

ROWS, WIDTH, VOCAB = 11, 6, 13
# How many of the 13 tokens each of the two ranks has.
CUTS = {"even": (7, 6), "uneven": (12, 1), "nothing on the last": (13, 0)}
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7, "with_entropy": True},
    "entropy with gradient": {"temperature": 1.3, "with_entropy": True, "entropy_grad": True},
    "kept tokens": {"with_entropy": True, "entropy_grad": True, "kept": True},
}


def problem(case):
    random = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, WIDTH, generator=random, dtype=torch.float64) * 3
    weight = torch.randn(VOCAB, WIDTH, generator=random, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=random)
    grads = torch.randn(2, ROWS, generator=random, dtype=torch.float64)
    options = dict(CASES[case])
    if options.pop("kept", False):
        counts = torch.randint(0, 4, (ROWS,), generator=random)
        ids = torch.randint(0, VOCAB, (int(counts.sum()),), generator=random)
        options["kept"] = KeptTokens(ids, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    return hidden, weight, targets, grads, options


def results_of(function, hidden, weight, grads):
    """log-probs, entropy, gradients of both inputs."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = function(hidden, weight)
    loss = (log_probs * grads[0]).sum()
    if entropy is not None and entropy.requires_grad:
        loss = loss + (entropy * grads[1]).sum()
    loss.backward()
    return [log_probs.detach(), None if entropy is None else entropy.detach(), hidden.grad, weight.grad]


def cut(rank, world_size, port):
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results = {}
    for case in CASES:
        hidden, weight, targets, grads, options = problem(case)
        for name, sizes in CUTS.items():
            first = sum(sizes[:rank])

            def function(h, w, first=first, targets=targets, options=options):
                return vocab_parallel_log_probs(h, w, targets, first, dist.group.WORLD, chunk_size=4, **options)

            results[case, name] = results_of(function, hidden, weight[first : first + sizes[rank]], grads)
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def results():
    return run_world(cut, 2)


@pytest.mark.integration
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_cut_vocabulary_is_the_whole(results, case, name):
    hidden, weight, targets, grads, options = problem(case)
    expected = results_of(lambda h, w: token_log_probs(h, w, targets, **options), hidden, weight, grads)
    ranks = [rank[case, name] for rank in results]
    for rank in ranks:
        torch.testing.assert_close(rank[0], expected[0], rtol=0, atol=1e-12)
        if expected[1] is not None:
            torch.testing.assert_close(rank[1], expected[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(ranks[0][2] + ranks[1][2], expected[2], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([rank[3] for rank in ranks]), expected[3], rtol=0, atol=1e-12)
