"""The transformers runtime: its models, under choicespec's own decoding loop."""

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from choicespec.decoding.along import drafts_along
from choicespec.decoding.batched import record_batch
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.loop import Block, decode, trace
from choicespec.decoding.proposer import Proposer
from choicespec.decoding.sampling import Sampler, greedy
from choicespec.decoding.small_blocks import use_small_blocks
from choicespec.decoding.step_cost import (
    CONTEXT_TOKENS,
    FAR_TOKENS,
    Floor,
    LiveCosts,
    StepCosts,
    measure_step_costs,
    time_verifications,
)
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.registry import PROPOSERS, Proposers, TargetSide
from choicespec.errors import CheckpointError, PromptTooLong, Unsupported
from choicespec.recordings import Recorded
from choicespec.records import Document, Proposal, Request, Sampling, TargetIdentity, Trace
from choicespec.runtimes.checkpoints import identify, input_embedding, locate
from choicespec.runtimes.hf_floor import measure_floor
from choicespec.runtimes.hf_generate import generate_with_transformers
from choicespec.runtimes.hf_generate_dflash import DFlashPeer
from choicespec.runtimes.hf_target import layers_refusal, read_config, target_refusal
from choicespec.runtimes.hf_tokenizer import HfTokenizer, read_eos_ids
from choicespec.runtimes.memory import held_bytes
from choicespec.runtimes.pair_parts import (
    as_trained,
    branches_refusal,
    drafter_refusal,
    open_drafter,
    peer_refusal,
    scorer_refusal,
)
from choicespec.runtimes.quantized import loading_settings, round_weights
from choicespec.scorer.files import check_scorer, find_scorer, load_scorer
from choicespec.scorer.ranker import ScorerRanker
from choicespec.scorer.source_states import TappedText
from choicespec.spec.method import (
    ONLY_REPLAYED,
    Choice,
    Draft,
    MethodSpec,
    TransformersGenerate,
    is_exact,
    is_oracle,
    is_tree,
)
from choicespec.spec.pair import PairSpec, ScorerSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.tasks.tokenizer import Tokenizer

_LONGEST_VERIFICATION = 17  # tokens whose cost is measured; more are taken in proportion
_LONGEST_TREE = 33  # the same for methods that verify trees


