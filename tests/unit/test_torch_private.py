"""Private names of torch: what they do, and what happens in a torch that lacks one.

Holds popdist.ground.torch_private_groups.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from inspect import currentframe
from runpy import run_path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined] # torch exports it all the same
from torch.futures import Future

from popdist.errors import BackendError, DescriptionError, PopdistWarning
from popdist.gradients import partial_gradients
from popdist.gradients.flat_buffers import GradientLayout
from popdist.gradients.shards import remember
from popdist.ground import torch_private, torch_private_groups


def test_autograd_runs_in_backward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook sees it; without torch's name nobody knows."""
    seen = list[bool | None]()
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda _: seen.append(torch_private.is_in_backward()))
    value.sum().backward()
    seen.append(torch_private.is_in_backward())
    monkeypatch.setattr(torch_private, "_current_graph_task_id", None)
    seen.append(torch_private.is_in_backward())

    assert seen == [True, False, None]


def test_the_engine_is_told_from_a_hook_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd's engine calls from C++, as torch's reducer is called, and what a hook in Python calls."""
    seen = dict[str, bool]()

    def group_method(name: str) -> None:
        seen[name] = torch_private.is_caller_the_engine(currentframe())

    def hook(_: torch.Tensor) -> None:
        group_method("hook")

    def backward() -> dict[str, bool]:
        seen.clear()
        value = torch.ones(1, requires_grad=True)
        value.register_hook(hook)
        value.register_hook(lambda _: seen.update(engine=torch_private.is_caller_the_engine(currentframe())))
        value.sum().backward()
        group_method("no backward")
        return dict(seen)

    assert backward() == {"hook": False, "engine": True, "no backward": False}
    for name, replaced in (("_engine_starter", lambda: None), ("_current_graph_task_id", None)):
        with monkeypatch.context() as patch:
            patch.setattr(torch_private, name, replaced)
            assert set(backward().values()) == {False}, name


def test_storages_without_torchs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is used again, and nothing is shared, which is an error that the callers expect."""
    storage, other = torch.ones(1).untyped_storage(), torch.ones(1).untyped_storage()
    assert torch_private.is_held_once(storage)
    for name in ("_storage_use_count", "_share_fd_cpu", "_swap_data_ptr"):
        monkeypatch.setattr(torch_private, name, None)

    assert not torch_private.is_held_once(storage)
    with pytest.raises(BackendError, match=r"lacks UntypedStorage\._share_fd_cpu_"):
        torch_private.descriptor_of(storage)
    with pytest.raises(BackendError, match=r"lacks UntypedStorage\._swap_data_ptr_"):
        torch_private.swap_memory(storage, other)


def test_works_and_futures_without_torchs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future gives its value where its error cannot be raised; without works there is no backend."""

    def reveal(_: object) -> NoReturn:
        raise ValueError("revealed")

    raising, plain = Future[str](), Future[str]()
    torch_private_groups.set_failure(raising, "value", reveal)
    with pytest.raises(ValueError, match="revealed"):
        raising.wait()
    assert torch_private_groups.done_work([]).is_completed()
    monkeypatch.setattr(torch_private_groups, "_set_unwrap_func", None)
    monkeypatch.setattr(torch_private_groups, "_create_work_from_future", None)
    torch_private_groups.set_failure(plain, "value", reveal)
    assert plain.wait() == "value"
    monkeypatch.delattr("torch._C._distributed_c10d")
    for names in vars(torch_private_groups), run_path(torch_private_groups.__file__):
        with pytest.raises(RuntimeError, match="use the backend gloo"):
            names["done_work"]([])


def test_functions_are_not_traced_without_torchs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public way is taken, which has to import the compiler."""
    monkeypatch.setattr(torch_private, "_set_code_exec_strategy", None)
    monkeypatch.setattr(torch.compiler, "disable", lambda function: [function])

    monkeypatch.delattr("torch._C._dynamo")

    for names in vars(torch_private), run_path(torch_private.__file__):
        assert names["skip_tracing"](len) == [len]


