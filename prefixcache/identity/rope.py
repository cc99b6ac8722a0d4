"""RoPE in one normal form, whatever the engine calls it.

Rules:
1. transformers 4.57 says `rope_theta` and `rope_scaling` (with `type` or `rope_type`; Gemma 3 also
   `rope_local_base_freq`), transformers 5.x and vLLM say `rope_parameters`, flat or by layer type. One checkpoint gives
   one form under all of them.
2. The form holds what the rotation is computed from: type, base, rotated dimensions, scaling. Numbers are floats, but
   for counts of dimensions and positions. Defaults are written out, what a type does not use is left out, and layer
   types that rotate alike are one entry, "all".
3. A field that this module does not know stays in the form: two forms too many lose sharing, one too few loses truth.
4. A rotation that depends on how long the prompt is (dynamic NTK, LongRoPE) makes K differ between two prompts with one
   prefix. It is refused, unless the engine fixes the length for all prompts.

What belongs here: reading configs. It must not compute frequencies.
"""

from collections.abc import Mapping

from prefixcache.identity.canonical import Value
from prefixcache.identity.hfconfig import Config, ConfigError, has, integer, read, required, text_config

_ALIASES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "none": "default"}

# What each type reads beside base and dimensions, with the value an engine takes when the field is missing.
_FIELDS: Mapping[str, Mapping[str, Value]] = {
    "default": {},
    "linear": {"factor": None},
    "proportional": {"factor": 1.0},
    "dynamic": {"factor": None, "alpha": None},
    "llama3": {"factor": None, "low_freq_factor": None, "high_freq_factor": None},
    "yarn": {
        "factor": None, "attention_factor": None, "mscale": None, "mscale_all_dim": None, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": True,
    },
    "longrope": {"factor": None, "attention_factor": None, "short_factor": None, "long_factor": None},
}  # fmt: skip
_EVERY_FIELD = {name for fields in _FIELDS.values() for name in fields}
_READ_ELSEWHERE = {
    "type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings",
    "max_position_embeddings",
}  # fmt: skip
_LENGTHS = {"original_max_position_embeddings", "max_position_embeddings"}
_USE_ORIGINAL_LENGTH = {"llama3", "yarn", "longrope"}


def rope_normal_form(config: Config, *, fixed_length: int | None = None) -> dict[str, Value]:
    """The rotation of every layer type: {"all": form}, or {layer type: form}; a form is {} where nothing is rotated.

    `fixed_length`: tokens the engine computes length-dependent frequencies for, once for all prompts (vLLM's
    max_model_len). Raises ConfigError with reason `rope_depends_on_length` when the type needs it and it is None.
    """
    text = text_config(config)
    forms = {name: _form(text, entry, fixed_length) for name, entry in _entries(text).items()}
    result: dict[str, Value] = dict(forms)
    first = next(iter(forms.values()))
    if all(form == first for form in forms.values()):
        result = {"all": first}
    unrotated = _unrotated_layers(text)
    if unrotated:
        result["unrotated_layers"] = unrotated
    return result


