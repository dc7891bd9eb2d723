"""Each private name of torch does what `torch_access` expects; without it the documented fallback acts."""

import types
from contextlib import ExitStack, contextmanager
from threading import Event, Thread, get_ident
from weakref import finalize

import pytest

from bertscope import torch_access
from bertscope.errors import BertscopeError
from bertscope.memory.ranks import fake_ranks
from bertscope.settings.parallelism import Parallelism
from bertscope.torch_access import DispatchMode, compiled, distributed, fake_gpu, torch
from tests.child_server import run_loaded
from tests.conftest import ROOT, run_python

aten = torch.ops.aten


class Seeing(DispatchMode):
    """Collect the answers of a function while operators run."""

    def __init__(self, answer=lambda operator, args: operator) -> None:
        super().__init__()
        self.answer, self.seen = answer, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(self.answer(operator, args))
        return operator(*args, **(kwargs or {}))


def backward():
    """Whether backward runs, and its node, at each operator of one backward pass."""
    loss, gradient = torch.ones(2, requires_grad=True).exp().sum(), torch.ones(())
    with Seeing(lambda *_: (torch_access.in_backward(), torch_access.autograd_node())) as mode:
        loss.backward(gradient)
    return mode.seen


def test_a_storage_has_one_key_for_all_its_views_with_and_without_values():
    with torch_access.fake_tensor_mode():
        fakes = torch.ones(4), torch.ones(4)
    pairs = fakes, (torch.ones(4), torch.ones(4)), (torch.ones(4, device="meta"), torch.ones(4, device="meta"))
    for tensor, other in pairs:
        key = torch_access.storage_key(tensor)
        assert key == torch_access.storage_key(tensor.view(2, -1)) == tensor.untyped_storage()._cdata
        assert key == torch_access.storage_key(tensor)
        assert key != torch_access.storage_key(other)


def test_torch_keeps_one_object_for_a_living_storage():
    tensor = torch.ones(4)
    storage = tensor.untyped_storage()
    assert tensor.view(2, 2).untyped_storage() is storage


def test_a_cpu_has_bf16_products_with_avx512_for_bf16_and_without_amx(monkeypatch):
    names = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
    assert all(isinstance(getattr(torch.cpu, name)(), bool) for name in names)
    for has_bf16, has_amx in ((True, False), (True, True), (False, False)):
        for name, value in zip(names, (has_bf16, has_amx), strict=True):
            monkeypatch.setattr(torch.cpu, name, lambda value=value: value)
        torch_access.has_bf16_products.cache_clear()
        assert torch_access.has_bf16_products() is (has_bf16 and not has_amx)
    for name in names:
        monkeypatch.delattr(torch.cpu, name)
    torch_access.has_bf16_products.cache_clear()
    assert torch_access.has_bf16_products() is False
    torch_access.has_bf16_products.cache_clear()


def test_the_device_of_a_fake_tensor_is_known_without_a_dispatch():
    asks = torch.ops.prim.device.default
    with torch_access.fake_tensor_mode():
        fake = torch.ones(4)
    assert torch_access.fake_device(asks, (fake,)) == fake.device == torch.device("cpu")
    assert torch_access.fake_device(aten.add.Tensor, (fake, fake)) is None
    assert torch_access.fake_device(asks, (torch.ones(4),)) is None


def test_a_node_has_the_tensors_that_it_saves():
    data, weight = torch.ones(2, 3), torch.ones(3, requires_grad=True)
    assert [tensor is data for tensor in torch_access.saved_tensors((data * weight).grad_fn)] == [True]


def test_one_more_reference_raises_the_use_counts():
    tensor = torch.ones(4)
    before = torch_access.use_counts(tensor)
    view = tensor.view(2, 2)
    after = torch_access.use_counts(tensor)
    assert after[1] == before[1] + 1, view


def test_without_use_counts_there_are_none(monkeypatch):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert torch_access.use_counts(torch.ones(4)) is None


