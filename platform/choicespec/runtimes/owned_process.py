"""A process that ends with its owner, and whose log says why it ended otherwise."""

import os
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from choicespec.errors import ServerError

_STOP_TIMEOUT_S = 10.0
_LAST_LINES = 12


class OwnedProcess:
    """A running process with its output in a log; it is to end when its standard input is closed.

    Args:
        name: for people.
        command: program and arguments.
        environment: its environment variables.
        replies: its standard output is read by the owner (``stdout``), and is no part of the log.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], replies: bool = False
    ) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if replies else self._log,
            stderr=subprocess.STDOUT if not replies else self._log,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is its owner's to answer
        )
        # Also at this process's exit. If this process is killed, its end of the pipe is closed all the same.
        self._stop = weakref.finalize(self, _end, self._process, self._log)

    @property
    def process_id(self) -> int:
        """The process to look for in the system's tables."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def stdin(self) -> IO[bytes]:
        """What the owner writes to."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """What the owner reads, of a process that replies."""
        assert self._process.stdout is not None
        return self._process.stdout

    def wait(self, timeout_s: float) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        return self._process.wait(timeout_s)

    def read_log(self) -> bytes:
        """All that it wrote so far; nothing, once it was stopped."""
        if self._log.closed:
            return b""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # the process writes where it was, not here

    def lost(self, when: str) -> ServerError:
        """Stop what does not answer; the error to raise, with the end of the log."""
        try:
            ended = f"it ended with {self.wait(_STOP_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            ended = "it does not answer, and is stopped"
        lines = self.read_log().decode(errors="replace").split("\n")
        last = "\n  ".join([line for line in lines if line.strip()][-_LAST_LINES:])
        self.stop()
        return ServerError(f"{self._name} was lost {when}: {ended}; the end of its log:\n  {last}")

    def stop(self) -> None:
        """End the process and wait for it; a second call does nothing."""
        self._stop()


def _end(process: "subprocess.Popen[bytes]", log: IO[bytes]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # of what was still to be written, where the process has ended by itself
        process.stdin.close()  # the process waits for this
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the process, and what it may have started
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
    log.close()
