"""torch's exporter traces a model twice: once as it runs, and once more to take its operators apart and to let none of
them write into its inputs. The second time, half of what a capture takes, is left out where it would change nothing.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import SymInt, Tag, fx, ops
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.export import ExportedProgram

from .slices import PARTS, made_anew

ATEN = ops.aten
COMPOSED = DispatchKey.CompositeImplicitAutograd
KEPT = {ATEN.chunk, ATEN.contiguous, ATEN.dropout, ATEN.reshape}  # one node each in ONNX, or none
ANEW = {ATEN.concat, ATEN.layer_norm, ATEN.linear, ATEN.matmul, ATEN.softmax, ATEN.where}  # give a tensor of their own
SAME: dict[OpOverload, tuple[OpOverload, tuple[Any, ...]]] = {  # as another operator, with more arguments
    ATEN.__and__.Tensor: (ATEN.bitwise_and.Tensor, ()),
    ATEN.__or__.Tensor: (ATEN.bitwise_or.Tensor, ()),
    ATEN.broadcast_to.default: (ATEN.expand.default, ()),
    ATEN.max.other: (ATEN.maximum.default, ()),
    ATEN.min.other: (ATEN.minimum.default, ()),
    ATEN.square.default: (ATEN.pow.Tensor_Scalar, (2,)),
}
SHAPED = {ATEN.expand_as: ATEN.expand} | dict.fromkeys((ATEN.flatten, ATEN.reshape_as, ATEN.view_as), ATEN.reshape)
_PATCHED = threading.RLock()


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Meanwhile a program of this thread stays as it was traced if that gives the same graph (``_settled``). Other
    threads that ask for this wait."""
    here = threading.get_ident()
    with _PATCHED:
        whole = ExportedProgram.run_decompositions

        def run(program: ExportedProgram, decomp_table: Mapping[Any, Any] | None = None, *how: Any, **more: Any) -> Any:
            if decomp_table is None or threading.get_ident() != here:
                return whole(program, decomp_table, *how, **more)
            if _settled(program.graph_module, decomp_table):
                return program
            return whole(program, decomp_table, *how, **more)

        ExportedProgram.run_decompositions = run
        try:
            yield
        finally:
            ExportedProgram.run_decompositions = whole


