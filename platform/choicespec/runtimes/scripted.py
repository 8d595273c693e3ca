"""The scripted runtime: a deterministic table model over bytes, for tests of everything around a model."""

import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import count
from typing import Any, NoReturn

from choicespec.decoding.loop import Block, decode, trace
from choicespec.decoding.step_cost import FAR_TOKENS, Floor, LiveCosts, StepCosts, time_verifications
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.registry import PROPOSERS, Proposers, TargetSide
from choicespec.errors import PromptTooLong, Unsupported
from choicespec.records import Document, Request, Sampling, Trace
from choicespec.runtimes.memory import held_bytes
from choicespec.spec.method import ONLY_REPLAYED, Draft, MethodSpec, drafters_of, is_oracle, uses_scorer
from choicespec.spec.pair import PairSpec, ScorerSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from choicespec.tasks.tokenizer import Tokenizer

_SCRIPT = "".join(f'f(x={number}, y="{number % 7}"); ' for number in range(10, 40))
_ORDER = 24  # more than a period of the script, so that the table sees the number before
EOS_ID = 256
_COSTS = StepCosts((1, 1024), (1.0, 1.0))  # a verification costs the same whatever its length


def _no_scorer() -> NoReturn:
    raise AssertionError("a table has no hidden states, and its runtime refuses methods that score")


def _no_drafter(method: Draft) -> NoReturn:
    raise AssertionError(f"{method.label} is refused before anything is loaded")


class ByteTokenizer:
    """UTF-8 bytes as token ids 0-255; 256 ends a sequence. Its chat template renders tools."""

    renders_tools = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < EOS_ID).decode(errors="replace")

    def chat_ids(self, messages: Sequence[Any], tools: Sequence[Any] | None) -> list[int]:
        turns = [("tools", list(tools))] if tools else []
        turns += [(m["role"], m["content"]) for m in messages]
        return self.encode("".join(f"<{role}>{content}\n" for role, content in turns) + "<assistant>")


class TableTarget:
    """A greedy target whose next token is looked up by the longest known suffix of the text.

    The table holds every suffix, up to the order, of one repetitive script that ends with an end-of-sequence token. A
    text that the table has never seen goes on at a place of the script that its checksum picks, so that the output
    depends on the whole prompt.
    """

    def __init__(self) -> None:
        script = [*_SCRIPT.encode(), EOS_ID]
        self._script: list[int] = script
        self._next: dict[tuple[int, ...], int] = {}
        for end in range(1, len(script)):
            for size in range(1, min(_ORDER, end) + 1):
                self._next.setdefault(tuple(script[end - size : end]), script[end])
        self._cache: list[int] = []
        self._block_tokens = 0

    def next_token(self, token_ids: Sequence[int]) -> int:
        """The target's own choice after a text."""
        for size in range(min(_ORDER, len(token_ids)), 0, -1):
            found = self._next.get(tuple(token_ids[-size:]))
            if found is not None:
                return found
        checksum = zlib.crc32(bytes(i % 256 for i in token_ids))
        return self._script[checksum % (len(self._script) - 1)]

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        self._cache = list(prompt_ids)
        return self.next_token(self._cache)

    def verify(self, block_ids: Sequence[int], parents: Sequence[int] = ()) -> list[int]:
        texts = [[*self._cache, block_ids[0]]]
        for token_id, parent in zip(block_ids[1:], parents or count(), strict=False):
            texts.append([*texts[parent], token_id])
        self._cache += block_ids
        self._block_tokens = len(block_ids)
        return [self.next_token(text) for text in texts]

    def gather(self, places: Sequence[int]) -> None:
        start = len(self._cache) - self._block_tokens
        self._cache[start : start + len(places)] = [self._cache[start + place] for place in places]

    def keep(self, num_tokens: int) -> None:
        del self._cache[len(self._cache) - self._block_tokens + num_tokens :]


class ScriptedRuntime:
    """Runs any pair on the table model; loads nothing, so that placement and scheduling can be tested alone."""

    context_tokens = 32768
    build = "scripted 1"
    device = "none"
    warm_methods: int | None = None
    knows_steps = True
    slots = 1
    samples = False

    def __init__(self, spec: ScriptedRuntimeSpec, pair: PairSpec) -> None:
        self._pair = pair
        self.tokenizer: Tokenizer = ByteTokenizer()
        self._target = TableTarget()
        self.precision = pair.target.precision
        self._costs = _COSTS
        self.use_repository(tuple)

    @staticmethod
    def refusal(pair: PairSpec, method: MethodSpec) -> str | None:
        """Everything runs here that proposes through the loop and does not look into the target."""
        if uses_scorer(method):
            return "a scorer reads hidden states, and its table has none"
        if is_oracle(method):
            return ONLY_REPLAYED
        if drafters_of(method):
            return "it has no drafters"
        return None if method.kind in PROPOSERS else "it has no proposer of that kind"

    def load(self) -> None:
        """There are no weights."""

    def use_repository(self, documents: Callable[[], Iterable[Document]]) -> None:
        """Start a task with fresh proposers."""
        self._documents = documents
        side = TargetSide(
            self.tokenizer.encode,
            lambda method: self._costs,
            lambda method: LiveCosts(self._costs, self._costs, FAR_TOKENS),
            _no_scorer,
            _no_drafter,
        )
        self._proposers = Proposers(side, documents)

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        """Decode one request."""
        return trace(request, self.stream(request, method, None))

    @staticmethod
    def stream_refusal(method: MethodSpec) -> str | None:
        """Everything that runs here streams."""
        return None

    def prepare(self, method: MethodSpec, scorer: ScorerSpec) -> None:
        """See ``StreamingRuntime.prepare``."""
        reason = self.refusal(self._pair, method)
        if reason is not None:
            raise Unsupported("scripted", method.label, reason)
        self.use_repository(self._documents)

    def stream(self, request: Request, method: MethodSpec, sampling: Sampling | None) -> Generator[Block, None, None]:
        """See ``StreamingRuntime.stream``."""
        if sampling is not None:
            raise Unsupported("scripted", method.label, "a table has no probabilities to sample from")
        prompt_tokens = len(request.prompt_ids)
        if prompt_tokens + request.max_new_tokens > self.context_tokens:
            raise PromptTooLong(request.request_id, prompt_tokens, request.max_new_tokens, self.context_tokens)
        stop = StopRule({EOS_ID}, request.max_new_tokens, request.stop, self.tokenizer.decode)
        proposer = self._proposers.of(method)
        output_ids: list[int] = []
        for block in decode(self._target, proposer, request, stop):
            output_ids += block.token_ids
            if block.step is not None:
                self._proposers.observe(method, block.step)
            if block.finish_reason is not None:
                proposer.finish(request, output_ids)
            yield block

    def engine_settings(self, method: MethodSpec) -> dict[str, str]:
        """The loop is choicespec's own."""
        return {}

    def memory_bytes(self, method: MethodSpec) -> int:
        """See ``Runtime.memory_bytes``."""
        return held_bytes((self._target, self._proposers.of(method)), apart=(self, self.tokenizer))

    def time_verifications(self, sizes: Sequence[int], context_tokens: int, rounds: int) -> list[tuple[float, ...]]:
        """See ``decoding.step_cost.time_verifications``."""
        return time_verifications(self._target, sizes, context_tokens, rounds)

    def floor(self) -> Floor | None:
        """A table computes nothing."""
        return None

    def use_step_costs(self, costs: StepCosts) -> None:
        """Let methods decide by these costs."""
        self._costs = costs

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """A table has no near-ties."""
        return 1.0
