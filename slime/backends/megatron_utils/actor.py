"""The policy's Megatron rank: log-probs, advantages, the policy's loss, its weights on their way to the engines."""

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
from slime.backends.megatron_utils import hooks
from slime.backends.megatron_utils.trainer import MegatronTrainer
from slime.training.advantages import compute_advantages
from slime.training.batch import MicroBatch
from slime.training.hooks import call_data_postprocess
from slime.training.losses import compute_loss
from slime.training.reducers import make_reducer
from slime.training.rollout_data import RankData
from slime.weight_sync.connect import EngineConnections
from slime.weight_sync.updater import WeightUpdater


class MegatronTrainRayActor(MegatronTrainer):
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

    def _copy_initial_weights(self, with_ref: bool) -> None:
        from slime.backends.megatron_utils.routing import RolloutRouting
        from slime.backends.megatron_utils.teacher import Teacher

        args = self.args
        self.updater: WeightUpdater | None = None
        self._connections: EngineConnections | None = None
        self._sent_at: int | None = None  # optimizer steps done at the last update
        self.reference: HostCopy | None = None
        if with_ref:
            # The trained model starts as the reference; a checkpoint is read into it only afterwards.
            self.reference = HostCopy(self._params.tensors)
            self.reference.save()
        self._sent = SentWeights(self._params)
        self._routing: RolloutRouting | None = None
        if args.use_routing_replay or args.use_rollout_routing_replay:
            self._routing = RolloutRouting(self.model, args.use_rollout_routing_replay)
        self.teacher: Teacher | None = None
        if args.opd_type == "trainer":
            self.teacher = Teacher(*self._load_teacher(args.opd_teacher_load), self.device)

    def _load_teacher(self, path: str) -> tuple[list[Any], Any]:
        """(chunks, forward) of the model at `path`, whose architecture may be another, in the policy's layout."""
        from slime.backends.megatron_utils.architecture import read_architecture

        architecture = read_architecture(path)
        chunks, config = self._load_model(
            architecture, path, stock=True, moe_enable_routing_replay=False, mtp_num_layers=None
        )
        return chunks, self._forward_of(chunks, config, architecture)

    def _resume(self) -> bool:
        from slime.backends.megatron_utils.checkpoint import latest_checkpoint, load_reference

        resumed = super()._resume()
        if resumed and self.reference is not None and not self.args.finetune:
            self._params.save()
            if load_reference(latest_checkpoint(self.args.load, self.args.ckpt_step), self.model):
                self.reference.save()
                self._params.load()
        return resumed

    def _reference_to_save(self) -> Callable[[], AbstractContextManager] | None:
        if self.reference is None or self.args.ref_update_interval is None:
            return None
        return partial(swapped, self._params, self.reference)

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
        steps = self._train_steps(rollout_id, data)
        if self._routing is not None:
            self._routing.forget()
        if args.ref_update_interval is not None and (rollout_id + 1) % args.ref_update_interval == 0:
            self.reference.save()
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
            with self.timer("ref_log_probs"), swapped(self._params, self.reference):
                data.set_flat("ref_log_probs", self._log_probs(data, "ref_")[0])
        if self.teacher is not None:
            with self.timer("teacher_log_probs"), self.teacher.on_device() as forward:
                data.set_flat("teacher_log_probs", self._log_probs(data, "teacher_", forward)[0])
        if old_policy is not None and "log_probs" not in data:
            with self.timer("log_probs"), swapped(self._params, old_policy):
                data.set_flat("log_probs", self._log_probs(data)[0])
        elif "log_probs" not in data and not self._skips_log_prob_pass(data):
            with self.timer("log_probs"):
                log_probs, entropy = self._log_probs(data, with_entropy=args.use_rollout_entropy)
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
        self, data: RankData, prefix: str = "", forward: Any = None, with_entropy: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Per-sample log-probs (and entropy) of the weights that the model holds now, in training's micro-batches.

        Args:
            prefix: "" for the policy, else whose weights they are.
            forward: of another model than the policy's.
        """
        forward = forward or self.forward
        hooks.before_log_prob(self.args, forward.chunks, prefix)
        batches, order = self._all_batches(data)
        options = {}
        if self._routing is not None and prefix == "":
            options["around"] = self._routing.around_log_probs(data)

        def keep(index: int, batch: MicroBatch, log_probs_R, entropy_R):
            return log_probs_R.new_zeros(()), (batch.split(log_probs_R), with_entropy and batch.split(entropy_R))

        kept = forward(batches, keep, backward=False, with_entropy=with_entropy, **options)
        log_probs = self._by_sample(data, order, [value for first, _ in kept for value in first])
        if not with_entropy:
            return log_probs, None
        return log_probs, self._by_sample(data, order, [value for _, second in kept for value in second])

    def _backward(self, batches: list[MicroBatch], data: RankData, step: int) -> list[dict[str, torch.Tensor]]:
        args = self.args
        options = {} if self._routing is None else {"around": self._routing.around_training(step)}

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
            **options,
        )
        if "log_probs" not in data and args.loss_type == "policy_loss" and len(data.steps) == 1:
            order = [sample for micro_batch in data.steps[step] for sample in micro_batch]
            data.set_flat("log_probs", self._by_sample(data, order, [value for _, parts in kept for value in parts]))
        return [metrics for metrics, _ in kept]

    def _dump_train_data(self, rollout_id: int, data: RankData) -> None:
        if self.args.save_debug_train_data is None or not self._first_of_data_rank():
            return
        path = Path(self.args.save_debug_train_data.format(rollout_id=rollout_id, rank=self.rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {key: data[key] for key in list(data.keys())}
        torch.save({"rollout_id": rollout_id, "rank": self.rank, "rollout_data": content}, path)

    def _first_of_data_rank(self) -> bool:
        """Of the ranks that share a part of the rollout, this one writes it down."""
        from megatron.core import parallel_state

        tensor = parallel_state.get_tensor_model_parallel_rank()
        return tensor == 0 and self.cp.rank == 0 and parallel_state.get_pipeline_model_parallel_rank() == 0

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

        def send() -> None:
            new.update()
            self._remember_sent(updater.version)

        try:
            self.memory.with_parameters(send)
        finally:
            new.close()

    def _updater_for(self, urls: list[str], engine_slots: list[list[int]], version: int) -> WeightUpdater:
        if self._connections is None:
            self._connections = EngineConnections(
                self.args, self.weights, self.rank, self.device, self.role, self.node_address()
            )
        return self._connections.connect(urls, engine_slots, version)

    def update_weights(self) -> dict[str, float] | None:
        return self._timed("update_weights", lambda: self.memory.with_parameters(self._send))

    def _send(self) -> dict[str, float]:
        updater = self._connected()
        metrics = updater.update()
        self._sent_at = self.optimizer.steps_done
        self._remember_sent(updater.version)
        return metrics

    def _remember_sent(self, version: int) -> None:
        if self.args.keep_old_actor:
            self._sent.remember(version, self.optimizer.steps_done)

    def check_weights(self) -> None:
        self.memory.with_parameters(self._connected().check)

    def _connected(self) -> WeightUpdater:
        if self.updater is None:
            raise RuntimeError("set_rollout_engines must be called before weights can be sent")
        return self.updater

    def _write(self, rollout_id: int) -> None:
        from slime.backends.megatron_utils.hf_export import export_hf

        args = self.args
        if self.updater is not None:
            self.progress.weight_version = self.updater.version
        super()._write(rollout_id)
        if args.save_hf is not None:
            export_hf(args.save_hf.format(rollout_id=rollout_id), self.weights, args.hf_checkpoint)

    def dispose(self) -> None:
        if self.updater is not None:
            self.updater.close()
            self.updater = None
        super().dispose()
