"""What is printed: tables, JSON, CSV and pictures hold what was predicted.

Holds popsize.tables and popsize.picture.
"""

import csv
import io
import json
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table

from poprun.plan.render.picture.documents import picture_css
from poprun.plan.render.table import terminal_text
from popsize.catalogue import model_digest, named_model
from popsize.hardware import named_machine
from popsize.mapping import Mapping, Training, Workload, from_table, saved
from popsize.picture import cube_svg
from popsize.search import Answer, predict, search
from popsize.svg import text_width
from popsize.tables import (
    TERM_WORDS,
    Part,
    answer_csv,
    answer_json,
    answer_table,
    explanation,
    heading,
    peak_share,
    seconds,
    why_not_faster,
)

WORKLOAD = Workload(
    model=named_model("gpt3-2.7b"), machine=named_machine("64xA100-80GB"), training=Training(global_batch=512)
)


def printed(parts: list[Part], width: int = 100) -> str:
    """What `poprun-size` prints of these on a terminal of ``width`` columns."""
    return terminal_text(*parts, width=width, has_color=False)


@cache
def the_answer() -> Answer:
    """Of the workload: a search takes some time, so no import makes one."""
    return search(WORKLOAD, {"micro_batch": 8})


def test_json_holds_all_of_it() -> None:
    """Each mapping with its terms, its memory by kind, and the bytes that it sends."""
    table = json.loads(answer_json(the_answer(), WORKLOAD, 5))
    first, found = table["mappings"][0], the_answer().fitting[0]

    assert len(table["mappings"]) == 5
    assert (table["fitting"], table["mappings_tried"]) == (len(the_answer().fitting), the_answer().num_mappings)
    assert from_table(first["mapping"]) == found.mapping
    assert first["seconds"] == pytest.approx(sum(first["seconds_by_term"].values()))
    assert first["seconds_by_term"].keys() == TERM_WORDS.keys()
    assert first["share_of_peak"] == peak_share(found) < 1
    assert first["memory_bytes"]["weights"] == found.memory.weights
    assert set(first["sent_bytes"]) <= {"tensor", "stages", "replicas", "gathering", "streaming"}


def test_csv_has_a_row_for_each() -> None:
    """With the fields of the mapping, from which it can be made again."""
    rows = list(csv.DictReader(io.StringIO(answer_csv(the_answer(), 7))))

    assert len(rows) == 7
    assert [float(row["seconds"]) for row in rows] == sorted(float(row["seconds"]) for row in rows)
    for row, found in zip(rows, the_answer().fitting, strict=False):
        assert from_table({name: row[name] for name in Mapping.__dataclass_fields__}) == found.mapping
        assert row["fits"] == "yes"


def test_the_table_lists_the_first_and_says_why_none_is_faster() -> None:
    """Columns in line, all kinds of memory, and what the faster one lacks."""
    small = Workload(
        model=WORKLOAD.model,
        machine=WORKLOAD.machine,
        training=WORKLOAD.training,
        memory_limit_bytes=20 * 2**30,
    )
    answer = search(small, {"recompute": "none"})
    text = printed(answer_table(answer, small, 3))

    assert answer.faster is not None
    assert text.startswith(
        "gpt3-2.7b, 2.65 billion parameters, sequence 2048, global batch 512, bf16, adamw, on 64 x"
    )
    for kind in ("weights", "gradients", "optimizer", "activations", "workspace", "in all"):
        assert f"  {kind} " in text
    assert f"{len(answer.fitting) - 3} more fit (--top {len(answer.fitting)} lists all)." in text
    assert f"Faster, but does not fit: {answer.faster.mapping.text}" in text
    assert f"({answer.faster.missing_bytes:,.0f} bytes) too many" in text


def test_an_explanation_has_each_term() -> None:
    """Of its time, and of its memory; terms are what the step is made of."""
    found = predict(WORKLOAD, Mapping(tensor=8, pipeline=4, replicas=2, micro_batch=1, sequence_parallel=True))
    text = printed(explanation(found))

    for name, words in TERM_WORDS.items():
        assert f"  {name} " in text
        assert words in text
    assert found.mapping.text in text
    assert "Memory of each device of stage 1 of 4: it fits." in text
    assert "network between hosts" in text