def test_backward_and_its_node_are_known_while_it_runs_only():
    assert torch_access.in_backward() is False
    assert torch_access.autograd_node() is None
    seen = backward()
    assert all(inside for inside, _ in seen)
    assert any("Exp" in node.name() for _, node in seen if node is not None)


def test_without_the_task_the_node_tells_that_backward_runs(monkeypatch):
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert torch_access.in_backward() is False
    assert any(inside for inside, _ in backward())


def test_without_the_node_backward_is_known_and_belongs_to_no_module(monkeypatch):
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    assert set(backward()) == {(True, None)}


@pytest.mark.parametrize("is_missing", [False, True])
def test_the_profiler_shows_names_and_allocations(monkeypatch, is_missing):
    if is_missing:
        monkeypatch.delattr(torch._C._profiler, "_RecordFunctionFast")
    profiling = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
    with profiling as profiler, torch_access.record_name("a name"):
        torch.ones(1000)
    pending = torch_access.profiled_events(profiler)
    events = []
    while pending:
        events.append(pending.pop())
        pending += events[-1].children
    assert "a name" in [event.name for event in events]
    sizes = [event.extra_fields.alloc_size for event in events if event.name == "[memory]" and event.extra_fields.ptr]
    assert 4000 in sizes


def test_events_of_the_driver_and_of_a_card_are_known_by_their_tag():
    """kineto shows a mark on the host a second time as a mark on the card (seen on an H200)."""
    kinds = torch._C._profiler._EventType
    found = [torch_access.is_of_device(types.SimpleNamespace(tag=kind)) for kind in (kinds.Kineto, kinds.TorchOp)]
    assert found == [True, False]
    assert not torch_access.is_of_device(object())


def test_no_dispatch_mode_sees_a_name():
    with Seeing() as mode, torch_access.record_name("a name"):
        pass
    assert mode.seen == []


def test_a_profile_without_allocations_is_an_error_that_names_the_version():
    with pytest.raises(BertscopeError, match=rf"torch {torch.__version__.split('+')[0]}.*another version"):
        torch_access.profiled_events(object())


def test_composite_operators_and_those_of_autocast_are_known():
    assert torch_access.has_kernel(aten.linear.default, "CompositeImplicitAutograd")
    assert not torch_access.has_kernel(aten.addmm.default, "CompositeImplicitAutograd")
    assert torch_access.has_kernel(aten.linear.default, "AutocastCPU")
    assert not torch_access.has_kernel(aten.mul.left_t, "CompositeImplicitAutograd")
    assert not torch_access.has_kernel(object(), "AutocastCPU")


def test_an_operator_has_a_name_a_packet_and_a_schema():
    operator = aten.add_.Tensor
    assert torch_access.operator_name(operator) == "add_"
    assert torch_access.operator_packet(operator) is operator._overloadpacket is aten.add_
    assert [torch_access.is_view(op) for op in (aten.t.default, operator, aten.mm.default)] == [True, False, False]
    one, other, third = (torch.ones(1) for _ in range(3))
    for op, given, changed in (
        (aten._foreach_add_.List, ([one], [other]), [one]),
        (aten._fused_adamw_.default, ([one], [other], [third], [], [], []), [one, other, third]),
        (operator, (one, other), []),  # it returns what it writes
    ):
        assert list(map(id, torch_access.written_tensors(op, given))) == list(map(id, changed))


def test_an_operator_without_private_names_keeps_its_packet():
    class Operator:
        def name(self):
            return "aten::add.Tensor"

    assert torch_access.operator_packet(Operator()) is aten.add
    assert torch_access.is_view(Operator()) is False
    assert torch_access.written_tensors(Operator(), (1,)) == []


