"""The asynchronous loop: the next rollout is generated while this one is trained on.

Engines and trainers have devices of their own. The default rollout function generates one rollout ahead, which ends
before the weights change: its samples are one version old when they are trained on. A rollout function that generates
in the background (`slime.rollout.fully_async_rollout`) never stops; its weights change in mid-request.
`slime train-async ...` and `python train_async.py ...` both come here.
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
    ahead = not session.wait(loop.manager.generates_in_background.remote())
    pending = None
    for rollout_id in loop.rollout_ids:
        rollout = loop.collect(rollout_id, loop.generate(rollout_id) if pending is None else pending)
        saves = loop.saves_after(rollout_id)
        if saves:
            loop.save_data(rollout_id)  # now: the next rollout takes its prompts from the same source
        more = rollout_id + 1 in loop.rollout_ids
        pending = loop.generate(rollout_id + 1) if ahead and more else None
        metrics = loop.train(rollout_id, rollout)
        if saves:
            metrics |= loop.save_model(rollout_id)
        if (rollout_id + 1) % args.update_weights_interval == 0:
            if pending is not None:
                loop.collect(rollout_id + 1, pending)
            metrics |= loop.sync_weights()
        loop.finish(rollout_id, metrics)


def main(argv: list[str] | None = None) -> int:
    """Parse, run, end all processes; returns the exit code (130 after Ctrl-C, 143 after SIGTERM)."""
    args = parse_args(argv, asynchronous=True)
    from slime.ray.session import Session  # only now: a wrong configuration is reported without importing ray

    with Session(args) as session:
        train(args, session)
    return session.exit_code


if __name__ == "__main__":
    sys.exit(main())
