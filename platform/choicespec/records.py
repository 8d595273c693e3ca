"""What goes into one decode, and what comes back: requests, proposals, steps, traces, measurements."""

from typing import Literal, NamedTuple

from pydantic import Field

from choicespec.spec.frozen import Frozen

FinishReason = Literal["eos", "length", "stop"]


class Request(NamedTuple):
    """One prompt to decode.

    Attributes:
        request_id: unique within its task.
        prompt_ids: the prompt's token ids, special tokens included.
        max_new_tokens: the most tokens to decode.
        stop: strings that end the output; the token that completes one is kept.
        reference: what the task knows of the right answer, as JSON; for a validity figure, never shown to a method.
        tools: the functions on offer, each as JSON in OpenAI's form; what a candidate set may draw on.
        document: the name of the repository's document that the prompt is cut from; a candidate set passes it over.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    reference: str | None = None
    tools: tuple[str, ...] = ()
    document: str | None = None


class Sampling(NamedTuple):
    """How tokens are drawn from the target's distribution, where they are not the likeliest.

    Attributes:
        temperature: above 0; what logits are divided by.
        top_p: in (0, 1]; only the fewest likeliest tokens are drawn that together have this probability.
        seed: the same seed, prompt and target draw the same tokens, whatever the method.
    """

    temperature: float
    top_p: float
    seed: int


class TargetIdentity(Frozen):
    """Which target: what a recording or a scorer is bound to.

    Attributes:
        weights: a digest of the configuration and of rows of the embedding, the same in every precision.
        tokenizer: a digest of the tokenizer.
        precision: dtype, and the quantisation where there is one.
        hidden_size: numbers of a hidden state.
        num_layers: decoder layers.
    """

    weights: str
    tokenizer: str
    precision: str
    hidden_size: int
    num_layers: int


class Document(NamedTuple):
    """A text of a repository, and its name there."""

    name: str
    text: str


class Proposal(NamedTuple):
    """A draft: token ids that continue the output, and who proposed them.

    Attributes:
        token_ids: the draft.
        source: who proposed it, of a tree its first token; empty where nobody did.
        probabilities: the drafter's own probability of each draft token given those before; empty where it has none.
        score_ms: spent on ranking candidates, a part of what the proposal took.
        parents: of a tree, for each token the place in the verified block of the token before it: 0 is the anchor, 1
            the first draft token. Parents come before their children, which differ. Empty for a chain.
    """

    token_ids: tuple[int, ...]
    source: str
    probabilities: tuple[float, ...] = ()
    score_ms: float = 0.0
    parents: tuple[int, ...] = ()


class Step(NamedTuple):
    """One propose-verify round.

    Attributes:
        proposed: draft tokens verified.
        accepted: draft tokens kept, the bonus token excluded.
        source: who proposed; empty where nobody did.
        propose_ms: search, scoring and drafting.
        verify_ms: the rest of the step: the target's pass, acceptance, rollback.
        score_ms: ranking, a part of ``propose_ms``; 0 where it is not told apart.
        settle_ms: what follows the target's pass, a part of ``verify_ms``; 0 where it is not told apart.
    """

    proposed: int
    accepted: int
    source: str
    propose_ms: float
    verify_ms: float
    score_ms: float = 0.0
    settle_ms: float = 0.0


class Trace(NamedTuple):
    """One decoded request.

    Attributes:
        output_ids: the tokens decoded, an end-of-sequence token included.
        prefill_tokens: the tokens that the prompt's own pass settled; they do not count for the decode rate.
        prefill_ms: from the request to its first token.
        decode_ms: from the first token to the last; the first draft is inside.
        steps: every round after the prefill.
    """

    request_id: str
    prompt_tokens: int
    output_ids: tuple[int, ...]
    prefill_tokens: int
    finish_reason: FinishReason
    prefill_ms: float
    decode_ms: float
    steps: tuple[Step, ...]

    @property
    def decode_tokens(self) -> int:
        """The tokens that ``decode_ms`` was spent on."""
        return len(self.output_ids) - self.prefill_tokens


class Estimate(Frozen):
    """A figure with its 95% interval and the number of requests behind it."""

    value: float
    low: float
    high: float
    n: int


class Divergence(Frozen):
    """Where a method's output first differs from the autoregressive output.

    Attributes:
        position: index into the output.
        expected_id, found_id: the token there; None where that output has already ended.
        top2_margin: the target's largest logit minus its second largest at that position, after the common prefix;
            a tiny margin is a numeric tie, a large one a bug.
    """

    request_id: str
    position: int
    expected_id: int | None
    found_id: int | None
    top2_margin: float


class Environment(Frozen):
    """What a measurement was made with.

    Attributes:
        engine: the settings of a runtime with a loop of its own.
    """

    choicespec: str
    git_revision: str
    python: str
    packages: dict[str, str]
    runtime_build: str
    device: str
    cpu: str
    threads: int
    dtype: str
    engine: dict[str, str] = Field(default={})


class Measurement(Frozen):
    """What one trial found. Rates are ratios of sums over requests; accepted/step excludes the bonus token.

    Attributes:
        decode_tokens_per_s: of the method.
        baseline_tokens_per_s: of plain decoding, interleaved on the same requests.
        speedup: the paired ratio of the two.
        acceptance_by_position: of the steps that proposed a first, second, ... token, the share that kept it; empty
            where single steps are not known, and for trees, whose tokens are not in a row.
        match: the share of requests with output ids equal to the baseline's.
        prefill_ms: mean time to the first token, of the method.
        propose_share: the share of decode time spent on search, scoring and drafting.
        memory_bytes: what decoding with the method took, see ``Runtime.memory_bytes``; None where it cannot be told.
        never_proposed: the method should draft but never did: it is plain decoding under another name.
        omitted: prompts left out, each with the reason.
        measured_at: UTC, ISO 8601; with the trial's fingerprint it names the measurement.
    """

    decode_tokens_per_s: Estimate
    baseline_tokens_per_s: Estimate
    speedup: Estimate
    accepted_per_step: Estimate
    acceptance_by_position: tuple[float, ...] = ()
    match: Estimate
    prefill_ms: Estimate
    propose_share: float
    memory_bytes: int | None = None
    never_proposed: bool
    divergences: tuple[Divergence, ...] = ()
    omitted: tuple[str, ...] = ()
    measured_at: str
    environment: Environment
