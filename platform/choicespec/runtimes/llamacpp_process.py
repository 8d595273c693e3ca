"""A handle on one llama.cpp server: started, awaited, asked, stopped."""

import json
import re
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

from choicespec.errors import ServerError
from choicespec.runtimes.owned_process import OwnedProcess

_LAUNCHER = Path(__file__).with_name("llamacpp_server.py")
_LISTENING = re.compile(rb"listening on (http://127\.0\.0\.1:\d+)")
_POLL_S = 0.02


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
        command = [sys.executable, "-P", str(_LAUNCHER), program, *flags]
        self._process = OwnedProcess("llama.cpp's server", command, environment)
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy has no business between two processes of one machine
        self._url = self._await_ready()

    @property
    def process_id(self) -> int:
        """The process to look for in the system's tables."""
        return self._process.process_id

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.alive

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for something; waits as long as the server lives.

        Raises:
            ServerError: the server died, or refuses.
        """
        try:
            answer = self._session.post(self._url + path, json=body)
        except requests.RequestException as error:
            raise self._process.lost(f"while it was asked for {path} ({type(error).__name__})") from None
        if not answer.ok:
            raise ServerError(f"llama.cpp's server refuses {path}: {answer.text.strip()}")
        found: dict[str, Any] = answer.json()
        return found

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Ask for a stream of events, on a connection of its own; closing it makes the server stop.

        Raises:
            ServerError: the server died, or refuses.
        """
        try:
            with requests.Session() as session:
                session.trust_env = False
                with session.post(self._url + path, json=body, stream=True) as answer:
                    if not answer.ok:
                        raise ServerError(f"llama.cpp's server refuses {path}: {answer.text.strip()}")
                    for line in answer.iter_lines():
                        if line:
                            yield json.loads(line.removeprefix(b"data: "))
        except requests.RequestException as error:
            raise self._process.lost(f"while it was asked for {path} ({type(error).__name__})") from None

    def stop(self) -> None:
        """End the process and wait for it; a second call does nothing."""
        self._process.stop()

    def _await_ready(self) -> str:
        """The address, once the server says that it is healthy."""
        while True:
            try:
                self._process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                listening = _LISTENING.search(self._process.read_log())
                if listening and self._healthy(url := listening[1].decode()):
                    return url
            else:
                raise self._process.lost("before it was ready")

    def _healthy(self, url: str) -> bool:
        try:
            return self._session.get(f"{url}/health").ok
        except requests.RequestException:
            return False
