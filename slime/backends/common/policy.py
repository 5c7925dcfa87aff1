"""What the policy's rank does, whatever its backend: log-probs, advantages, the loss, its weights to the engines."""

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
from slime.backends.common.teacher import Teacher
from slime.backends.common.trainer import Trainer
from slime.training.advantages import compute_advantages
from slime.training.hooks import call_data_postprocess
from slime.training.rollout_data import RankData
from slime.weight_sync.connect import EngineConnections
from slime.weight_sync.updater import WeightUpdater


class PolicyRole(Trainer):
    """Trains the policy and serves its weights.

    The backend's `_build` sets `weights` and `trained` before it calls `_keep_initial_weights`.
    """

    weights: Any
    """Names the model's tensors for the engines, and gathers them."""
    trained: HostCopy
    """A host copy of the parameters that training changes."""

    def _keep_initial_weights(self, with_ref: bool) -> None:
        self.updater: WeightUpdater | None = None
        self._connections: EngineConnections | None = None
        self._sent_at: int | None = None  # optimizer steps done at the last update
        self._sent = SentWeights(self.trained)
        self.reference: HostCopy | None = None
        if with_ref:
            # Parameters that are not trained are the reference's, too.
            self.reference = HostCopy(self.trained.tensors)
            self.reference.save()
        self._routing = self._build_routing()
        self.teacher: Teacher | None = None
        if self.args.opd_type == "trainer":
            self.teacher = self._build_teacher(self.args.opd_teacher_load)

    def _build_routing(self) -> Any:
        """Where the experts' choices are kept and replayed; None without routing replay. It has `forget()`."""
        raise NotImplementedError

    def _build_teacher(self, path: str) -> Teacher:
        raise NotImplementedError

    def _resume(self) -> bool:
        resumed = super()._resume()
        if resumed and self.reference is not None and not self.args.finetune:
            self.trained.save()
            if self._read_reference():
                self.reference.save()
                self.trained.load()
        return resumed

    def _read_reference(self) -> bool:
        """Read the reference that the checkpoint of `--load` holds into the model; whether it holds one."""
        raise NotImplementedError

    def _reference_to_save(self) -> Callable[[], AbstractContextManager] | None:
        if self.reference is None or self.args.ref_update_interval is None:
            return None
        return partial(swapped, self.trained, self.reference)

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
            with self.timer("ref_log_probs"), swapped(self.trained, self.reference):
                data.set_flat("ref_log_probs", self._log_probs(data, "ref_")[0])
        if self.teacher is not None:
            with self.timer("teacher_log_probs"), self.teacher.on_device() as teacher:
                data.set_flat("teacher_log_probs", self._log_probs(data, "teacher_", teacher)[0])
        if old_policy is not None and "log_probs" not in data:
            with self.timer("log_probs"), swapped(self.trained, old_policy):
                data.set_flat("log_probs", self._log_probs(data)[0])
        elif "log_probs" not in data and not self._skips_log_prob_pass(data):
            with self.timer("log_probs"):
                log_probs, entropy = self._log_probs(data, with_entropy=args.use_rollout_entropy)
            data.set_flat("log_probs", log_probs)
            if entropy is not None:
                data.set_flat("entropy", entropy)

    def _log_probs(
        self, data: RankData, prefix: str = "", model: Any = None, with_entropy: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """Per-sample log-probs (and entropy), each (response_length,), in training's micro-batches; no gradients.

        Args:
            prefix: whose weights they are: "" of the policy, "ref_" or "teacher_".
            model: another than the trained one, as its `Teacher` lends it.
        """
        raise NotImplementedError

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
        measured = args.get_mismatch_metrics or args.true_on_policy_mode
        return len(data.steps) == 1 or (args.use_rollout_logprobs and not measured)

    def _gives_old_log_probs(self, data: RankData) -> bool:
        """Whether the log-probs of training are those of the old policy, which nothing has computed before."""
        return "log_probs" not in data and self.args.loss_type == "policy_loss" and len(data.steps) == 1

    def _dump_train_data(self, rollout_id: int, data: RankData) -> None:
        if self.args.save_debug_train_data is None or not self._is_first_of_data_rank():
            return
        path = Path(self.args.save_debug_train_data.format(rollout_id=rollout_id, rank=self.rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {key: data[key] for key in list(data.keys())}
        torch.save({"rollout_id": rollout_id, "rank": self.rank, "rollout_data": content}, path)

    def _is_first_of_data_rank(self) -> bool:
        """Of the ranks that share a part of the rollout, one writes it down."""
        return self.cp.rank == 0

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
                self.args, self.weights, self.rank, self.device, self.role, self.node_address(), self._adapters()
            )
        return self._connections.connect(urls, engine_slots, version)

    def _adapters(self) -> Any:
        """What names and gathers the tensors of LoRA adapters alone; None without LoRA."""
        return None

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
        if self.updater is not None:
            self.progress.weight_version = self.updater.version
        super()._write(rollout_id)
        if self.args.save_hf is not None:
            self._export(self.args.save_hf.format(rollout_id=rollout_id))

    def _export(self, path: str) -> None:
        """Write the weights as a Hugging Face directory; collective."""
        raise NotImplementedError

    def dispose(self) -> None:
        if self.updater is not None:
            self.updater.close()
            self.updater = None
        super().dispose()
