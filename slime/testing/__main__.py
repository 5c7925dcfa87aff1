"""`slime test-hooks --custom-rm-path my.module.reward ...`: the contracts of user functions, by the flags of a run."""

from __future__ import annotations

import importlib.util
import sys


def main(argv: list[str] | None = None) -> int:
    """Flags of hooks become contracts, `--samples DUMP` is the rollout dump to use, the rest goes to pytest."""
    argv = sys.argv[1:] if argv is None else argv
    if importlib.util.find_spec("pytest") is None:
        print('slime test-hooks needs pytest: pip install pytest, or "slime[dev]"', file=sys.stderr)
        return 2
    import pytest

    from slime.testing import contracts, plugin

    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__, "\nhooks:", *(f"  {plugin.flag_of(hook)}" for hook in contracts.CONTRACTS), sep="\n")
        return 0 if argv else 2
    options: list[str] = []
    words = iter(argv)
    for word in words:
        hook = plugin.hook_of(word)
        if word.startswith("--") and hook in contracts.CONTRACTS:
            options += ["--contract", f"{hook}={next(words, '')}"]
        elif word == "--samples":
            options += ["--contract-samples", next(words, "")]
        else:
            options.append(word)
    command = ["--pyargs", "slime.testing.contracts", "-q", "-p", "no:cacheprovider", *options]
    return int(pytest.main(command, plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