def test_a_closed_library_leaves_no_kernel():
    library = torch.library.Library("aten", "IMPL")
    torch_access.replace_kernel(library, "sinc", lambda given: given, "AutocastCPU")
    assert torch_access.has_kernel(aten.sinc.default, "AutocastCPU")
    torch_access.close_library(library)
    assert not torch_access.has_kernel(aten.sinc.default, "AutocastCPU")
    torch_access.close_library(object())


def test_a_kernel_that_python_registered_runs_by_its_key_and_names_its_arguments():
    library = torch.library.Library("canary", "DEF")
    library.define("twice(Tensor values, int times) -> Tensor")
    library.impl("twice", lambda values, times: values * times, "CUDA")
    twice = torch.ops.canary.twice.default
    assert torch_access.argument_names(twice) == ["values", "times"]
    assert torch_access.run_kernel(twice, "CUDA", (torch.ones(1), 2), {}).item() == 2
    torch_access.close_library(library)


def test_a_fake_tensor_refuses_its_value_with_the_known_errors():
    depends_on_values, unknown_shape = torch_access.value_errors()
    with torch_access.fake_tensor_mode():
        assert type(torch.ones(1)) is torch_access.fake_class()
        with pytest.raises(depends_on_values):
            torch.ones(1).item()
        with pytest.raises(unknown_shape):
            torch.ones(3).nonzero()


def test_trees_of_containers_are_walked_in_order():
    tree = {"a": (1, [2]), "b": 3}
    assert torch_access.tree_leaves(tree) == [1, 2, 3]
    assert torch_access.tree_map(lambda leaf: -leaf, tree) == {"a": (-1, [-2]), "b": -3}


