"""A handle on one vLLM engine: started, asked, stopped."""

import pickle
import sys
from collections.abc import Mapping
from typing import Any

from choicespec.errors import ChoiceSpecError
from choicespec.runtimes.owned_process import OwnedProcess
from choicespec.runtimes.vllm_methods import EngineSpec


class VllmEngineProcess:
    """An engine that has its weights.

    Args:
        spec: what the engine is to be.
        environment: the process's environment variables.

    Raises:
        ServerError: it ended before it was ready.
        ChoiceSpecError: what the engine itself says is wrong.
    """

    def __init__(self, spec: EngineSpec, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "choicespec.runtimes.vllm_engine"]
        self._process = OwnedProcess("vLLM's engine", command, environment, replies=True)
        self.facts: dict[str, str] = self._exchange(spec, "before it was ready")

    @property
    def process_id(self) -> int:
        """The process to look for in the system's tables."""
        return self._process.process_id

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.alive

    def ask(self, what: str, *values: object) -> Any:
        """Call one of ``vllm_engine.Engine``'s methods; waits as long as the engine lives.

        Raises:
            ServerError: the engine died.
            ChoiceSpecError: as the method raises it.
        """
        return self._exchange((what, values), f"while it was asked to {what}")

    def stop(self) -> None:
        """End the process and wait for it; a second call does nothing."""
        self._process.stop()

    def _exchange(self, message: object, when: str) -> Any:
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise self._process.lost(when) from None
        if isinstance(answer, ChoiceSpecError):
            raise answer
        return answer
