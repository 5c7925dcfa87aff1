"""--sglang-config and --prefill-num-servers: which models are served, and by which servers."""

from __future__ import annotations

import importlib.util
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime.arguments.families.engine import OWNED_BY_SLIME, SHARED, attribute_of
from slime.arguments.parser import BY_DEST, SERVER_FLAGS, unknown_flag
from slime.arguments.problems import Problem, Problems, closest
from slime.arguments.validation.model import check_weights, read_hf_config
from slime.arguments.yaml_files import load_yaml
from slime.utils.checkpoint_files import block_of, read_config
from slime.utils.served_models import WORKER_TYPES, ServedModel, ServerGroup, one_group, policy_model

FLAG = "--sglang-config"
MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
RESERVED_NAMES = ("engine", "train", "critic")
"""They would share log files with processes of the run."""
TRANSFER_PACKAGES = {"mooncake": "mooncake", "mooncake_tcp": "mooncake", "nixl": "nixl", "mori": "mori"}
"""Import names of what moves KV caches between servers, by --sglang-disaggregation-transfer-backend."""


def read(args: Namespace, problems: Problems) -> None:
    """served_models as the file says; empty without one, until the sizes are known."""
    args.served_models = ()
    args.sglang_model_routers = {}
    if args.sglang_config is None:
        return
    for other, given in (
        ("--rollout-external", args.rollout_external),
        ("--prefill-num-servers", args.prefill_num_servers is not None),
    ):
        if given:
            problems.add(FLAG, args.sglang_config, f"excludes {other}", "give one of the two")
            return
    if not args.debug_train_only:
        args.served_models = _Reader(args, problems).models()


def complete(args: Namespace, problems: Problems) -> None:
    """The one model of a run without a file, and the rules of servers that share a request."""
    if args.debug_train_only or problems.concern(FLAG, "--rollout-num-gpus", "--rollout-num-gpus-per-engine"):
        return
    if args.sglang_config is None:
        args.served_models = one_group(args.hf_checkpoint, args.rollout_num_gpus, args.rollout_num_gpus_per_engine)
    if args.prefill_num_servers is not None:
        args.served_models = _split(args, args.served_models[0], problems)
    _check_quantised(args, problems)
    if any(model.is_disaggregated for model in args.served_models):
        _check_disaggregated(args, problems)


def _check_quantised(args: Namespace, problems: Problems) -> None:
    """Engines may have FP8 weights; trainers may not."""
    if args.debug_rollout_only or args.rollout_external or problems:
        return
    path = policy_model(args).model_path
    flag = "--hf-checkpoint" if path == args.hf_checkpoint else f"{FLAG} {args.sglang_config}: model_path"
    try:
        block = block_of(read_config(path))
    except ValueError as error:
        problems.add(flag, path, f"{error}: engines with it cannot take the trainer's weights")
        return
    if block is None:
        return
    if args.rollout_engine != "sglang":
        problems.add(flag, path, "has FP8 weights, which need SGLang", "add --rollout-engine sglang")
    elif path == args.hf_checkpoint:
        rule = "has FP8 weights, which cannot be trained"
        fix = (
            "give the checkpoint in bfloat16 (tools/fp8_cast_bf16.py), and the FP8 one to the engines by "
            "--sglang-config, with its model_path and update_weights: true"
        )
        problems.add(flag, path, rule, fix)


def _split(args: Namespace, model: ServedModel, problems: Problems) -> tuple[ServedModel, ...]:
    """The same model with servers that prefill and servers that decode."""
    total, size, prefill = model.num_gpus, args.rollout_num_gpus_per_engine, args.prefill_num_servers
    if args.rollout_external:
        problems.add("--prefill-num-servers", prefill, "excludes --rollout-external", "give one of the two")
    elif not 0 < prefill < total // size:
        rule = f"must leave servers that decode: there are {total // size} (--rollout-num-gpus {total} / {size})"
        problems.add("--prefill-num-servers", prefill, rule, "lower it, or give more GPUs")
    split = ServerGroup("prefill", prefill * size, size), ServerGroup("decode", total - prefill * size, size)
    return (replace(model, groups=split),)