@given(
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([1, 2, 4, 16, 32]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 30]),
)
@settings(max_examples=30)
def test_a_picture_is_well_formed(tensor: int, pipeline: int, replicas: int, phases: int) -> None:
    """As many cells as devices are drawn; more are said, not drawn; all is inside."""
    mapping = Mapping(
        tensor=tensor,
        pipeline=pipeline,
        replicas=replicas,
        phases=min(phases, 2 * (32 // pipeline)),
        recompute="layer",
    )
    root = ET.fromstring(cube_svg(predict(WORKLOAD, mapping), picture_css()))  # noqa: S314 - our own
    cells = [group for group in root.findall("{*}g") if group.find("{*}title") is not None]
    words = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]

    assert len(cells) == min(tensor, 8) * min(pipeline, 8) * min(replicas, 4)
    assert any(word.startswith("not drawn") for word in words) == (tensor > 8 or pipeline > 8 or replicas > 4)
    assert any("phases of a stage" in word for word in words) == (mapping.phases > 1)
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if "x" in rect.attrib:
            assert 0 <= float(rect.attrib["x"]) <= float(root.attrib["width"]) - float(rect.attrib["width"])
            assert 0 <= float(rect.attrib["y"]) <= float(root.attrib["height"]) - float(rect.attrib["height"])
    for cell in cells:
        for label in cell.findall("{*}text"):
            assert text_width(label.text or "", 11) < float(cell.find("{*}rect").attrib["width"])  # type: ignore[union-attr] # each has one
    for word in root.findall("{*}text"):
        assert text_width(word.text or "", int(word.attrib["font-size"])) < float(root.attrib["width"])


def test_a_picture_shows_any_name_of_a_model() -> None:
    """A character that no XML document may contain is replaced, and markup stays text."""
    named = replace(WORKLOAD, model=replace(WORKLOAD.model, name="\x1b<b>&amp;"))
    root = ET.fromstring(cube_svg(predict(named, Mapping(replicas=64)), ""))  # noqa: S314 - our own

    assert root.findtext("{*}title", "").startswith("\ufffd<b>&amp;, ")
    assert root.findtext("{*}text", "").startswith("\ufffd<b>&amp; on 64 x ")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "-"), (0.0123, "12.3 ms"), (1.5, "1.50 s"), (99.99, "99.99 s"), (100.0, "100 s")]
)
def test_seconds_as_people_read_them(value: float, text: str) -> None:
    """Three or four digits."""
    assert seconds(value) == text


def test_tables_keep_all_numbers_at_the_least_width() -> None:
    """All words are there, in their order; only those of the last column go on below."""
    for parts in (
        answer_table(the_answer(), WORKLOAD, 200),
        explanation(predict(WORKLOAD, Mapping(tensor=8, pipeline=4, replicas=2))),
    ):
        tables: list[Part] = [part for part in parts if isinstance(part, Table)]
        narrow, wide = printed(tables, 80), printed(tables, 300)

        assert max(map(len, narrow.splitlines())) <= 80
        assert "".join(narrow.split()) == "".join(wide.split())


def test_small_amounts_have_digits() -> None:
    """Of parameters, and of memory."""
    model = named_model("gpt2")
    small = Workload(model=model, machine=WORKLOAD.machine, training=WORKLOAD.training, memory_limit_bytes=2**20)
    answer = Answer(fitting=(), faster=predict(small, Mapping(replicas=64)), num_mappings=1)

    assert heading(small).startswith("gpt2, 124 million parameters,")
    assert "GiB and has 0.000977: " in "".join(why_not_faster(answer))
    assert named_model("gpt3-175b").num_parameters > 1e11
    assert heading(replace(small, model=named_model("gpt3-175b"))).startswith("gpt3-175b, 175 billion parameters,")


def test_a_saved_mapping_tells_its_model_from_others() -> None:
    """By its parameters, and by a digest of all its numbers."""
    mapping = Mapping(replicas=64)
    one, other = (
        json.loads(saved(mapping, replace(WORKLOAD, model=named_model("gpt3-2.7b", words))))
        for words in ([], ["sequence=1024"])
    )

    assert one["model"] == other["model"]
    assert one["model_sha256"] == model_digest(WORKLOAD.model) != other["model_sha256"]
    assert one["parameters"] == WORKLOAD.model.num_parameters
