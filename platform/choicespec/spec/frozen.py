"""The one configuration that every specification shares."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A specification: immutable, hashable, and an unknown field is an error rather than silently dropped."""

    model_config = ConfigDict(frozen=True, extra="forbid")
