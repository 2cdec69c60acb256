"""torch's exporter traces a model twice: once as it runs, and once more to take its operators apart and to let none of
them write into its inputs. The second time, half of what a capture takes, is left out where it would change nothing.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, fx, ops
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.export import ExportedProgram

ATEN = ops.aten
KEPT = {  # made of others, but one node each in ONNX, or none
    ATEN.chunk,
    ATEN.concat,
    ATEN.contiguous,
    ATEN.dropout,
    ATEN.layer_norm,
    ATEN.linear,
    ATEN.reshape,
    ATEN.softmax,
    ATEN.sym_size,
    ATEN.type_as,
    ATEN.where,
}
COMPOSED = DispatchKey.CompositeImplicitAutograd
SAME = {ATEN.__and__.Tensor: ATEN.bitwise_and.Tensor, ATEN.__or__.Tensor: ATEN.bitwise_or.Tensor}


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Meanwhile a program stays as it was traced if that gives the same graph (``_settled``)."""
    whole = ExportedProgram.run_decompositions

    def run(program: ExportedProgram, decomp_table: Mapping[Any, Any] | None = None, **how: Any) -> ExportedProgram:
        if decomp_table is not None and _settled(program.graph_module, decomp_table):
            return program
        return whole(program, decomp_table, **how)

    ExportedProgram.run_decompositions = run
    try:
        yield
    finally:
        ExportedProgram.run_decompositions = whole


def _settled(module: fx.GraphModule, apart: Mapping[Any, Callable[..., Any]]) -> bool:
    """Whether nothing in it has to be taken ``apart``, writes into an input or runs a graph, once what can be said
    otherwise is: what it computes stays the same."""
    for node in list(module.graph.nodes):
        if isinstance(node.target, OpOverload):
            _rewrite(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    called = [node.target for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    runs = any(isinstance(child, fx.GraphModule) for child in module.children())
    return not runs and not any(target in apart or _writes(target) or _composed(target) for target in called)


def _rewrite(node: fx.Node) -> None:
    """Say by operators that ONNX has what a cast, a bitwise operator or a write into a tensor nobody else sees does."""
    packet = node.target.overloadpacket
    if packet is ATEN.to:
        source, dtype = node.args[0], node.meta["val"].dtype
        copied = node.kwargs.get("copy") or any(given is True for given in node.args)
        given_out = any(user.op == "output" for user in node.users)  # by its name: it has to stay
        if source.meta["val"].dtype == dtype and not copied and not given_out:
            node.replace_all_uses_with(source)
        else:
            node.target, node.args, node.kwargs = ATEN._to_copy.default, (source,), {"dtype": dtype}
    elif node.target in SAME:
        node.target = SAME[node.target]
    elif packet is ATEN.detach_:
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)
    elif _writes(node.target) and _alone(node.args[0]) and _as_wide(node):
        pure = getattr(getattr(ATEN, packet.__name__.removesuffix("_"), None), node.target._overloadname, None)
        if pure is not None and not _writes(pure):
            written, node.target = node.args[0], pure
            written.replace_all_uses_with(node, delete_user_cb=lambda user: user > node)


def _as_wide(node: fx.Node) -> bool:
    """Whether what it writes would have the same dtype if it were written anew: that of the widest it is made of."""
    dtypes = {source.meta["val"].dtype for source in node.all_input_nodes if isinstance(source.meta["val"], Tensor)}
    written = node.args[0].meta["val"].dtype
    return written.is_floating_point and not any(dtype.is_floating_point for dtype in dtypes - {written})


def _alone(written: fx.Node) -> bool:
    """Whether what is written into is a tensor of its own, of which there is no view."""
    maker = written.args[0] if written.target is operator.getitem else written
    return not _views(maker) and not any(map(_views, written.users))


def _views(node: fx.Node) -> bool:
    """Whether it may give out what it was given; of what is no operator of torch's nothing is known."""
    if not isinstance(node.target, OpOverload):
        return True
    return any(value.alias_info is not None for value in node.target._schema.returns) and not _writes(node.target)


def _writes(target: OpOverload) -> bool:
    return bool(target._schema.is_mutable)


def _composed(target: OpOverload) -> bool:
    """Whether torch makes it of other operators."""
    return target.overloadpacket not in KEPT and target.has_kernel_for_dispatch_key(COMPOSED)
