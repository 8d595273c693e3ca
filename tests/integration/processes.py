"""Waiting for what other processes bring about."""

import os
import select
import socket
import subprocess
from collections.abc import Callable
from time import monotonic

DEADLINE_S = 120.0  # of what must happen; nothing is measured by it
_POLL_S = 0.05


def await_from(process: "subprocess.Popen[bytes]", condition: Callable[[], bool]) -> None:
    """Poll for what a running process is to bring about."""
    deadline = monotonic() + DEADLINE_S
    while not condition():
        assert monotonic() < deadline, "it never happened"
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the process ended before, with {process.returncode}")


def free_port() -> int:
    """A port of the loopback at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_end(process_id: int) -> None:
    """Wait for a process that need not be a child; one that has ended already will do."""
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([handle], [], [], DEADLINE_S)
    os.close(handle)
    assert ended, f"process {process_id} goes on"
