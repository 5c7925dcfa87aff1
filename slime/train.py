"""The synchronous loop: generate, train, push the weights, again.

The same on two CPU cores and on a cluster; colocated (trainers and engines take turns on the same devices) or
disaggregated. `slime train ...` and `python train.py ...` both come here.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from slime.utils.arguments import parse_args

if TYPE_CHECKING:
    from slime.ray.session import Session


def train(args: Namespace, session: Session) -> None:
    """Run the whole training that `args` describe."""
    from slime.loop import Loop

    loop = Loop(args, session)
    loop.begin()
    for rollout_id in loop.rollout_ids:
        rollout = loop.collect(rollout_id, loop.generate(rollout_id))
        if args.offload_rollout:
            session.wait(loop.manager.offload.remote())
        metrics = loop.train(rollout_id, rollout)
        if loop.saves_after(rollout_id):
            loop.save_data(rollout_id)
            metrics |= loop.save_model(rollout_id)
        metrics |= loop.sync_weights()
        loop.finish(rollout_id, metrics)


def main(argv: list[str] | None = None) -> int:
    """Parse, run, end all processes; returns the exit code (130 after Ctrl-C, 143 after SIGTERM)."""
    args = parse_args(argv)
    from slime.ray.session import Session  # only now: a wrong configuration is reported without importing ray

    with Session(args) as session:
        train(args, session)
    return session.exit_code


if __name__ == "__main__":
    sys.exit(main())
