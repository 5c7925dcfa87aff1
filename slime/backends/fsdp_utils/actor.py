"""The policy's FSDP rank."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.common.policy import PolicyRole
from slime.backends.common.teacher import Teacher
from slime.backends.fsdp_utils.checkpoint import latest_checkpoint, read_reference
from slime.backends.fsdp_utils.hf_export import export_hf
from slime.backends.fsdp_utils.model import PolicyModel, decoder_layers, local_tensor
from slime.backends.fsdp_utils.router import RouterTap
from slime.backends.fsdp_utils.routing import RolloutRouting
from slime.backends.fsdp_utils.trainer import FSDPTrainer
from slime.backends.fsdp_utils.weights import AdapterWeights, ShardedWeights
from slime.modeling.routing_replay import RoutingReplay
from slime.training.batch import MicroBatch
from slime.training.losses import LossOutput, compute_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData


class FSDPTrainRayActor(PolicyRole, FSDPTrainer):
    """Trains the policy and serves its weights."""

    def _keep_initial_weights(self, with_ref: bool) -> None:
        self.weights = ShardedWeights(
            self.model, self.dtype, self.mesh, self.device, self.lora.scale if self.lora else 1.0
        )
        self.router = RouterTap(self.model.model, self.cp)
        super()._keep_initial_weights(with_ref)

    def _build_routing(self) -> RolloutRouting | None:
        args = self.args
        if not args.use_routing_replay and not args.use_rollout_routing_replay:
            return None
        replay = RoutingReplay(self.model.model, decoder_layers(self.model.model))
        return RolloutRouting(replay, args.use_rollout_routing_replay, self.cp)

    def _build_teacher(self, path: str) -> Teacher[PolicyModel]:
        model = self._load(path).requires_grad_(False)
        return Teacher(model, (local_tensor(p) for p in model.parameters()))

    def _read_reference(self) -> bool:
        return read_reference(latest_checkpoint(self.args.load, self.args.ckpt_step), self.model)

    # -- training -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _log_probs(
        self, data: RankData, prefix: str = "", model: PolicyModel | None = None, with_entropy: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        model = model or self.model
        routing = self._routing if prefix == "" else None
        log_probs: list[Any] = [None] * data.num_samples
        entropy: list[Any] = [None] * data.num_samples
        model.free_unsharded()
        for step, micro_batches in enumerate(data.steps):
            for index, samples in enumerate(micro_batches):
                batch = data.micro_batch(step, index, self.device)
                if routing is not None:
                    routing.before_log_probs(batch)
                log_probs_R, entropy_R, _ = self._forward(model, batch, with_entropy)
                if routing is not None:
                    routing.after_log_probs(batch, samples)
                for i, sample in enumerate(samples):
                    log_probs[sample] = batch.split(log_probs_R)[i]
                    if entropy_R is not None:
                        entropy[sample] = batch.split(entropy_R)[i]
        model.free_unsharded()
        return log_probs, entropy if with_entropy else None

    def _forward(self, model: PolicyModel, batch: MicroBatch, with_entropy: bool, with_logits: bool = False):
        args = self.args
        return model(
            batch,
            temperature=args.rollout_temperature,
            with_entropy=with_entropy,
            entropy_grad=args.entropy_coef != 0,
            chunk_size=args.log_probs_chunk_size,
            with_logits=with_logits,
        )

    def _gradients(self, data: RankData, step: int) -> dict[str, float]:
        self._kept: dict[int, torch.Tensor] = {}
        out = super()._gradients(data, step)
        if self._gives_old_log_probs(data):
            data.set_flat("log_probs", [self._kept[i] for i in range(data.num_samples)])
        return out

    def _loss(self, batch: MicroBatch, samples: list[int]) -> LossOutput:
        args = self.args
        if self._routing is not None:
            self._routing.before_training(batch, samples)
        with self.router.recording() as router_logits:
            log_probs_R, entropy_R, logits = self._forward(
                self.model,
                batch,
                with_entropy=args.loss_type == "policy_loss",
                with_logits=args.loss_type == "custom_loss",
            )
        self._kept.update(zip(samples, batch.split(log_probs_R.detach()), strict=True))
        reduce = make_reducer(batch, args.calculate_per_token_loss)
        loss, metrics = compute_loss(args, batch, log_probs_R, entropy_R, reduce, logits)
        if router_logits:
            balance = self.router.balance(router_logits, batch)
            share = reduce(torch.ones_like(batch.loss_masks))  # the micro-batch's part of the loss
            loss = loss + args.moe_aux_loss_coeff * share * balance.loss
            metrics |= {"moe_aux_loss": share * balance.loss.detach(), "moe_max_load": share * balance.max_load}
        return loss, metrics

    # -- weights ------------------------------------------------------------------------------------------------------

    def _adapters(self) -> AdapterWeights | None:
        return None if self.lora is None else AdapterWeights(self.weights, self.lora)

    def _export(self, path: str) -> None:
        export_hf(path, self.weights, self.args.hf_checkpoint, self.args.trust_remote_code)
