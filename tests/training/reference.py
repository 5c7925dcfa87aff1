"""The formulas in plain Python floats (float64), one token at a time, straight from their definitions.

Nothing here is shared with `slime.training`; the tests compare the two.
"""

import math


def log_softmax(logits, temperature):
    scaled = [z / temperature for z in logits]
    top = max(scaled)
    norm = top + math.log(sum(math.exp(z - top) for z in scaled))
    return [z - norm for z in scaled]


def entropy(logits, temperature):
    return -sum(math.exp(lp) * lp for lp in log_softmax(logits, temperature))


def kl(kind, log_prob, ref, ratio=1.0):
    x = log_prob - ref
    value = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x, "low_var_kl": math.exp(-x) - 1 + x}[kind]
    value *= ratio
    return min(max(value, -10.0), 10.0) if kind == "low_var_kl" else value


def group_rewards(rewards, groups, rollouts, divide):
    out = []
    for i, reward in enumerate(rewards):
        scores = []
        for rollout in sorted({rollouts[j] for j in range(len(rewards)) if groups[j] == groups[i]}):
            pieces = [rewards[j] for j in range(len(rewards)) if groups[j] == groups[i] and rollouts[j] == rollout]
            scores.append(sum(pieces) / len(pieces))
        mean = sum(scores) / len(scores)
        value = reward - mean
        if divide and len(scores) > 1:
            value /= math.sqrt(sum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) + 1e-6
        out.append(value)
    return out


def discounted(rewards, gamma):
    out, running = [], 0.0
    for reward in reversed(rewards):
        running = reward + gamma * running
        out.append(running)
    return out[::-1]


def reinforce_plus_plus(reward, kls, mask, kl_coef, gamma):
    if 1 not in mask:
        return [0.0] * len(kls)
    token_rewards = [-kl_coef * k * m for k, m in zip(kls, mask, strict=True)]
    last = max(t for t, m in enumerate(mask) if m)
    token_rewards[last] += reward
    return discounted(token_rewards, gamma)


def gae(reward, kls, values, kl_coef, gamma, lambd):
    """Advantages and returns by the recursion A_t = delta_t + gamma lambda A_{t+1}."""
    token_rewards = [-kl_coef * k for k in kls]
    if token_rewards:
        token_rewards[-1] += reward
    out, running, following = [], 0.0, 0.0
    for r, v in zip(reversed(token_rewards), reversed(values), strict=True):
        running = r + gamma * following - v + gamma * lambd * running
        following = v
        out.append(running)
    out = out[::-1]
    return out, [a + v for a, v in zip(out, values, strict=True)]


def sequence_log_ratio(d, mask):
    return sum(x * m for x, m in zip(d, mask, strict=True)) / max(sum(mask), 1)


def tis(args, train, rollout):
    """Weight and metrics per token."""
    ratios = [math.exp(a - b) for a, b in zip(train, rollout, strict=True)]
    weights = [min(max(w, args.tis_clip_low), args.tis_clip) for w in ratios]
    return weights, _tis_metrics(ratios, weights)


def icepop(args, train, rollout):
    ratios = [math.exp(a - b) for a, b in zip(train, rollout, strict=True)]
    weights = [w if args.tis_clip_low <= w <= args.tis_clip else 0.0 for w in ratios]
    return weights, _tis_metrics(ratios, weights)


def _tis_metrics(ratios, weights):
    return {
        "tis": ratios,
        "tis_clipfrac": [float(a != b) for a, b in zip(ratios, weights, strict=True)],
        "tis_abs": [abs(w - 1) for w in ratios],
    }


def mis(args, train, rollout, mask):
    """Weight (0 where a token leaves the loss) and metrics per token of one sample."""
    d = [a - b for a, b in zip(train, rollout, strict=True)]
    kept = [x for x, m in zip(d, mask, strict=True) if m]
    if args.mis_level == "token":
        logs = d
    elif args.mis_level == "sequence":
        logs = [sum(kept)] * len(d)
    else:
        logs = [sum(kept) / max(len(kept), 1)] * len(d)
    ratios = [math.exp(min(max(x, -20.0), 20.0)) for x in logs]
    low, high = args.mis_lower_bound, args.mis_upper_bound
    veto = args.mis_veto_threshold is not None and any(math.exp(x) < args.mis_veto_threshold for x in kept)
    weights = []
    for w in ratios:
        if args.mis_mode == "truncate":
            weights.append(min(w, high))
        elif args.mis_mode == "clip":
            weights.append(max(low, min(w, high)))
        else:
            weights.append(w if low <= w <= high else 0.0)
    if veto:
        weights = [0.0] * len(weights)
    return weights, {
        "mis_ratio": ratios,
        "mis_weight": weights,
        "mis_low_frac": [float(w < low and args.mis_mode != "truncate") for w in ratios],
        "mis_high_frac": [float(w > high) for w in ratios],
        "mis_veto_frac": [float(veto)] * len(d),
        "mis_kl": [-x for x in d],
        "mis_k3_kl": [math.exp(x) - 1 - x for x in d],
    }


def value_tokens(values, old, returns, clip):
    losses, clips = [], []
    for v, o, r in zip(values, old, returns, strict=True):
        plain, clipped = (v - r) ** 2, (o + min(max(v - o, -clip), clip) - r) ** 2
        losses.append(max(plain, clipped))
        clips.append(float(clipped > plain))
    return losses, clips


def whiten(values, masks):
    kept = [v for vs, ms in zip(values, masks, strict=True) for v, m in zip(vs, ms, strict=True) if m]
    mean = sum(kept) / len(kept)
    variance = sum((v - mean) ** 2 for v in kept) / max(len(kept) - 1, 1)
    return [[(v - mean) / math.sqrt(variance + 1e-8) for v in vs] for vs in values]


def aggregate(values, masks, rollouts, per_token):
    """Per-token lists of all samples of one global batch -> scalar."""
    sums = [sum(v * m for v, m in zip(vs, ms, strict=True) if m) for vs, ms in zip(values, masks, strict=True)]
    if per_token:
        return sum(sums) / sum(max(sum(ms), 1) for ms in masks)
    total = 0.0
    for rollout in set(rollouts):
        pieces = [i for i in range(len(rollouts)) if rollouts[i] == rollout]
        total += sum(sums[i] for i in pieces) / max(sum(sum(masks[i]) for i in pieces), 1)
    return total / len(set(rollouts))


def policy_tokens(args, pi, old, advantages, mask):
    """Per-token policy loss, clip indicator and log-ratio d of one sample."""
    d = [o - p for o, p in zip(old, pi, strict=True)]
    if args.advantage_estimator == "gspo":
        d = [sequence_log_ratio(d, mask)] * len(d)
    losses, clips = [], []
    for x, p, a in zip(d, pi, advantages, strict=True):
        ratio = math.exp(-x)
        bounded = min(max(ratio, 1 - args.eps_clip), 1 + args.eps_clip_high)
        if args.advantage_estimator == "cispo":
            losses.append(-bounded * a * p)
            clips.append(float(bounded != ratio))
            continue
        loss = max(-ratio * a, -bounded * a)
        if args.eps_clip_c is not None and a < 0:
            loss = min(loss, -args.eps_clip_c * a)
        losses.append(loss)
        clips.append(float(-bounded * a > -ratio * a))
    return losses, clips, d
