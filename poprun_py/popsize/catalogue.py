"""Descriptions of models, from a name, from sizes, from a Hugging Face configuration, or from measurements."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from hashlib import sha256
from types import UnionType
from typing import Any, Final

from popsize.errors import ModelError, shown
from popsize.model import Layer, Model, Split, Transformer, transformer

_MOST_DIGITS: Final = 12
_LARGEST: Final = 10**24

_GPT: Final = Transformer(
    layers=1, hidden=1, heads=1, sequence=1, vocab=50257, tied=True, dropout=False, fused_attention=True
)
_LLAMA: Final = replace(_GPT, tied=False, gated=True, biases=False, full_loss=True)


def _gpt(layers: int, hidden: int, heads: int, sequence: int) -> Transformer:
    return replace(_GPT, layers=layers, hidden=hidden, heads=heads, sequence=sequence, positions=sequence)


def _llama(version: int, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Transformer:
    vocab, sequence = {2: (32000, 4096), 3: (128256, 8192)}[version]
    sizes = replace(_LLAMA, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn)
    return replace(sizes, vocab=vocab, sequence=sequence)


MODELS: Final[Mapping[str, Transformer]] = {
    "bert-base": replace(_gpt(12, 768, 12, 512), vocab=30522, causal=False),
    "bert-large": replace(_gpt(24, 1024, 16, 512), vocab=30522, causal=False),
    "gpt2": _gpt(12, 768, 12, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    "llama2-7b": _llama(2, 32, 4096, 32, 32, 11008),
    "llama2-13b": _llama(2, 40, 5120, 40, 40, 13824),
    "llama2-70b": _llama(2, 80, 8192, 64, 8, 28672),
    "llama3-8b": _llama(3, 32, 4096, 32, 8, 14336),
    "llama3-70b": _llama(3, 80, 8192, 64, 8, 28672),
    "llama3-405b": _llama(3, 126, 16384, 128, 8, 53248),
}
"""Published models by name: of Devlin et al. (arXiv 1810.04805), Radford et al. (GPT-2), Brown et al. (arXiv
2005.14165, table 2.1), Touvron et al. (arXiv 2307.09288) and Grattafiori et al. (arXiv 2407.21783, table 3)."""

FAMILIES: Final[Mapping[str, Transformer]] = {
    "gpt": _GPT,
    "bert": replace(_GPT, causal=False),
    "llama": _LLAMA,
}
"""Transformers without sizes by name; ``--model gpt layers=96 …`` gives the sizes."""


FIELD_NAMES: Final[Mapping[str, list[str]]] = {
    "layers": ["num_hidden_layers", "n_layer", "n_layers", "num_layers"],
    "hidden": ["hidden_size", "n_embd", "n_embed", "d_model"],
    "heads": ["num_attention_heads", "n_head", "n_heads"],
    "vocab": ["vocab_size", "padded_vocab_size"],
    "sequence": [
        *("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"),
        "max_sequence_length",
    ],
    "kv_heads": ["num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"],
    "ffn": ["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"],
    "head_width": ["head_dim", "kv_channels"],
}
"""For each field of `Transformer`, the names that Hugging Face configurations use for the field."""

_USUAL: Final = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 50257, "sequence": 2048}
"""The fields without a default, each with an example value for the error that reports a missing field."""


def named_model(name: str, numbers: Iterable[str] = ()) -> Model:
    """Return the model called ``name``, with sizes replaced by ``numbers`` such as ``layers=96``.

    Raises ModelError if no model has this name, or if a family such as ``gpt`` lacks a size.
    """
    given, key = model_numbers(numbers), name.lower()
    known = {**MODELS, **FAMILIES}
    if key not in known:
        near = get_close_matches(key, known, 3, 0.3) or list(MODELS)
        raise ModelError(
            f"no model is called {name!r}: nearest are {', '.join(near)}; or give numbers (--model gpt "
            "layers=… hidden=… heads=… sequence=…), a config.json, or a file that "
            "popdist.parallel.describe(...).save() wrote"
        )
    missing = [number for number in ("layers", "hidden", "heads", "sequence") if number not in given]
    if key in FAMILIES and missing:
        raise ModelError(f"--model {name} needs {', '.join(f'{number}=…' for number in missing)}")
    changed = replace(known[key], **given)
    if changed.positions and "positions" not in given:  # position embeddings grow with the sequence
        changed = replace(changed, positions=max(changed.sequence, changed.positions))
    return transformer(changed, key)


def model_numbers(words: Iterable[str]) -> dict[str, Any]:
    """Return the sizes of a model that ``words`` such as ``layers=96`` set. Raise ModelError if one is wrong."""
    given: dict[str, Any] = {}
    for word in words:
        name, value = _number(word)
        if name in given:
            raise ModelError(f"{word!r} gives {name} a second time")
        given[name] = value
    return given


def _number(word: str) -> tuple[str, int | bool]:
    """Return name and value of a word such as ``layers=96`` or ``gated=yes``. Raise ModelError if it is wrong."""
    name, _, value = word.partition("=")
    known = {f.name: f.type for f in fields(Transformer)}
    if name not in known:
        near = get_close_matches(name, known, 3, 0.4) or list(known)
        raise ModelError(f"{word!r} says nothing about a model: nearest are {', '.join(near)}")
    if known[name] is bool:
        if value.lower() not in _TRUTHS:
            raise ModelError(f"{word!r}: say {name}=yes or {name}=no")
        return name, _TRUTHS[value.lower()]
    whole = re.fullmatch(rf"([0-9]{{1,{_MOST_DIGITS}}})(?:\.0*)?", value)
    if whole is None:
        raise ModelError(f"{word!r} gives no number: write {name}=16")
    return name, int(whole[1])


_TRUTHS: Final = {"yes": True, "true": True, "no": False, "false": False}


_GATED: Final = (
    *("llama", "mistral", "qwen", "gemma", "phi3", "olmo", "granite", "cohere", "deepseek", "stablelm"),
    *("internlm", "baichuan", "minicpm", "exaone", "smollm", "chatglm", "glm4"),
)
_GATES: Final = ("silu", "swish", "swiglu")
_UNTIED: Final = (
    *("llama", "mistral", "qwen", "phi", "olmo", "granite", "deepseek", "stablelm", "internlm", "baichuan"),
    *("chatglm", "glm4", "falcon", "gpt_neox", "gptj", "codegen", "persimmon", "nemotron", "exaone"),
)
_PLAIN_POSITIONS: Final = ("gpt2", "bert", "roberta", "opt", "gpt_bigcode", "electra")
_BOTH_WAYS: Final = ("bert", "roberta", "electra", "deberta")
_NOT_PLANNED: Final = {
    "an encoder-decoder": ("t5", "bart", "pegasus", "marian", "whisper", "blenderbot", "m2m_100", "prophetnet"),
    "a state-space model": ("mamba", "rwkv", "jamba", "zamba"),
    "a model of images": ("vit", "clip", "swin", "deit", "convnext", "resnet"),
    "a model whose layers share parameters": ("albert",),
    "a distilled BERT": ("distilbert",),
}
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def config_model(table: object, origin: str, numbers: Iterable[str] = ()) -> Model:
    """Return the model in ``table``, a Hugging Face ``config.json``, with sizes replaced by ``numbers``."""
    if not isinstance(table, dict):
        raise ModelError(f"{origin} is no configuration: it holds no object")
    if isinstance(table.get("text_config"), dict):
        table = {**table["text_config"], "model_type": table.get("model_type", "")}
    kind = str(table.get("model_type", "")).lower()
    _check_planned(table, kind, origin)
    given = model_numbers(numbers)
    sizes = {
        name: number
        for name in FIELD_NAMES
        if name not in given and (number := _config_number(table, name, origin)) is not None
    }
    if table.get("multi_query") is True and not table.get("new_decoder_architecture"):
        sizes["kv_heads"] = 1
    gated = any(word in kind for word in _GATED) or table.get("hidden_act") in _GATES
    tied = table.get("tie_word_embeddings")
    base = replace(
        _LLAMA if gated else _GPT,
        tied=tied if isinstance(tied, bool) else not any(word in kind for word in _UNTIED),
        causal=not any(word in kind for word in _BOTH_WAYS),
        biases=not gated and table.get("bias") is not False,
    )
    values = sizes | given
    if any(kind.startswith(word) for word in _PLAIN_POSITIONS):
        values = {"positions": values["sequence"]} | values
    name = str(table.get("_name_or_path") or kind or origin)
    return transformer(replace(base, **values), _printable(name) or origin)


def _check_planned(table: Mapping[str, Any], kind: str, origin: str) -> None:
    """Check that a Hugging Face configuration describes equal transformer layers. Raise ModelError if not."""
    inner = table.get("ffn_config")
    tables = (table, inner) if isinstance(inner, dict) else (table,)
    if any(one.get(name) for one in tables for name in _EXPERTS):
        raise ModelError(f"{origin} has experts ({kind}): expert parallelism is not planned")
    what = next((what for what, words in _NOT_PLANNED.items() if any(word in kind for word in words)), None)
    if table.get("is_encoder_decoder") is True:
        what = "an encoder-decoder"
    if what:
        raise ModelError(
            f"{origin} is {what} ({kind}), which is not planned: give numbers (--model gpt layers=…), or measure "
            "it with popdist.parallel.describe(...).save()"
        )


def _config_number(table: Mapping[str, Any], number: str, origin: str) -> int | None:
    """Return the size called ``number`` from a Hugging Face configuration; None if it is optional and missing."""
    names = FIELD_NAMES[number]
    name = next((name for name in names if table.get(name) is not None), None)
    if name is None and number in _USUAL:
        raise ModelError(
            f"{origin} has no {names[0]} ({', or '.join(names[1:])}): give {number}=… behind it, such as "
            f"{number}={_USUAL[number]}"
        )
    value = None if name is None else table[name]
    if value is None or (value == 0 and number not in _USUAL):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 10**_MOST_DIGITS:
        raise ModelError(f"{origin}: {name} is {shown(value)}, and should be a positive number")
    return value


def _printable(name: str) -> str:
    """Return ``name`` without characters that cannot be printed, cut to `_LONGEST_NAME` characters."""
    return "".join(filter(str.isprintable, name))[:_LONGEST_NAME].strip()


_LONGEST_NAME: Final = 80
_MODEL_FILE: Final = 1
"""The version of the format of a model's file, which `model_text` writes."""


