"""A mapping applied to transformers: what the parts learn is what the whole model does.

Holds popdist.parallel.apply_mapping.
"""

import pytest

from tests.contract import parallelize_laws
from tests.contract.forked_calls import ForkedWorlds


@pytest.mark.parametrize(("num_instances", "tensor", "pipeline"), [(1, 1, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2)])
def test_laws(forked_world: ForkedWorlds, num_instances: int, tensor: int, pipeline: int) -> None:
    """Every law of parallelize_laws.py, on every instance."""
    pytest.importorskip("transformers")
    forked_world.keep_laws(parallelize_laws, num_instances=num_instances, tensor=tensor, pipeline=pipeline)
