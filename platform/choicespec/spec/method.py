"""A method: how a pair decodes. Methods are one table of kinds, not one script each."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from choicespec.spec.frozen import Frozen


class Autoregressive(Frozen):
    """Plain greedy decoding: one token a step. The baseline of every measurement."""

    kind: Literal["autoregressive"] = "autoregressive"

    @property
    def drafts(self) -> bool:
        """Whether the method should propose; one that should and never does is flagged."""
        return False

    @property
    def label(self) -> str:
        return self.kind


class Ngram(Frozen):
    """Prompt lookup: propose what followed the latest earlier occurrence of the last n tokens.

    Source: A. Saxena, "Prompt Lookup Decoding" (2023). Longest n first; the latest occurrence wins.

    Attributes:
        num_draft_tokens: k, the most tokens proposed a step.
        min_ngram, max_ngram: the shortest and the longest suffix, in tokens, that is looked up.
    """

    kind: Literal["ngram"] = "ngram"
    num_draft_tokens: int = Field(default=8, ge=1)
    min_ngram: int = Field(default=1, ge=1)
    max_ngram: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _sizes_in_order(self) -> "Ngram":
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram={self.min_ngram} exceeds max_ngram={self.max_ngram}")
        return self

    @property
    def drafts(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"ngram k={self.num_draft_tokens}"


class Choice(Frozen):
    """ChoiceSpec: pick one of a finite set of continuations, and verify it.

    Attributes:
        block_length: L, tokens of a candidate.
        selection: ``prior`` ranks without looking at the model, ``scorer`` with the pair's scorer; ``oracle`` knows the
            recorded answer, the upper bound that only a replay has.
        num_candidates: N, the most candidates of a set.
        min_survival: a token is verified only if its probability of being accepted is at least this; 0 always verifies
            the whole candidate. None verifies as many tokens as pay, by what a verification costs on this target.
    """

    kind: Literal["choice"] = "choice"
    block_length: int = Field(default=8, ge=1)
    selection: Literal["prior", "scorer", "oracle"] = "prior"
    num_candidates: int = Field(default=16, ge=1)
    min_survival: float | None = Field(default=None, ge=0.0, le=1.0)

    @property
    def drafts(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"choice {self.selection} L={self.block_length}"


class TransformersGenerate(Frozen):
    """transformers' own ``generate``: a peer to compare with, never a baseline.

    Attributes:
        prompt_lookup_num_tokens: None decodes greedily; a number turns on transformers' own prompt lookup.
    """

    kind: Literal["transformers_generate"] = "transformers_generate"
    prompt_lookup_num_tokens: int | None = Field(default=None, ge=1)

    @property
    def drafts(self) -> bool:
        return self.prompt_lookup_num_tokens is not None

    @property
    def label(self) -> str:
        if self.prompt_lookup_num_tokens is None:
            return "transformers generate"
        return f"transformers prompt lookup k={self.prompt_lookup_num_tokens}"


class Draft(Frozen):
    """Draft with one of the pair's drafters, and verify.

    Attributes:
        drafter: its name in ``pair.drafters``.
        num_draft_tokens: k, the most tokens drafted a step.
    """

    kind: Literal["draft"] = "draft"
    drafter: str = Field(min_length=1)
    num_draft_tokens: int = Field(default=3, ge=1)

    @property
    def drafts(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"draft {self.drafter} k={self.num_draft_tokens}"


ONLY_REPLAYED = "the oracle knows the recorded answer, so that it runs in a replay only: bench --replay"


def is_oracle(method: "MethodSpec") -> bool:
    """Whether a method is a bound, which no runtime can run."""
    return isinstance(method, Choice) and method.selection == "oracle"


def uses_scorer(method: "MethodSpec") -> bool:
    """Whether a method ranks with the pair's scorer."""
    return isinstance(method, Choice) and method.selection == "scorer"


MethodSpec = Annotated[Autoregressive | Ngram | Choice | Draft | TransformersGenerate, Field(discriminator="kind")]
