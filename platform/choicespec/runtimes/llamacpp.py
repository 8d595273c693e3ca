"""The llama.cpp runtime: its own server and decoding loop, one process a method."""

import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from importlib import metadata, util
from math import ceil
from threading import Lock
from typing import Any, NamedTuple

from choicespec.decoding.loop import Block
from choicespec.decoding.stopping import StopRule
from choicespec.errors import ChoiceSpecError, PromptTooLong, SpecError, TaskDataError, Unsupported
from choicespec.records import Document, Request, Sampling, Step, Trace
from choicespec.runtimes.checkpoints import is_here, locate_gguf
from choicespec.runtimes.gguf_header import GgufHeader, read_header
from choicespec.runtimes.llamacpp_methods import RUNTIME, speculation_flags
from choicespec.runtimes.llamacpp_process import LlamaCppServer
from choicespec.runtimes.llamacpp_server import PACKAGE
from choicespec.runtimes.llamacpp_stream import FINISH_REASONS, BlockStream, Pieces
from choicespec.runtimes.memory import peak_resident_bytes
from choicespec.spec.method import Autoregressive, Draft, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec, ScorerSpec
from choicespec.spec.runtime import LlamaCppRuntimeSpec
from choicespec.tasks.tokenizer import Message, Tokenizer, Tool

_INSTALL = "pip install 'choicespec[llamacpp]'"
# The largest logit, whatever a GGUF recommends to sample with; and nothing of the request before.
_GREEDY = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0, "cache_prompt": False}
_SPARE_TOKENS = 1  # where drafts fill the context to its end, the server stops a token early
_CONTROL = 3  # the kind of token that llama.cpp leaves out of texts
Ask = Callable[[str, Mapping[str, Any]], dict[str, Any]]


