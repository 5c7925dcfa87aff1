"""What the synchronous and the asynchronous loop share: how a run is set up, and the steps that it is made of."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from slime.arguments.validation import memory
from slime.observability.staleness import staleness_metrics

if TYPE_CHECKING:
    import ray

    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.rollout import GenerateResult
    from slime.ray.session import Session


class Loop:
    """Engines, trainers and data of one run. Each step waits for its end; a loop decides the order.

    Attributes: `manager` (the rollout manager), `trainers` (None under --debug-rollout-only), `start` (the
    first rollout id), `args` (with `num_rollout` known), `weight_version` (what the engines serve; None before the
    first sync).
    """

    def __init__(self, args: Namespace, session: Session) -> None:
        from slime.ray.placement_group import create_placement_groups, create_training_models
        from slime.ray.recovery import EngineRecovery
        from slime.ray.rollout import create_rollout_manager

        self.session = session
        self._print_memory_plan(args)
        self.phase = session.metrics.phase
        self.weight_version: int | None = None
        slices = create_placement_groups(args)
        self.manager = create_rollout_manager(args, slices["rollout"], session)
        wait = session.wait
        with self.phase("starting engines and trainers"):
            self.trainers = create_training_models(args, slices, session)
            # Known from now on, so that a start that hangs can be explained.
            session.track_memory(wait(self.manager.pids.remote()))
            wait(self.manager.start.remote())
            session.guard(self.manager.wait_for_death.remote())
            self.per_epoch = wait(self.manager.get_num_rollout_per_epoch.remote())
            self.args = args = with_num_rollout(args, self.per_epoch)
            if args.offload_rollout:
                wait(self.manager.offload.remote())
            self.start = args.start_rollout_id or 0
            session.track_memory(wait(self.manager.pids.remote()))
            if self.trainers is not None:
                session.track_memory(self.trainers.pids())
                self.start = self.trainers.init(args)
                self.actor.connect(self.manager)
                self.recovery = EngineRecovery(args, session, self.manager, self.actor)
            wait(self.manager.load.remote(self.start - 1))

    def _print_memory_plan(self, args: Namespace) -> None:
        plan = memory.plan_of(args, memory.gpu_memory()) if args.device == "cuda" else None
        if plan is not None:
            self.session.console.line(plan.text())

    @property
    def actor(self) -> RayTrainGroup:
        """The policy's ranks."""
        return self.trainers.actor

    @property
    def rollout_ids(self) -> range:
        return range(self.start, self.args.num_rollout)

    def begin(self) -> None:
        """First sync, its check if asked for, and the evaluation before training."""
        args = self.args
        self.sync_weights()
        if args.check_weight_update_equal and self.weight_version is not None:
            self.session.wait(self.actor.call("check_weights"))
        if self.evaluates and (args.num_rollout == 0 or (self.start == 0 and not args.skip_eval_before_train)):
            self.evaluate(self.start)

    # -- generation and training --------------------------------------------------------------------------------------

    def generate(self, rollout_id: int) -> ray.ObjectRef:
        """Start a rollout; `collect` waits for it."""
        return self.manager.generate.remote(rollout_id)

    def collect(self, rollout_id: int, pending: ray.ObjectRef) -> GenerateResult:
        """The rollout that `generate` started, complete."""
        with self.phase(f"{self._progress(rollout_id)}: generating"):
            return self.session.wait(pending, progress=self.manager.progress.remote)

    def train(self, rollout_id: int, rollout: GenerateResult) -> dict[str, Any]:
        """Train on a rollout; the metrics of both."""
        metrics = rollout.metrics | staleness_metrics(rollout.token_versions, self.weight_version)
        if self.trainers is None:
            return metrics
        with self.phase(f"{self._progress(rollout_id)}: training"):
            metrics |= self.trainers.train(rollout_id, rollout.refs)
        self.session.run_dir.record_trained(rollout_id, rollout.sample_indices)
        return metrics

    def sync_weights(self) -> dict[str, float]:
        """The trainers' weights to the engines, which serve them as the next version."""
        args, wait = self.args, self.session.wait
        if args.debug_train_only or args.debug_rollout_only:
            return {}
        with self.phase("updating weights"):
            metrics = wait(self.actor.call("offload", keep_parameters=True))[0] if args.offload_train else {}
            if args.offload_rollout:
                wait(self.manager.onload.remote(["weights"]))
            metrics |= self.recovery.update_weights()
            if args.offload_train:
                metrics["perf/sleep_time"] += wait(self.actor.call("offload"))[0]["perf/sleep_time"]
            if args.offload_rollout:
                wait(self.manager.onload.remote(["cuda_graph", "kv_cache"]))
        self.weight_version = int(metrics["train/weight_version"])
        return metrics

    def _progress(self, rollout_id: int) -> str:
        return f"rollout {rollout_id + 1}/{self.args.num_rollout}"

    # -- checkpoints, evaluation, metrics -----------------------------------------------------------------------------

    def saves_after(self, rollout_id: int) -> bool:
        """Whether a checkpoint follows this rollout: every `--save-interval`, at each epoch's end, after the last."""
        if self.trainers is None or self.args.save is None:
            return False
        done = rollout_id + 1
        intervals = [n for n in (self.args.save_interval, self.per_epoch) if n]
        return done == self.args.num_rollout or any(done % n == 0 for n in intervals)

    def save_data(self, rollout_id: int) -> None:
        """The position in the data, with the buffer. Always before the model: the model's tracker file, written last,
        is what makes the checkpoint count."""
        with self.phase("saving"):
            self.session.wait(self.manager.save.remote(rollout_id))

    def save_model(self, rollout_id: int) -> dict[str, float]:
        with self.phase("saving"):
            return self.trainers.save_model(rollout_id)

    @property
    def evaluates(self) -> bool:
        return self.args.eval_interval is not None and not self.args.debug_train_only

    def evaluate(self, rollouts_done: int) -> None:
        """Evaluate the weights that the engines hold, and log it."""
        with self.phase("evaluating"):
            metrics = self.session.wait(self.manager.eval.remote(rollouts_done))
        self.session.metrics.log_eval(rollouts_done, metrics)

    def finish(self, rollout_id: int, metrics: dict[str, Any]) -> None:
        """Log a rollout and, when it is time, evaluate."""
        metrics = metrics | self.session.memory_metrics()
        self.session.metrics.log_rollout(rollout_id, self.args.num_rollout, metrics)
        if self.evaluates and (rollout_id + 1) % self.args.eval_interval == 0:
            self.evaluate(rollout_id + 1)


def with_num_rollout(args: Namespace, per_epoch: int | None) -> Namespace:
    """`--num-epoch` as a number of rollouts, known once the data is open; before trainers read it."""
    if args.num_rollout is not None:
        return args
    return Namespace(**{**vars(args), "num_rollout": args.num_epoch * per_epoch})
