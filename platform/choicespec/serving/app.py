"""The application as Ray Serve deployments: one ingress for all models, and for each the replicas that pin its pair."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from choicespec.errors import TrackingError
from choicespec.records import Document
from choicespec.serving.answers import Event, Finished, Question, Refused, Status
from choicespec.serving.endpoints import build_api, digest
from choicespec.serving.figures import Figures
from choicespec.serving.replica import Replica
from choicespec.serving.source import ChampionSource, Registered, Shipped, Versioned
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.resources import bundle
from choicespec.spec.serving import LimitsSpec, ServedSpec, ServingSpec
from choicespec.tasks.python_repo import repository_documents
from choicespec.tracking.connection import tracking_uri

TOKEN_VARIABLE = "CHOICESPEC_API_TOKEN"
_MOST_ONGOING = 1000  # a replica bounds its queue itself, and must answer for its status while it decodes
_STATUS_TIMEOUT_S = 10.0
_log = logging.getLogger("ray.serve")


def build(spec: ServingSpec) -> serve.Application:
    """The application; a champion that cannot be served is refused here, before anything starts.

    Raises:
        ChoiceSpecError: with the reason.
    """
    uri = spec.tracking_uri or tracking_uri(Path())
    token = os.environ.get(TOKEN_VARIABLE)
    models = {name: _pair(name, served, spec, uri) for name, served in spec.models.items()}
    ingress = serve.deployment(Ingress).options(
        name="_api", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_MOST_ONGOING
    )
    return ingress.bind(models, spec.limits, digest(token) if token else None)


def _pair(name: str, served: ServedSpec, spec: ServingSpec, uri: str) -> serve.Application:
    """A model's deployment, placed as the bench places the pair: all of a replica on one node."""
    trial = _source(served, uri).first(None).champion.trial
    deployment = serve.deployment(Pair).options(
        name=name,
        max_ongoing_requests=_MOST_ONGOING,
        placement_group_bundles=[bundle(trial.pair, trial.runtime)],
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": trial.runtime.threads, "num_gpus": trial.pair.gpus},
        autoscaling_config={
            "min_replicas": served.min_replicas,
            "max_replicas": served.max_replicas,
            "target_ongoing_requests": served.target_ongoing_requests,
        },
    )
    return deployment.bind(name, served, trial, spec.limits, uri, spec.follow_s)


def _source(served: ServedSpec, uri: str) -> ChampionSource:
    if served.champion is None:
        return Shipped()
    return Registered(uri, served.champion)


class Pair:
    """A replica of a model, which follows its champion; ``trial`` says which target and runtime it is placed for."""

    def __init__(
        self, name: str, served: ServedSpec, trial: TrialSpec, limits: LimitsSpec, uri: str, follow_s: float
    ) -> None:
        self._figures = Figures(name)
        self._source = _source(served, uri)
        self._replica = Replica(self._source.first(trial), limits, _documents(served))
        self._seen = self._replica.served.version
        self._following = asyncio.get_running_loop().create_task(self._follow(follow_s))

    async def answer(self, question: Question) -> AsyncGenerator[Event, None]:
        """See ``Model.answer``."""
        event: Event | None = None
        try:
            async with aclosing(self._replica.answer(question)) as events:
                async for event in events:
                    yield event
        finally:
            if isinstance(event, Finished | Refused):
                self._figures.ended(question.question_id, event)
            else:
                self._figures.left(question.question_id)

    async def status(self) -> Status:
        """See ``Model.status``."""
        return self._replica.status()

    async def _follow(self, every_s: float) -> None:
        """Serve each newer champion; one that cannot be served is refused, and the old one goes on."""
        while True:
            await asyncio.sleep(every_s)
            try:
                newest = await asyncio.to_thread(self._source.newest)
            except TrackingError as error:
                _log.warning("the registry cannot be asked: %s", error)
                continue
            if newest != self._seen:
                self._seen = newest
                await self._take(newest)

    async def _take(self, version: str) -> None:
        try:
            champion = await asyncio.to_thread(self._source.read, version, self._replica.served.champion.trial)
            await self._replica.roll_out(Versioned(champion, version))
            _log.info("champion: version %s, %s", version, champion.trial.method.label)
        except Exception as error:  # whatever is wrong with a new champion, it must not end the old one
            _log.error("champion refused, the old one goes on: version %s: %s", version, error)
            self._replica.refuse(version, str(error))
            if isinstance(error, TrackingError):
                self._seen = self._replica.served.version  # the registry may have failed, not the champion: ask again


@serve.ingress()
class Ingress:
    """The HTTP side."""

    def __init__(self, models: Mapping[str, DeploymentHandle], limits: LimitsSpec, token_digest: str | None) -> None:
        self._models = {name: _Remote(handle) for name, handle in models.items()}
        self._limits, self._token_digest = limits, token_digest

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._models, self._limits, self._token_digest)


class _Remote:
    """A model behind a deployment handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle: Any = handle
        self._streaming: Any = handle.options(stream=True)

    async def answer(self, question: Question) -> AsyncGenerator[Event, None]:
        """See ``Model.answer``."""
        response = self._streaming.answer.remote(question)
        try:
            async for event in response:
                yield event
        finally:
            response.cancel()

    async def status(self) -> Status:
        """See ``Model.status``."""
        status: Status = await asyncio.wait_for(self._handle.status.remote(), _STATUS_TIMEOUT_S)
        return status


def _documents(served: ServedSpec) -> Callable[[], Iterable[Document]]:
    return tuple if served.repository is None else partial(repository_documents, served.repository)
