"""SGLang's server arguments as flags: read from source without importing it, and from the installed release."""

import argparse
import ast
import textwrap
from argparse import Namespace

import pytest

from slime.arguments.flag import OPTIONAL_BOOL, STORE_TRUE
from slime.backends.sglang_utils import arguments, compat
from slime.backends.sglang_utils.arguments import given_words, server_flags, to_words

pytestmark = pytest.mark.unit
needs_sglang = pytest.mark.skipif(compat.installed_version() is None, reason="SGLang is not installed")

FIELDS = """
class Memory:
    disable_radix_cache: A[bool, Arg(help="No prefix cache.", resolvable=True)] = False
    tp_size: A[int, Arg(cli_name="--tensor-parallel-size", aliases=["--tp-size"], help="Ranks.")] = 1
    hicache_ratio: A[Optional[float], "Host to "
        "device."] = None
    urls: A[List[str], Arg(help="Where.")] = []
    lora_target_modules: A[Optional[List[str]], Arg(nargs="*", help="x")] = None
    config: A[Optional[Dict[str, Any]], Arg(type_parser=json.loads, help="JSON.")] = None
    flow: A[bool, Arg(action=argparse.BooleanOptionalAction, help="x")] = True
    _hidden: A[bool, Arg(no_cli=True)] = False
    number: int = 3
    _NS_PATH = "memory"

def add_cli_args(parser):
    parser.add_argument("--sampling-backend", type=str, choices=CHOICES, default=None, help=f"Kernels {x} for it.")
    parser.add_argument("--old", dest="renamed", action=DeprecatedStoreTrueAction, help="Deprecated.")
    parser.add_argument("--config", type=str)
"""


@pytest.fixture
def flags(tmp_path):
    path = tmp_path / "server_args.py"
    path.write_text(textwrap.dedent(FIELDS))
    ast.parse(path.read_text())
    return {flag.dest: flag for flag in arguments._flags_in(path)}


def test_fields_of_the_source(flags):
    assert set(flags) == {
        *("sglang_disable_radix_cache", "sglang_tp_size", "sglang_hicache_ratio", "sglang_urls", "sglang_flow"),
        *("sglang_lora_target_modules", "sglang_config", "sglang_sampling_backend", "sglang_renamed"),
    }
    assert flags["sglang_disable_radix_cache"].action == STORE_TRUE
    assert flags["sglang_disable_radix_cache"].help == "No prefix cache."
    assert flags["sglang_tp_size"].names == ("--sglang-tensor-parallel-size", "--sglang-tp-size")
    assert flags["sglang_tp_size"].convert("2") == 2 and flags["sglang_tp_size"].default == 1
    assert flags["sglang_hicache_ratio"].help == "Host to device."
    assert flags["sglang_hicache_ratio"].convert("0.5") == 0.5
    assert flags["sglang_urls"].nargs == "+" and flags["sglang_lora_target_modules"].nargs == "*"
    assert flags["sglang_flow"].action == OPTIONAL_BOOL and flags["sglang_flow"].default is True
    assert flags["sglang_sampling_backend"].help == "Kernels for it."
    assert flags["sglang_renamed"].is_bool


def test_words_for_the_server(flags):
    defaults = {flag.dest: flag.default for flag in flags.values()}
    rows = tuple(flags.values())
    assert given_words(Namespace(**defaults), rows) == []
    given = {"sglang_tp_size": 2, "sglang_urls": ["a", "b"], "sglang_flow": False, "sglang_disable_radix_cache": True}
    words = given_words(Namespace(**{**defaults, **given}), rows)
    assert sorted(words) == sorted(
        ["--tensor-parallel-size", "2", "--urls", "a", "b", "--no-flow", "--disable-radix-cache"]
    )
    assert to_words("config", {"a": 1}) == ["--config", '{"a": 1}']
    assert to_words("enable_x", False) == to_words("x", None) == []


@needs_sglang
def test_every_argument_of_the_installed_release_is_accepted():
    """Against SGLang's own parser."""
    from slime.backends.sglang_utils.cpu import CPU_ENGINE, install_shims

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CPU_ENGINE, "1")
        install_shims()
        server_args = pytest.importorskip("sglang.srt.server_args")
        parser = argparse.ArgumentParser()
        server_args.ServerArgs.add_cli_args(parser)
    known = {"--" + name.removeprefix("--sglang-"): flag for flag in server_flags() for name in flag.names}
    actions = {name: a for a in parser._actions for name in a.option_strings if name.startswith("--")}
    # Retired spellings may share an attribute with what replaced them; negations come with their flag.
    missing = [name for name in actions if name not in known and not name.startswith("--no-")]
    missing = [name for name in missing if "eprecated" not in type(actions[name]).__name__]
    assert sorted(missing) == ["--config", "--help"]
    for name, action in actions.items():
        if name in known and "eprecated" not in type(action).__name__:
            assert known[name].is_bool == (action.nargs == 0), name
            assert known[name].is_list == (action.nargs in ("+", "*")), name


@needs_sglang
@pytest.mark.parametrize("name", ["model_path", "tp_size", "port", "random_seed", "dist_init_addr"])
def test_what_slime_decides_is_no_flag(name):
    from slime.arguments.parser import BY_DEST

    assert f"sglang_{name}" not in BY_DEST and "sglang_attention_backend" in BY_DEST


@pytest.mark.parametrize(
    "version, words",
    [("0.5.17", None), ("0.5.23.post1", None), ("0.6.0", "newer than 0.5.23"), ("0.5.9", "older than 0.5.17")],
)
def test_versions(version, words):
    warning = compat.version_warning(version)
    assert warning is None if words is None else words in warning and version in warning
    assert compat.pinned_torch("0.5.19") == "2.13.0" and compat.pinned_torch("0.9.0") is None
