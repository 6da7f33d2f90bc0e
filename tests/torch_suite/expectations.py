"""What is expected of torch's own tests: which run on each change, and which do not pass, and why."""

from collections.abc import Sequence
from typing import Final

from tests.torch_suite.forked_tests import Outcome

FAILING: Final[dict[str, str]] = {}
"""Tests that do not pass on the backend ``popdist``, each with the reason."""

EACH_CHANGE: Final[Sequence[str]] = (
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_max",
    "test_all_reduce_coalesced_max_complex_unsupported",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_product",
    "test_all_reduce_sum_async",
    "test_barrier",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo",
    "test_broadcast_full_group",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather_checks",
    "test_gather_full_group",
    "test_get_backend",
    "test_get_future",
    "test_isend",
    "test_monitored_barrier_gloo",
    "test_reduce_full_group_max",
    "test_scatter_checks",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
)
"""One or two tests of each kind of call, so that all of them take about a minute at two and at three ranks."""


def problem(backend: str, outcome: Outcome) -> str:
    """What is unexpected in an outcome; empty if nothing is."""
    reason = FAILING.get(outcome.name, "") if backend == "popdist" else ""
    if outcome.result == "failed" and not reason:
        return "failed"
    if outcome.result == "passed" and reason:
        return f"passed, and was expected not to, because {reason}"
    return ""
