"""The tables are complete and every pending flag is refused."""

from pathlib import Path

import pytest

from slime.arguments.families import FLAGS
from slime.arguments.flag import BOOL_ACTIONS, OPTIONAL_BOOL, STORE_FALSE
from slime.arguments.parser import ALL_FLAGS, BY_DEST, BY_NAME
from slime.arguments.reference import markdown

pytestmark = pytest.mark.unit
HERE = Path(__file__).parent
SAMPLES = {"integer": "3", "number": "0.5", "json_object": '{"a": "b"}', "function_path": "pkg.mod.fn", "text": "x"}
PENDING = [flag for flag in FLAGS if flag.pending]
PENDING_CHOICES = [(flag, choice) for flag in FLAGS for choice in flag.pending_choices]


def sample(flag) -> list[str]:
    if flag.action in BOOL_ACTIONS:
        return [flag.name]
    return [flag.name, flag.choices[-1] if flag.choices else SAMPLES[flag.type.__name__]]


def test_every_flag_that_users_know_exists():
    missing = [name for name in (HERE / "flag_names.txt").read_text().split() if name not in BY_NAME]
    assert missing == []


def test_names_and_attributes_are_unique():
    assert len(BY_DEST) == len(ALL_FLAGS)
    assert len(BY_NAME) == sum(len(flag.names) for flag in ALL_FLAGS)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_rows_are_consistent(flag):
    assert flag.name.startswith("--") and flag.name == flag.name.lower()
    assert flag.help
    assert set(flag.pending_choices) <= set(flag.choices)
    assert set(flag.choice_aliases.values()) <= set(flag.choices)
    if flag.is_bool:
        assert flag.default is (flag.action == STORE_FALSE) or flag.action == OPTIONAL_BOOL
    elif flag.default is not None:
        assert flag.convert(flag.default) == flag.default


@pytest.mark.parametrize("flag", PENDING, ids=lambda flag: flag.name)
def test_pending_flag_is_refused_on_the_command_line(flag, one_error):
    message = one_error(*sample(flag))
    assert f"{flag.name}" in message and f"not available yet: {flag.pending}" in message


@pytest.mark.parametrize("flag", PENDING, ids=lambda flag: flag.name)
def test_pending_flag_is_refused_in_yaml(flag, setup, one_error):
    value = str(flag.action != STORE_FALSE).lower() if flag.is_bool else sample(flag)[1]
    message = one_error(*setup.yaml(f"{flag.dest}: {value}"))
    assert f"{flag.dest} (in --custom-config-path)" in message and f"not available yet: {flag.pending}" in message


@pytest.mark.parametrize("flag, choice", PENDING_CHOICES, ids=lambda v: getattr(v, "name", v))
def test_pending_choice_is_refused(flag, choice, one_error):
    assert f"not available yet: {flag.pending_choices[choice]}" in one_error(flag.name, choice)


@pytest.mark.parametrize("name", ["--moe-z-loss-coeff"])
def test_flags_of_engines_and_backends_to_come_are_named(name, setup, one_error):
    assert f"{name} 3: not available yet" in one_error(name, "3")
    assert "not available yet" in one_error(*setup.yaml(f"{name[2:].replace('-', '_')}: 3"))


@pytest.mark.parametrize("name", ["--sglang-model-path", "--sglang-tp-size", "--sglang-port"])
def test_engine_arguments_that_slime_sets_are_refused(name, one_error):
    assert f"{name}: slime sets this itself" in one_error(name, "3")


def test_flag_reference_is_current():
    page = HERE.parents[1] / "docs" / "flags.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run: make docs"
