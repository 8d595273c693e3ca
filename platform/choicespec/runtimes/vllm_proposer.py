"""ChoiceSpec inside vLLM: a proposer class that vLLM's model runner makes and asks after each step.

It is the hf runtime's: the same candidate sets, stores and ranker (``drafters.registry``). What is vLLM's own is found
here: which request a row of the batch is, its tokens, and the target's hidden states, which vLLM does not hand out. In
a union it is asked after vLLM's own drafter (``vllm_worker``), with what that has drafted. The functions at the end are
run on the engine's workers.

Shapes: T tokens of a step, of all requests, one request's after the other's; H hidden size.
"""

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, NoReturn

import torch
from transformers import AutoTokenizer

from choicespec.decoding.step_cost import BatchCosts, StepCosts
from choicespec.drafters.choice import ChoiceDrafter
from choicespec.drafters.registry import Proposers, TargetSide
from choicespec.records import Document, Proposal, Request
from choicespec.runtimes.checkpoints import identify, input_embedding
from choicespec.runtimes.hf_tokenizer import HfTokenizer
from choicespec.runtimes.vllm_drafter import NOTHING, VllmDrafter
from choicespec.runtimes.vllm_methods import SETTINGS
from choicespec.runtimes.vllm_steps import Drafted
from choicespec.runtimes.vllm_target import loses_state
from choicespec.runtimes.vllm_texts import VllmTexts
from choicespec.scorer.files import check_scorer, find_scorer, load_scorer
from choicespec.scorer.ranker import ScorerRanker
from choicespec.spec.method import Choice, MethodSpec
from choicespec.spec.pair import PairSpec

_GUARD = "guard"


class _Live:
    """A request that has not finished: its own view of the proposer, and its tokens so far."""

    def __init__(self, request: Request, drafter: ChoiceDrafter) -> None:
        self.request, self.drafter = request, drafter
        self.token_ids: list[int] = []
        self.drafted: Drafted | None = None  # of the latest draft