def test_a_model_on_meta_is_built_without_initial_values_and_a_real_tensor_gets_its_own():
    with torch_access.on_device("meta"):
        with Seeing() as mode:
            linear = torch.nn.Linear(2, 3)
            torch.nn.init.trunc_normal_(linear.weight)
        real = torch.nn.init.ones_(torch.empty(2, device="cpu"))
    assert not any("uniform" in str(operator) or "normal" in str(operator) for operator in mode.seen)
    assert linear.weight.is_meta
    assert real.tolist() == [1.0, 1.0]
    with torch_access.on_device("cpu"):
        assert torch.nn.init.ones_(torch.empty(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_fake_tensor_becomes_a_parameter_that_a_module_registers(requires_grad):
    with torch_access.fake_tensor_mode():
        fake = torch.empty(2, 3)
        param = torch_access.fake_parameter(fake, requires_grad)
        module = torch.nn.Linear(3, 2)
        module.weight = param
    assert module.get_parameter("weight") is param is fake
    assert param.requires_grad is requires_grad


def test_a_module_with_values_is_initialized_where_others_are_built_on_meta():
    given = torch.nn.Linear.reset_parameters
    torch.manual_seed(0)
    expected = torch.nn.Linear(2, 3).weight.tolist()
    began, may_end = Event(), Event()

    def build_until_the_other_ended():
        with torch_access.on_device("meta"):
            began.set()
            may_end.wait(20)

    thread = Thread(target=build_until_the_other_ended)
    with torch_access.on_device("meta"):
        thread.start()
        assert began.wait(20)
        torch.manual_seed(0)
        assert torch.nn.Linear(2, 3, device="cpu").weight.tolist() == expected
    assert torch.nn.Linear.reset_parameters is given
    may_end.set()
    thread.join()
    assert torch.nn.Linear.reset_parameters is given


def test_torch_dynamo_is_loaded_by_its_first_real_use_also_after_a_failure_and_inside_a_mode():
    """A forward on meta and a job of FSDP are no such use; a mode sees none of the operators of the import."""
    code = """
import sys
from bertscope import torch_access
from bertscope.torch_access import torch
seen = []
class Mode(torch_access.DispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        seen.append(operator)
        return operator(*args, **kwargs or {})
def run():
    weight, ids = torch.empty(5, 3, device='meta'), torch.empty(2, 4, dtype=torch.long, device='meta')
    with Mode():
        return (torch.nn.functional.embedding(ids, weight) + 1.5).shape == (2, 4, 3)
is_loaded = lambda: 'torch._dynamo.eval_frame' in sys.modules
torch_access.load_dynamo_later()
print(run(), is_loaded(), torch._dynamo.graph_break(), torch._dynamo.is_compiling())
print(torch._dynamo.config.fake_tensor_cache_enabled)
torch._dynamo.trace_rules.clear_lru_cache()
import bertscope as b; b.estimate('bert-tiny', strategy='fsdp', world_size=2, batch=1, seq=8)
print(is_loaded())
sys.modules['torch._dynamo.eval_frame'] = None
try:
    torch._dynamo.explain
except ImportError as error:
    print('eval_frame' in str(error))
del sys.modules['torch._dynamo.eval_frame']
seen.clear()
with Mode():
    found = torch._dynamo.explain
    torch.ones(2)
print(len(seen), is_loaded(), callable(found), run(), torch._dynamo.is_compiling())
print(torch._dynamo.trace_rules.lookup.__module__, type(torch._dynamo.trace_rules).__name__)
"""
    done = run_python(code, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == [
        "True False None False", "True", "False", "True", "1 True True True False",
        "torch._dynamo.trace_rules module",
    ]  # fmt: skip


def test_counting_trees_and_prints_load_no_meta_kernel_of_python_and_a_forward_loads_them(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("import torch\ndef build():\n    return torch.nn.Linear(int(torch.arange(4.0).sum()), 2)\n")
    code = (
        "import io, os, sys; from contextlib import redirect_stdout, redirect_stderr\n"
        "from bertscope import cli\n"
        "def run(*words):\n"
        "    sys.argv = ['bertscope', *words]\n"
        "    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):\n"
        "        code = cli._run()\n"
        "    print(code, type(sys.modules['torch._meta_registrations']).__name__)\n"
        "    return out.getvalue()\n"
        "for command in (['count'], ['tree'], ['tree', '--style', 'torch']):\n"
        "    run(*command, 'bert-tiny', '-a', 'BertForPreTraining', '--lora', 'r=8,target=query+value')\n"
        "run('count', 'bert-tiny', '-a', 'BertForMaskedLM', '--untie', '--freeze', 'embeddings')\n"
        "run('count', 'bert-tiny', 'bert-mini', '--by', 'group')\n"
        "before = run('tree', 'bert-tiny', '--depth', '3')\n"
        "sys.stdout.flush()\n"
        "last = SHAPES if os.fork() else OWN\n"  # two processes from here
        "if last is SHAPES:\n"
        "    os.wait()\n"
        "run('tree', *last)\n"
        "assert run('tree', 'bert-tiny', '--depth', '3') == before\n"
        "import torch; from torch import _meta_registrations\n"
        "print(torch._meta_registrations is sys.modules['torch._meta_registrations'])\n"
        "ids, weight = torch.ones(2, 4, device='meta').long(), torch.ones(5, 3, device='meta')\n"
        "print(*torch.nn.functional.embedding(ids, weight).shape)\n"
    )
    given = f"SHAPES, OWN = ['bert-tiny', '--shapes'], [{f'{own}:build'!r}]\n"
    done = run_python(given + code, cwd=ROOT, check=True)
    *without, loaded, again, is_one, shape = done.stdout.splitlines()
    assert [loaded, again, is_one, shape] == without[-4:] == ["0 module", "0 module", "True", "2 4 3"]
    assert (set(without[:-4]), len(without[:-4])) == ({"0 _LaterKernels"}, 6), done.stdout


def test_meta_kernels_that_were_left_out_are_loaded_when_one_of_their_names_is_read():
    code = (
        "import sys, gc; from bertscope import torch_import\n"
        "torch_import.without_meta_kernels()\n"
        "with torch_import.quick_import():\n"
        "    import torch\n"
        "torch_import.without_meta_kernels()\n"
        "later = sys.modules['torch._meta_registrations']\n"
        "print(hasattr(later, '__wrapped__'), later is sys.modules['torch._meta_registrations'], gc.isenabled())\n"
        "print(later.activate_meta.__module__, later is sys.modules['torch._meta_registrations'])\n"
        "torch_import.load_meta_kernels()\n"
        "print(torch.nn.functional.softmax(torch.ones(2, 3, device='meta'), -1).shape)\n"
    )
    done = run_python(code, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == [
        "False True True", "torch._meta_registrations False", "torch.Size([2, 3])",
    ]  # fmt: skip


def test_in_a_mode_nothing_is_compiled_so_that_it_needs_no_protection():
    assert not torch_access.DispatchMode()._should_skip_dynamo()
    assert not hasattr(Seeing.__torch_dispatch__, "__wrapped__")  # torch._disable_dynamo wraps it
    compiled = torch.compile(lambda: torch.compiler.is_compiling(), backend=lambda *_: pytest.fail("it is compiled"))
    with Seeing():
        assert torch.ones(2).sum() == 2
        assert not compiled()


def test_a_fake_tensor_gets_a_layout_in_an_own_storage_or_in_that_of_another():
    with torch_access.fake_tensor_mode():
        given = torch.ones(2, 3)
    new = torch_access.fake_tensor_as(given, (4, 2), (1, 4), torch.half, 0, shares=False)
    view = torch_access.fake_tensor_as(given, (2,), (3,), torch.float, 1, shares=True)
    for made, layout in ((new, ((4, 2), (1, 4), torch.half, 0)), (view, ((2,), (3,), torch.float, 1))):
        assert type(made) is type(given)
        assert (tuple(made.shape), made.stride(), made.dtype, made.storage_offset()) == layout
        assert (made.device, made.fake_mode) == (given.device, given.fake_mode)
    assert new.untyped_storage().nbytes() == 16
    assert torch_access.storage_key(view) == torch_access.storage_key(given) != torch_access.storage_key(new)


def test_an_operator_runs_on_meta_in_the_storages_of_fake_tensors():
    with torch_access.fake_tensor_mode():
        given = torch.ones(4, 6)
        part, other = given[2:], torch.ones(6, dtype=torch.half)
        view = torch.ops.aten.view.default
        (meta, _), viewed = torch_access.run_on_meta(view, (part, [12]), {})
        (changed, _), same = torch_access.run_on_meta(torch.ops.aten.mul_.Tensor, (part, other), {})
        copy = {"dtype": torch.half, "device": torch.device("cpu")}
        _, copied = torch_access.run_on_meta(torch.ops.aten._to_copy.default, (part,), copy)
    assert (meta.is_meta, meta.shape, meta.stride(), meta.storage_offset()) == (True, (2, 6), (6, 1), 12)
    assert (viewed.shape, viewed.storage_offset(), same is changed) == ((12,), 12, True)
    assert torch_access.storage_key(viewed) == torch_access.storage_key(given) != torch_access.storage_key(copied)
    assert (copied.is_meta, copied.dtype, copied.shape) == (True, torch.half, (2, 6))


def test_a_fake_tensor_is_plain_unless_it_has_a_value_no_strides_or_complex_elements():
    with torch_access.fake_tensor_mode():
        plain, constant, complex_one = torch.ones(2, 3), torch.tensor(1.0), torch.ones(2, dtype=torch.cfloat)
        sparse = torch.ones(2, 3).to_sparse()
    assert torch_access.is_plain_fake(plain)
    for other in (constant, complex_one, sparse, torch.ones(2), None, 1):
        assert not torch_access.is_plain_fake(other), other


def test_a_tensor_on_meta_is_plain_unless_it_is_of_another_class_or_has_complex_elements():
    with torch.device("meta"):
        plain, complex_one = torch.ones(2, 3), torch.ones(2, dtype=torch.cfloat)
    with torch_access.fake_tensor_mode():
        fake = torch.ones(2, device="meta")
    for own in (plain, torch.nn.Parameter(plain)):
        assert torch_access.is_plain_meta(own)
    for other in (complex_one, fake, torch.ones(2), None, 1):
        assert not torch_access.is_plain_meta(other)


def test_a_dtensor_holds_the_rows_of_its_rank_and_other_tensors_hold_themselves(tmp_path):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=distributed.fake_store())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        whole = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
        (part,) = distributed.held_tensors(whole)
    finally:
        torch.distributed.destroy_process_group()
    assert distributed.is_wrapper(DTensor)
    assert tuple(part.shape) == (3, 3)
    plain = torch.ones(2)
    assert list(distributed.held_tensors(plain)) == [plain]


def test_the_tensors_of_an_output_are_found_in_tuples_mappings_and_objects_once():
    one, two, three = (torch.zeros(1) for _ in range(3))
    cache = types.SimpleNamespace(layers=[types.SimpleNamespace(keys=one, values=two)])
    cache.itself = cache
    found = distributed.tensors_in({"logits": three, "past": (cache, None, "text"), "again": [three]})
    assert sorted(map(id, found)) == sorted(map(id, (three, one, two, three)))
    assert list(distributed.tensors_in(torch.nn.Linear(2, 2))) == []  # a module is no output
    assert not distributed.is_wrapper(torch.Tensor)


def test_a_resize_of_a_storage_is_seen_while_it_is_watched():
    seen = []
    tensor = torch.ones(4)
    storage = tensor.untyped_storage()
    with distributed.watched_resizes(lambda key, storage, before: seen.append((key, before, storage.nbytes()))):
        storage.resize_(0)
        storage.resize_(8)
    storage.resize_(16)
    key = torch_access.key_of(storage)
    assert seen == [(key, 16, 0), (key, 0, 8)]


def test_fsdp_keeps_whole_gradients_where_they_are_found_until_the_next_reduction():
    from torch.distributed.fsdp import fully_shard

    with fake_ranks(Parallelism(strategy="fsdp", world_size=2)) as meshes:
        model = torch.nn.Linear(6, 4, bias=False)
        fully_shard(model, mesh=meshes.shard)
        sizes = []
        for is_on in (False, True):
            distributed.set_gradient_sync(model, is_on)
            model(torch.ones(1, 6)).sum().backward()
            sizes.append([tuple(grad.shape) for _, grad in distributed.unreduced_gradients(model)])
    assert sizes == [[(4, 6)], []]
    plain = torch.nn.Linear(2, 2)
    distributed.set_gradient_sync(plain, False)
    assert plain.require_backward_grad_sync is False  # as DDP names it


def test_fsdp_says_whose_parameters_it_gathers():
    from torch.distributed.fsdp import fully_shard

    seen = []

    @contextmanager
    def gathering(path):
        seen.append(path)
        yield

    with fake_ranks(Parallelism(strategy="fsdp", world_size=2)) as meshes:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for module in (model[0], model):
            fully_shard(module, mesh=meshes.shard)
        with distributed.watched_gathers(gathering):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert set(seen) == {"", "0"}


def test_without_the_mode_a_tensor_is_real():
    with torch_access.fake_tensor_mode():
        with distributed.real_tensors():
            real = torch.ones(2)
        fake = torch.ones(2)
    assert (type(real), type(fake) is torch.Tensor) == (torch.Tensor, False)


def test_the_group_of_a_collective_is_among_its_arguments():
    from torch.distributed import _functional_collectives as functional_collectives

    def answer(operator, args):
        is_collective = operator.namespace in ("c10d", "_c10d_functional")
        group = distributed.process_group(args) if is_collective else None
        return group and (torch_access.operator_name(operator), group.size())

    dist = torch.distributed
    dist.init_process_group("fake", rank=0, world_size=6, store=distributed.fake_store())
    try:
        pair = dist.new_group([0, 1, 2])
        with Seeing(answer) as mode:
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(2), group=pair)
            functional_collectives.all_reduce(torch.ones(2), "sum", pair).wait()
    finally:
        dist.destroy_process_group()
    assert [*filter(None, mode.seen)][:3] == [("allreduce_", 6), ("allreduce_", 3), ("all_reduce", 3)]


def test_a_group_of_gloo_in_one_thread_holds_nothing_of_a_collective_once_it_is_drained():
    dist = torch.distributed
    dist.init_process_group(distributed.gloo_in_one_thread("lo"), rank=0, world_size=1, store=dist.HashStore())
    try:
        group = dist.group.WORLD
        assert group._get_backend(torch.device("cpu")).options._threads == 1
        ended = []
        for _ in range(20):
            tensor = torch.ones(1000)
            finalize(tensor.untyped_storage(), ended.append, None)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            del tensor, work
            distributed.drain(group)
            assert ended.pop() is None
    finally:
        dist.destroy_process_group()


def test_after_a_job_no_result_of_its_operators_is_remembered():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import debug, distribute_tensor

    dist = torch.distributed
    dist.init_process_group("fake", rank=0, world_size=2, store=distributed.fake_store())
    try:
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)))
        tensor.sum()
    finally:
        dist.destroy_process_group()
    distributed.forget_meshes()
    assert debug._get_python_sharding_prop_cache_info().currsize == 0