def model_text(model: Model) -> str:
    """Return ``model`` as the JSON text of a file, from which `model_of` reads the model."""
    return json.dumps({"popsize_model": _MODEL_FILE, **asdict(model)}, indent=1) + "\n"


def model_digest(model: Model) -> str:
    """Return the SHA-256 of a model's text (`model_text`), which differs for any two different models."""
    return sha256(model_text(model).encode()).hexdigest()


def model_of(table: Mapping[str, Any], origin: str) -> Model:
    """Return the model in ``table``, the parsed JSON of the file ``origin`` that `model_text` wrote.

    Raises ModelError, which names the file ``origin``, if a field is missing or has the wrong type.
    """
    if table.get("popsize_model") != _MODEL_FILE or table["popsize_model"] is True:
        version = shown(table.get("popsize_model"))
        raise ModelError(f"{origin} has version {version}; this one reads {_MODEL_FILE}: describe it again")
    try:
        checked: dict[str, Any] = _checked(table, _LEAST_MODEL, "it")
    except (TypeError, ValueError) as error:
        raise ModelError(f"{origin} is no model that describe(...).save() wrote: {error}") from None
    model = Model(
        name=_printable(checked["name"]) or origin,
        sequence=checked["sequence"],
        layers=tuple(map(_layer, checked["layers"])),
        divisors=tuple((_printable(name), number) for name, number in checked["divisors"]) or _UNDIVIDED,
        tied_parameters=checked["tied_parameters"],
    )
    if model.num_parameters <= 0:
        raise ModelError(f"{origin} is a model of {model.num_parameters:g} parameters")
    return model


