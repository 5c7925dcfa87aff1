import math

import pytest
import torch

from slime.training.losses import compute_loss, compute_value_loss
from slime.training.reducers import get_sum_of_sample_mean, make_reducer
from tests.training import reference
from tests.training.batches import make_args, random_batch, random_tokens, rank_data
from tests.training.problem import ALGORITHMS, ICEPOP, Problem

pytestmark = pytest.mark.unit
REDUCER = "slime.backends.megatron_utils.cp_utils.get_sum_of_sample_mean"


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_against_reference(name, per_token):
    args = make_args(**ALGORITHMS[name])
    problem = Problem(seed=4, samples=12)
    got, _ = problem.run(args, per_token)

    batch, columns = problem.batch, {k: [x.tolist() for x in v] for k, v in problem.columns.items()}
    rollout = [torch.tensor(x, dtype=torch.float32).tolist() for x in batch["rollout_log_probs"]]
    old = rollout if args.use_rollout_logprobs else columns["log_probs"]
    table = [
        [
            (reference.log_softmax(z, 1.0)[t], reference.entropy(z, 1.0))
            for z, t in zip(zs.tolist(), ts.tolist(), strict=True)
        ]
        for zs, ts in zip(problem.logits, problem.targets, strict=True)
    ]
    pi = [[lp for lp, _ in row] for row in table]
    tokens = [
        reference.policy_tokens(args, *row)
        for row in zip(pi, old, columns["advantages"], batch["loss_masks"], strict=True)
    ]
    kl = [
        [
            reference.kl(args.kl_loss_type, p, r, math.exp(p - o) if args.use_unbiased_kl else 1.0)
            for p, r, o in zip(*rows, strict=True)
        ]
        for rows in zip(pi, columns["ref_log_probs"], old, strict=True)
    ]
    pg, of_correction = corrected(args, batch, columns, rollout, [losses for losses, _, _ in tokens])
    if args.use_opsm:
        gone = [
            [float(a < 0 and d > args.opsm_delta) for a in advantages]
            for advantages, d in zip(columns["advantages"], sequence_log_ratios(batch, old, pi), strict=True)
        ]
        pg = [[x * (1 - g) for x, g in zip(*row, strict=True)] for row in zip(pg, gone, strict=True)]
        of_correction["opsm_clipfrac"] = gone
        assert any(1.0 in row for row in gone)
    if args.use_tis or args.get_mismatch_metrics:
        of_correction["ois"] = [[math.exp(-x) for x in d] for _, _, d in tokens]
    want = {
        **of_correction,
        "pg_loss": pg,
        "pg_clipfrac": [clips for _, clips, _ in tokens],
        "ppo_kl": [d for _, _, d in tokens],
        "entropy_loss": [[h for _, h in row] for row in table],
        "train_rollout_logprob_abs_diff": [
            [abs(a - b) for a, b in zip(*rows, strict=True)]
            for rows in zip(columns["log_probs"], rollout, strict=True)
        ],
    }
    if args.use_kl_loss:
        want["kl_loss"] = kl
    want = {
        key: reference.aggregate(values, batch["loss_masks"], batch["rollout_ids"], per_token)
        for key, values in want.items()
    }
    want["loss"] = (
        want["pg_loss"] - args.entropy_coef * want["entropy_loss"] + args.kl_loss_coef * want.get("kl_loss", 0.0)
    )
    assert set(got) == set(want)
    for key, value in want.items():
        assert got[key].item() == pytest.approx(value, rel=1e-10, abs=1e-12), key
    assert 0 < want["pg_clipfrac"] < 1