class ChoiceProposer:
    """Proposes for every request of a batch, each with a view of its own over shared stores.

    vLLM's protocol for ``method: custom_class``: it makes one from its configuration, loads the target, and calls
    ``propose`` after each step. What is asked for stands in ``additional_config`` (see ``vllm_methods``).

    Args:
        vllm_config: the engine's configuration.

    Attributes:
        drafter: vLLM's own, in a union.
    """

    def __init__(self, vllm_config: Any) -> None:
        asked = vllm_config.additional_config[SETTINGS]
        self._pair = PairSpec.model_validate(asked["pair"])
        self._method = Choice.model_validate(asked["method"])
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._model_config = vllm_config.model_config
        self._most_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        target = self._pair.target
        tokenizer = AutoTokenizer.from_pretrained(self._model_config.model, revision=target.revision)
        self._tokenizer = HfTokenizer(tokenizer, target.template_settings)
        self._fewest = self._fewest_tokens() if loses_state(self._model_config.hf_config.to_dict()) else 0
        self.drafter = VllmDrafter()
        self._runner: Any = None
        self._costs: BatchCosts | None = None
        self._ranker: ScorerRanker | None = None
        self._states_TH: dict[int, torch.Tensor] = {}
        self._texts: VllmTexts | None = None  # where the scorer reads the states at candidates' sources
        self._row = 0  # of the states: the last token before the anchor, of the request that is proposed for
        self._live: dict[str, _Live] = {}
        self.use_repository(())

    def load_model(self, model: torch.nn.Module) -> None:
        """Once the target has its weights: watch the layers that the scorer reads.

        Raises:
            ScorerError: it is missing, broken or for another target.
        """
        if self._method.selection != "scorer":
            return
        checkpoint, target = self._model_config.model, self._pair.target
        identity = identify(checkpoint, target)
        folder = find_scorer(self._pair.scorer, identity)
        manifest = check_scorer(folder, identity, self._pair.scorer.transfer)
        embedding = input_embedding(checkpoint, target.revision).to(self._model_config.dtype)
        layers = _decoder_layers(model)
        shape = (self._most_tokens, identity.hidden_size)
        for layer in {*manifest.layers, *manifest.source_layers}:
            self._states_TH[layer] = torch.zeros(shape, dtype=self._model_config.dtype, device=_device(model))
            layers[layer - 1].register_forward_hook(_keep(self._states_TH[layer]))
        scorer = load_scorer(folder, manifest, lambda token_ids: embedding[token_ids].float())
        if manifest.source_layers:
            self._texts = VllmTexts(
                [self._states_TH[layer] for layer in manifest.source_layers], scorer.net.source_scale
            )
        cosines = self._texts.cosines if self._texts is not None else None
        self._ranker = ScorerRanker(scorer, lambda layer: self._states_TH[layer][self._row], cosines)

    def attach(self, runner: Any) -> None:
        """Know the model runner, which knows the requests behind the batch's rows."""
        self._runner = runner

    def use_step_costs(self, costs: BatchCosts) -> None:
        """Know what verifications cost."""
        self._costs = costs

    def use_repository(self, documents: Iterable[Document]) -> None:
        """Start a task with fresh stores."""
        encode = self._tokenizer.encode
        side = TargetSide(encode, self._step_costs, _no_live_costs, self._scorer, lambda draft: self.drafter)
        self._proposers = Proposers(side, lambda: documents)
        self._live.clear()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each row of the batch, of at most k tokens.

        Args:
            sampled_token_ids: what the step has settled of each request; empty where its prompt is not yet done.
            num_tokens_no_spec: tokens of each request, those just settled included.
            token_ids_cpu: of each request, its tokens.
            slot_mappings: of the cache; not needed.
        """
        if self._runner is None:
            return [[] for _ in sampled_token_ids]
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(sampled_token_ids))]
        return self._draft_all(sampled_token_ids, texts, [NOTHING] * len(texts))

    def improve(self, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """A union's draft for each row of the batch: the best of a candidate and of what vLLM's drafter has drafted.

        Args:
            drafts: of each row, by vLLM's drafter.
        """
        batch = self._runner.input_batch
        texts = [batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]] for row in range(len(drafts))]
        settled = [text[self._known(row) :].tolist() for row, text in enumerate(texts)]
        return self._draft_all(settled, texts, self.drafter.take(drafts))

    def drafted(self) -> dict[str, Drafted]:
        """Of each request, what is to be said of its latest draft."""
        return {name: live.drafted for name, live in self._live.items() if live.drafted is not None}

    def finish(self, request_id: str, output_ids: Sequence[int]) -> None:
        """End a request and learn from its output."""
        live = self._live.pop(request_id, None)
        if live is not None:
            live.drafter.finish(live.request, output_ids)

    def _draft_all(
        self, settled: Sequence[Sequence[int]], texts: Sequence[Any], handed: Sequence[Proposal]
    ) -> list[list[int]]:
        for gone in self._live.keys() - self._runner.requests.keys():
            del self._live[gone]  # aborted; a request that was preempted is still there
        if self._texts is not None:
            self._texts.take_in(self._runner)
        if self._costs is not None:
            self._costs.requests = max(1, sum(1 for tokens in settled if tokens))
        drafts = []
        for row, (tokens, text, draft) in enumerate(zip(settled, texts, handed, strict=True)):
            self.drafter.handed = draft
            drafts.append(self._draft(row, tokens, text) if tokens else [])
        return drafts

    def _known(self, row: int) -> int:
        """How many tokens a row's text had when it was last looked at: its prompt's, where it never was."""
        request_id = self._runner.input_batch.req_ids[row]
        live = self._live.get(request_id)
        return len(live.token_ids if live else self._runner.requests[request_id].prompt_token_ids)

    def _draft(self, row: int, settled: Sequence[int], text: Any) -> list[int]:
        request_id = self._runner.input_batch.req_ids[row]
        params = self._runner.requests[request_id].sampling_params
        if not (params.extra_args and SETTINGS in params.extra_args):
            return []  # not a request of ours
        started = perf_counter()
        live = self._live.get(request_id) or self._begin(request_id)
        live.token_ids += text[len(live.token_ids) :].tolist()
        left = len(live.request.prompt_ids) + live.request.max_new_tokens - len(live.token_ids)
        if left <= 0 or not set(settled).isdisjoint(params.stop_token_ids):
            return []  # the output ends here
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        self._row = int(starts[row] + len(live.token_ids) - 2 - batch.num_computed_tokens_cpu[row])
        if self._texts is not None:
            self._texts.asked = (request_id, len(live.token_ids))
        draft = live.drafter.propose(live.token_ids, min(left - 1, self._most)) if left > 1 else NOTHING
        missing = self._fewest - len(draft.token_ids)
        live.drafted = Drafted(draft.source or (_GUARD if missing > 0 else ""), (perf_counter() - started) * 1e3)
        return [*draft.token_ids, *[live.token_ids[-1]] * missing]

    def _fewest_tokens(self) -> int:
        """Of a draft, on a target with linear attention, whose state known faults leave wrong.

        On every device: a step in which no request has a draft, after accepted ones. On the CPU: every step whose draft
        is shorter than the most, as the state of its convolution is looked for where that of a full draft would be.
        """
        return 1 if self._pair.gpus else self._most

    def _begin(self, request_id: str) -> _Live:
        state = self._runner.requests[request_id]
        params = state.sampling_params
        asked = params.extra_args[SETTINGS]
        request = Request(
            asked["request_id"],
            tuple(state.prompt_token_ids),
            params.max_tokens,
            tools=tuple(asked["tools"]),
            document=asked["document"],
        )
        first = self._proposers.of(self._method)
        assert isinstance(first, ChoiceDrafter)
        live = self._live[request_id] = _Live(request, first.beside())
        live.drafter.begin(request)
        return live

    def _step_costs(self, method: MethodSpec) -> BatchCosts:
        assert self._costs is not None, "they are measured before the first request"
        return self._costs

    def _scorer(self) -> ScorerRanker:
        assert self._ranker is not None, "it is read with the target's weights"
        return self._ranker


def _no_live_costs(method: MethodSpec) -> NoReturn:
    raise AssertionError("methods that adapt are refused before an engine starts")


def request_arguments(request: Request) -> dict[str, Any]:
    """What a request tells the proposer through vLLM's ``extra_args``."""
    return {SETTINGS: {"request_id": request.request_id, "tools": list(request.tools), "document": request.document}}


