"""A write into a part of a tensor (``x[..., 2:4] = y``), said as the whole tensor made anew: in ONNX nobody writes in
place. Whoever reads the tensor later, or another part of it, reads the new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from torch import fx, ops
from torch._ops import OpOverload

ATEN = ops.aten
PARTS: dict[OpOverload, OpOverload] = {
    ATEN.slice.Tensor: ATEN.slice_scatter.default,
    ATEN.select.int: ATEN.select_scatter.default,
}
TURNED = {ATEN.transpose.int, ATEN.permute.default, ATEN.unsqueeze.default}  # of another, each element where it was


def made_anew(
    write: fx.Node, views: Callable[[fx.Node], bool], fitted: Callable[[fx.Node, fx.Node], fx.Node | None]
) -> None:
    """Take the ``write``, a ``copy_`` into a part, out of its graph if nobody sees the tensor but by its parts; else
    leave it. ``views``: whether a node may give out what it was given; ``fitted``: of the part and what is written
    there, the latter in the part's shape and dtype, None if it cannot be said."""
    part, value = write.args[:2]
    path = list(_upwards(part))
    whole = path[-1]
    if len(path) < 2 or not _unseen(whole, views):
        return
    seen = list(_parts(whole))
    if any(views(user) for each in seen for user in each.users if user < write and user not in seen):
        return
    with write.graph.inserting_before(write):
        if (new := fitted(part, value)) is None:
            return
        for inner, outer in pairwise(path):
            new = write.graph.call_function(PARTS[inner.target], (outer, new, *inner.args[1:]), inner.kwargs)
            new.meta = write.meta | {"val": outer.meta["val"]}
        instead = {whole: new}
        for each in sorted(each for each in seen[1:] if each < write):
            instead[each] = write.graph.node_copy(each, lambda given: instead.get(given, given))
    write.replace_all_uses_with(part)
    for old, anew in instead.items():
        old.replace_all_uses_with(anew, delete_user_cb=lambda user: user > write)
    for node in (write, *reversed((*instead.values(), *instead))):
        if not node.users and node is not whole:
            write.graph.erase_node(node)


def _upwards(part: fx.Node) -> Iterator[fx.Node]:
    """``part``, what it is a part of, and so on to the whole."""
    yield part
    while isinstance(part, fx.Node) and part.target in PARTS:
        part = part.args[0]
        yield part


def _unseen(whole: fx.Node, views: Callable[[fx.Node], bool]) -> bool:
    """Whether its elements are nobody else's: it, or what it only turns, was made for it."""
    while whole.target in TURNED and len(whole.args[0].users) == 1:
        whole = whole.args[0]
    return not views(whole)


def _parts(whole: fx.Node) -> Iterator[fx.Node]:
    """``whole``, and its parts, and theirs."""
    yield whole
    for user in whole.users:
        if user.target in PARTS and user.args[0] is whole:
            yield from _parts(user)
