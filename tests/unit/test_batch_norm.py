"""Which layers are batch norms. The laws in tests/contract/batch_norm_laws.py hold what these do in groups."""

from torch import nn

from popdist.step.training.batch_norm import BatchNorm

LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def test_batch_norms_are_known_by_what_they_are_derived_from() -> None:
    """Torch's own, those that others derive from these or from their base, and no other norms."""
    base = nn.BatchNorm2d.__bases__[0]
    for kind in (*LAYERS, nn.LazyBatchNorm1d, type("Own", (nn.BatchNorm3d,), {}), type("Own", (base,), {})):
        assert issubclass(kind, BatchNorm)
    assert not issubclass(nn.InstanceNorm2d, BatchNorm)