def test_what_follows_a_backward_pass_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it has ended; a torch without the names says so, and calls nothing."""
    ends, answers, numbers = list[int](), list[bool](), list[int | None]()
    value = torch.ones(1, requires_grad=True)

    def hook(_gradient: torch.Tensor) -> None:
        numbers.append(torch_private.backward_pass())
        answers.append(torch_private.call_after_backward(lambda: ends.append(1)))

    value.register_hook(hook)
    value.sum().backward()
    monkeypatch.setattr(torch_private, "_execution_engine", None)
    monkeypatch.setattr(torch_private, "_current_graph_task_id", None)
    value.sum().backward()

    assert (ends, answers) == ([1], [True, False])
    assert numbers[0] is not None
    assert numbers[1] is None


def test_writes_are_counted() -> None:
    """Of what has no count, none."""
    tensor = torch.ones(2)
    before = torch_private.num_writes(tensor)
    tensor.add_(1)
    uncounted: Any = object()
    assert torch_private.num_writes(tensor) == before + 1
    assert torch_private.num_writes(uncounted) == 0


def test_classes_of_the_pytree_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """And closed with other children; without the name none is known."""
    made: Any = torch.return_types.max
    children, close = cast("Any", torch_private.open_nest(made((1, 2))))
    assert children == [1, 2]
    assert close([3, 4]) == made((3, 4))
    assert torch_private.open_nest("text") is None
    monkeypatch.setattr(torch_private, "_pytree", None)
    assert torch_private.open_nest(made((1, 2))) is None


def test_hooks_of_gradients_are_counted() -> None:
    """Of both kinds."""
    leaf = torch.zeros(2, requires_grad=True)
    assert torch_private.num_gradient_hooks(leaf) == 0
    leaf.register_hook(lambda it: it)
    leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.num_gradient_hooks(leaf) == 2


def test_compiled_modules_are_known() -> None:
    """Wrapped by torch.compile, and compiled in place."""
    module = torch.nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    wrapped: Any = torch.compile(module, backend="eager")
    assert torch_private.is_compiled(wrapped)
    module.compile(backend="eager")
    assert torch_private.is_compiled(module)


@pytest.mark.parametrize("name", ["_Options", "_devices", "_timeout"])
def test_gloo_groups_without_torchs_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The group has the address that is asked for; without one of the names gloo chooses another."""
    gloo: Any = dist.ProcessGroupGloo
    owners = [gloo, *gloo._Options.__mro__]

    def connect() -> Any:
        return torch_private_groups.connect_gloo(HashStore(), 0, 1, timedelta(seconds=30), "no address")

    with pytest.raises(RuntimeError, match="no address"):
        connect()
    monkeypatch.delattr(next(owner for owner in owners if name in vars(owner)), name)

    assert connect().size() == 1


@pytest.mark.parametrize("name", ["_timeout", "other"])
def test_nccl_groups_without_torchs_name(name: str) -> None:
    """The options have the timeout that is asked for; without its name they stay as NCCL makes them."""
    timeout = timedelta(seconds=30)
    nccl = Mock(side_effect=lambda *arguments: arguments, Options=lambda: SimpleNamespace(**{name: None}))

    made = torch_private_groups.connect_direct(nccl, HashStore(), 0, 1, timeout)[-1]

    assert vars(made) == {name: timeout if name == "_timeout" else None}


def test_workers_of_streams_without_torchs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that divides itself would lose items, so it is an error that says what to do."""
    monkeypatch.setattr(torch_private, "_worker", None)
    with pytest.raises(RuntimeError, match="num_workers=0"):
        torch_private.hide_worker_info()


def test_gradients_stay_whole_without_torchs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no tensor can be made without memory no gradient is in parts; a scaler reads whole ones."""
    net, optimizer = torch.nn.Linear(2, 2), nullcontext()
    remember([(parameter, (range(parameter.numel()),)) for parameter in net.parameters()], optimizer)
    gradients = GradientLayout(net.named_parameters())
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    assert partial_gradients.parts_of(gradients) is not None
    assert torch_private.unscaler_of(operator) is not None
    monkeypatch.setattr(torch_private, "has_wrapper_tensors", False)
    monkeypatch.setattr(torch_private, "_unscale", None)

    assert partial_gradients.parts_of(gradients) is None
    assert torch_private.unscaler_of(operator) is None


