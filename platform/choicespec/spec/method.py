"""A method: how a pair decodes. Methods are one table of kinds, not one script each."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from choicespec.spec.frozen import Frozen

LONGEST_BLOCK = 127  # tokens; no verification of more has paid anywhere, and lengths are kept in a byte


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


class Speculative(Frozen):
    """What methods share that propose through the loop.

    Attributes:
        exact: a block's tokens are computed one by one, as in plain decoding, so that outputs are equal to the last bit
            in every precision; it costs about what plain decoding costs (docs/decisions/0015).
        pace: ``planned`` proposes by what is known when the method starts; ``adaptive``, in each step, what pays by the
            acceptance and the times seen so far, and nothing while nothing does.
    """

    # Left out where they change nothing, so that what was measured before there were any keeps its identity.
    exact: bool = Field(default=False, exclude_if=lambda exact: not exact)
    pace: Literal["planned", "adaptive"] = Field(default="planned", exclude_if=lambda pace: pace == "planned")

    @property
    def drafts(self) -> bool:
        """See ``Autoregressive.drafts``."""
        return True

    @property
    def _shared_label(self) -> str:
        return (" exact" if self.exact else "") + (" adaptive" if self.pace == "adaptive" else "")


class Branching(Speculative):
    """What methods share that may verify several drafts at once, as a tree (docs/decisions/0016).

    Attributes:
        width: the most branches of the tree; 1 verifies one draft.
    """

    width: int = Field(default=1, ge=1, exclude_if=lambda width: width == 1)

    @model_validator(mode="after")
    def _a_tree_is_planned(self) -> Self:
        if self.width > 1 and self.exact:
            raise ValueError(
                f"exact takes tokens one by one, so that width={self.width} saves nothing; leave one of them out"
            )
        if self.width > 1 and self.pace == "adaptive":
            raise ValueError(
                f"pace=adaptive judges one draft a step, not the {self.width} of width; leave one of them out"
            )
        return self

    @property
    def _shared_label(self) -> str:
        return (f" width={self.width}" if self.width > 1 else "") + super()._shared_label


class Ngram(Speculative):
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
    def label(self) -> str:
        return f"ngram k={self.num_draft_tokens}{self._shared_label}"


class Choice(Branching):
    """ChoiceSpec: pick one of a finite set of continuations, and of the drafts of drafters beside it, and verify it.

    Attributes:
        block_length: L, tokens of a candidate.
        selection: ``prior`` ranks without looking at the model, ``scorer`` with the pair's scorer; ``oracle`` knows the
            recorded answer, the upper bound that only a replay has.
        num_candidates: N, the most candidates of a set.
        min_survival: a token is verified only if its probability of being accepted is at least this; 0 always verifies
            the whole candidate. None verifies as many tokens as pay, by what a verification costs on this target.
        drafters: names in ``pair.drafters`` of those whose drafts are weighed with the candidates: by the scorer where
            it was trained beside drafters, else by how right they have been. Drafts are of L tokens, or of as many as
            the drafter was trained for.
        gate: when a drafter is called. None calls all at every step (a union). A number for each drafter calls it where
            the best expected accepted length is below that (a hybrid); ``cost`` calls it where that pays, by the time
            that the drafter and a verification take.
    """

    kind: Literal["choice"] = "choice"
    block_length: int = Field(default=8, ge=1, le=LONGEST_BLOCK)
    selection: Literal["prior", "scorer", "oracle"] = "prior"
    num_candidates: int = Field(default=16, ge=1)
    min_survival: float | None = Field(default=None, ge=0.0, le=1.0)
    drafters: tuple[str, ...] = ()
    gate: Literal["cost"] | tuple[Annotated[float, Field(gt=0.0)], ...] | None = None

    @model_validator(mode="after")
    def _gate_fits_the_drafters(self) -> "Choice":
        if len(set(self.drafters)) < len(self.drafters):
            raise ValueError(f"drafters={', '.join(self.drafters)} names one twice")
        if self.gate is not None and not self.drafters:
            raise ValueError(f"gate={self.gate} is for drafters, and there are none; name some, or leave gate out")
        if isinstance(self.gate, tuple) and len(self.gate) != len(self.drafters):
            raise ValueError(f"gate has {len(self.gate)} numbers for {len(self.drafters)} drafters; give one each")
        if self.gate == "cost" and self.min_survival is not None:
            raise ValueError(
                "gate=cost compares costs, and min_survival leaves them out; leave min_survival out instead"
            )
        if self.pace == "adaptive" and self.min_survival is not None:
            raise ValueError(
                f"pace=adaptive finds what pays, and min_survival={self.min_survival} sets it; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _the_oracle_needs_no_tree(self) -> "Choice":
        if self.width > 1 and self.selection == "oracle":
            raise ValueError(f"the oracle knows which candidate is right; leave width={self.width} out")
        return self

    @property
    def label(self) -> str:
        alone = f"choice {self.selection} L={self.block_length}{self._shared_label}"
        if not self.drafters:
            return alone
        if self.gate is None:
            return f"{alone} union[{','.join(self.drafters)}]"
        kind = "hybrid" if len(self.drafters) == 1 else "hybrid-all"
        if self.gate == "cost":
            return f"{alone} {kind}[{','.join(self.drafters)}]"
        gated = ",".join(f"{name}<{gate:g}" for name, gate in zip(self.drafters, self.gate, strict=True))
        return f"{alone} {kind}[{gated}]"

    @property
    def calls(self) -> "tuple[Draft, ...]":
        """Each of its drafters, as the method that drafts with it alone."""
        return tuple(Draft(drafter=name, num_draft_tokens=self.block_length) for name in self.drafters)


class TransformersGenerate(Frozen):
    """transformers' own ``generate``: a peer to compare with, never a baseline.

    Attributes:
        prompt_lookup_num_tokens: None decodes greedily; a number turns on transformers' own prompt lookup.
        cache: ``dynamic`` grows with the text; ``static`` is allocated as a whole, and on a GPU the pass is compiled.
        drafter: the name in ``pair.drafters`` of one of kind ``dflash``, with which transformers' own DFlash drafts.
    """

    kind: Literal["transformers_generate"] = "transformers_generate"
    prompt_lookup_num_tokens: int | None = Field(default=None, ge=1)
    # Left out where they change nothing, like ``exact``.
    cache: Literal["dynamic", "static"] = Field(default="dynamic", exclude_if=lambda cache: cache == "dynamic")
    drafter: str | None = Field(default=None, min_length=1, exclude_if=lambda drafter: drafter is None)

    @model_validator(mode="after")
    def _drafts_one_way(self) -> "TransformersGenerate":
        if self.drafter is not None and self.prompt_lookup_num_tokens is not None:
            raise ValueError(f"drafter={self.drafter} and prompt_lookup_num_tokens exclude each other; leave one out")
        if self.cache == "static" and self.drafts:
            raise ValueError(
                "cache=static and drafts exclude each other: transformers verifies no drafts with its static cache; "
                "leave one of them out"
            )
        return self

    @property
    def drafts(self) -> bool:
        return self.prompt_lookup_num_tokens is not None or self.drafter is not None

    @property
    def label(self) -> str:
        if self.drafter is not None:
            return f"transformers draft {self.drafter}"
        if self.prompt_lookup_num_tokens is None:
            return "transformers generate" + (" static" if self.cache == "static" else "")
        return f"transformers prompt lookup k={self.prompt_lookup_num_tokens}"


class Draft(Branching):
    """Draft with one of the pair's drafters, and verify.

    Attributes:
        drafter: its name in ``pair.drafters``.
        num_draft_tokens: k, the most tokens drafted a step; of a tree, the most in a row. How many tokens a tree has is
            decided by what a verification costs.
    """

    kind: Literal["draft"] = "draft"
    drafter: str = Field(min_length=1)
    num_draft_tokens: int = Field(default=3, ge=1)

    @property
    def label(self) -> str:
        return f"draft {self.drafter} k={self.num_draft_tokens}{self._shared_label}"


class Suffix(Frozen):
    """Suffix decoding: propose what followed the longest matching suffix, in this text and in earlier outputs.

    Source: G. Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (2024).

    Attributes:
        num_draft_tokens: k, the most tokens proposed a step.
    """

    kind: Literal["suffix"] = "suffix"
    num_draft_tokens: int = Field(default=16, ge=1)

    @property
    def drafts(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"suffix k={self.num_draft_tokens}"


ONLY_REPLAYED = "the oracle knows the recorded answer, so that it runs in a replay only: bench --replay"


def is_oracle(method: "MethodSpec") -> bool:
    """Whether a method is a bound, which no runtime can run."""
    return isinstance(method, Choice) and method.selection == "oracle"


def uses_scorer(method: "MethodSpec") -> bool:
    """Whether a method ranks with the pair's scorer."""
    return isinstance(method, Choice) and method.selection == "scorer"


