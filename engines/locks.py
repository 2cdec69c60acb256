"""Locks on files that processes share: nobody keeps one beyond the end of its process."""

from __future__ import annotations

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

AVAILABLE = fcntl is not None


def lock(handle: int, *, wait: bool) -> bool:
    """Lock the file that the descriptor ``handle`` is open on, until it is closed; with ``wait``, wait until it is
    free. Returns whether it is locked now: not if another process has it, nor on systems or disks without such locks
    (network disks, say)."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
