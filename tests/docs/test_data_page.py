"""The page on data tells the truth: its blocks are one program, and it runs everywhere.

Holds popdist.job.weights.
"""

from pathlib import Path

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT, blocks

PAGE = ROOT / "docs" / "data.md"


def test_the_blocks_are_a_program(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Alone, and in a job; what it computes is the same on every instance of a job."""
    found = blocks(PAGE)
    program = tmp_path / "program.py"
    program.write_text(
        "\n".join([*(block.text for block in found), "print(popdist.checksum(model), mean_square_error)"])
    )

    assert {block.language for block in found} == {"python"}
    ((alone,),) = forked_world.script(program)
    (first,), (second,) = forked_world.script(program, num_instances=2, num_replicas=4)
    assert first == second != alone
