"""GRPO training in float64 from the formulas: stock transformers attention, one sample at a time, AdamW by hand."""

from __future__ import annotations

import torch


class ReferenceTrainer:
    """Policy, reference and moments of one process."""

    def __init__(self, args):
        self.args = args
        self.model, self.ref = (_load(args.hf_checkpoint) for _ in range(2))
        self.params = dict(self.model.named_parameters())
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.params.items()}
        self.steps = 0

    def train(self, batch: dict) -> list[float]:
        """Steps of `global_batch_size` samples in order; the loss of each."""
        with torch.no_grad():
            old = [self._log_probs(self.model, batch, i)[0] for i in range(len(batch["tokens"]))]
        size = self.args.global_batch_size
        return [self._step(batch, range(start, start + size), old) for start in range(0, len(old), size)]

    def _log_probs(self, model, batch, i):
        tokens, length = torch.tensor(batch["tokens"][i]), batch["response_lengths"][i]
        logits = model(tokens[None]).logits[0, -length - 1 : -1] / self.args.rollout_temperature
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, tokens[-length:, None])[:, 0], entropy

    def _step(self, batch, samples, old) -> float:
        args = self.args
        loss = torch.zeros((), dtype=torch.float64)
        tokens = sum(max(sum(batch["loss_masks"][i]), 1) for i in samples)
        for i in samples:
            mask = torch.tensor(batch["loss_masks"][i], dtype=torch.float64)
            log_probs, entropy = self._log_probs(self.model, batch, i)
            with torch.no_grad():
                ref, _ = self._log_probs(self.ref, batch, i)
            ratio, advantage = (log_probs - old[i]).exp(), batch["rewards"][i]
            per_token = -torch.minimum(
                ratio * advantage, ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * advantage
            )
            per_token = per_token - args.entropy_coef * entropy
            if args.use_kl_loss:
                per_token = per_token + args.kl_loss_coef * ((ref - log_probs).exp() - 1 - ref + log_probs)
            total = (per_token * mask).sum()
            count = tokens if args.calculate_per_token_loss else mask.sum().clamp(min=1) * len(samples)
            loss = loss + total / count
        loss.backward()
        self._adamw()
        return loss.item()

    @torch.no_grad()
    def _adamw(self) -> None:
        args = self.args
        self.steps += 1
        norm = torch.stack([p.grad.square().sum() for p in self.params.values()]).sum().sqrt()
        for name, p in self.params.items():
            grad = p.grad * min(1.0, args.clip_grad / (norm.item() + 1e-6))
            first, second = self.moments[name]
            first.mul_(args.adam_beta1).add_(grad, alpha=1 - args.adam_beta1)
            second.mul_(args.adam_beta2).add_(grad.square(), alpha=1 - args.adam_beta2)
            mean, square = first / (1 - args.adam_beta1**self.steps), second / (1 - args.adam_beta2**self.steps)
            decay = args.weight_decay if p.ndim > 1 else 0.0
            p.sub_(args.lr * (mean / (square.sqrt() + args.adam_eps) + decay * p))
            p.grad = None


def _load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
