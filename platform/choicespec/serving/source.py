"""Where a served name's champion comes from: the package, or the MLflow registry."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Protocol

from choicespec.errors import ChampionError, ChoiceSpecError
from choicespec.serving.champion import SHIPPED, Champion, check_champion, read_champion
from choicespec.spec.experiment import TrialSpec
from choicespec.tracking.registry import ChampionRegistry

_log = logging.getLogger("ray.serve")


class Versioned(NamedTuple):
    """A champion and which one it is."""

    champion: Champion
    version: str


class ChampionSource(Protocol):
    """Gives the champion to start with, and newer ones."""

    def first(self, served: TrialSpec | None) -> Versioned:
        """The champion to start with, checked against what this place was made for, where that is given.

        Raises:
            ChoiceSpecError: there is none that can be served.
        """
        ...

    def newest(self) -> str:
        """The version that should be served now."""
        ...

    def read(self, version: str, served: TrialSpec | None) -> Champion:
        """A version, checked against what is served.

        Raises:
            ChoiceSpecError: it is missing or broken, or cannot take over.
        """
        ...


class Shipped:
    """The configuration that ships for the embedded default; it never changes."""

    def first(self, served: TrialSpec | None) -> Versioned:
        """See ``ChampionSource.first``."""
        version = self.newest()
        return Versioned(self.read(version, served), version)

    def newest(self) -> str:
        """See ``ChampionSource.newest``."""
        return "shipped"

    def read(self, version: str, served: TrialSpec | None) -> Champion:
        """See ``ChampionSource.read``."""
        champion = read_champion(SHIPPED)
        check_champion(champion, served)
        return champion


class Registered:
    """A registered model, the alias ``champion`` of which is followed.

    Args:
        uri: of MLflow.
        name: of the registered model.
    """

    def __init__(self, uri: str, name: str) -> None:
        self._registry, self._name = ChampionRegistry(uri), name
        self._copies = TemporaryDirectory(prefix="choicespec-champions-")  # goes with this object

    def first(self, served: TrialSpec | None) -> Versioned:
        """The version with the alias, or where that cannot be served the latest earlier one that can."""
        reigning = self._registry.reigning(self._name)
        reasons = []
        for version in (v for v in self._registry.versions(self._name) if v <= reigning):
            try:
                return Versioned(self.read(str(version), served), str(version))
            except ChoiceSpecError as error:
                _log.error("champion refused: %s version %s: %s", self._name, version, error)
                reasons.append(f"version {version}: {error}")
        raise ChampionError(f"no version of {self._name} can be served: " + "; ".join(reasons))

    def newest(self) -> str:
        """See ``ChampionSource.newest``."""
        return str(self._registry.reigning(self._name))

    def read(self, version: str, served: TrialSpec | None) -> Champion:
        """See ``ChampionSource.read``."""
        copy = Path(self._copies.name, version)
        copy.mkdir(exist_ok=True)
        champion = read_champion(self._registry.fetch(self._name, int(version), copy))
        check_champion(champion, served)
        return champion
