"""Settings of sampling: those that a model comes with, the same for every engine."""

from typing import Any

# no filters; the temperature for models whose generation config sets nothing
PLAIN = {
    "temperature": 0.7,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
# values of options that a generation config leaves open
DEFAULTS = PLAIN | {"temperature": 1.0}


def settings_of(generation_config: Any) -> dict[str, Any]:
    """Settings of a generation config by csd's names; those of PLAIN if it sets none."""
    own = {name: getattr(generation_config, name, None) for name in DEFAULTS}
    own = {name: value for name, value in own.items() if value not in (None, DEFAULTS[name])}
    return DEFAULTS | own if own else dict(PLAIN)


def of_transformers(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings for a generation config, where a min_p of 0 would still pass over all logits."""
    return settings | {"min_p": settings["min_p"] or None}


def words(settings: dict[str, Any] | None) -> str:
    """The settings in words. None: those of results from before settings were recorded."""
    settings = settings or PLAIN
    cuts = [
        f"{name} {settings[name]:g}"
        for name in PLAIN
        if name != "temperature" and settings[name] != PLAIN[name]
    ]
    return ", ".join([f"temperature {settings['temperature']:g}", *(cuts or ["no filters"])])
