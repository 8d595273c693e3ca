"""The HTTP side in front of replicas in this process, on a real port of the loopback."""

import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from choicespec.records import Environment, Estimate, Measurement
from choicespec.serving.answers import Event, Question, Status
from choicespec.serving.champion import Champion
from choicespec.serving.endpoints import build_api
from choicespec.serving.replica import Replica
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.serving import LimitsSpec

_LIMITS = LimitsSpec()
TABLE = {
    "pair": {"target": {"model": "table"}},
    "runtime": {"kind": "scripted"},
    "task": {"kind": "tool_call"},
    "method": {"kind": "ngram", "num_draft_tokens": 8},
}


def measurement(speedup: float = 2.0, match: float = 1.0, never_proposed: bool = False) -> Measurement:
    """Figures as a bench on 20 prompts would give them."""

    def estimate(value: float) -> Estimate:
        return Estimate(value=value, low=value, high=value, n=20)

    environment = Environment(
        choicespec="0",
        git_revision="0",
        python="3",
        packages={},
        runtime_build="scripted 1",
        device="none",
        cpu="any",
        threads=1,
        dtype="float32",
    )
    return Measurement(
        decode_tokens_per_s=estimate(10.0 * speedup),
        baseline_tokens_per_s=estimate(10.0),
        speedup=estimate(speedup),
        accepted_per_step=estimate(1.0),
        match=estimate(match),
        prefill_ms=estimate(1.0),
        propose_share=0.1,
        never_proposed=never_proposed,
        measured_at=f"2026-01-01T00:00:{speedup:06.3f}+00:00",
        environment=environment,
    )


def table_champion(**changes: object) -> Champion:
    """A champion on the scripted runtime."""
    return Champion(trial=TrialSpec.model_validate({**TABLE, **changes}), measurement=measurement())


class LocalModel:
    """A model whose replica is in this process."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def answer(self, question: Question) -> AsyncGenerator[Event, None]:
        return self._replica.answer(question)

    async def status(self) -> Status:
        return self._replica.status()


@contextmanager
def serving(
    replicas: Mapping[str, Replica], limits: LimitsSpec = _LIMITS, token_digest: str | None = None
) -> Iterator[str]:
    """The address at which replicas are served."""
    api = build_api({name: LocalModel(replica) for name, replica in replicas.items()}, limits, token_digest)
    server = uvicorn.Server(uvicorn.Config(api, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:  # listens at once: who connects now is served later
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
