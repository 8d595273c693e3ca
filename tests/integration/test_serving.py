"""The application on a real local Ray with Ray Serve's own proxy, and a real registry that it follows."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import choicespec
import openai
import psutil
import pytest
import ray
import requests
from choicespec.records import Request
from choicespec.runtimes.scripted import ByteTokenizer, ScriptedRuntime
from choicespec.serving.champion import Champion, promote, registered_name, write_champion
from choicespec.spec.method import Autoregressive
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.spec.serving import LimitsSpec, ServedSpec, ServingSpec
from choicespec.tasks.tool_prompt import conversation_ids
from choicespec.tracking.registry import ChampionRegistry
from integration.local_api import measurement, table_champion
from integration.processes import DEADLINE_S, free_port
from ray import serve
from ray.util import placement_group_table

from deployments.app import build

_NEW_TOKENS = 200
_CLIENTS = 4
_PAIR = {"target": {"model": "table", "tensor_parallel": 4}, "gpus": 4}
_POLL_S = 0.05


class Application(NamedTuple):
    """What is served, where, the registry that it follows, Ray's session folder, and where its metrics are."""

    address: str
    registry: ChampionRegistry
    name: str
    session: Path
    metrics: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0)

    def served(self) -> dict[str, Any]:
        """What the model's entry says."""
        (model,) = self.client().models.list().data
        found: dict[str, Any] = model.model_dump()["choicespec"]
        return found


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    uri = f"sqlite:///{tmp_path_factory.mktemp('registry') / 'mlflow.db'}"
    registry, champion, port = ChampionRegistry(uri), table_champion(pair=_PAIR), free_port()
    name = promote(registry, champion.trial, champion.measurement).name
    package = str(Path(choicespec.__path__[0]).parent)
    metrics_port = free_port()
    session = ray.init(
        address="local",
        _metrics_export_port=metrics_port,
        _system_config={"metrics_report_interval_ms": 500},
        num_cpus=2,
        num_gpus=4,  # logical: placement is tested without one
        include_dashboard=False,
        logging_level="warning",
        runtime_env={"env_vars": {"PYTHONPATH": package}},
    )
    try:
        serve.start(http_options={"port": port})
        limits = LimitsSpec(waiting=2 * _CLIENTS)
        models = {"table": ServedSpec(champion=name)}
        serve.run(build(ServingSpec(models=models, limits=limits, tracking_uri=uri, follow_s=0.1)))
        folder = Path(session.address_info["session_dir"])
        metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        yield Application(f"http://127.0.0.1:{port}", registry, name, folder, metrics)
    finally:
        serve.shutdown()
        ray.shutdown()


def _expected(prompt: str) -> str:
    """What plain decoding answers."""
    runtime = ScriptedRuntime(ScriptedRuntimeSpec(), PairSpec.model_validate({"target": {"model": "table"}}))
    prompt_ids = conversation_ids(ByteTokenizer(), [{"role": "user", "content": prompt}], ())
    request = Request(prompt, tuple(prompt_ids), _NEW_TOKENS)
    return ByteTokenizer().decode(runtime.generate(request, Autoregressive()).output_ids)