def test_compiled_modules_are_known_also_inside_others_and_without_the_private_names(monkeypatch):
    linear = torch.nn.Linear(2, 2)
    whole, part = torch_access.compile_module(linear), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    part[0].compile()
    assert torch_access.compiled_paths(linear) == []
    assert torch_access.compiled_paths(whole) == [""]
    assert torch_access.compiled_paths(part) == ["0"]
    assert [path for path, _ in torch_access.uncompiled_modules(part)] == ["", "1"]
    assert torch_access.without_compiler(whole) is linear is torch_access.without_compiler(linear)
    monkeypatch.setattr(torch_access, "_INNER", "no such module")
    assert torch_access.compiled_paths(whole) == []


def test_inductor_runs_its_programs_on_fake_tensors_without_kernels():
    with torch_access.fake_tensor_mode(), compiled.inductor_without_kernels():
        run = torch.compile(lambda given: given.sin().cos())
        found = run(torch.ones(3, 5))
    assert found.shape == (3, 5)
    assert torch_access.is_plain_fake(found)


def test_the_frames_that_run_are_those_of_this_thread_and_of_another():
    (own,) = torch_access.running_frames(get_ident())
    assert own.f_code.co_name == "test_the_frames_that_run_are_those_of_this_thread_and_of_another"
    done = Event()
    waiting = Thread(target=done.wait)
    waiting.start()
    _, other = torch_access.running_frames(waiting.ident)
    done.set()
    waiting.join()
    assert other.f_code.co_name == "wait"


