"""Callables of users: their names in messages, and the arguments that they take."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or of the class of another callable."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def takes(function: Callable[..., Any], num_arguments: int) -> bool:
    """True if it can be called with so many positional arguments, or has no signature."""
    try:
        parameters = signature(function)
    except (TypeError, ValueError):  # some builtins
        return True
    try:
        parameters.bind(*range(num_arguments))
    except TypeError:
        return False
    return True
