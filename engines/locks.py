"""Locks on files that processes share: nobody keeps one beyond the end of its process."""

from __future__ import annotations

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

AVAILABLE = fcntl is not None


def lock(handle: int, *, wait: bool) -> bool:
    """Lock what the descriptor ``handle`` is open on, until it is closed; ``wait`` for whoever has it. Gives whether it
    was to be had: where another has it, on systems without locks and on disks without them (a network's, say), it is
    not."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