def corrected(args, batch, columns, rollout, pg):
    """Token losses with the reference's correction, and its metrics."""
    if not args.use_tis and not args.get_mismatch_metrics:
        return pg, {}
    pairs = list(zip(columns["log_probs"], rollout, strict=True))
    if args.custom_tis_function_path == ICEPOP:
        parts = [reference.icepop(args, *pair) for pair in pairs]
    elif args.custom_tis_function_path is not None:
        parts = [reference.mis(args, *pair, mask) for pair, mask in zip(pairs, batch["loss_masks"], strict=True)]
    else:
        parts = [reference.tis(args, *pair) for pair in pairs]
    metrics = {key: [m[key] for _, m in parts] for key in parts[0][1]}
    weights = [w for w, _ in parts]
    touched = [
        abs(w - math.exp(a - b)) > 1e-9
        for ws, (train, mu) in zip(weights, pairs, strict=True)
        for w, a, b in zip(ws, train, mu, strict=True)
    ]
    assert any(touched)
    if args.use_tis:
        pg = [[x * w for x, w in zip(*row, strict=True)] for row in zip(pg, weights, strict=True)]
    return pg, metrics


def sequence_log_ratios(batch, old, pi):
    return [
        reference.sequence_log_ratio([o - p for o, p in zip(os, ps, strict=True)], mask)
        for os, ps, mask in zip(old, pi, batch["loss_masks"], strict=True)
    ]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_cut_gives_the_same_loss_and_gradient(name, per_token):
    """Micro-batch sizes, packing, order and data parallelism change nothing; some micro-batches are empty."""
    args = make_args(**ALGORITHMS[name])
    problem = Problem(seed=7)
    want_metrics, want_grads = problem.run(args, per_token)
    cuts = [
        {"micro_batch_size": 1},
        {"micro_batch_size": 2, "dp_size": 2},
        {"micro_batch_size": 1, "dp_size": 4},
        {"max_tokens": 20},
        {"max_tokens": 20, "dp_size": 3, "balance": False},
        {"max_tokens": 1000, "dp_size": 2},
    ]
    for cut in cuts:
        metrics, grads = problem.run(args, per_token, **{"balance": True, **cut})
        for key, value in want_metrics.items():
            assert metrics[key].item() == pytest.approx(value.item(), rel=1e-10, abs=1e-12), (cut, key)
        for got, want in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
    assert sum(g.abs().sum() for g in want_grads) > 0


@pytest.mark.parametrize("name", sorted(name for name in ALGORITHMS if "cispo" not in name))
def test_gradient_is_the_derivative(name):
    """Central differences of the loss on some logits. CISPO's weight is detached, so it has a test of its own."""
    args = make_args(**ALGORITHMS[name])
    problem = Problem(seed=3)
    _, grads = problem.run(args)
    for sample, token, column in ((1, 0, 0), (3, 1, 4), (5, 0, 2), (0, 0, 1)):
        values = []
        for shift in (1e-6, -1e-6):
            problem.logits[sample][token, column] += shift
            values.append(problem.run(args)[0]["loss"].item())
            problem.logits[sample][token, column] -= shift
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(grads[sample][token, column].item(), abs=1e-7)


def test_cispo_gradient_is_weighted_reinforce():
    batch = random_batch(1)
    columns = {"log_probs": random_tokens(1, batch), "advantages": random_tokens(2, batch)}
    mb = rank_data(batch, columns)[0].micro_batch(0, 0)
    pi = (mb.old_log_probs + 0.5).requires_grad_()
    args = make_args(advantage_estimator="cispo", eps_clip=1.0, eps_clip_high=0.2)
    compute_loss(args, mb, pi, torch.zeros_like(pi), lambda x: (x * mb.loss_masks).sum())[0].backward()
    torch.testing.assert_close(pi.grad, -1.2 * mb.advantages * mb.loss_masks)