def test_scripts_without_torchs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning says what has other bits, once."""
    monkeypatch.setattr(torch_private, "_set_profiling_executor", None)
    torch_private.compile_scripts_at_once.cache_clear()
    with pytest.warns(PopdistWarning, match=r"lacks _jit_set_profiling_executor: what torch\.jit has scripted"):
        torch_private.compile_scripts_at_once()
    torch_private.compile_scripts_at_once()
    torch_private.compile_scripts_at_once.cache_clear()


def test_modules_are_not_measured_without_torchs_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has moved them, an error names what lacks; nothing is printed while they run."""
    seen = list[object]()

    def see(operator: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        seen.append(operator)
        return operator(*args, **kwargs)

    with torch_private.fake_tensors(), torch_private.seen_operations(see):
        made = torch.ones(2**20, 2**20, dtype=torch.float32) + 1
    assert made.shape == (2**20, 2**20)
    assert torch.ops.aten.add.Tensor in seen
    monkeypatch.setattr(torch_private, "find", lambda *_: None)
    with pytest.raises(DescriptionError, match="lacks FakeTensorMode"), torch_private.fake_tensors():
        pass
    monkeypatch.setattr(torch_private, "import_module", Mock(side_effect=ImportError))
    with pytest.raises(DescriptionError, match="lacks TorchDispatchMode"):
        torch_private.seen_operations(see)


def test_a_schedule_shows_its_parts() -> None:
    """One stage or several, whatever it calls them; what has no such, or not torch's name, is no schedule."""
    first, second = (SimpleNamespace(stage_index=index, submod=torch.nn.Identity()) for index in range(2))
    one = SimpleNamespace(_stage=first, _n_microbatches=2)
    several = SimpleNamespace(_stages=[second, first], by_index={1: second}, _n_microbatches=4)

    assert torch_private.parts_of_schedule(one) == ([first], 2)
    assert torch_private.parts_of_schedule(several) == ([first, second], 4)
    assert torch_private.parts_of_schedule(SimpleNamespace(_stage=first)) is None
    assert torch_private.parts_of_schedule(SimpleNamespace(_n_microbatches=4)) is None
    assert torch_private.parts_of_schedule(7) is None


def test_parts_of_tensors_draw_alike_without_torchs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning says where to draw instead; with the name, nothing that torch has put there is replaced."""
    random = importlib.import_module("torch.distributed.tensor._random")
    torchs = object()
    monkeypatch.setattr(random, "_rng_tracker", torchs)
    torch_private.set_numbers_of_dtensors(lambda *_: nullcontext())
    assert random._rng_tracker is torchs
    monkeypatch.delattr(random, "_rng_tracker")
    with pytest.warns(PopdistWarning, match="lacks _rng_tracker: .*sharded_randomness"):
        torch_private.set_numbers_of_dtensors(lambda *_: nullcontext())
    assert not hasattr(random, "_rng_tracker")


def test_versions_are_compared() -> None:
    """By number; a refusal names what is needed and what is here."""
    assert not torch_private.is_older_than(2, 6)
    assert torch_private.is_older_than(99, 0)
    assert torch_private.needs(99, 1, "flying") == f"flying needs torch 99.1; this is {torch.__version__}"


def test_older_dtensors_leave_a_generator_in_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """From there it is taken, so that each part draws numbers of its own from it; torch 2.9 is not looked into."""
    random = SimpleNamespace(_rng_tracker=None)
    monkeypatch.setattr(torch_private, "_module", lambda _: random)
    torch_private.set_numbers_of_dtensors(lambda *given: nullcontext(given[2]))
    op_info = SimpleNamespace(local_kwargs={"generator": "mine"})
    tracker, spec = cast("Any", random._rng_tracker), SimpleNamespace(mesh=1, placements=2)
    found = []
    for version in ("2.9.0", "2.8.0", "2.8.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with tracker._distribute_region(spec) as generator:
            found.append(generator)
    assert (found, op_info.local_kwargs) == ([None, "mine", None], {})


@pytest.mark.parametrize(("version", "is_kept"), [("2.6.0", False), ("2.7.1", False), ("2.8.0", True)])
def test_older_torchs_keep_no_work_that_they_get(
    version: str, *, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions of torch.distributed do, and are seen through what torch.compiler.disable wraps around."""
    monkeypatch.setattr(torch, "__version__", version)
    frame = cast("FrameType", currentframe())
    assert torch_private_groups.keeps_works(frame) is is_kept

    def called_by(*namespaces: dict[str, Any]) -> Any:
        frames = None
        for namespace in namespaces:
            frames = SimpleNamespace(f_globals=namespace, f_back=frames)
        return SimpleNamespace(f_back=frames)

    wrapper = {"__name__": "torch._dynamo.eval_frame"}
    assert torch_private_groups.keeps_works(called_by(vars(distributed_c10d), wrapper, wrapper))
    assert torch_private_groups.keeps_works(called_by(wrapper)) is is_kept


def test_stores_serve_a_socket_that_listens_in_older_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libuv before torch 2.8."""
    seen = list[bool]()
    for version in ("2.6.0", "2.7.1+cu126", "2.8.0", "2.15.0"):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch_private_groups, "TCPStore", lambda _host, use_libuv: seen.append(use_libuv))
        torch_private_groups.tcp_store("host")
    assert seen == [False, False, True, True]


def test_operators_say_what_they_are_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which arguments there are, and which name each has, differs; one that is not there is refused."""
    assert torch_private_groups.arguments_of("barrier")[:3] == ["tensor", "process_group", "device_ids"]
    with pytest.raises(RuntimeError, match="lacks c10d::no_such: use the backend gloo"):
        torch_private_groups.arguments_of("no_such")


def test_options_have_the_field_that_older_ones_lack() -> None:
    """A class of the same kind, so that torch takes it."""
    older = type("Options", (), {})
    made = torch_private_groups.with_async_op(older)()
    made.asyncOp = False
    assert isinstance(made, older)
    assert torch_private_groups.with_async_op(older)().asyncOp
    assert torch_private_groups.with_async_op(dist.BroadcastOptions) is dist.BroadcastOptions


def test_an_operation_is_found_among_the_arguments_where_torch_hides_it() -> None:
    """As options, as an operation, or as none, which is a sum; an operator called itself is refused."""
    options, ops = dist.AllreduceOptions(), cast("Any", dist.ReduceOp)
    options.reduceOp = ops.MAX
    boxed = object()
    cases: list[tuple[list[object], Any]] = [([[], options], ops.MAX), ([[], ops.MIN], ops.MIN), ([[]], ops.SUM)]
    for arguments, wanted in cases:
        assert torch_private_groups.reduce_op(boxed, arguments) == wanted
    assert torch_private_groups.reduce_op(SimpleNamespace(op=lambda: 3), None) == ops.RedOpType(3)
    with pytest.raises(RuntimeError, match=r"a c10d operator itself needs torch 2\.11; this is .*call torch.dist"):
        torch_private_groups.reduce_op(boxed, None)


@pytest.mark.parametrize(
    ("version", "op", "is_gloos"), [("2.6.0", "MAX", False), ("2.6.0", "SUM", True), ("2.11.0", "MAX", True)]
)
def test_older_gloos_scatter_what_they_all_reduce(
    version: str, op: str, *, is_gloos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 2.11 gloo adds whatever is asked where it is to reduce and scatter one tensor."""
    backend = Mock(spec=dist.ProcessGroupGloo, size=lambda: 2, rank=lambda: 1)
    backend.allreduce.side_effect = lambda tensors, _: Mock(result=tensors[0].mul_(10))
    monkeypatch.setattr(torch, "__version__", version)
    output, tensor, options = torch.zeros(3), torch.arange(6.0), dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, op)
    torch_private_groups.reduce_scatter_of(backend)(output, tensor, options)
    assert backend._reduce_scatter_base.called == is_gloos
    if not is_gloos:
        assert backend.allreduce.call_args.args[1].reduceOp == options.reduceOp
        assert (output.tolist(), tensor.tolist()) == ([30, 40, 50], [0, 1, 2, 3, 4, 5])


def test_groups_are_shut_down_by_older_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the kind, by their own method; others as torch does."""
    torchs_own, ours = Mock(), Mock(spec=["shutdown"])
    monkeypatch.setattr(torch_private_groups, "_shutdown_backend", torchs_own)
    monkeypatch.setattr(distributed_c10d, "_shutdown_backend", torchs_own, raising=False)
    torch_private_groups.have_shut_down(type(ours))
    shut_down: Any = vars(distributed_c10d)["_shutdown_backend"]
    shut_down(ours)
    shut_down("another's")
    ours.shutdown.assert_called_once_with()
    torchs_own.assert_called_once_with("another's")
