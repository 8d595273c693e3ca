"""The transformers runtime: its models, under choicespec's own decoding loop."""

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from choicespec.decoding.batched import record_batch
from choicespec.decoding.causal_lm import CausalLmTarget
from choicespec.decoding.loop import Block, decode, trace
from choicespec.decoding.sampling import Sampler, greedy
from choicespec.decoding.small_blocks import use_small_blocks
from choicespec.decoding.step_cost import StepCosts, measure_step_costs
from choicespec.decoding.stopping import StopRule
from choicespec.drafters.registry import PROPOSERS, Proposers, TargetSide
from choicespec.errors import CheckpointError, PromptTooLong, ScorerError, TaskDataError, Unsupported
from choicespec.recordings import Recorded
from choicespec.records import Document, Request, Sampling, TargetIdentity, Trace
from choicespec.runtimes.checkpoints import identify, input_embedding, locate
from choicespec.runtimes.hf_generate import generate_with_transformers
from choicespec.runtimes.quantized import round_weights
from choicespec.scorer.files import ScorerManifest, check_scorer, find_scorer, load_scorer
from choicespec.scorer.ranker import ScorerRanker
from choicespec.spec.method import Choice, MethodSpec, TransformersGenerate
from choicespec.spec.pair import PairSpec, ScorerSpec
from choicespec.spec.runtime import HfRuntimeSpec
from choicespec.tasks.tokenizer import Message, Tool

_LONGEST_VERIFICATION = 17  # tokens whose cost is measured; more are taken in proportion


class HfTokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.renders_tools = "tools" in str(tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise TaskDataError("the target has no chat template; name an instruct checkpoint, or the task python_repo")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise TaskDataError(f"the target's chat template refuses a conversation: {error}") from error
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids


class HfRuntime:
    """One pair on the CPU or on one GPU.

    Raises:
        CheckpointError: the checkpoint or its tokenizer cannot be read.
        Unsupported: the target has layers whose cache cannot be rolled back.
    """

    build = f"transformers {transformers.__version__}, torch {torch.__version__}"
    slots = 1
    samples = True

    def __init__(self, spec: HfRuntimeSpec, pair: PairSpec) -> None:
        transformers.logging.disable_progress_bar()
        self._spec, self._pair = spec, pair
        self._checkpoint = locate(pair.target.model, pair.target.revision)
        try:
            config = AutoConfig.from_pretrained(self._checkpoint, revision=pair.target.revision).get_text_config()
            tokenizer = AutoTokenizer.from_pretrained(self._checkpoint, revision=pair.target.revision)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"target.model: cannot read {pair.target.model!r}: {error}") from error
        other_layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if other_layers:
            raise Unsupported("hf", "every method", f"{pair.target.model} has {', '.join(sorted(other_layers))} layers")
        self.tokenizer = HfTokenizer(tokenizer)
        self.context_tokens: int = config.max_position_embeddings
        self.device = torch.cuda.get_device_name() if pair.gpus else "cpu"
        self.precision = pair.target.precision
        self._eos_ids = self._read_eos_ids(config)
        self.model: Any = None  # the transformers model, once ``load`` has read it
        self._target: CausalLmTarget | None = None
        self._costs: StepCosts | None = None
        self.use_repository(tuple)

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
        if method.kind not in PROPOSERS and not isinstance(method, TransformersGenerate):
            return "it has no proposer of that kind"
        if isinstance(method, Choice) and method.selection == "scorer":
            return _scorer_refusal(pair, method)
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
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"target.model: cannot load {target.model!r}: {error}") from error
        if target.quantization is not None:
            round_weights(model, target.quantization)
        self.model = model.to("cuda" if self._pair.gpus else "cpu").eval()
        use_small_blocks(self.model)
        self._target = CausalLmTarget(self.model)

    def use_repository(self, documents: Callable[[], Iterable[Document]]) -> None:
        """Start a task with fresh proposers."""
        self._documents = documents
        self._proposers = Proposers(TargetSide(self.tokenizer.encode, self._step_costs, self._scorer), documents)

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        """Decode one request greedily."""
        if not isinstance(method, TransformersGenerate):
            return trace(request, self.stream(request, method, None))
        self._check_length(request)
        self.load()
        return generate_with_transformers(self.model, self._eos_ids, request, method, self._stop_rule(request))

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
        output_ids: list[int] = []
        for block in decode(self._target, proposer, request, self._stop_rule(request)):
            output_ids += block.token_ids
            if block.finish_reason is not None:
                proposer.finish(request, output_ids)
            yield block

    def record(self, requests: Sequence[Request], layers: Sequence[int]) -> list[Recorded]:
        """Decode requests greedily as one batch, keeping the outputs of some decoder layers.

        Raises:
            PromptTooLong: before the target runs.
        """
        for request in requests:
            self._check_length(request)
        self.load()
        return record_batch(self.model, requests, [self._stop_rule(request) for request in requests], layers)

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """The target's largest logit minus its second largest after ``token_ids``."""
        self.load()
        assert self._target is not None
        return self._target.top2_margin(token_ids)

    def _step_costs(self) -> StepCosts:
        """Measured once, by the first method that asks."""
        if self._costs is None:
            assert self._target is not None, "a method is made once the weights are there"
            self._costs = measure_step_costs(self._target, _LONGEST_VERIFICATION)
        return self._costs

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
        return ScorerRanker(load_scorer(folder, manifest, self._embed), self._target.hidden_states)

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

    def _read_eos_ids(self, config: Any) -> list[int]:
        try:
            generation = GenerationConfig.from_pretrained(self._checkpoint, revision=self._pair.target.revision)
            eos = generation.eos_token_id
        except OSError:
            eos = config.eos_token_id
        return [eos] if isinstance(eos, int) else list(eos or ())


def scorer_of(pair: PairSpec) -> ScorerManifest:
    """What a pair's scorer is for, read without loading the target.

    Raises:
        CheckpointError: the target is missing.
        ScorerError: the scorer is missing, broken or for another target.
    """
    identity = identify(locate(pair.target.model, pair.target.revision), pair.target)
    return check_scorer(find_scorer(pair.scorer, identity), identity, pair.scorer.transfer)


def _scorer_refusal(pair: PairSpec, method: Choice) -> str | None:
    """Why the pair's scorer cannot rank for a method, or None."""
    try:
        manifest = scorer_of(pair)
    except (CheckpointError, ScorerError) as error:
        return str(error)
    if method.block_length > manifest.block_length:
        return f"its scorer judges {manifest.block_length} tokens at most, but block_length is {method.block_length}"
    return None
