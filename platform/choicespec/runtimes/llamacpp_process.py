"""A handle on one llama.cpp server: started, awaited, asked, stopped."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import requests

from choicespec.errors import ServerError

_LAUNCHER = Path(__file__).with_name("llamacpp_server.py")
_LISTENING = re.compile(rb"listening on (http://127\.0\.0\.1:\d+)")
_POLL_S = 0.02
_STOP_TIMEOUT_S = 10.0
_LAST_LINES = 12


class LlamaCppServer:
    """A server that listens and has its weights.

    Args:
        program: the path of a ``llama-server`` binary, or ``xllamacpp``.
        flags: as the binary takes them.
        environment: the server's environment variables.

    Raises:
        ServerError: it ended before it was ready.
    """

    def __init__(self, program: str, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_LAUNCHER), program, *flags],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is its owner's to answer
        )
        # Also at this process's exit. If this process is killed, its end of the pipe is closed all the same.
        self._stop = weakref.finalize(self, _end, self._process, self._log)
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy has no business between two processes of one machine
        self._url = self._await_ready()

    @property
    def process_id(self) -> int:
        """The process to look for in the system's tables."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for something; waits as long as the server lives.

        Raises:
            ServerError: the server died, or refuses.
        """
        try:
            answer = self._session.post(self._url + path, json=body)
        except requests.RequestException as error:
            raise self._died(f"while it was asked for {path} ({type(error).__name__})") from None
        if not answer.ok:
            raise ServerError(f"llama.cpp's server refuses {path}: {answer.text.strip()}")
        found: dict[str, Any] = answer.json()
        return found

    def stop(self) -> None:
        """End the process and wait for it; a second call does nothing."""
        self._stop()

    def _await_ready(self) -> str:
        """The address, once the server says that it is healthy."""
        while True:
            try:
                self._process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                listening = _LISTENING.search(self._read_log())
                if listening and self._healthy(url := listening[1].decode()):
                    return url
            else:
                raise self._died("before it was ready")

    def _healthy(self, url: str) -> bool:
        try:
            return self._session.get(f"{url}/health").ok
        except requests.RequestException:
            return False

    def _read_log(self) -> bytes:
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # the server writes where it was, not here

    def _died(self, when: str) -> ServerError:
        try:
            ended = f"it ended with {self._process.wait(_STOP_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            ended = "it does not answer, and is stopped"
        lines = self._read_log().decode(errors="replace").split("\n")
        last = "\n  ".join([line for line in lines if line.strip()][-_LAST_LINES:])
        self.stop()
        return ServerError(f"llama.cpp's server was lost {when}: {ended}; the end of its log:\n  {last}")


def _end(process: "subprocess.Popen[bytes]", log: IO[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()  # the launcher waits for this
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the launcher, and the binary that it may have started
        process.wait()
    log.close()
