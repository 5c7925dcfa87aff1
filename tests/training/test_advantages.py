import time

import pytest
import torch
import torch.distributed as dist

from slime.training.advantages import (
    compute_advantages,
    discounted_returns,
    get_ppo_advantages_and_returns,
    whiten,
)
from tests.processes import run_ranks
from tests.training import reference
from tests.training.batches import make_args, random_batch, random_tokens, rank_data

pytestmark = pytest.mark.unit


def case(**changes):
    batch = random_batch(seed=5)
    names = ("log_probs", "ref_log_probs", "values", "teacher_log_probs")
    columns = {name: random_tokens(i + 1, batch) for i, name in enumerate(names)}
    (data,) = rank_data(batch, columns)
    batch = {key: data[key] for key in ("rewards", "loss_masks", "rollout_log_probs", *names)}
    args = make_args(**changes)
    compute_advantages(args, data)
    return data, {key: [x if key == "rewards" else x.tolist() for x in values] for key, values in batch.items()}


def assert_equal(got: list[torch.Tensor], want: list[list[float]], tolerance: float = 1e-10):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), torch.tensor(w, dtype=torch.float64), rtol=tolerance, atol=tolerance)


def token_kl(batch, kind, old="log_probs"):
    return [
        [reference.kl(kind, p, r) * m for p, r, m in zip(*rows, strict=True)]
        for rows in zip(batch[old], batch["ref_log_probs"], batch["loss_masks"], strict=True)
    ]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_relative(estimator):
    data, batch = case(advantage_estimator=estimator)
    want = [[r] * len(m) for r, m in zip(batch["rewards"], batch["loss_masks"], strict=True)]
    assert_equal(data["advantages"], want, 1e-6)
    assert_equal(data["returns"], want, 1e-6)
    assert "kl" not in data


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("use_rollout_logprobs", [False, True])
def test_reinforce_plus_plus(gamma, kind, use_rollout_logprobs):
    data, batch = case(
        advantage_estimator="reinforce_plus_plus",
        gamma=gamma,
        kl_coef=0.05,
        kl_loss_type=kind,
        use_rollout_logprobs=use_rollout_logprobs,
    )
    kl = token_kl(batch, kind, "rollout_log_probs" if use_rollout_logprobs else "log_probs")
    want = [
        reference.reinforce_plus_plus(*row, 0.05, gamma)
        for row in zip(batch["rewards"], kl, batch["loss_masks"], strict=True)
    ]
    assert_equal(data["advantages"], want)
    assert_equal(data["returns"], want)
    assert_equal(data["kl"], kl)


def test_reinforce_plus_plus_baseline_and_whitening():
    changes = {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1}
    data, batch = case(**changes)
    kl = token_kl(batch, "k3")
    want = [[r - 0.1 * k for k in ks] for r, ks in zip(batch["rewards"], kl, strict=True)]
    assert_equal(data["advantages"], want)
    data, _ = case(**changes, normalize_advantages=True)
    assert_equal(data["advantages"], reference.whiten(want, batch["loss_masks"]))
    assert_equal(data["returns"], want)


