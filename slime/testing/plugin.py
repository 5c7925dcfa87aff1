"""The pytest options of `slime.testing.contracts`."""

from __future__ import annotations

import pytest

from slime.testing import contracts


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("slime")
    group.addoption(
        "--contract",
        action="append",
        default=[],
        metavar="HOOK=PATH",
        help="a function to test, for example custom-rm=my.module.reward; hooks: " + ", ".join(contracts.CONTRACTS),
    )
    group.addoption(
        "--contract-samples", metavar="DUMP", help="a rollout dump (--save-debug-rollout-data) to call hooks with"
    )


def pytest_configure(config: pytest.Config) -> None:
    for text in config.getoption("--contract"):
        parse(text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "contract" not in metafunc.fixturenames:
        return
    chosen = [parse(text) for text in metafunc.config.getoption("--contract")] or contracts.BUILT_IN
    ids = [f"{hook}={path}" for hook, path in chosen]
    metafunc.parametrize("contract", [(contracts.CONTRACTS[hook], path) for hook, path in chosen], ids=ids)


def parse(text: str) -> tuple[str, str]:
    """(hook, path) of `HOOK=PATH`; the hook as it is, or as the flag is spelled.

    Raises:
        pytest.UsageError: no such hook.
    """
    hook, separator, path = text.partition("=")
    hook = hook_of(hook)
    if not separator or hook not in contracts.CONTRACTS:
        raise pytest.UsageError(f"--contract {text}: write HOOK=PATH with one of {', '.join(contracts.CONTRACTS)}")
    return hook, path


def hook_of(flag: str) -> str:
    """`--custom-rm-path` -> `custom-rm`."""
    return flag.removeprefix("--").removesuffix("-paths").removesuffix("-path")


def flag_of(hook: str) -> str:
    return f"--{hook}-path" + ("s" if hook == "slime-router-middleware" else "")