def attach(worker: Any) -> None:
    """On a worker: let the proposer know its model runner."""
    _proposer(worker).attach(worker.model_runner)


def use_step_costs(worker: Any, one: StepCosts, full: StepCosts, most: int) -> None:
    """On a worker: see ``BatchCosts``."""
    _proposer(worker).use_step_costs(BatchCosts(one, full, most))


def use_repository(worker: Any, documents: Sequence[Document]) -> None:
    """On a worker: see ``ChoiceProposer.use_repository``."""
    _proposer(worker).use_repository(documents)


def drafted(worker: Any) -> dict[str, Drafted]:
    """On a worker: see ``ChoiceProposer.drafted``."""
    return _proposer(worker).drafted()


def finish(worker: Any, request_id: str, output_ids: Sequence[int]) -> None:
    """On a worker: see ``ChoiceProposer.finish``."""
    _proposer(worker).finish(request_id, output_ids)


def _proposer(worker: Any) -> ChoiceProposer:
    """A union's worker has made it, or vLLM's model runner."""
    found: ChoiceProposer = getattr(worker, "choice", None) or worker.model_runner.drafter
    return found


def _keep(states_TH: torch.Tensor) -> Callable[..., None]:
    """A hook that copies a layer's output: in place, so that a CUDA graph which replays the layer copies it too.

    vLLM's layers return their output and the residual apart; their sum is what the hf runtime reads.
    """

    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        hidden_TH = output[0] + output[1] if isinstance(output, tuple) else output
        states_TH[: hidden_TH.shape[0]].copy_(hidden_TH)

    return hook


def _decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    for name, module in model.named_modules():
        if name.endswith("layers") and isinstance(module, torch.nn.ModuleList):
            return module
    raise ValueError(f"{type(model).__name__} has no list of decoder layers to read hidden states from")


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
