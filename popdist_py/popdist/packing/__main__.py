"""A command that shows how well a file of sequences packs: ``python -m popdist.packing lengths.txt``."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from popdist.errors import PopdistError
from popdist.packing.linear_programme import SMALL_PACK, nnlshp, optimal
from popdist.packing.sample_lengths import TOO_LONG, TooLong, as_lengths, cut_to_fit
from popdist.packing.strategies import Histogram, PackingStrategy, check_histogram, lpfhp, spfhp, table, unpacked

_MAX_BYTES: Final = 2**30
"""The largest size, in bytes, of a file of lengths."""


@click.command(context_settings={"help_option_names": ["--help", "-h"]})
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--max-length", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of a row.")
@click.option("--max-sequences-per-pack", type=click.IntRange(min=1), help="Most sequences of a row; any number.")
@click.option("--histogram", is_flag=True, help="FILE counts sequences: its first number those of one token.")
@click.option(
    "--too-long", type=click.Choice(TOO_LONG), default="error", show_default=True, help="Longer sequences."
)
@click.option("--nnlshp", "with_nnlshp", is_flag=True, help="Show nnlshp, too; it may take a minute.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(  # noqa: PLR0913 - click passes each option as an argument
    file: Path,
    max_length: int,
    max_sequences_per_pack: int | None,
    *,
    histogram: bool,
    too_long: TooLong,
    with_nnlshp: bool,
    form: str,
) -> None:
    """Show how many rows of a batch the sequences of FILE take, by each packing strategy.

    FILE has the lengths of sequences, in tokens: whole numbers, divided by spaces, commas or lines, or a list as
    JSON.
    """
    try:
        counts = _counts(_numbers(file), max_length, too_long, is_histogram=histogram)
        strategies = _strategies(counts, max_length, max_sequences_per_pack, with_nnlshp=with_nnlshp)
    except PopdistError as error:
        raise click.ClickException(str(error)) from None
    click.echo(table(strategies) if form == "table" else json.dumps([_as_json(each) for each in strategies]))


def _numbers(file: Path) -> list[Any]:
    """Return the whole numbers in ``file``, which is a text of numbers or a JSON list."""
    if file.stat().st_size > _MAX_BYTES:
        raise click.ClickException(
            f"{file} has more than {_MAX_BYTES >> 30} GiB: count the lengths first (--histogram)"
        )
    try:
        text = file.read_text()
        if text.lstrip().startswith("["):
            values = json.loads(text)
            return values if isinstance(values, list) else [values]
        return [int(word) for word in text.replace(",", " ").split()]
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise click.ClickException(f"{file} is no list of whole numbers: {error}") from None


def _counts(numbers: list[Any], max_length: int, too_long: TooLong, *, is_histogram: bool) -> Histogram:
    """Return how many sequences have each length; ``numbers`` are lengths, or counts if ``is_histogram``."""
    if is_histogram:
        return check_histogram(numbers, max_length)
    pieces = cut_to_fit(as_lengths(numbers, "the file"), max_length, too_long)
    return np.bincount(pieces.lengths, minlength=max_length + 1)[1:].astype(np.int64)


def _strategies(
    counts: Histogram, max_length: int, limit: int | None, *, with_nnlshp: bool
) -> list[PackingStrategy]:
    """Return the results of all packing strategies, ``unpacked`` first; without scipy, ``optimal`` is omitted."""
    # A lower bound that one strategy proves holds for every strategy with the same limit.
    strategies = [unpacked(counts, max_length), spfhp(counts, max_length, limit), lpfhp(counts, max_length, limit)]
    if with_nnlshp:
        strategies.append(nnlshp(counts, max_length, min(limit or SMALL_PACK, SMALL_PACK)))
    try:
        strategies.append(optimal(counts, max_length, limit))
    except PopdistError as error:
        click.echo(f"without optimal: {error}", err=True)
    proved = strategies[-1]
    return [
        replace(each, lower_bound=max(each.lower_bound, proved.lower_bound))
        if each.max_sequences_per_pack == proved.max_sequences_per_pack
        else each
        for each in strategies
    ]


def _as_json(strategy: PackingStrategy) -> dict[str, Any]:
    names = "max_length max_sequences_per_pack num_sequences num_packs efficiency packing_factor padding_tokens"
    shown = {name: getattr(strategy, name) for name in [*names.split(), "lower_bound", "gap"]}
    return {"strategy": strategy.algorithm, **shown}


if __name__ == "__main__":
    main(prog_name=f"{Path(sys.executable).name} -m popdist.packing")
