"""Where users import the command line from: `from slime.utils.arguments import parse_args`."""

from slime.arguments.entry import config_to_yaml, parse_args, public_config, public_words
from slime.arguments.problems import ConfigError
from slime.arguments.validation import validate_args

__all__ = ["ConfigError", "config_to_yaml", "parse_args", "public_config", "public_words", "validate_args"]