class HfRuntime:
    """One pair on the CPU or on one GPU.

    Raises:
        CheckpointError: the checkpoint or its tokenizer cannot be read.
        Unsupported: the target has layers whose cache cannot be rolled back.
    """

    build = f"transformers {transformers.__version__}, torch {torch.__version__}"
    warm_methods: int | None = None
    knows_steps = True
    slots = 1
    samples = True

    def __init__(self, spec: HfRuntimeSpec, pair: PairSpec) -> None:
        transformers.logging.disable_progress_bar()
        self._spec, self._pair = spec, pair
        self._checkpoint = locate(pair.target.model, pair.target.revision)
        self._config = read_config(pair.target)
        reason = layers_refusal(self._config)
        if reason is not None:
            raise Unsupported("hf", "every method", reason)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._checkpoint, revision=pair.target.revision)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"target.model: cannot read {pair.target.model!r}: {error}") from error
        self.tokenizer: Tokenizer = HfTokenizer(tokenizer, pair.target.template_settings)
        config = self._config.get_text_config()
        self.context_tokens: int = config.max_position_embeddings
        self.precision = pair.target.precision
        self._eos_ids = read_eos_ids(self._checkpoint, pair.target.revision, config)
        self.model: Any = None  # the transformers model, once ``load`` has read it
        self._target: CausalLmTarget | None = None
        self._costs: dict[tuple[bool, int], StepCosts] = {}  # by whether exact, and the context
        self._drafters: dict[str, Any] = {}  # the checkpoints of the pair's drafters that are in use
        self._peers: dict[str, DFlashPeer] = {}
        self.use_repository(tuple)

    @cached_property
    def device(self) -> str:
        """Asked of CUDA by the worker that has the GPU; whoever only reads the checkpoint needs none."""
        return str(torch.cuda.get_device_name()) if self._pair.gpus else "cpu"

    @cached_property
    def identity(self) -> TargetIdentity:
        """Which target this is, read from the checkpoint without loading it.

        Raises:
            CheckpointError: the weights are missing.
        """
        return identify(self._checkpoint, self._pair.target)

    def input_embedding(self) -> torch.Tensor:
        """The (vocabulary, embedding size) input embedding in float32, read without the other weights."""
        return input_embedding(self._checkpoint, self._pair.target.revision)

    @staticmethod
    def refusal(pair: PairSpec, method: MethodSpec) -> str | None:
        """Why the pair cannot run the method here, or None."""
        if pair.gpus > 1:
            return f"it runs a pair on one GPU or the CPU, but gpus={pair.gpus}"
        if pair.target.dtype == "gguf":
            return "it computes in torch's types, not in a GGUF's; set target.dtype: float32"
        if method.kind not in PROPOSERS and not isinstance(method, Draft | TransformersGenerate):
            return "it has no proposer of that kind"
        if is_oracle(method):
            return ONLY_REPLAYED
        reason = target_refusal(pair, method)
        if reason is not None:
            return reason
        if isinstance(method, Draft):
            return drafter_refusal(pair, method) or branches_refusal(pair, method)
        if isinstance(method, TransformersGenerate) and method.drafter is not None:
            return peer_refusal(pair, method.drafter)
        if isinstance(method, Choice):
            reasons = [HfRuntime.refusal(pair, draft) for draft in method.calls]
            if method.selection == "scorer":
                reasons.append(scorer_refusal(pair, method))
            return next((reason for reason in reasons if reason is not None), None)
        return None

    def load(self) -> None:
        """Load the weights and set the threads."""
        if self.model is not None:
            return
        torch.set_num_threads(self._spec.threads)
        target = self._pair.target
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self._checkpoint,
                revision=target.revision,
                dtype=getattr(torch, target.dtype),
                use_safetensors=True,  # other weight files are pickles, which can run code
                **loading_settings(target, self._config),
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"target.model: cannot load {target.model!r}: {error}") from error
        if target.quantization == "q4_0" or target.quantization == "q8_0":
            round_weights(model, target.quantization)
        self.model = model.to("cuda" if self._pair.gpus else "cpu").eval()
        use_small_blocks(self.model)
        self._target = CausalLmTarget(self.model)

    def use_repository(self, documents: Callable[[], Iterable[Document]]) -> None:
        """Start a task with fresh proposers."""
        self._documents = documents
        side = TargetSide(
            self.tokenizer.encode,
            self._step_costs,
            self._live_costs,
            self._scorer,
            self._drafter,
            partial(as_trained, self._pair),
        )
        self._proposers = Proposers(side, documents)

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        """Decode one request greedily; a prompt's pass that methods share counts for each of them."""
        if not isinstance(method, TransformersGenerate):
            found = trace(request, self.stream(request, method, None))
            assert self._target is not None
            return found._replace(prefill_ms=found.prefill_ms + self._target.spared_ms)
        self._check_length(request)
        self.load()
        peer = self._peer(method.drafter) if method.drafter is not None else None
        return generate_with_transformers(self.model, self._eos_ids, request, method, self._stop_rule(request), peer)

    @staticmethod
    def stream_refusal(method: MethodSpec) -> str | None:
        """Why a method's blocks cannot be streamed, or None."""
        return (
            "it is transformers' own loop, a peer to compare with" if isinstance(method, TransformersGenerate) else None
        )

    def prepare(self, method: MethodSpec, scorer: ScorerSpec) -> None:
        """See ``StreamingRuntime.prepare``; the weights stay."""
        pair = self._pair.model_copy(update={"scorer": scorer})
        reason = self.refusal(pair, method) or self.stream_refusal(method)
        if reason is not None:
            raise Unsupported("hf", method.label, reason)
        self.load()
        before = self._pair, self._proposers
        self._pair = pair
        self.use_repository(self._documents)
        try:
            self._proposers.of(method)
        except Exception:
            self._pair, self._proposers = before
            raise

    def stream(self, request: Request, method: MethodSpec, sampling: Sampling | None) -> Generator[Block, None, None]:
        """See ``StreamingRuntime.stream``."""
        self._check_length(request)
        self.load()
        assert self._target is not None
        proposer = self._proposers.of(method)
        self._target.choose = greedy if sampling is None else Sampler(sampling)
        self._target.exact = is_exact(method)
        output_ids: list[int] = []
        for block in decode(self._target, proposer, request, self._stop_rule(request)):
            output_ids += block.token_ids
            if block.step is not None:
                self._proposers.observe(method, block.step)
            if block.finish_reason is not None:
                proposer.finish(request, output_ids)
            yield block

    def record(self, requests: Sequence[Request], layers: Sequence[int], prompt_states: bool = False) -> list[Recorded]:
        """Decode requests greedily as one batch, keeping the outputs of some decoder layers; at the prompts' tokens too
        where they are wanted.

        Raises:
            PromptTooLong: before the target runs.
        """
        for request in requests:
            self._check_length(request)
        self.load()
        stops = [self._stop_rule(request) for request in requests]
        return record_batch(self.model, requests, stops, layers, prompt_states)

    def draft_along(
        self, outputs: Sequence[tuple[Request, Sequence[int]]], methods: Sequence[Draft]
    ) -> list[list[list[Proposal]]]:
        """What some of the pair's drafters draft at each position of known outputs; see ``decoding.along``.

        Raises:
            CheckpointError: the drafter is missing, broken or for another target.
        """
        self.load()
        assert self._target is not None
        self._target.choose = greedy
        proposers = [self._proposers.of(method) for method in methods]
        return [drafts_along(self._target, proposers, request, output_ids) for request, output_ids in outputs]

    def engine_settings(self, method: MethodSpec) -> dict[str, str]:
        """The loop is choicespec's own."""
        return {}

    def memory_bytes(self, method: MethodSpec) -> int | None:
        """See ``Runtime.memory_bytes``; what transformers' own loop holds is not known."""
        if isinstance(method, TransformersGenerate):
            return None
        self.load()
        return held_bytes((self._target, self._proposers.of(method)), apart=(self, self.tokenizer))

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """The target's largest logit minus its second largest after ``token_ids``."""
        self.load()
        assert self._target is not None
        return self._target.top2_margin(token_ids)

    def time_verifications(self, sizes: Sequence[int], context_tokens: int, rounds: int) -> list[tuple[float, ...]]:
        """See ``decoding.step_cost.time_verifications``."""
        self.load()
        assert self._target is not None
        return time_verifications(self._target, sizes, context_tokens, rounds)

    def floor(self) -> Floor | None:
        """See ``hf_floor``; not known where weights are computed with as they are stored."""
        self.load()
        return None if loading_settings(self._pair.target, self._config) else measure_floor(self.model)

    def use_step_costs(self, costs: StepCosts) -> None:
        """Let methods made from now on decide by these costs, such as a recording's, instead of measuring them."""
        self._costs[False, CONTEXT_TOKENS] = costs

    def _step_costs(self, method: MethodSpec) -> StepCosts:
        """What a method's verifications cost."""
        return self._costs_at(CONTEXT_TOKENS, method)

    def _live_costs(self, method: MethodSpec) -> LiveCosts:
        """The same, to be corrected by the method's steps; measured at a long context too."""
        far = min(FAR_TOKENS, max(CONTEXT_TOKENS + 1, self.context_tokens - _LONGEST_VERIFICATION))
        return LiveCosts(self._step_costs(method), self._costs_at(far, method), far)

    def _costs_at(self, context_tokens: int, method: MethodSpec) -> StepCosts:
        """Measured once, by the first method that asks; again, where a tree may be longer than what was measured."""
        exact, longest = is_exact(method), _LONGEST_TREE if is_tree(method) else _LONGEST_VERIFICATION
        known = self._costs.get((exact, context_tokens))
        if known is None or (is_tree(method) and known.tokens[-1] < longest):
            assert self._target is not None, "a method is made once the weights are there"
            self._target.exact = exact
            known = self._costs[exact, context_tokens] = measure_step_costs(self._target, longest, context_tokens)
        return known

    def _scorer(self) -> ScorerRanker:
        """The pair's scorer on this target.

        Raises:
            ScorerError: it is missing, broken or for another target.
        """
        assert self._target is not None, "a method is made once the weights are there"
        spec = self._pair.scorer
        folder = find_scorer(spec, self.identity)
        manifest = check_scorer(folder, self.identity, spec.transfer)
        for layer in manifest.layers:
            self._target.watch(layer)
        scorer = load_scorer(folder, manifest, self._embed)
        cosines, layers = None, manifest.source_layers
        if layers:
            cosines = TappedText(self._target.tap(layers), len(layers), scorer.net.source_scale).cosines
        return ScorerRanker(scorer, self._target.hidden_states, cosines)

    def _drafter(self, method: Draft) -> Proposer:
        """One of the pair's drafters on this target; methods with other k share its weights.

        Raises:
            CheckpointError: it is missing, broken or for another target.
        """
        assert self._target is not None, "a method is made once the weights are there"
        drafter: Proposer = self._opened_drafter(method.drafter).drafter(self._target, method.num_draft_tokens)
        return drafter

    def _peer(self, name: str) -> DFlashPeer:
        """One of the pair's DFlash drafters for transformers' own loop.

        Raises:
            CheckpointError: it is missing, broken or for another target, or has what that loop does not take.
        """
        assert self._target is not None, "a method is made once the weights are there"
        if name not in self._peers:
            net = self._opened_drafter(name).network(self._target)
            try:
                self._peers[name] = DFlashPeer(net, self._target.config.vocab_size)
            except ValueError as error:
                raise CheckpointError(f"pair.drafters.{name}: {error}") from None
        return self._peers[name]

    def _opened_drafter(self, name: str) -> Any:
        if name not in self._drafters:
            self._drafters[name] = open_drafter(self._pair, name)
        return self._drafters[name]

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedding = self.model.get_input_embeddings()
        embedded: torch.Tensor = embedding(token_ids.to(self.model.device)).float().cpu()
        return embedded

    def _check_length(self, request: Request) -> None:
        prompt_tokens = len(request.prompt_ids)
        if prompt_tokens + request.max_new_tokens > self.context_tokens:
            raise PromptTooLong(request.request_id, prompt_tokens, request.max_new_tokens, self.context_tokens)

    def _stop_rule(self, request: Request) -> StopRule:
        return StopRule(self._eos_ids, request.max_new_tokens, request.stop, self.tokenizer.decode)