def is_exact(method: "MethodSpec") -> bool:
    """Whether a method computes a block's tokens one by one."""
    return isinstance(method, Speculative) and method.exact


def is_adaptive(method: "MethodSpec") -> bool:
    """Whether a method goes by the acceptance and the times that it sees."""
    return isinstance(method, Speculative) and method.pace == "adaptive"


NOT_RECORDED = "it goes by alternatives or times that a recording does not hold"


def decided_live(method: "MethodSpec") -> bool:
    """Whether a method's steps, or their times, follow from more than a recording holds."""
    return is_exact(method) or is_adaptive(method) or (isinstance(method, Draft) and is_tree(method))


NO_TREES = "its own loop verifies chains, not trees; leave width out, or use hf"


def is_tree(method: "MethodSpec") -> bool:
    """Whether a method verifies trees."""
    return isinstance(method, Branching) and method.width > 1


def drafters_of(method: "MethodSpec") -> tuple[str, ...]:
    """The names in ``pair.drafters`` that a method calls."""
    if isinstance(method, Choice):
        return method.drafters
    one = method.drafter if isinstance(method, Draft | TransformersGenerate) else None
    return (one,) if one is not None else ()


MethodSpec = Annotated[
    Autoregressive | Ngram | Suffix | Choice | Draft | TransformersGenerate, Field(discriminator="kind")
]
