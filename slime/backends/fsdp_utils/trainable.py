"""Which parameters are trained."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from slime.backends.common.trainable import trained_names


def select_trainable(
    parameters: Mapping[str, nn.Parameter], only_train: list[str] | None, freeze: list[str] | None
) -> None:
    """Switch gradients off for what `--only-train-params-name-list` leaves out or `--freeze-params-name-list` names.

    Args:
        parameters: by Hugging Face name.
        only_train, freeze: regular expressions, found anywhere in a name.

    Raises:
        ValueError: an expression matches no name (the message shows some), or nothing is left to train.
    """
    trained = trained_names(list(parameters), only_train, freeze)
    for name, parameter in parameters.items():
        parameter.requires_grad_(parameter.requires_grad and name in trained)
