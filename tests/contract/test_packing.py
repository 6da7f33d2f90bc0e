"""Packed data obeys the same laws in jobs of every split, and trains the same bits; models of others agree.

Holds popdist.packing.packed_loader and popdist.packing.stream_packing.
"""

import pytest
import torch

from popdist.packing import Collator, attention_mask
from tests.contract import packing_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.contract.laws import laws_of
from tests.running import DEADLINE_SECONDS


def test_laws(forked_world: ForkedWorlds) -> None:
    """Every law of packing_laws.py on every instance; equally many replicas train equal bits in any split."""
    expected = len(laws_of(packing_laws))
    checksums: dict[int, set[str]] = {1: set(), 2: set(), 4: set()}
    for num_instances, num_replicas in ((1, 1), (2, 2), (1, 4), (2, 4), (4, 4)):
        told = forked_world(
            packing_laws.run_all,
            num_instances=num_instances,
            num_replicas=num_replicas,
            timeout_seconds=DEADLINE_SECONDS,
        )
        assert [count for count, _ in told] == [expected] * num_instances
        checksums[num_replicas] |= {checksum for _, checksum in told}
    assert [len(found) for found in checksums.values()] == [1, 1, 1]


TEXTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9]]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_of_transformers_read_packed_rows(name: str) -> None:
    """BERT with a mask and a GPT with positions alone: each sequence as if it were alone."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

    sizes = {"vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = (
        BertModel(BertConfig(**sizes, intermediate_size=32))
        if name == "bert"
        else GPT2Model(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    )
    model.eval()
    rows = [[{"input_ids": TEXTS[1]}, {"input_ids": TEXTS[0]}], [{"input_ids": TEXTS[3]}, {"input_ids": TEXTS[2]}]]
    packed = Collator(max_length=9, padding={"input_ids": 0})(rows)
    options = {"attention_mask": attention_mask(packed.segment_ids)} if name == "bert" else {"use_cache": False}
    with torch.no_grad():
        found = model(packed.input_ids, position_ids=packed.position_ids, **options).last_hidden_state
        for row, start, text in [(0, 0, TEXTS[1]), (0, 5, TEXTS[0]), (1, 0, TEXTS[3]), (1, 4, TEXTS[2])]:
            alone = model(torch.tensor([text])).last_hidden_state[0]
            assert torch.allclose(found[row, start : start + len(text)], alone, rtol=0, atol=1e-5)