def _entries(text: Config) -> dict[str, Mapping[str, object] | None]:
    """The engine's own parameters by layer type, in transformers 5.x's flat form; None where nothing is rotated."""
    parameters = read(text, "rope_parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        return _legacy_entries(text)
    nested = {str(name): entry for name, entry in parameters.items() if isinstance(entry, Mapping)}
    if not nested:
        return {"all": parameters}
    # An entry that is None is a layer type without rotation; a scalar beside nested entries is a leftover.
    unrotated = [str(name) for name, entry in parameters.items() if entry is None]
    return nested | dict.fromkeys(name for name in unrotated if name.endswith("attention"))


def _legacy_entries(text: Config) -> dict[str, Mapping[str, object] | None]:
    """The same from the fields of transformers 4.57."""
    theta, scaling = read(text, "rope_theta", "rotary_emb_base"), read(text, "rope_scaling")
    if theta is None and scaling is None:
        return {"all": None}
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ConfigError(f"config field rope_scaling is {scaling!r}, not a map")
    entry = {**(scaling or {}), "rope_theta": theta}
    local = read(text, "rope_local_base_freq")
    if local is None:
        return {"all": entry}
    return {"full_attention": entry, "sliding_attention": {"rope_theta": local}}


def _form(text: Config, entry: Mapping[str, object] | None, fixed_length: int | None) -> dict[str, Value]:
    if entry is None:
        return {}
    stated = str(read(entry, "rope_type", "type") or "default")
    kind = _ALIASES.get(stated, stated)
    form: dict[str, Value] = {
        "type": kind,
        "theta": _number("rope_theta", read(entry, "rope_theta") or read(text, "rope_theta") or 10000.0),
        "dims": _rotated_dims(text, entry),
        **_scaling_fields(kind, entry),
    }
    if kind in _USE_ORIGINAL_LENGTH:
        form["original_length"] = _original_length(text, entry)
    if kind in _RESOLVERS:
        _RESOLVERS[kind](text, form, fixed_length)
    return {name: value for name, value in form.items() if value is not None}


def _scaling_fields(kind: str, entry: Mapping[str, object]) -> dict[str, Value]:
    """What the type reads, with its defaults, and every field that no type is known to read (rule 3)."""
    known = _FIELDS.get(kind, {})
    # Of a type that is new here nothing can be said to be unused, not even the trained length.
    unused = _EVERY_FIELD | _READ_ELSEWHERE if kind in _FIELDS else _READ_ELSEWHERE - _LENGTHS
    unknown = set(entry) - unused
    fields: dict[str, Value] = {}
    for name in [*known, *sorted(unknown)]:
        value = entry.get(name)
        fields[name] = known.get(name) if value is None else _value(name, value)
    return fields


def _resolve_dynamic(text: Config, form: dict[str, Value], fixed_length: int | None) -> None:
    """Dynamic NTK: the base grows with the length beyond the trained one; within it nothing is scaled."""
    trained = required(integer(text, "max_position_embeddings"), "max_position_embeddings")
    length = _need_length(form, fixed_length)
    form["trained_length"], form["length"] = trained, max(length, trained)
    if length <= trained and form["alpha"] is None:
        for name in ("trained_length", "length", "factor"):
            del form[name]
        form["type"] = "default"


def _resolve_longrope(text: Config, form: dict[str, Value], fixed_length: int | None) -> None:
    """LongRoPE: one of two lists of factors, by length; and a scale of K that follows from `factor`."""
    original = form["original_length"]
    assert isinstance(original, int)  # from _original_length
    length = _need_length(form, fixed_length)
    form["long_factor" if length <= original else "short_factor"] = None
    # transformers 4.57 ignores the stated factor when the config has the trained length as a field of its own.
    ignores_stated = not has(text, "rope_parameters") and has(text, "original_max_position_embeddings")
    if form["factor"] is None or ignores_stated:
        longest = required(integer(text, "max_position_embeddings"), "max_position_embeddings")
        form["factor"] = longest / original


_RESOLVERS = {"dynamic": _resolve_dynamic, "longrope": _resolve_longrope}


def _need_length(form: Mapping[str, Value], fixed_length: int | None) -> int:
    if fixed_length is None:
        raise ConfigError(
            f"RoPE type {form['type']!r} rotates by the prompt's length, so prompts with one prefix differ in KV; "
            "it can be cached only where the engine fixes the length for all prompts (fixed_length)",
            "rope_depends_on_length",
        )
    return fixed_length


def _original_length(text: Config, entry: Mapping[str, object]) -> int:
    """Positions the model was trained on: a config field of its own (Phi 3) goes before the one inside the scaling."""
    value = integer(text, "original_max_position_embeddings")
    if value is None:
        value = integer(entry, "original_max_position_embeddings")
    if value is None:
        value = integer(text, "max_position_embeddings")
    return required(value, "original_max_position_embeddings")


def _rotated_dims(text: Config, entry: Mapping[str, object]) -> int:
    """Dimensions of a head that are rotated, from the left."""
    head = integer(text, "qk_rope_head_dim", "head_dim")
    if head is None:
        hidden = required(integer(text, "hidden_size", "n_embd"), "head_dim or hidden_size")
        head = hidden // required(integer(text, "num_attention_heads", "n_head"), "num_attention_heads")
    share = entry.get("partial_rotary_factor")
    if share is None:
        share = read(text, "partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
    return head if share is None else int(head * _number("partial_rotary_factor", share))


def _unrotated_layers(text: Config) -> list[Value]:
    """Model layers that skip the rotation (SmolLM3, Llama 4: `no_rope_layers` has a 0 for them)."""
    flags = read(text, "no_rope_layers")
    if not isinstance(flags, list | tuple):
        return []
    return [layer for layer, rotated in enumerate(flags) if not rotated]


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"RoPE parameter {name} is {value!r}, not a number")
    return float(value)


def _value(name: str, value: object) -> Value:
    """A parameter as a canonical value: numbers as floats, lists of them alike, strings and flags as they are."""
    if isinstance(value, str | bool):
        return value
    if isinstance(value, list | tuple):
        return [_value(name, item) for item in value]
    return _number(name, value)