def test_the_fake_mode_that_is_entered_is_known_also_inside_another_mode():
    assert torch_access.active_fake_mode() is None
    with torch_access.fake_tensor_mode() as mode, Seeing():
        assert torch_access.active_fake_mode() is mode
    assert torch_access.active_fake_mode() is None


# ---- the fake GPU: in processes of their own, since it goes before the first backward pass of a process ----

ON_THE_CARD = """
import torch
from bertscope import torch_access
from bertscope.torch_access import fake_gpu, fake_tensor_mode
assert torch_access.threads_of_import() >= 1  # as torch chose
names = [(torch.cuda, "_lazy_init"), (torch.nn.Module, "_apply"), (torch.UntypedStorage, "data_ptr")]
before = [getattr(place, name) for place, name in names] + [torch.nn.Parameter.data, torch.cuda.is_available()]
from torch.optim.optimizer import _foreach_supported_types
def after():
    now = [getattr(place, name) for place, name in names]
    assert before == now + [torch.nn.Parameter.data, torch.cuda.is_available()]
    assert "FakeTensor" not in [kind.__name__ for kind in _foreach_supported_types]
    assert not hasattr(torch._C, "_cuda_getDeviceCount") or torch.version.cuda
    assert torch_access.has_kernel(torch.ops.aten.silu_backward.default, "CUDA") == (torch.version.cuda is not None)
    try:
        torch.ones(1, device="cuda")
    except (AssertionError, RuntimeError):
        pass
    else:
        raise SystemExit("the card stayed")
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]
"""


