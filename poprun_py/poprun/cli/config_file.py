"""A file of options: YAML such as ``host: node[0-3]``, in which each value is written as on the command line."""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from io import StringIO
from typing import Final

import yaml

from poprun.cli.options import HELP_ALL, Option, OptionValue
from poprun.errors import UsageError
from poprun.text.atomic_file import check_target, write_whole
from poprun.text.input_files import YamlError, compose_yaml

_NULL: Final = "tag:yaml.org,2002:null"
_TEXT: Final = "tag:yaml.org,2002:str"
_MAPPING: Final = "tag:yaml.org,2002:map"
_SEQUENCE: Final = "tag:yaml.org,2002:seq"


def read_config(text: str, source: str, options: Mapping[str, Option]) -> tuple[OptionValue, ...]:
    """Return the options in ``text``, the content of the file of options ``source``; their values are not checked.

    Raises UsageError if ``text`` is not YAML, or if an option is unknown or comes twice.
    """
    try:
        root = compose_yaml(text)
    except YamlError as error:
        line = "" if error.line is None else f":{error.line}"
        raise UsageError(f"{source}{line}: this is no YAML: {error}") from None
    if root is None:
        return ()
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{_place(source, root)}: a file of options has lines such as num-instances: 4")
    by_name: dict[str, OptionValue] = {}
    for key, value in root.value:
        place = _place(source, key)
        option = _option(key, place, options)
        if option.name in by_name:
            raise UsageError(f"{place}: {option.name} comes twice: {by_name[option.name].place} has it, too")
        by_name[option.name] = OptionValue(option=option, texts=_texts(option, value, place), place=place)
    return tuple(by_name.values())


def export_config(given: Iterable[OptionValue], path: str, *, may_overwrite: bool) -> None:
    """Write the options ``given`` to the file ``path``. Raise UsageError if the file exists or writing fails."""
    if not may_overwrite and os.path.lexists(path):
        raise UsageError(f"--export-config {path}: there is such a file: give another name, or --overwrite-config")
    try:
        check_target(path)
        write_whole(path, config_text(given))
    except (OSError, ValueError) as error:
        raise UsageError(f"--export-config {path}: {getattr(error, 'strerror', None) or error}") from None


def config_text(given: Iterable[OptionValue]) -> str:
    """Return the options ``given`` as the text of a file of options, which is YAML in ASCII."""
    writer = yaml.SafeDumper(StringIO())
    pairs = [
        (_scalar(one.option.name, writer), _value(one.texts, writer, is_list=one.option.kind.read_all is not None))
        for one in given
    ]
    text: str = yaml.serialize(yaml.MappingNode(_MAPPING, pairs, flow_style=False), Dumper=yaml.SafeDumper)
    return text if pairs else ""


def _option(key: yaml.Node, place: str, options: Mapping[str, Option]) -> Option:
    name = key.value if isinstance(key, yaml.ScalarNode) else ""
    if name in options:
        return options[name]
    nearest = get_close_matches(name.replace("_", "-").lstrip("-"), options, n=1, cutoff=0.6)
    cure = (
        f"did you mean {nearest[0]}?"
        if nearest
        else f"poprun {HELP_ALL} lists the options, here without their dashes"
    )
    raise UsageError(f"{place}: there is no option {name or 'of this form'} for a file: {cure}")


def _texts(option: Option, value: yaml.Node, place: str) -> tuple[str, ...]:
    """Return the texts that a file of options gives to ``option``: each item of a list ``value``, or one text."""
    if isinstance(value, yaml.SequenceNode) and option.kind.read_all is not None and value.value:
        return tuple(_text(option, item, place) for item in value.value)
    return (_text(option, value, place),)


def _text(option: Option, value: yaml.Node, place: str) -> str:
    if isinstance(value, yaml.SequenceNode):
        raise UsageError(f"{place}: {option.name} takes one value, and here is a list")
    if not isinstance(value, yaml.ScalarNode):
        raise UsageError(f"{place}: {option.name} takes one value, and here is a mapping")
    if value.tag == _NULL:
        raise UsageError(f"{place}: {option.name} has no value: give it one, or leave the line out")
    return str(value.value)


def _value(texts: tuple[str, ...], writer: yaml.SafeDumper, *, is_list: bool) -> yaml.Node:
    if not is_list:
        return _scalar(texts[-1], writer)
    return yaml.SequenceNode(_SEQUENCE, [_scalar(text, writer) for text in texts], flow_style=False)


def _scalar(text: str, writer: yaml.SafeDumper) -> yaml.ScalarNode:
    """Return a YAML scalar for ``text``; quote the text if YAML would otherwise read it as null."""
    tag = writer.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]  # the type stubs lack this type
    return yaml.ScalarNode(_TEXT if tag == _NULL else tag, text)


def _place(source: str, node: yaml.Node) -> str:
    return f"{source}:{node.start_mark.line + 1}"