def _settled(module: fx.GraphModule, apart: Mapping[Any, Callable[..., Any]]) -> bool:
    """Whether nothing in it has to be taken ``apart``, writes into an input or runs a graph, once what can be said
    otherwise is: what it computes stays the same."""
    sizes = dict[Any, fx.Node]()
    for node in list(module.graph.nodes):
        if isinstance(node.target, OpOverload):
            _rewrite(node, sizes)
    module.graph.eliminate_dead_code()
    module.recompile()
    called = [node.target for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    runs = any(isinstance(child, fx.GraphModule) for child in module.children())
    return not runs and not any(target in apart or _writes(target) or _opened(target) for target in called)


def _rewrite(node: fx.Node, sizes: dict[Any, fx.Node]) -> None:
    """Say by operators that ONNX has what a cast, another name, shape or parts, or a write into a tensor nobody else
    sees does. ``sizes``: the nodes before it that give one, by what they give."""
    packet = node.target.overloadpacket
    if packet is ATEN.to:
        source, dtype = node.args[0], node.meta["val"].dtype
        copied = node.kwargs.get("copy") or any(given is True for given in node.args)
        if source.meta["val"].dtype == dtype and not copied:
            _hand_on(node)
        else:
            node.target, node.args, node.kwargs = ATEN._to_copy.default, (source,), {"dtype": dtype}
    elif packet is ATEN.sym_size and isinstance(size := node.meta["val"], SymInt):
        sizes.setdefault(size.node.expr, node)
    elif packet in SHAPED:
        if None not in (shape := _shape(node, sizes)):
            node.target, node.args, node.kwargs = SHAPED[packet].default, (node.args[0], shape), {}
    elif packet is ATEN.chunk:
        dim = (*node.args, 0)[2]
        if isinstance(size := node.meta["val"][0].shape[dim], int):
            node.target, node.args = ATEN.split.Tensor, (node.args[0], size, dim)
    elif packet is ATEN.numpy_T:
        turned = list(reversed(range(node.meta["val"].dim())))
        node.target, node.args = ATEN.permute.default, (node.args[0], turned)
    elif packet is ATEN.detach_:
        _hand_on(node)
    elif node.target in SAME:
        node.target, more = SAME[node.target]
        node.args = (*node.args, *more)
    elif node.target is ATEN.copy_.default and node.args[0].target in PARTS:
        made_anew(node, _views, functools.partial(_fitted, sizes))
    elif _writes(node.target) and _alone(node) and (pure := _pure(node)) is not None:
        written, node.target = node.args[0], pure
        written.replace_all_uses_with(node, delete_user_cb=lambda user: user > node)


def _shape(node: fx.Node, sizes: dict[Any, fx.Node]) -> list[Any]:
    """Of what it gives: numbers, and nodes that give one; None where no node does."""
    return [size if isinstance(size, int) else sizes.get(size.node.expr) for size in node.meta["val"].shape]


def _fitted(sizes: dict[Any, fx.Node], part: fx.Node, value: fx.Node) -> fx.Node | None:
    """``value`` in the shape of ``part``; None where that, or its dtype, is another that cannot be said."""
    ours, theirs = part.meta["val"], value.meta["val"]
    if ours.dtype != theirs.dtype:
        return None
    if list(map(str, ours.shape)) == list(map(str, theirs.shape)):
        return value
    if None in (shape := _shape(part, sizes)):
        return None
    wide = part.graph.call_function(ATEN.expand.default, (value, shape))
    wide.meta = dict(part.meta)
    return wide


def _hand_on(node: fx.Node) -> None:
    """It gives what it was given: leave it out, or, where it is given out and so has to keep its name, say so."""
    if any(user.op == "output" for user in node.users):
        node.target, node.args, node.kwargs = ATEN.alias.default, node.args[:1], {}
    else:
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)


def _pure(node: fx.Node) -> OpOverload | None:
    """What gives anew the values that it writes, in the dtype in which it writes them; None if nothing does."""
    target = node.target
    packet = getattr(ATEN, target.overloadpacket.__name__.removesuffix("_"), None)
    pure = getattr(packet, target._overloadname, None)
    if target.namespace != "aten" or packet is ATEN.set or pure is None:
        return None
    if _writes(pure) or _takes(pure) != _takes(target):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    with args[0].fake_mode:
        return pure if pure(*args, **kwargs).dtype == args[0].dtype else None


def _takes(target: OpOverload) -> list[str]:
    return [str(argument.type) for argument in target._schema.arguments]


def _alone(node: fx.Node) -> bool:
    """Whether what it writes into is a tensor of its own, of which there is no view."""
    written = node.args[0] if node.args else None
    if not isinstance(written, fx.Node):
        return False
    maker = written.args[0] if written.target is operator.getitem else written
    return not _views(maker) and not any(_views(user) for user in written.users if user is not node)


def _views(node: fx.Node) -> bool:
    """Whether it may give out what it was given. What torch makes of other operators need not say so; of what is no
    operator of torch's nothing is known."""
    if not isinstance(node.target, OpOverload):
        return True
    if _composed(node.target) and node.target.overloadpacket not in ANEW:
        return True
    return any(value.alias_info is not None for value in node.target._schema.returns)


def _writes(target: OpOverload) -> bool:
    return bool(target._schema.is_mutable)


def _composed(target: OpOverload) -> bool:
    """Whether torch makes it of other operators."""
    return bool(target.has_kernel_for_dispatch_key(COMPOSED))


def _opened(target: OpOverload) -> bool:
    """Whether torch takes it apart though no table says so: it does what may give out what it was given."""
    if not _composed(target) or target.overloadpacket in KEPT:
        return False
    named = any(argument.alias_info is not None for argument in target._schema.arguments)
    return named or Tag.maybe_aliasing_or_mutating in target.tags