def on_the_card(code):
    done = run_loaded(ON_THE_CARD + code)  # where no backward pass ran
    assert done.returncode == 0, done.stderr


def test_the_fake_gpu_trains_copies_ties_and_leaves_torch_as_it_was():
    """Training takes torch's own CUDA dispatch; an exception on the card puts all back too."""
    on_the_card("""
import copy, io
with fake_gpu.fake_gpu(), fake_tensor_mode():
    model = torch.nn.Linear(4, 2)
    weight = model.weight
    optimizer = torch.optim.AdamW(model.parameters())
    model.cuda()
    assert model.weight is weight and weight.device == torch.device("cuda", 0) and weight.is_cuda
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(torch.ones(3, 4, device="cuda"))
        assert out.dtype == torch.float16 and out.softmax(-1).dtype == torch.float32
        loss = torch.nn.functional.cross_entropy(out, torch.zeros(3, dtype=torch.long, device="cuda"))
        assert loss.grad_fn.next_functions[0][0].name() == "ToCopyBackward0"
    loss.backward()
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].is_cuda
after()
with fake_gpu.fake_gpu(), fake_tensor_mode():
    model = torch.nn.ModuleDict({"a": torch.nn.Embedding(5, 4), "b": torch.nn.Linear(4, 5, bias=False)})
    model["b"].weight = model["a"].weight
    model.cuda()
    assert model["a"].weight is model["b"].weight
    other = copy.deepcopy(model)
    assert other["a"].weight is not model["a"].weight and isinstance(other["a"].weight, torch.nn.Parameter)
    assert other["a"].weight.untyped_storage().data_ptr() != model["a"].weight.untyped_storage().data_ptr()
    model["a"].weight.data = torch.zeros(5, 4)
    assert model["a"].weight.shape == (5, 4)
    torch.save({"saved": torch.ones(5, device="cuda")}, file := io.BytesIO())
    for place, kind in ((None, "cuda"), ("cpu", "cpu"), (lambda storage, _: storage, "cpu")):
        file.seek(0)
        with fake_gpu.loading(place):
            assert torch.load(file, place)["saved"].device.type == kind
after()
try:
    with fake_gpu.fake_gpu(), fake_tensor_mode():
        torch.nn.Linear(2, 2).cuda()
        raise KeyError
except KeyError:
    pass
after()
""")


def test_a_torch_that_changed_or_ran_a_backward_pass_refuses_the_card_in_one_line():
    on_the_card("""
from bertscope.errors import BertscopeError
def refused():
    try:
        with fake_gpu.fake_gpu():
            raise SystemExit("there is one")
    except BertscopeError as error:
        assert "no fake GPU" in str(error) and "\\n" not in str(error)
        return str(error)
hooks, fake_gpu._HOOKS = fake_gpu._HOOKS, "no_such_symbol"
refused()
fake_gpu._HOOKS = hooks
torch.ones(2, requires_grad=True).sum().backward()
assert "backward pass" in refused()
after()
""")


def test_what_is_put_into_a_module_is_taken_out_at_the_end():
    place = types.SimpleNamespace(kept=1)
    with ExitStack() as stack:
        fake_gpu.Put(stack)(place, kept=2, new=3)
        assert vars(place) == {"kept": 2, "new": 3}
    assert vars(place) == {"kept": 1}
