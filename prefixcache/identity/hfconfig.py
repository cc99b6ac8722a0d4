"""Reading a Hugging Face config without importing transformers: objects of any version and plain dicts look the same.

What belongs here: how to find a field. It must not know what the field means (see rope and model).
"""

from collections.abc import Mapping
from typing import TypeVar

Config = object  # a PretrainedConfig of transformers 4.57 or 5.x, vLLM's, or the dict of a config.json

T = TypeVar("T")


class ConfigError(ValueError):
    """A model config from which no identity can be made. `reason` is the machine-readable cause."""

    def __init__(self, message: str, reason: str = "config_unsupported") -> None:
        """`message` names the field at fault and what to do instead."""
        super().__init__(message)
        self.reason = reason


def text_config(config: Config) -> Config:
    """The part of a config that describes the language model: itself, or its `text_config` (multimodal models)."""
    inner = read(config, "text_config")
    return config if inner is None else inner


def read(config: Config, *names: str) -> object:
    """The first of `names` that the config has and that is not None, else None."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    return None


def has(config: Config, name: str) -> bool:
    """Whether the config has the field at all, None included."""
    return name in config if isinstance(config, Mapping) else hasattr(config, name)


def integer(config: Config, *names: str) -> int | None:
    """The first of `names` as an integer. Raises ConfigError when it is something else."""
    value = read(config, *names)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"config field {names[0]} is {value!r}, not an integer")
    return value


def required(value: T | None, name: str) -> T:
    """`value`, or ConfigError naming the field that is missing."""
    if value is None:
        raise ConfigError(f"the config does not say {name}; pass the engine's config object, which holds the defaults")
    return value
