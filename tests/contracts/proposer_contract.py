"""What every proposer promises, whatever it proposes. A proposer's test class inherits this and says its methods."""

from collections.abc import Iterable
from typing import ClassVar, NoReturn

from choicespec.decoding.proposer import Proposer
from choicespec.decoding.step_cost import FAR_TOKENS, LiveCosts, StepCosts
from choicespec.decoding.verification import depths
from choicespec.drafters.registry import Proposers, TargetSide
from choicespec.records import Document, Proposal, Request, Trace
from choicespec.runtimes.scripted import ScriptedRuntime
from choicespec.spec.method import Autoregressive, Draft, MethodSpec
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import ScriptedRuntimeSpec
from contracts.lossless import assert_lossless
from hypothesis import given
from hypothesis import strategies as st

# Few different tokens, so that repetitions are frequent.
Texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)
Limits = st.integers(0, 20)

_TIMELESS = Proposal._fields.index("score_ms")  # the fields before it say what is proposed

# Steep enough for a draft to be cut where it becomes unlikely.
COSTS = StepCosts((1, 2, 5, 17), (1.0, 1.1, 2.0, 6.0))


def request_of(prompt_ids: list[int]) -> Request:
    """A request for at most as many tokens as any of these tests proposes."""
    return Request("r", tuple(prompt_ids), max_new_tokens=64)


def _no_scorer() -> NoReturn:
    raise AssertionError("bytes have no hidden states")


def _no_drafter(method: Draft) -> NoReturn:
    raise AssertionError("nor is there a target to draft from")


def fresh(method: MethodSpec, documents: Iterable[Document] = ()) -> Proposer:
    """A proposer that has seen nothing, on byte tokens."""
    side = TargetSide(
        lambda text: list(text.encode()),
        lambda method: COSTS,
        lambda method: LiveCosts(COSTS, COSTS, FAR_TOKENS),
        _no_scorer,
        _no_drafter,
    )
    return Proposers(side, lambda: documents).of(method)


class ProposerContract:
    """The properties."""

    methods: ClassVar[st.SearchStrategy[MethodSpec]]

    def most_tokens(self, method: MethodSpec) -> int:
        """k of a method."""
        raise NotImplementedError

    def fresh(self, method: MethodSpec) -> Proposer:
        """A proposer that has seen nothing."""
        return fresh(method)

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        """Decode a request on a target for tests."""
        return ScriptedRuntime(ScriptedRuntimeSpec(), PairSpec(target=TargetSpec(model="none"))).generate(
            request, method
        )

    def same(self, found: Proposal, expected: Proposal) -> bool:
        """Whether two proposals for one text agree, however long they took."""
        return found[:_TIMELESS] == expected[:_TIMELESS]

    def draft(self, method: MethodSpec, text: list[int], limit: int) -> Proposal:
        """What a fresh proposer proposes after a text."""
        proposer = self.fresh(method)
        proposer.begin(request_of(text))
        return proposer.propose(text, limit)

    def assert_grows(self, method: MethodSpec, text: list[int], lengths: list[int], limit: int) -> None:
        """A proposer that is asked at some lengths of a text proposes what a fresh one does."""
        proposer = self.fresh(method)
        proposer.begin(request_of(text[: min(lengths, default=1)]))
        for length in lengths:
            found = proposer.propose(text[:length], limit)
            assert self.same(found, self.draft(method, text[:length], limit))

    @given(st.data(), Texts, Limits)
    def test_never_more_than_k_nor_than_the_limit(self, data: st.DataObject, text: list[int], limit: int) -> None:
        """Fails if a draft runs beyond what can be accepted, or beyond what the target's cache has room for; or if a
        token of a tree comes before the one that it follows, or twice."""
        method = data.draw(self.methods)
        found = self.draft(method, text, limit)
        parents = found.parents or range(len(found.token_ids))
        assert max(depths(parents)) <= min(self.most_tokens(method), limit)
        assert all(parent < place for place, parent in enumerate(parents, start=1))
        assert len(set(zip(parents, found.token_ids, strict=True))) == len(found.token_ids)

    @given(st.data(), Texts)
    def test_limit_0_gives_an_empty_draft(self, data: st.DataObject, text: list[int]) -> None:
        """Fails if the last token of an output is drafted as well."""
        assert self.draft(data.draw(self.methods), text, 0) == Proposal((), "")

    @given(st.data(), Texts, Limits)
    def test_a_source_is_named_exactly_where_something_is_proposed(
        self, data: st.DataObject, text: list[int], limit: int
    ) -> None:
        """Fails if an empty draft is booked on a proposer, or a draft on none."""
        found = self.draft(data.draw(self.methods), text, limit)
        assert bool(found.source) == bool(found.token_ids)

    @given(st.data(), Texts, Limits)
    def test_the_same_text_gives_the_same_draft(self, data: st.DataObject, text: list[int], limit: int) -> None:
        """Fails if a draft depends on the process's hash seed, the clock or the global random state."""
        method = data.draw(self.methods)
        found, again = self.draft(method, text, limit), self.draft(method, text, limit)
        assert found[:_TIMELESS] == again[:_TIMELESS]

    @given(st.data(), Texts, Texts, Limits)
    def test_begin_forgets_the_last_request(
        self, data: st.DataObject, last: list[int], text: list[int], limit: int
    ) -> None:
        """Fails if anything of one user's request reaches the next one's drafts."""
        method = data.draw(self.methods)
        proposer = self.fresh(method)
        for prompt in (last, text):
            proposer.begin(request_of(prompt))
            found = proposer.propose(prompt, limit)
        assert self.same(found, self.draft(method, text, limit))

    @given(st.data(), Texts, Limits)
    def test_a_growing_text_gives_what_the_whole_text_gives(
        self, data: st.DataObject, text: list[int], limit: int
    ) -> None:
        """Fails if an index that grows with the text misses, repeats or misplaces a part of it."""
        method = data.draw(self.methods)
        lengths = data.draw(st.sets(st.integers(1, len(text))))
        self.assert_grows(method, text, sorted(lengths), limit)

    @given(st.data(), st.text(alphabet='f(x=1234, y"); é', min_size=1, max_size=30), st.integers(1, 48))
    def test_the_output_is_plain_decodings(self, data: st.DataObject, prompt: str, max_new_tokens: int) -> None:
        """Fails if a draft can change what is decoded."""
        method = data.draw(self.methods)
        request = Request("r", tuple(prompt.encode()), max_new_tokens)
        assert_lossless([request], lambda r: self.generate(r, Autoregressive()), lambda r: self.generate(r, method))