@pytest.mark.parametrize(
    "name", ["grpo", "dual_clip", "gspo", "cispo", "kl", "opsm", "gspo_opsm", "tis", "icepop", "mis_token_clip"]
)
@pytest.mark.parametrize("skipped_pass", [False, True])
def test_first_step_is_exactly_zero(name, skipped_pass):
    """Old log-probs bit-equal, or none because the pass was skipped: ppo_kl, pg_clipfrac, kl_loss are 0.0."""
    batch = random_batch(2)
    current = [x.float() for x in random_tokens(1, batch)]
    columns = {"ref_log_probs": current, "advantages": [x.float() for x in random_tokens(2, batch)]}
    if not skipped_pass:
        columns["log_probs"] = current
    (data,) = rank_data(batch, columns)
    mb = data.micro_batch(0, 0)
    pi = torch.cat([current[i - 100] for i in mb.sample_indices]).requires_grad_()
    loss, metrics = compute_loss(make_args(**ALGORITHMS[name]), mb, pi, pi.detach(), make_reducer(mb, False))
    assert metrics["ppo_kl"].item() == 0 and metrics["pg_clipfrac"].item() == 0
    assert all(metrics.get(key, torch.zeros(())).item() == 0 for key in ("kl_loss", "opsm_clipfrac"))
    assert "ois" not in metrics or metrics["ois"] == make_reducer(mb, False)(torch.ones_like(pi))
    loss.backward()
    assert pi.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masked_positions_may_hold_anything(name):
    problem = Problem(seed=11)
    args = make_args(**ALGORITHMS[name])
    want, want_grads = problem.run(args)
    for values in (*problem.columns.values(), problem.batch["rollout_log_probs"]):
        for value, mask in zip(values, problem.batch["loss_masks"], strict=True):
            for t, m in enumerate(mask):
                if not m:
                    value[t] = float("nan") if t % 2 else -float("inf")
    got, grads = problem.run(args)
    assert {k: v.item() for k, v in got.items()} == {k: v.item() for k, v in want.items()}
    assert all(torch.equal(a, b) for a, b in zip(grads, want_grads, strict=True))


@pytest.mark.parametrize(
    "changes", [{}, {"eps_clip_c": 3.0}, {"advantage_estimator": "gspo"}, {"advantage_estimator": "cispo"}]
)
@pytest.mark.parametrize("kind", ["k1", "k2", "low_var_kl"])
def test_gradients_stay_finite_where_exp_overflows_in_fp32(changes, kind):
    """A policy 100 nats away from the old one and the reference; where a term is clipped its gradient is 0."""
    batch = {**random_batch(2, samples=3, fan_out=False), "response_lengths": [3, 3, 3], "loss_masks": [[1, 1, 1]] * 3}
    batch |= {"tokens": [[1, 2, 3, 4]] * 3, "total_lengths": [4] * 3, "rollout_log_probs": [[-1.0] * 3] * 3}
    far = [torch.full((3,), value) for value in (-101.0, -1.0, -101.0)]
    columns = {"log_probs": far, "ref_log_probs": far, "advantages": [torch.tensor([1.0, -1.0, 0.0])] * 3}
    mb = rank_data(batch, columns)[0].micro_batch(0, 0)
    for unbiased in (False, True):
        pi = torch.tensor([-1.0, -101.0, -1.0]).repeat_interleave(3).requires_grad_()
        args = make_args(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=kind, use_unbiased_kl=unbiased, **changes)
        loss, _ = compute_loss(args, mb, pi, torch.zeros_like(pi), make_reducer(mb, False))
        loss.backward()
        assert pi.grad.isfinite().all()
        if kind == "low_var_kl" and not unbiased and changes.get("advantage_estimator") is None:
            assert pi.grad[0] == 0, "both terms are clipped"


def test_wholly_masked_batch_has_zero_loss_and_gradient():
    problem = Problem(seed=1)
    problem.batch["loss_masks"] = [[0] * n for n in problem.batch["response_lengths"]]
    for per_token in (False, True):
        metrics, grads = problem.run(make_args(**ALGORITHMS["kl"]), per_token)
        assert all(value.item() == 0 for value in metrics.values())
        assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("per_token", [False, True])