def _ask(client: openai.OpenAI, prompt: str, stream: bool) -> str:
    """An answer's text."""
    if not stream:
        whole = client.chat.completions.create(
            model="table", messages=[{"role": "user", "content": prompt}], max_tokens=_NEW_TOKENS
        )
        return whole.choices[0].message.content or ""
    chunks = client.chat.completions.create(
        model="table", messages=[{"role": "user", "content": prompt}], max_tokens=_NEW_TOKENS, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def _await(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + DEADLINE_S
    while not condition():
        assert monotonic() < deadline, "it never happened"
        threading.Event().wait(_POLL_S)


class _Load:
    """Clients that ask until they are told to stop; every answer must be right, or an error of the API."""

    def __init__(self, application: Application) -> None:
        self._application, self._stop = application, threading.Event()
        self._pool = ThreadPoolExecutor(_CLIENTS)
        self.right, self.errors = 0, list[Exception]()

    def __enter__(self) -> "_Load":
        self._running = [self._pool.submit(self._ask_on, number) for number in range(_CLIENTS)]
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._running:
            client.result()

    def _ask_on(self, number: int) -> None:
        client, turn = self._application.client(), 0
        while not self._stop.is_set():
            prompt, turn = f"client {number}, turn {turn % 5}", turn + 1
            try:
                answer = _ask(client, prompt, stream=turn % 2 == 0)
            except openai.APIError as error:
                self.errors.append(error)
                continue
            assert answer == _expected(prompt), "an answer is lost in part, or somebody else's"
            self.right += 1


def test_answers_and_streams_are_plain_decodings(application: Application) -> None:
    """Fails if Serve, its proxy or the handles between lose, double or reorder a part of an answer."""
    for stream in (False, True):
        assert _ask(application.client(), "hello", stream) == _expected("hello")


def test_a_tensor_parallel_pair_is_one_bundle(application: Application) -> None:
    """Fails if a replica's GPUs may lie on several nodes, or if it is placed otherwise than the bench places it."""
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    assert [group["bundles"] for group in groups] == [{0: {"CPU": 1.0, "GPU": 4.0}}]


def test_logs_and_metrics_tell_of_answers_but_not_their_text(application: Application) -> None:
    """Fails if an operator cannot see what is going on, or can read what people ask."""
    assert _ask(application.client(), "my secret question", stream=False)
    logs = application.session / "logs" / "serve"
    _await(lambda: "answered question=" in _all_text(logs))
    assert "secret" not in _all_text(logs)
    _await(lambda: "choicespec_drafted_steps" in requests.get(application.metrics, timeout=60).text)
    figures = requests.get(application.metrics, timeout=60).text
    for name in ("decode_tokens", "decode_seconds", "accepted_tokens", "steps", "answers"):
        assert f"choicespec_{name}" in figures
    assert "secret" not in figures


def _all_text(folder: Path) -> str:
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in folder.rglob("*") if file.is_file())


def test_health_and_page(application: Application) -> None:
    health = requests.get(f"{application.address}/healthz", timeout=60)
    assert (health.status_code, health.json()["models"]) == (200, {"table": "ok"})
    page = requests.get(application.address, timeout=60)
    assert page.headers["content-type"].startswith("text/html")
    assert "http" not in page.text, "the page must load nothing from elsewhere"


def test_a_new_champion_takes_over_without_dropping_requests(application: Application) -> None:
    """Fails if a roll-out costs a request, or changes an answer that is under way."""
    assert application.served()["version"] == "1"
    newer = table_champion(pair=_PAIR, method={"kind": "ngram", "num_draft_tokens": 2})
    with _Load(application) as load:
        _await(lambda: load.right >= _CLIENTS)
        promote(application.registry, newer.trial, measurement(2.5))
        _await(lambda: application.served()["version"] == "2")
        before = load.right
        _await(lambda: load.right >= before + _CLIENTS)
    assert not load.errors
    assert application.served()["method"] == "ngram k=2"


def _plant(application: Application, folder: Path, champion: Champion | None) -> str:
    """Registers a champion that cannot be served, by hand; returns its version."""
    trial = table_champion(pair=_PAIR).trial
    if champion is None:
        (folder / "readme.txt").write_text("no champion", encoding="utf-8")
    else:
        write_champion(folder, champion)
    planted = measurement(3.0 if champion is None else 3.5)
    return str(application.registry.register(registered_name(trial), trial, planted, folder))


@pytest.mark.parametrize(
    ("champion", "said"),
    [(None, "champion.json"), (table_champion(), "its target is model='table'")],
)
def test_a_broken_champion_is_refused_and_the_old_one_goes_on(
    application: Application, tmp_path: Path, champion: Champion | None, said: str
) -> None:
    """Fails if a promotion can take the endpoint down, or if nobody is told that it was refused."""
    with _Load(application) as load:
        version = _plant(application, tmp_path, champion)
        _await(lambda: f"version {version}: " in (application.served()["refused"] or ""))
        before = load.right
        _await(lambda: load.right >= before + _CLIENTS)
    assert not load.errors
    assert said in application.served()["refused"]
    assert application.served()["method"] == "ngram k=2"
    health = requests.get(f"{application.address}/healthz", timeout=60).json()
    assert said in health["refused_champions"]["table"]


def test_a_killed_replica_comes_back_and_loses_no_answer_silently(application: Application) -> None:
    """Fails if a client gets half an answer as a whole one, or if the new replica trips over a broken champion."""
    with _Load(application) as load:
        _await(lambda: load.right >= _CLIENTS)
        (replica,) = [p for p in psutil.Process().children(recursive=True) if _is_replica(p)]
        replica.kill()
        replica.wait()
        _await(lambda: load.right >= 2 * _CLIENTS and _is_healthy(application))
        before = load.right
        _await(lambda: load.right >= before + _CLIENTS)
    assert all(isinstance(e, openai.APIStatusError | openai.APIError) for e in load.errors)
    assert application.served()["version"] == "2"


def _is_replica(process: psutil.Process) -> bool:
    title = " ".join(process.cmdline())
    return title.startswith("ray::ServeReplica") and "table" in title


def _is_healthy(application: Application) -> bool:
    return requests.get(f"{application.address}/healthz", timeout=60).status_code == 200