@pytest.mark.parametrize("gamma, lambd", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_ppo(gamma, lambd, kl_coef):
    data, batch = case(advantage_estimator="ppo", gamma=gamma, lambd=lambd, kl_coef=kl_coef, kl_loss_type="k1")
    kl = token_kl(batch, "k1")
    want = [
        reference.gae(*row, kl_coef, gamma, lambd) for row in zip(batch["rewards"], kl, batch["values"], strict=True)
    ]
    assert_equal(data["advantages"], [a for a, _ in want])
    assert_equal(data["returns"], [r for _, r in want])
    data, _ = case(
        advantage_estimator="ppo",
        gamma=gamma,
        lambd=lambd,
        kl_coef=kl_coef,
        kl_loss_type="k1",
        normalize_advantages=True,
    )
    assert_equal(data["advantages"], reference.whiten([a for a, _ in want], batch["loss_masks"]))
    assert_equal(data["returns"], [r for _, r in want])


def test_ppo_pays_on_the_last_response_token_also_where_it_is_masked():
    batch = random_batch(0, samples=3)
    batch["loss_masks"] = [[0] * n for n in batch["response_lengths"]]
    (data,) = rank_data(batch, {"values": [torch.zeros(n).double() for n in batch["response_lengths"]]})
    compute_advantages(make_args(advantage_estimator="ppo", gamma=1.0, lambd=0.0), data)
    for reward, advantages in zip(batch["rewards"], data["advantages"], strict=True):
        assert advantages.tolist() == [0.0] * (len(advantages) - 1) + [reward] * min(len(advantages), 1)


@pytest.mark.parametrize("estimator", ["grpo", "on_policy_distillation"])
@pytest.mark.parametrize("use_rollout_logprobs", [False, True])
def test_distillation(estimator, use_rollout_logprobs):
    changes = {"advantage_estimator": estimator, "use_rollout_logprobs": use_rollout_logprobs, "opd_kl_coef": 0.7}
    data, batch = case(**changes, use_opd=estimator == "grpo")
    old = batch["rollout_log_probs" if use_rollout_logprobs else "log_probs"]
    reverse_kl = [
        [(o - t) * m for o, t, m in zip(*rows, strict=True)]
        for rows in zip(old, batch["teacher_log_probs"], batch["loss_masks"], strict=True)
    ]
    if estimator == "grpo":
        want = [[r - 0.7 * d for d in ds] for r, ds in zip(batch["rewards"], reverse_kl, strict=True)]
        assert_equal(data["opd_reverse_kl"], reverse_kl)
        assert_equal(
            data["returns"], [[r] * len(ds) for r, ds in zip(batch["rewards"], reverse_kl, strict=True)], 1e-6
        )
    else:
        want = [[-d for d in ds] for ds in reverse_kl]
    assert_equal(data["advantages"], want, 1e-6 if estimator == "grpo" else 1e-10)


@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns(length, gamma):
    rewards = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    want = torch.tensor(reference.discounted(rewards.tolist(), gamma), dtype=torch.float64)
    torch.testing.assert_close(discounted_returns(rewards, gamma), want, rtol=1e-12, atol=1e-12)


def test_discounted_returns_of_joined_sequences():
    lengths = [3, 0, 17, 1, 64]
    rewards = torch.randn(2, sum(lengths), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = discounted_returns(rewards, 0.9, lengths)
    want = torch.cat([discounted_returns(piece, 0.9) for piece in rewards.split(lengths, -1)], -1)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_long_sequences_are_fast_and_exact():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(131_072, generator=generator)
    start = time.process_time()
    (advantages,), _ = get_ppo_advantages_and_returns([1.0], [torch.zeros(131_072)], [values], 0.0, 0.9999, 0.999)
    assert time.process_time() - start < 0.5
    want, _ = reference.gae(1.0, [0.0] * 131_072, values.tolist(), 0.0, 0.9999, 0.999)
    torch.testing.assert_close(advantages.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-4)


def test_whiten_edge_cases():
    one = whiten([torch.tensor([3.0, 5.0])], [torch.tensor([1.0, 0.0])])
    assert_equal(one, [[0.0, 2e4]], 1e-6)
    with pytest.raises(ValueError, match="every response token of the rollout is masked"):
        whiten([torch.ones(3)], [torch.zeros(3)])
    constant = whiten([torch.full((1000,), 0.1)], [torch.ones(1000)])[0]
    assert constant.abs().max() < 1e-3


def advantage_hook(args, rollout_data):
    pairs = zip(rollout_data["loss_masks"], rollout_data["rewards"], strict=True)
    rollout_data["advantages"] = [mask * reward for mask, reward in pairs]
    rollout_data["returns"] = rollout_data["advantages"]


def forgetful_hook(args, rollout_data):
    rollout_data["advantages"] = rollout_data["loss_masks"]


def test_custom_function():
    data, batch = case(custom_advantage_function_path=f"{__name__}.advantage_hook")
    want = [[r * m for m in ms] for r, ms in zip(batch["rewards"], batch["loss_masks"], strict=True)]
    assert_equal(data["advantages"], want, 1e-6)
    with pytest.raises(ValueError, match=r"did not set rollout_data\['returns'\]"):
        case(custom_advantage_function_path=f"{__name__}.forgetful_hook")


def test_missing_reference_is_named():
    (data,) = rank_data(random_batch(0))
    with pytest.raises(KeyError, match="has no 'log_probs'"):
        compute_advantages(make_args(kl_coef=0.1), data)
    with pytest.raises(ValueError, match="unknown advantage estimator 'nope'"):
        compute_advantages(make_args(advantage_estimator="nope"), data)


def whiten_worker(rank, path, cases):
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    torch.save([whiten(*shards[rank], dist.group.WORLD) for shards in cases], f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.integration
def test_whitening_over_ranks_equals_one_rank(tmp_path):
    """Uneven shards, and a rank without any response token, which takes part all the same."""
    batch = random_batch(8)
    values, masks = random_tokens(3, batch), [torch.tensor(m, dtype=torch.float32) for m in batch["loss_masks"]]
    cases = [[(values[:cut], masks[:cut]), (values[cut:], masks[cut:])] for cut in (7, len(values))]
    run_ranks(whiten_worker, 2, str(tmp_path), cases)
    for first, second in zip(torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt"), strict=True):
        for got, want in zip(first + second, whiten(values, masks), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