def _check_disaggregated(args: Namespace, problems: Problems) -> None:
    flag, value = (FLAG, args.sglang_config) if args.sglang_config else ("--prefill-num-servers", None)
    if args.rollout_engine != "sglang":
        problems.add(flag, value, "servers that only prefill need SGLang", "add --rollout-engine sglang")
        return
    if args.use_slime_router:
        rule = "only sglang-router knows servers that only prefill"
        problems.add(flag, value, rule, "install it, or name its environment with --sglang-router-env")
    if args.offload_rollout:
        rule = "servers that only prefill hold connections that do not survive the release of their memory"
        problems.add(
            flag, value, f"{rule}: excludes --offload-rollout and --colocate", "give engines GPUs of their own"
        )
    backend = vars(args).get("sglang_disaggregation_transfer_backend") or "mooncake"
    package = TRANSFER_PACKAGES.get(backend)
    if package is not None and importlib.util.find_spec(package) is None:
        problems.add(
            "--sglang-disaggregation-transfer-backend",
            backend,
            f"moves KV caches with the package {package}, which is not installed",
            f"install {package}, or choose another backend",
        )


class _Reader:
    """One file; collects what is wrong with it."""

    def __init__(self, args: Namespace, problems: Problems) -> None:
        self.args = args
        self.problems = problems
        self.path = args.sglang_config

    def models(self) -> tuple[ServedModel, ...]:
        """The models, the policy first, on slots one behind the other."""
        entries = self._entries()
        before = len(self.problems)
        models = [model for model in map(self._model, range(len(entries)), entries) if model is not None]
        if len(self.problems) > before or not entries:
            return ()
        names = [model.name for model in models]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self._add(f"two models are called {name}", "give each model a name of its own")
        trained = [model.name for model in models if model.update_weights]
        if len(trained) > 1:
            rule = f"{' and '.join(trained)} would both take the trainer's weights"
            self._add(rule, "one model is trained; set update_weights: false on the others")
        if not trained and not self.args.debug_rollout_only:
            rule = "no model takes the trainer's weights"
            self._add(rule, "set update_weights: true on the one that rollouts are generated with")
        if not any(model.num_answering() for model in models):
            self._add("has no servers", "give a group of worker_type regular")
        if len(self.problems) > before:
            return ()
        ordered, slot = [], 0
        for model in sorted(models, key=lambda model: not model.update_weights):
            ordered.append(replace(model, first_slot=slot))
            slot += model.num_gpus
        return tuple(ordered)

    def _add(self, rule: str, fix: str = "") -> None:
        self.problems.add(FLAG, self.path, rule, fix)

    def _entries(self) -> list[Any]:
        import yaml

        try:
            with open(self.path, encoding="utf-8") as file:
                content = load_yaml(file)
        except OSError as error:
            self._add(f"cannot be read ({error.strerror})")
            return []
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            self._add(f"is not valid YAML ({' '.join(str(error).split())})")
            return []
        models = content.get("sglang") if isinstance(content, Mapping) and set(content) == {"sglang"} else None
        if not isinstance(models, list) or not models:
            self._add("must hold one key, sglang, with a list of models", "see docs/engines.md")
            return []
        return models

    def _model(self, index: int, entry: Any) -> ServedModel | None:
        where = f"sglang[{index}]"
        if not self._is_mapping(entry, where, MODEL_KEYS):
            return None
        name = entry.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*(-\w+)*", name) or name in RESERVED_NAMES:
            rule = f"{where}.name must be letters, digits, _ and -, and not one of {', '.join(RESERVED_NAMES)}"
            self._add(f"{rule}, got {name!r}")
            return None
        where = f"model {name}"
        path = entry.get("model_path") or self.args.hf_checkpoint
        same = path is None or os.path.realpath(path) == os.path.realpath(self.args.hf_checkpoint or "")
        if not same:
            shown = f"{FLAG} {self.path}: {where}.model_path"
            if read_hf_config(path, shown, self.problems) is not None:
                check_weights(path, shown, self.problems)
        update = entry.get("update_weights", same)
        if not isinstance(update, bool):
            self._add(f"{where}.update_weights must be true or false, got {update!r}")
        size = self._count(entry, "num_gpus_per_engine", where, self.args.rollout_num_gpus_per_engine)
        given = entry.get("server_groups")
        if not isinstance(given, list) or not given:
            self._add(f"{where} has no list of server_groups", "add one with worker_type and num_gpus")
            return None
        groups = [self._group(group, f"{where}.server_groups[{i}]", size) for i, group in enumerate(given)]
        if None in groups:
            return None
        kinds = {group.worker_type for group in groups} - {"placeholder"}
        if kinds & {"prefill", "decode"} and kinds != {"prefill", "decode"}:
            self._add(f"{where} has servers of types {', '.join(sorted(kinds))}", "prefill and decode come as a pair")
        return ServedModel(name, path, update is True, tuple(groups))

    def _group(self, entry: Any, where: str, size: int) -> ServerGroup | None:
        before = len(self.problems)
        if not self._is_mapping(entry, where, GROUP_KEYS):
            return None
        kind = entry.get("worker_type", "regular")
        if kind not in WORKER_TYPES:
            self._add(f"{where}.worker_type must be one of {', '.join(WORKER_TYPES)}, got {kind!r}")
        gpus = self._count(entry, "num_gpus", where, None)
        size = self._count(entry, "num_gpus_per_engine", where, size)
        if size and gpus and gpus % size and kind != "placeholder":
            self._add(f"{where}: num_gpus {gpus} must be a multiple of num_gpus_per_engine {size}")
        if size and size > 1 and self.args.rollout_engine == "embedded":
            self._add(f"{where}: the embedded engine runs on one device", "use --rollout-engine sglang")
        overrides = self._overrides(entry.get("overrides") or {}, where)
        return ServerGroup(kind, gpus, size, overrides) if len(self.problems) == before else None

    def _overrides(self, entry: Any, where: str) -> dict[str, Any]:
        if not isinstance(entry, Mapping):
            self._add(f"{where}.overrides must be a mapping of SGLang's server arguments")
            return {}
        values: dict[str, Any] = {}
        known = {flag.dest for flag in SERVER_FLAGS}
        shared = {f"sglang_{name}" for name in (*SHARED, "mem_fraction_static", "dtype")}
        for key, raw in entry.items():
            dest = "sglang_" + str(key).replace("-", "_")
            shown = f"{FLAG} {self.path}: {where}.overrides.{key}"
            if dest not in shared and dest not in known:
                reserved = attribute_of("--" + dest) in OWNED_BY_SLIME
                problem = unknown_flag("--" + dest.replace("_", "-"))
                rule = problem.rule if reserved or not SERVER_FLAGS else "is no server argument of SGLang"
                self.problems.append(Problem(shown, rule, problem.fix))
            elif dest not in shared and self.args.rollout_engine == "embedded":
                self.problems.add(shown, None, "is an argument of SGLang's server", "add --rollout-engine sglang")
            else:
                try:
                    values[dest] = BY_DEST[dest].convert(raw)
                except ValueError as error:
                    self.problems.add(shown, raw, str(error))
        return values

    def _is_mapping(self, entry: Any, where: str, keys: tuple[str, ...]) -> bool:
        if not isinstance(entry, Mapping):
            self._add(f"{where} must be a mapping with {', '.join(keys)}")
            return False
        for key in [str(key) for key in entry if key not in keys]:
            close = closest(key, keys)
            self._add(f"{where} has an unknown key {key}", f"did you mean {close}?" if close else "")
        return all(key in keys for key in entry)

    def _count(self, entry: Mapping[str, Any], key: str, where: str, default: int | None) -> int:
        value = entry.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._add(f"{where}.{key} must be a whole number above 0, got {value!r}")
            return 0
        return value