class LlamaCppTokenizer:
    """A GGUF's tokenizer, as the server runs it, and its chat template, as transformers renders it.

    Args:
        header: the target's.
        ask: posts to a server of the target.
        template_settings: what the chat template is told beside the conversation.
    """

    def __init__(self, header: GgufHeader, ask: Ask, template_settings: Mapping[str, bool]) -> None:
        self._ask, self._template_settings = ask, template_settings
        kinds = header.metadata.get("tokenizer.ggml.token_type", ())
        self._control_ids = {token_id for token_id, kind in enumerate(kinds) if kind == _CONTROL}
        self._template: str | None = None
        if "tokenizer.chat_template" in header.metadata:
            self._template = header.text("tokenizer.chat_template")
        self._words = {}
        for name in ("bos", "eos"):
            token_id = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
            self._words[f"{name}_token"] = "" if token_id is None else header.vocabulary[token_id].decode()
        self.renders_tools = "tools" in (self._template or "")

    def encode(self, text: str) -> list[int]:
        return self._tokens(text, add_special=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self._control_ids]
        return str(self._ask("/detokenize", {"tokens": shown})["content"])

    def chat_ids(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[int]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._template is None:
            raise TaskDataError("the target has no chat template; name an instruct checkpoint, or the task python_repo")
        try:
            (text,), _ = render_jinja_template(
                [list(messages)],
                tools=list(tools) if tools else None,
                chat_template=self._template,
                add_generation_prompt=True,
                **self._words,
                **self._template_settings,
            )
        except TemplateError as error:
            raise TaskDataError(f"the target's chat template refuses a conversation: {error}") from error
        return self._tokens(text, add_special=False)

    def _tokens(self, text: str, add_special: bool) -> list[int]:
        asked = {"content": text, "add_special": add_special, "parse_special": True}
        token_ids: list[int] = self._ask("/tokenize", asked)["tokens"]
        return token_ids


class LlamaCppRuntime:
    """One pair's servers: one a method, started when the method is first asked for; each decodes a request at a time.

    Raises:
        CheckpointError: the target is missing, or no GGUF.
        SpecError: the specification's context or server cannot be.
        Unsupported: the package is missing, or has no code for the pair's GPUs.
    """

    slots = 1
    samples = False  # a draft changes what the server draws with a seed: it would not be plain decoding's

    def __init__(self, spec: LlamaCppRuntimeSpec, pair: PairSpec) -> None:
        self._spec, self._pair = spec, pair
        self._program = _find_program(spec, pair)
        self._header = read_header(locate_gguf(pair.target.model))
        self._servers: dict[tuple[str, ...], LlamaCppServer] = {}
        self._starting = Lock()
        self._pieces = Pieces(self._header)
        self.tokenizer: Tokenizer = LlamaCppTokenizer(
            self._header, lambda path, body: self._plain().post(path, body), pair.target.template_settings
        )
        self.context_tokens = self._read_context()
        self.warm_methods: int | None = None
        self.knows_steps = False
        self.build = _read_build(self._program)
        self.precision = self._header.file_type
        self.device = _gpu_name() if pair.gpus else "cpu"

    @staticmethod
    def refusal(pair: PairSpec, method: MethodSpec) -> str | None:
        """Why the pair cannot run the method here, or None; reads the headers of its files, where they are here."""
        if not all(map(is_here, _files(pair))):
            return None  # whoever runs it fetches the files, and then looks into them
        try:
            speculation_flags(pair, method)
        except Unsupported as error:
            return str(error.args[2])
        except ChoiceSpecError as error:
            return str(error)
        return None

    def load(self) -> None:
        """Start the server of plain decoding; the others start with their methods."""
        self._plain()

    def use_repository(self, documents: Callable[[], Iterable[Document]]) -> None:
        """The servers look into nothing but the request."""

    def generate(self, request: Request, method: MethodSpec) -> Trace:
        """Decode one request greedily.

        Raises:
            Unsupported: this pair cannot run the method.
            ServerError: the server died; the next request starts another.
        """
        self._check_length(request)
        asked = {"prompt": request.prompt_ids, "n_predict": request.max_new_tokens, "stop": request.stop}
        answer = self._server(method).post("/completion", _GREEDY | asked | {"return_tokens": True})
        return trace_of(request, method, answer)

    @staticmethod
    def stream_refusal(method: MethodSpec) -> str | None:
        """Everything that runs here streams."""
        return None

    def prepare(self, method: MethodSpec, scorer: ScorerSpec) -> None:
        """See ``StreamingRuntime.prepare``: the method's server and plain decoding's are up, and no other."""
        reason = self.refusal(self._pair, method)
        if reason is not None:
            raise Unsupported(RUNTIME, method.label, reason)
        needed = (self._plain(), self._server(method))
        for flags, server in list(self._servers.items()):
            if server not in needed:
                self._servers.pop(flags).stop()

    def stream(self, request: Request, method: MethodSpec, sampling: Sampling | None) -> Generator[Block, None, None]:
        """See ``StreamingRuntime.stream``."""
        if sampling is not None:
            raise Unsupported(RUNTIME, method.label, "it decodes greedily")
        self._check_length(request)
        server = self._server(method)

        def decode_on(output_ids: Sequence[int], number: int) -> Sequence[int]:
            asked = {"prompt": [*request.prompt_ids, *output_ids], "n_predict": number}
            known = {"cache_prompt": True, "return_tokens": True}
            token_ids: list[int] = server.post("/completion", _GREEDY | asked | known)["tokens"]
            return token_ids

        stop = StopRule((), request.max_new_tokens, request.stop, self.tokenizer.decode)
        stream = BlockStream(method.kind, stop, self._pieces, decode_on)
        asked = {"prompt": request.prompt_ids, "n_predict": request.max_new_tokens}
        events = server.events("/completion", _GREEDY | asked | {"stream": True, "timings_per_token": True})
        with closing(events):
            yield from stream.blocks(events)

    def engine_settings(self, method: MethodSpec) -> dict[str, str]:
        """The flags of the method's server."""
        return {"flags": " ".join([*self._common_flags(), *speculation_flags(self._pair, method)])}

    def memory_bytes(self, method: MethodSpec) -> int | None:
        """See ``Runtime.memory_bytes``; what lies on GPUs is not known."""
        return None if self._pair.gpus else peak_resident_bytes(self._server(method).process_id)

    def top2_margin(self, token_ids: Sequence[int]) -> float:
        """The target's largest logit minus its second largest after ``token_ids``."""
        asked = {"prompt": token_ids, "n_predict": 1, "n_probs": 2}
        answer = self._plain().post("/completion", _GREEDY | asked)
        first, second = answer["completion_probabilities"][0]["top_logprobs"]
        return float(first["logprob"] - second["logprob"])

    def close(self) -> None:
        """Stop the servers; they also stop with this process."""
        for server in self._servers.values():
            server.stop()
        self._servers.clear()

    @property
    def process_ids(self) -> list[int]:
        """The servers' processes."""
        return [server.process_id for server in self._servers.values()]

    def _plain(self) -> LlamaCppServer:
        return self._server(Autoregressive())

    def _server(self, method: MethodSpec) -> LlamaCppServer:
        speculation = speculation_flags(self._pair, method)
        with self._starting:  # when serving, prompts are tokenized beside a stream
            running = self._servers.get(speculation)
            if running is None or not running.alive:
                quiet = os.environ | {"GGML_NO_BACKTRACE": "1"}  # the log's end is to be the reason, not the stack
                running = LlamaCppServer(self._program, [*self._common_flags(), *speculation], quiet)
                self._servers[speculation] = running
            return running

    def _check_length(self, request: Request) -> None:
        prompt_tokens = len(request.prompt_ids)
        if prompt_tokens + request.max_new_tokens > self.context_tokens:
            raise PromptTooLong(request.request_id, prompt_tokens, request.max_new_tokens, self.context_tokens)

    def _common_flags(self) -> list[str]:
        threads = str(self._spec.threads)
        flags = ["--model", str(self._header.path), "--host", "127.0.0.1", "--port", "0"]
        flags += [
            "--ctx-size",
            str(self.context_tokens + _SPARE_TOKENS),
            "--parallel",
            "1",
            "--fit",
            "off",
            "--cache-ram",
            "0",
        ]
        flags += ["--threads", threads, "--threads-batch", threads]
        if self._program != PACKAGE:
            flags += ["--n-gpu-layers", "999"] if self._pair.gpus else ["--device", "none"]
        return flags

    def _read_context(self) -> int:
        trained, asked = self._header.context_tokens, self._spec.context_tokens
        if asked is not None and asked > trained:
            raise SpecError(f"runtime.context_tokens={asked} exceeds the {trained} that the target was trained for")
        return min(asked or trained, trained - _SPARE_TOKENS)


class _Counts(NamedTuple):
    steps: int
    accepted: int


def count_steps(decode_tokens: int, proposed: int, accepted: int, most: int) -> _Counts:
    """Steps, and draft tokens kept, from a request's totals.

    A step yields its accepted tokens and the bonus token, so there are ``decode_tokens - accepted`` steps. Only where
    an output ends inside a draft may the server have accepted tokens that were cut; then there are at least as many
    steps as it takes to yield the tokens, and to propose what was proposed.

    Args:
        decode_tokens: tokens of the output after the first.
        proposed, accepted: draft tokens, as the server counts them.
        most: k, the most that a step proposes.
    """
    fewest = max(ceil(decode_tokens / (most + 1)), ceil(proposed / most) if most else 0)
    steps = max(decode_tokens - accepted, fewest)
    return _Counts(steps, min(accepted, decode_tokens - steps + 1))


def trace_of(request: Request, method: MethodSpec, answer: Mapping[str, Any]) -> Trace:
    """A trace from a server's answer, which has totals only.

    The steps share proposed and accepted tokens and the time evenly, so that their sums are the server's; a single one
    says nothing. Drafting is inside the time, but not told apart from it.
    """
    timings = answer["timings"]
    output_ids = tuple(answer["tokens"])
    decode_tokens = len(output_ids) - 1
    proposed = timings.get("draft_n", 0)  # missing where nothing was drafted
    most = method.num_draft_tokens if isinstance(method, Ngram | Draft) else 0
    steps, accepted = count_steps(decode_tokens, proposed, timings.get("draft_n_accepted", 0), most)
    decode_ms = float(timings["predicted_ms"]) if decode_tokens else 0.0
    shares = zip(_spread(proposed, steps), _spread(accepted, steps), strict=True)
    return Trace(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_ids),
        output_ids=output_ids,
        prefill_tokens=1,
        finish_reason=FINISH_REASONS[answer["stop_type"]],
        prefill_ms=float(timings["prompt_ms"]),
        decode_ms=decode_ms,
        steps=tuple(Step(p, a, method.kind if p else "", 0.0, decode_ms / steps) for p, a in shares),
    )


