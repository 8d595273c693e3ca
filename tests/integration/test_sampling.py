"""Sampling with drafts draws from the target's own distribution: the same seed, the same tokens in every method."""

from collections.abc import Sequence

import pytest
import torch
from choicespec.decoding.sampling import Sampler
from choicespec.records import Request, Sampling
from choicespec.runtimes.hf import HfRuntime
from choicespec.spec.method import Autoregressive, Choice, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec
from choicespec.spec.runtime import HfRuntimeSpec
from contracts.streaming_contract import StreamingContract
from integration.small_checkpoints import save_checkpoint, small_llama

_PLAIN = Autoregressive()
_METHODS: tuple[MethodSpec, ...] = (Ngram(num_draft_tokens=4), Choice(min_survival=0.0))
_REQUEST = Request("sampled", (1, 2, 3) * 6, 48)
_SAMPLING = Sampling(temperature=0.9, top_p=0.95, seed=1)
_VOCABULARY = 8  # so few that a draft is often right by chance


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> HfRuntime:
    folder = save_checkpoint(tmp_path_factory.mktemp("small") / "target", small_llama(vocab_size=_VOCABULARY))
    pair = PairSpec.model_validate({"target": {"model": str(folder)}})
    return HfRuntime(HfRuntimeSpec(threads=1), pair)


class TestStreams(StreamingContract):
    @pytest.fixture(scope="class")
    def runtime(self, runtime: HfRuntime) -> HfRuntime:
        return runtime

    @pytest.fixture(scope="class")
    def requests(self) -> list[Request]:
        return [_REQUEST, Request("other", (4, 5) * 6, 16)]


def _drawn(runtime: HfRuntime, method: MethodSpec, sampling: Sampling) -> list[int]:
    return [i for block in runtime.stream(_REQUEST, method, sampling) for i in block.token_ids]


@pytest.mark.parametrize("method", _METHODS, ids=lambda method: method.kind)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drafts_change_no_drawn_token(runtime: HfRuntime, method: MethodSpec, seed: int) -> None:
    """Fails if a draft is accepted more often than the target would draw it."""
    sampling = _SAMPLING._replace(seed=seed)
    assert _drawn(runtime, method, sampling) == _drawn(runtime, _PLAIN, sampling)


def test_drafts_are_accepted_and_rejected(runtime: HfRuntime) -> None:
    """Fails if the test above compares plain decoding with itself."""
    for method in _METHODS:
        steps = [block.step for block in runtime.stream(_REQUEST, method, _SAMPLING) if block.step]
        assert any(step.accepted for step in steps)
        assert any(step.accepted < step.proposed for step in steps)


def test_the_seed_decides(runtime: HfRuntime) -> None:
    """Fails if sampling is silently greedy, or a seed is not kept to."""
    first = _drawn(runtime, _PLAIN, _SAMPLING)
    assert first == _drawn(runtime, _PLAIN, _SAMPLING)
    assert first != _drawn(runtime, _PLAIN, _SAMPLING._replace(seed=2))
    assert first != list(runtime.generate(_REQUEST, _PLAIN).output_ids)


def test_greedy_requests_stay_greedy_after_sampled_ones(runtime: HfRuntime) -> None:
    """Fails if a request's temperature lingers."""
    greedy = runtime.generate(_REQUEST, _PLAIN).output_ids
    _drawn(runtime, _PLAIN, _SAMPLING)
    assert runtime.generate(_REQUEST, _PLAIN).output_ids == greedy


def test_a_sampler_that_counts_its_draws_is_caught(runtime: HfRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what is drawn depends on how many tokens were drawn before, rejected ones included."""

    class Counting(Sampler):
        def __init__(self, sampling: Sampling) -> None:
            super().__init__(sampling)
            self._drawn = 0

        def __call__(self, logits_TV: torch.Tensor, positions: Sequence[int]) -> list[int]:
            self._drawn += len(logits_TV)
            return super().__call__(logits_TV, range(self._drawn, self._drawn + len(positions)))

    monkeypatch.setattr("choicespec.runtimes.hf.Sampler", Counting)
    with pytest.raises(AssertionError):
        test_drafts_change_no_drawn_token(runtime, _METHODS[0], 1)


def _frequencies(logits_V: torch.Tensor, sampling: Sampling, draws: int) -> torch.Tensor:
    tokens = [Sampler(sampling._replace(seed=seed))(logits_V[None], [5])[0] for seed in range(draws)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits_V)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_the_target_says(temperature: float) -> None:
    """Fails if the distribution is another: half the sum of the differences is below what 4000 draws explain."""
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    found_V = _frequencies(logits_V, Sampling(temperature, 1.0, 0), 4000)
    assert (found_V - (logits_V / temperature).softmax(-1)).abs().sum() / 2 < 0.03


def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p() -> None:
    """Fails if the token that reaches the share is left out, or one more is let in."""
    logits_V = torch.tensor([0.1, 0.5, 0.3, 0.1]).log()
    found_V = _frequencies(logits_V, Sampling(1.0, 0.7, 0), 2000)
    assert found_V[[0, 3]].sum() == 0
    assert (found_V - torch.tensor([0.0, 0.625, 0.375, 0.0])).abs().sum() / 2 < 0.03


def test_places_draw_independently() -> None:
    """Fails if neighbouring places or seeds share their randomness, so that an output repeats itself."""
    logits_TV = torch.zeros(4000, 2)
    first = torch.tensor(Sampler(Sampling(1.0, 1.0, 0))(logits_TV, range(len(logits_TV)))).double()
    second = torch.tensor(Sampler(Sampling(1.0, 1.0, 1))(logits_TV, range(len(logits_TV)))).double()
    for left, right in ((first[:-1], first[1:]), (first, second)):
        assert torch.corrcoef(torch.stack([left, right]))[0, 1].abs() < 0.06
