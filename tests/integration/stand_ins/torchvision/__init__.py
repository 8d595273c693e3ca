"""Stands in for torchvision, which vLLM's CPU build breaks: whatever is imported of it is there, and does nothing.

vLLM's description of the Qwen3.5 family imports the processor of its images, of which no test sends one.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.28.0"


class Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)


class EmptyModule(ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        return _anything(name)


def _anything(name: str) -> Anything:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {})


class Finder(MetaPathFinder, Loader):
    """Finds every module of torchvision."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.append(Finder())