def _spread(total: int, parts: int) -> list[int]:
    """A total in nearly equal parts, the larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def _files(pair: PairSpec) -> list[str]:
    """A pair's GGUFs, as the specification names them."""
    return [pair.target.model, *(drafter.model for drafter in pair.drafters.values() if drafter.model is not None)]


def _find_program(spec: LlamaCppRuntimeSpec, pair: PairSpec) -> str:
    if spec.server is not None:
        found = shutil.which(os.path.expanduser(spec.server))
        if found is None:
            raise SpecError(
                f"runtime.server: no program {spec.server!r}; give the path of a llama-server, or leave it out"
            )
        return found
    if util.find_spec(PACKAGE) is None:
        raise Unsupported(RUNTIME, "every method", f"the package {PACKAGE} is missing; run: {_INSTALL}")
    if pair.gpus:
        reason = f"gpus={pair.gpus}, but {PACKAGE} runs on the CPU; give a llama-server for your GPUs as runtime.server"
        raise Unsupported(RUNTIME, "every method", reason)
    return PACKAGE


def _read_build(program: str) -> str:
    """The package's version, or what the binary says of itself."""
    if program == PACKAGE:
        installed = metadata.version(PACKAGE)
        return f"llama.cpp b{installed.rsplit('.', 1)[1]} ({PACKAGE} {installed})"
    said = subprocess.run([program, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = said.stdout.splitlines()
    version = next((line for line in lines if line.startswith("version:")), None)
    if version is None:
        raise SpecError(f"runtime.server: {program} --version says no version but {said.stdout!r}; give a llama-server")
    return f"llama.cpp {version.removeprefix('version:').strip()} ({program})"


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()
