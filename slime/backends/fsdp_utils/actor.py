"""The policy's trainer rank: log-probs, advantages, the policy's loss, and its weights on their way to the engines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.common import checks
from slime.backends.common.host_memory import HostCopy, swapped
from slime.backends.common.metrics import rollout_means
from slime.backends.common.sent_weights import SentWeights
from slime.backends.fsdp_utils.checkpoint import latest_checkpoint, read_reference
from slime.backends.fsdp_utils.hf_export import export_hf
from slime.backends.fsdp_utils.model import PolicyModel, decoder_layers
from slime.backends.fsdp_utils.router import RouterTap
from slime.backends.fsdp_utils.routing import RolloutRouting
from slime.backends.fsdp_utils.teacher import Teacher
from slime.backends.fsdp_utils.trainer import FSDPTrainer
from slime.backends.fsdp_utils.weights import AdapterWeights, ShardedWeights
from slime.modeling.routing_replay import RoutingReplay
from slime.training.advantages import compute_advantages
from slime.training.batch import MicroBatch
from slime.training.hooks import call_data_postprocess
from slime.training.losses import LossOutput, compute_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData
from slime.weight_sync.connect import EngineConnections
from slime.weight_sync.updater import WeightUpdater


class FSDPTrainRayActor(FSDPTrainer):
    """Trains the policy and serves its weights."""

    def _copy_initial_weights(self, with_ref: bool) -> None:
        self.weights = ShardedWeights(
            self.model, self.dtype, self.mesh, self.device, self.lora.scale if self.lora else 1.0
        )
        self.updater: WeightUpdater | None = None
        self._connections: EngineConnections | None = None
        self._sent_at: int | None = None  # optimizer steps done at the last update
        self.reference: HostCopy | None = None
        if with_ref:
            # Parameters that are not trained are the reference's, too.
            self.reference = HostCopy(self._trained.tensors)
            self.reference.save()
        self.router = RouterTap(self.model.model)
        self._sent = SentWeights(self._trained)
        self._routing: RolloutRouting | None = None
        if self.args.use_routing_replay or self.args.use_rollout_routing_replay:
            replay = RoutingReplay(self.model.model, decoder_layers(self.model.model))
            self._routing = RolloutRouting(replay, self.args.use_rollout_routing_replay, self.cp)
        self.teacher: Teacher | None = None
        if self.args.opd_type == "trainer":
            self.teacher = Teacher(self._build(self.args.opd_teacher_load), self.device, self.args.fsdp_cpu_offload)

    def _resume(self) -> bool:
        resumed = super()._resume()
        if resumed and self.reference is not None and not self.args.finetune:
            self._trained.save()
            if read_reference(latest_checkpoint(self.args.load, self.args.ckpt_step), self.model):
                self.reference.save()
                self._trained.load()
        return resumed

    def _reference_to_save(self) -> Callable[[], AbstractContextManager] | None:
        if self.reference is None or self.args.ref_update_interval is None:
            return None
        return partial(swapped, self._trained, self.reference)

    # -- training -----------------------------------------------------------------------------------------------------

    def train_on(self, rollout_id: int, data: RankData) -> dict[str, float]:
        """Log-probs, advantages, optimizer steps; metrics of the global batch, the same on every rank."""
        args = self.args
        if args.reset_optimizer_states:
            self.optimizer.reset_state()
        old_policy = self._old_policy(data)
        self._prepare(data, old_policy)
        if args.rollout_data_postprocess_path:
            call_data_postprocess(args, rollout_id, data)
        self._dump_train_data(rollout_id, data)
        with self.timer("actor_train"):
            self._kept: dict[int, torch.Tensor] = {}
            steps = [self._train_step(data, step) for step in range(len(data.steps))]
        if self._routing is not None:
            self._routing.forget()
        if "log_probs" not in data and args.loss_type == "policy_loss" and len(data.steps) == 1:
            data.set_flat("log_probs", [self._kept[i] for i in range(data.num_samples)])
        if args.ref_update_interval is not None and (rollout_id + 1) % args.ref_update_interval == 0:
            self.reference.save()
        if args.true_on_policy_mode:
            checks.check_on_policy(steps)
        if args.ci_test and old_policy is None:
            # The reference goes its own way through experts that the engine chose for the policy.
            fresh = rollout_id == 0 and not self._resumed and not args.use_rollout_routing_replay
            checks.check_first_step(args, steps[0], data, fresh_reference=fresh)
        return self._over_steps(steps) | rollout_means(data, self.dp_group, self.device)

    def _prepare(self, data: RankData, old_policy: HostCopy | None) -> None:
        """Log-probs and advantages."""
        args = self.args
        self._compute_log_probs(data, old_policy)
        if args.compute_advantages_and_returns and args.loss_type != "sft_loss":
            compute_advantages(args, data, self.dp_group)

    def _compute_log_probs(self, data: RankData, old_policy: HostCopy | None) -> None:
        """Of the reference, the teacher and the old policy, where they are needed and not there yet."""
        args = self.args
        if self.reference is not None and "ref_log_probs" not in data:
            with self.timer("ref_log_probs"), swapped(self._trained, self.reference):
                data.set_flat("ref_log_probs", self._log_probs(data, self.model)[0])
        if self.teacher is not None:
            with self.timer("teacher_log_probs"), self.teacher.on_device() as teacher:
                data.set_flat("teacher_log_probs", self._log_probs(data, teacher)[0])
        if old_policy is not None and "log_probs" not in data:
            with self.timer("log_probs"), swapped(self._trained, old_policy):
                data.set_flat("log_probs", self._log_probs(data, self.model, routing=self._routing)[0])
        elif "log_probs" not in data and not self._skips_log_prob_pass(data):
            with self.timer("log_probs"):
                log_probs, entropy = self._log_probs(data, self.model, args.use_rollout_entropy, self._routing)
            data.set_flat("log_probs", log_probs)
            if entropy is not None:
                data.set_flat("entropy", entropy)

    def compute_log_probs(self, refs: list[Any]) -> dict[str, list[Any]]:
        """`log_probs` and `ref_log_probs` of this rank's part, an array per sample: what the critic needs for KL."""
        data = self._receive(refs)
        self._compute_log_probs(data, self._old_policy(data))
        return {key: [v.cpu().numpy() for v in data[key]] for key in ("log_probs", "ref_log_probs")}

    def _old_policy(self, data: RankData) -> HostCopy | None:
        """`--keep-old-actor`: the weights that generated this rollout, if they are not the current ones."""
        if not self.args.keep_old_actor or not self._sent:
            return None
        versions = torch.tensor(max(data.get("weight_version", [0]), default=0), device=self.device)
        dist.all_reduce(versions, dist.ReduceOp.MAX)
        return self._sent.of_version(int(versions), self.optimizer.steps_done)

    def _skips_log_prob_pass(self, data: RankData) -> bool:
        """Whether nothing needs log-probs from before the update.

        In the only step of a rollout the old policy is the current one, so training itself gives them.
        """
        args = self.args
        if args.loss_type == "sft_loss":
            return True
        if args.loss_type == "custom_loss" or args.kl_coef != 0:
            return False
        if args.use_rollout_entropy or args.opd_type is not None:
            return False
        if args.use_routing_replay and not args.use_rollout_routing_replay:
            return False
        if args.custom_advantage_function_path or args.rollout_data_postprocess_path:
            return False
        # The mismatch is measured between the engine and the weights before the update.
        return len(data.steps) == 1 or (args.use_rollout_logprobs and not args.get_mismatch_metrics)

    @torch.no_grad()
    def _log_probs(
        self,
        data: RankData,
        model: PolicyModel,
        with_entropy: bool = False,
        routing: RolloutRouting | None = None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Per-sample log-probs (and entropy) of the weights that `model` holds now, in training's micro-batches."""
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
            balance = self.router.balance(router_logits)
            # The micro-batch's part of the loss; context-parallel ranks have their own tokens and add up.
            share = reduce(torch.ones_like(batch.loss_masks))
            loss = loss + args.moe_aux_loss_coeff / self.cp.size * share * balance.loss
            metrics |= {"moe_aux_loss": share * balance.loss.detach(), "moe_max_load": share * balance.max_load}
        return loss, metrics

    def _dump_train_data(self, rollout_id: int, data: RankData) -> None:
        if self.args.save_debug_train_data is None or self.cp.rank != 0:
            return
        path = Path(self.args.save_debug_train_data.format(rollout_id=rollout_id, rank=self.rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {key: data[key] for key in list(data.keys())}
        torch.save({"rollout_id": rollout_id, "rank": self.rank, "rollout_data": content}, path)

    # -- weights ------------------------------------------------------------------------------------------------------

    def set_rollout_engines(self, urls: list[str], engine_slots: list[list[int]]) -> None:
        version = self.progress.weight_version if self.updater is None else self.updater.version
        if self.updater is not None:
            self.updater.close()
        self.updater = self._updater_for(urls, engine_slots, version)

    def sync_new_engines(self, urls: list[str], engine_slots: list[list[int]]) -> None:
        updater = self._connected()
        if self.optimizer.steps_done != self._sent_at:
            updater.version += 1  # newer weights than the others serve must not carry their version
        new = self._updater_for(urls, engine_slots, updater.version - 1)
        try:
            self._with_parameters(new.update)
        finally:
            new.close()
        if self.args.keep_old_actor:
            self._sent.remember(updater.version, self.optimizer.steps_done)

    def _updater_for(self, urls: list[str], engine_slots: list[list[int]], version: int) -> WeightUpdater:
        if self._connections is None:
            adapters = None if self.lora is None else AdapterWeights(self.weights, self.lora)
            self._connections = EngineConnections(
                self.args, self.weights, self.rank, self.device, self.role, self.node_address(), adapters
            )
        return self._connections.connect(urls, engine_slots, version)

    def _write(self, rollout_id: int) -> None:
        args = self.args
        if self.updater is not None:
            self.progress.weight_version = self.updater.version
        super()._write(rollout_id)
        if args.save_hf is not None:
            path = args.save_hf.format(rollout_id=rollout_id)
            export_hf(path, self.weights, args.hf_checkpoint, args.trust_remote_code)

    def update_weights(self) -> dict[str, float] | None:
        return self._timed("update_weights", lambda: self._with_parameters(self._send))

    def _send(self) -> dict[str, float]:
        updater = self._connected()
        metrics = updater.update()
        self._sent_at = self.optimizer.steps_done
        if self.args.keep_old_actor:
            self._sent.remember(updater.version, self.optimizer.steps_done)
        return metrics

    def check_weights(self) -> None:
        self._with_parameters(self._connected().check)

    def _connected(self) -> WeightUpdater:
        if self.updater is None:
            raise RuntimeError("set_rollout_engines must be called before weights can be sent")
        return self.updater

    def _with_parameters(self, action: Callable[[], Any]) -> Any:
        """Run what only reads the parameters with them on the device, even while they are offloaded."""
        if not self._parameters_released:
            return action()
        self._restore_parameters()
        try:
            return action()
        finally:
            self._trained.drop()
            self._frozen.drop()
            torch.cuda.empty_cache()

    def dispose(self) -> None:
        if self.updater is not None:
            self.updater.close()
            self.updater = None
        super().dispose()
