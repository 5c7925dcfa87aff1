"""The reward of the soak: late now and then, and for some samples, once, never."""

import asyncio
from pathlib import Path


async def sometimes_hangs(args, sample, **kwargs):
    """Share of even token ids. Hangs when there is a file `hang-{index}` beside the run directory, and removes it."""
    mark = Path(args.run_dir).parent / f"hang-{sample.index}"
    if mark.exists():
        mark.unlink()
        await asyncio.sleep(3600)
    await asyncio.sleep(0.05 * (sample.index % 7))
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token % 2 == 0 for token in response) / max(1, len(response))
