"""Configuration itself: YAML files, printing."""

from slime.arguments.flag import STORE_TRUE, Family, Flag, text

FAMILY = Family(
    "General",
    "Where configuration comes from. Order of precedence: command line, `--custom-config-path`, default.",
    (
        Flag(
            "--custom-config-path",
            text,
            help="YAML file of flag values, named as flags (`use_kl_loss: true`); it overrides defaults and is "
            "overridden by the command line. Keys that name no flag are set on args for your own functions.",
        ),
        Flag("--print-config", action=STORE_TRUE, help="Print the resolved configuration as YAML and exit."),
        Flag(
            "--run-dir",
            text,
            help="Directory of the run: config.yaml, metrics.jsonl, samples/, logs/, tensorboard/. "
            "Default: runs/<time>-<model>.",
        ),
    ),
)