def _layer(table: dict[str, Any]) -> Layer:
    """Return the layer of a model that ``table``, a part of a checked model file, describes."""
    splits = {key: Split(**value) for key, value in table.items() if isinstance(value, dict)}
    return Layer(**table | splits | {"name": _printable(table["name"]) or "layer", "parts": tuple(table["parts"])})


_UNDIVIDED: Final = (("largest_tensor_group", 1),)
"""The sizes that tensor parallelism must divide, if a model's file does not list any."""

_LEAST_LAYER: Final = asdict(Layer(name="", parameters=Split(), can_recompute=False)) | {"parts": [0.0]}
_LEAST_MODEL: Final = {
    "popsize_model": _MODEL_FILE,
    "name": "",
    "sequence": 1,
    "layers": [_LEAST_LAYER],
    "divisors": [("", 1)],
    "tied_parameters": 0.0,
}
"""The smallest legal file of a model: each number is the least legal value, and lists may be longer."""

_KINDS: Final[tuple[tuple[type, type | UnionType, str], ...]] = (
    (bool, bool, "true or false"),
    (int, int, "a whole number"),
    (float, int | float, "a number"),
    (str, str, "a text"),
    (dict, dict, "an object"),
    (tuple, list, "a name and a number"),
    (list, list, "a list"),
)
"""The types of values in a model's file: the type in `_LEAST_MODEL`, the type in parsed JSON, and its name."""


def _checked(value: Any, least: Any, name: str) -> Any:
    """Return the parsed JSON ``value`` if it agrees with ``least``: same types and keys, no smaller number.

    Raises TypeError or ValueError if ``value`` does not agree with ``least``.
    """
    kind, word = next((kind, word) for own, kind, word in _KINDS if isinstance(least, own))
    is_of_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not is_of_kind or (isinstance(least, tuple) and len(value) != len(least)):
        raise TypeError(f"{name} is {shown(value)}, and should be {word}")
    if isinstance(least, dict):
        if unknown := value.keys() - least.keys():
            raise ValueError(f"{name} has {shown(min(unknown))}")
        if lacking := least.keys() - value.keys():
            raise ValueError(f"{name} has no {min(lacking)}")
        return {key: _checked(value[key], one, key) for key, one in least.items()}
    if isinstance(least, tuple):
        return [_checked(part, one, name) for part, one in zip(value, least, strict=True)]
    if isinstance(least, list):
        if not value and name != "divisors":
            raise ValueError(f"{name} is empty")
        return [_checked(one, least[0], f"one of {name}") for one in value]
    if isinstance(value, int | float) and not least <= value <= _LARGEST:
        raise ValueError(f"{name} is {shown(value)}, which no model has")
    return value
