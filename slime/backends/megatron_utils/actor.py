"""The policy's Megatron rank."""

from __future__ import annotations

from typing import Any

import torch

from slime.backends.common.policy import PolicyRole
from slime.backends.common.teacher import Teacher
from slime.backends.megatron_utils import hooks
from slime.backends.megatron_utils.architecture import read_architecture
from slime.backends.megatron_utils.trainer import MegatronTrainer
from slime.training.batch import MicroBatch
from slime.training.losses import compute_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData
from slime.utils.checkpoint_files import is_hf_directory


class MegatronTrainRayActor(PolicyRole, MegatronTrainer):
    """Trains the policy and serves its weights."""

    def _forward_of(self, chunks, config, architecture):
        from slime.backends.megatron_utils.forward import Forward

        args = self.args
        return Forward(
            **self._rows(chunks, config, architecture),
            temperature=args.rollout_temperature,
            chunk_size=args.log_probs_chunk_size,
        )

    def _load_model(self, architecture, *args, **overrides):
        drafts = {"mtp_num_layers": architecture.mtp_layers} if self.args.enable_mtp_training else {}
        return super()._load_model(architecture, *args, **{**drafts, **overrides})

    def _keep_initial_weights(self, with_ref: bool) -> None:
        from slime.backends.megatron_utils.balance import Balancing

        args, moe_layers = self.args, sum(self.architecture.moe_layers)
        self._balance: Balancing | None = None
        if moe_layers:
            per_token = args.calculate_per_token_loss
            self._balance = Balancing(self.model, moe_layers, args.moe_aux_loss_coeff, per_token)
        super()._keep_initial_weights(with_ref)

    def _build_routing(self) -> Any:
        from slime.backends.megatron_utils.routing import RolloutRouting

        args = self.args
        if not args.use_routing_replay and not args.use_rollout_routing_replay:
            return None
        return RolloutRouting(self.model, args.use_rollout_routing_replay)

    def _build_teacher(self, path: str) -> Teacher:
        """In the policy's layout of ranks; a torch_dist checkpoint has the policy's architecture."""
        architecture = read_architecture(path) if is_hf_directory(path) else self.architecture
        step = self.args.opd_teacher_ckpt_step
        chunks, config = self._load_model(
            architecture, path, step, stock=True, moe_enable_routing_replay=False, mtp_num_layers=None
        )
        parameters = [p for chunk in chunks for p in chunk.requires_grad_(False).parameters()]
        return Teacher(self._forward_of(chunks, config, architecture), parameters)

    def _read_reference(self) -> bool:
        from slime.backends.megatron_utils.checkpoint import latest_checkpoint, load_reference

        return load_reference(latest_checkpoint(self.args.load, self.args.ckpt_step), self.model)

    # -- training -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _log_probs(
        self, data: RankData, prefix: str = "", model: Any = None, with_entropy: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        forward = model or self.forward
        hooks.before_log_prob(self.args, forward.chunks, prefix)
        batches, order = self._all_batches(data)
        arounds = []
        if self._routing is not None and prefix == "":
            arounds.append(self._routing.around_log_probs(data))

        def keep(index: int, batch: MicroBatch, log_probs_R, entropy_R):
            return log_probs_R.new_zeros(()), (batch.split(log_probs_R), with_entropy and batch.split(entropy_R))

        kept = forward(batches, keep, backward=False, with_entropy=with_entropy, arounds=arounds)
        log_probs = self._by_sample(data, order, [value for first, _ in kept for value in first])
        if not with_entropy:
            return log_probs, None
        return log_probs, self._by_sample(data, order, [value for _, second in kept for value in second])

    def _backward(self, batches: list[MicroBatch], data: RankData, step: int) -> list[dict[str, torch.Tensor]]:
        args = self.args
        arounds = []
        if self._routing is not None:
            arounds.append(self._routing.around_training(step))
        if self._balance is not None:
            arounds.append(self._balance.around_training())

        def result(index: int, batch: MicroBatch, log_probs_R, entropy_R, *more):
            reduce = make_reducer(batch, args.calculate_per_token_loss)
            logits = more[0] if args.loss_type == "custom_loss" else None
            loss, metrics = compute_loss(args, batch, log_probs_R, entropy_R, reduce, logits)
            if args.enable_mtp_training:
                drafts = -torch.stack([reduce(layer_R) for layer_R in more[-1]]).mean()
                loss = loss + args.mtp_loss_scaling_factor * drafts
                metrics["mtp_loss"] = drafts.detach()
            return loss, (metrics, batch.split(log_probs_R.detach()))

        kept = self.forward(
            batches,
            result,
            backward=True,
            with_entropy=args.loss_type == "policy_loss",
            entropy_grad=args.entropy_coef != 0,
            with_logits=args.loss_type == "custom_loss",
            with_drafts=args.enable_mtp_training,
            arounds=arounds,
        )
        if self._balance is not None:
            balance = self._balance.metrics()
            for (metrics, _), more in zip(kept, balance, strict=False):  # only the last stage keeps any
                metrics |= more
        if self._gives_old_log_probs(data):
            order = [sample for micro_batch in data.steps[step] for sample in micro_batch]
            data.set_flat("log_probs", self._by_sample(data, order, [value for _, parts in kept for value in parts]))
        return [metrics for metrics, _ in kept]

    def _is_first_of_data_rank(self) -> bool:
        from megatron.core import parallel_state

        tensor = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        return super()._is_first_of_data_rank() and tensor == 0 and stage == 0

    def _export(self, path: str) -> None:
        from slime.backends.megatron_utils.hf_export import export_hf

        export_hf(path, self.weights, self.args.hf_checkpoint)