def test_sft_loss(per_token):
    problem = Problem(seed=6)
    args = make_args(loss_type="sft_loss")
    got, grads = problem.run(args, per_token)
    pi = [
        [-reference.log_softmax(z, 1.0)[t] for z, t in zip(zs.tolist(), ts.tolist(), strict=True)]
        for zs, ts in zip(problem.logits, problem.targets, strict=True)
    ]
    want = reference.aggregate(pi, problem.batch["loss_masks"], problem.batch["rollout_ids"], per_token)
    assert set(got) == {"loss"} and got["loss"].item() == pytest.approx(want, rel=1e-12)
    _, split = problem.run(args, per_token, micro_batch_size=1, dp_size=3)
    for a, b in zip(grads, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("per_token", [False, True])
def test_value_loss(per_token):
    """Against the reference, for any cut; masked positions may hold anything."""
    batch = random_batch(5)
    values = random_tokens(1, batch)
    columns = {"values": [v + n for v, n in zip(values, random_tokens(2, batch, 0.3), strict=True)]}
    columns["returns"] = random_tokens(3, batch)
    want = [
        reference.value_tokens(*(x.tolist() for x in row), 0.2)
        for row in zip(values, columns["values"], columns["returns"], strict=True)
    ]
    total = {
        key: reference.aggregate([w[i] for w in want], batch["loss_masks"], batch["rollout_ids"], per_token)
        for i, key in enumerate(("value_loss", "value_clipfrac"))
    }
    assert 0 < total["value_clipfrac"] < 1
    grads = []
    for cut in ({}, {"micro_batch_size": 1, "dp_size": 2}, {"max_tokens": 20, "dp_size": 3}):
        leaves = [v.clone().requires_grad_() for v in values]
        got = {}
        for data in rank_data(batch, columns, **cut):
            for index in range(len(data.steps[0])):
                mb = data.micro_batch(0, index)
                rows = [leaves[i - 100] for i in mb.sample_indices]
                current = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64, requires_grad=True)
                current = torch.where(mb.loss_masks != 0, current, float("nan"))
                loss, metrics = compute_value_loss(make_args(), mb, current, make_reducer(mb, per_token))
                loss.backward()
                got = {key: got.get(key, 0.0) + value.item() for key, value in metrics.items()}
        assert got.pop("loss") == got["value_loss"] and got == pytest.approx(total, rel=1e-10)
        grads.append(leaves)
    for cut in grads[1:]:
        for a, b in zip(grads[0], cut, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)
    assert torch.cat([leaf.grad for leaf in grads[0] if leaf.grad is not None]).isfinite().all()


def custom_loss(args, batch, logits, sum_of_sample_mean):
    assert [len(a) for a in batch["advantages"]] == batch["response_lengths"]
    assert [len(t) for t in batch["tokens"]] == batch["total_lengths"]
    assert batch["metadata"][0] == {"row": batch["sample_indices"][0] - 100}
    per_token = logits[0, : sum(batch["response_lengths"]), 0] * torch.cat(batch["advantages"])
    return sum_of_sample_mean(per_token), {"tokens": sum(batch["response_lengths"]), "mine": per_token.sum()}


def test_custom_loss():
    batch = random_batch(2)
    (data,) = rank_data(batch, {"advantages": random_tokens(2, batch)})
    mb = data.micro_batch(0, 0)
    logits = torch.randn(1, mb.tokens.shape[0], 4, dtype=torch.float64, requires_grad=True)
    args = make_args(loss_type="custom_loss", custom_loss_function_path=f"{__name__}:custom_loss")
    reduce = make_reducer(mb, False)
    loss, metrics = compute_loss(args, mb, torch.zeros(0), None, reduce, logits)
    responses = sum(batch["response_lengths"])
    assert loss.item() == pytest.approx(reduce(logits[0, :responses, 0] * mb.advantages).item())
    assert metrics["tokens"] == responses and not metrics["mine"].requires_grad
    with pytest.raises(ValueError, match="the loss needs logits"):
        compute_loss(args, mb, torch.zeros(0), None, reduce)


def test_sum_of_sample_mean():
    masks = [torch.tensor([1.0, 0.0, 1.0]), torch.zeros(2), torch.ones(1)]
    x = torch.tensor([1.0, float("nan"), 3.0, 5.0, 5.0, 7.0], requires_grad=True)
    reduce = get_sum_of_sample_mean([5, 4, 2], [3, 2, 1], masks)
    assert reduce(x).item() == 2 + 0 + 7
    reduce(x).backward()
    assert x.grad.tolist() == [0.5, 0, 0.5, 0, 0, 1]
    assert get_sum_of_sample_mean([5, 4, 2], [3, 2, 1], masks, True)(x).item() == 11


