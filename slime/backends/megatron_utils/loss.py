"""Corrections under the names that users import; they live in `slime.training`."""

from slime.training.corrections import icepop_function, vanilla_tis_function

__all__ = ["icepop_function", "vanilla_tis_function"]