@pytest.mark.parametrize("per_token", [False, True])
def test_custom_pg_loss_reducer(per_token):
    """It reduces pg_loss alone, over the masks that a correction left, for any cut."""
    problem = Problem(seed=9)
    # Without trajectories of several samples the plug-in's denominators are the default ones.
    problem.batch["rollout_ids"] = list(range(9))
    common = {"calculate_per_token_loss": per_token, "entropy_coef": 0.1, **ALGORITHMS["tis"]}
    want, want_grads = problem.run(make_args(**common), per_token)
    args = make_args(**common, custom_pg_loss_reducer_function_path=REDUCER)
    for cut in ({}, {"micro_batch_size": 2, "dp_size": 2}):
        got, grads = problem.run(args, per_token, **cut)
        assert {k: v.item() for k, v in got.items()} == pytest.approx({k: v.item() for k, v in want.items()}, rel=1e-9)
        for a, b in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


def drop_first_tokens(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, **kw):
    masks = [mask.clone() for mask in loss_masks]
    for mask in masks:
        mask[:2] = 0
    seen = torch.full_like(pg_loss, float(len(total_lengths)))
    return 2 * pg_loss, masks, {"seen": seen}


def test_custom_correction_keeps_denominators_and_original_masks_for_metrics():
    problem = Problem(seed=9)
    path = f"{__name__}.drop_first_tokens"
    got, _ = problem.run(make_args(use_tis=True, custom_tis_function_path=path))
    kept = [[2.0 * (t >= 2) for t in range(n)] for n in problem.batch["response_lengths"]]
    pi = [
        [reference.log_softmax(z, 1.0)[t] for z, t in zip(zs.tolist(), ts.tolist(), strict=True)]
        for zs, ts in zip(problem.logits, problem.targets, strict=True)
    ]
    columns = {k: [x.tolist() for x in v] for k, v in problem.columns.items()}
    masks, ids = problem.batch["loss_masks"], problem.batch["rollout_ids"]
    rows = zip(pi, columns["log_probs"], columns["advantages"], masks, strict=True)
    pg = [reference.policy_tokens(make_args(), *row)[0] for row in rows]
    pg = [[x * k for x, k in zip(*row, strict=True)] for row in zip(pg, kept, strict=True)]
    assert got["pg_loss"].item() == pytest.approx(reference.aggregate(pg, masks, ids, False), rel=1e-10)
    seen = reference.aggregate([[9.0] * len(m) for m in masks], masks, ids, False)
    assert got["seen"].item() == pytest.approx(seen)
    # Metrics alone: the loss is the uncorrected one.
    plain, _ = problem.run(make_args())
    metrics, _ = problem.run(make_args(get_mismatch_metrics=True, custom_tis_function_path=path))
    assert metrics["loss"] == plain["loss"] and metrics["seen"].item() == pytest.approx(seen)


def wrong_shape(*, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks, {"mean": pg_loss.mean()}


def test_wrong_shapes_of_a_custom_correction_are_named():
    args = make_args(use_tis=True, custom_tis_function_path=f"{__name__}:wrong_shape")
    with pytest.raises(ValueError, match=r"wrong_shape: mean has the shape \(\), but there are \d+ response tokens"):
        Problem().run(args)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_tis": True}, "needs rollout_log_probs"),
        ({"use_rollout_logprobs": True}, "needs rollout_log_probs"),
        ({"use_kl_loss": True}, "needs ref_log_probs"),
        ({"loss_type": "nope"}, "unknown --loss-type 'nope'"),
    ],
)
def test_missing_inputs_are_named(changes, message):
    batch = {**random_batch(2), "rollout_log_probs": None}
    (data,) = rank_data(batch, {"advantages": random_tokens(2, batch)})
    mb = data.micro_batch(0, 0)
    x = torch.zeros_like(mb.loss_masks)
    with pytest.raises(ValueError, match=message):
        compute_loss(make_args(**changes), mb, x, x, make_reducer(mb, False))
