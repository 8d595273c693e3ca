"""The llama.cpp runtime on the embedded default's own GGUF and on small random ones: real servers, real processes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import openai
import pytest
from choicespec.decoding.loop import trace
from choicespec.errors import CheckpointError, ServerError, SpecError, Unsupported
from choicespec.measuring.lossless import first_divergence
from choicespec.measuring.measure import TrialResult, measure
from choicespec.records import Request, Trace
from choicespec.runtimes.hf import HfRuntime
from choicespec.runtimes.llamacpp import LlamaCppRuntime
from choicespec.runtimes.llamacpp_process import LlamaCppServer
from choicespec.runtimes.runtime import StreamingRuntime
from choicespec.serving.champion import Champion
from choicespec.serving.replica import Replica
from choicespec.serving.source import Versioned
from choicespec.spec.experiment import TrialSpec
from choicespec.spec.method import Autoregressive, Draft, MethodSpec, Ngram
from choicespec.spec.pair import PairSpec, TargetSpec
from choicespec.spec.runtime import HfRuntimeSpec, LlamaCppRuntimeSpec
from choicespec.spec.serving import LimitsSpec
from choicespec.spec.task import PythonRepo, ToolCall
from choicespec.tasks.prompts import Prompts, open_task
from contracts.runtime_contract import PLAIN, RuntimeContract
from contracts.served_contract import MODEL, VERSION, ServedContract
from contracts.streaming_contract import StreamingContract
from integration.local_api import measurement, serving
from integration.processes import await_end
from integration.small_ggufs import CONTEXT, END_ID, write_dflash, write_llama, write_qwen35

PLATFORM = Path(__file__).parents[2] / "platform"
COUNTING = "".join(f"Item {i}: apple pie and cream\n" for i in range(1, 8)) + "Item"
PIES = "apple pie, apple pie, apple"
EMOJIS = "\N{SNOWMAN}\N{PARTY POPPER}" * 3
GREETING = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
BYTES = tuple(b"hello world, hello world")


def _open(
    model: str | Path,
    context_tokens: int | None = None,
    server: Path | None = None,
    **drafters: tuple[str, Path | None],
) -> LlamaCppRuntime:
    named = {n: {"kind": kind, "model": str(file) if file else None} for n, (kind, file) in drafters.items()}
    pair = PairSpec.model_validate({"target": {"model": str(model), "dtype": "gguf"}, "drafters": named})
    binary = str(server) if server else None
    return LlamaCppRuntime(LlamaCppRuntimeSpec(threads=1, server=binary, context_tokens=context_tokens), pair)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LlamaCppRuntime]:
    runtime = _open("smollm2", context_tokens=2048)
    yield runtime
    runtime.close()


class TestLlamaCppRuntime(RuntimeContract):
    methods = (
        Ngram(num_draft_tokens=3, min_ngram=1, max_ngram=1),
        Ngram(num_draft_tokens=8, min_ngram=2, max_ngram=2),
    )

    @pytest.fixture(scope="class")
    def runtime(self, smollm2: LlamaCppRuntime) -> LlamaCppRuntime:
        return smollm2

    @pytest.fixture(scope="class")
    def prompts(self, smollm2: LlamaCppRuntime) -> list[tuple[int, ...]]:
        texts = (COUNTING, "The planets are Mercury, Venus, Earth, Mars,")
        return [tuple(smollm2.tokenizer.encode(text)) for text in texts]


class TestLlamaCppStreams(StreamingContract):
    method = Ngram(num_draft_tokens=8, min_ngram=2, max_ngram=2)

    @pytest.fixture(scope="class")
    def runtime(self, smollm2: LlamaCppRuntime) -> StreamingRuntime:
        return smollm2

    @pytest.fixture(scope="class")
    def requests(self, smollm2: LlamaCppRuntime) -> list[Request]:
        """One ends at a stop string, one inside a character, one at the end of a sequence."""
        asked = [(PIES, 24, ("pie, apple pie, apple pie, ap",)), (EMOJIS, 13, ()), (GREETING, 40, ())]
        return [Request(text, tuple(smollm2.tokenizer.encode(text)), n, stop) for text, n, stop in asked]

    def test_the_requests_end_as_they_are_to(self, runtime: StreamingRuntime, requests: Sequence[Request]) -> None:
        """Fails if the properties are held where nothing is difficult."""
        ends = [trace(request, runtime.stream(request, self.method, None)) for request in requests]
        assert [end.finish_reason for end in ends] == ["stop", "length", "eos"]
        assert runtime.tokenizer.decode(ends[1].output_ids).endswith("\ufffd")
        assert any(step.accepted > 1 for end in ends for step in end.steps)


class TestLlamaCppServed(ServedContract):
    """There is one slot: the clients wait for each other."""

    @pytest.fixture(scope="class")
    def runtime(self, smollm2: LlamaCppRuntime) -> StreamingRuntime:
        return smollm2

    @pytest.fixture(scope="class")
    def client(self) -> Iterator[openai.OpenAI]:
        pair = PairSpec(target=TargetSpec(model="smollm2", dtype="gguf"))
        spec = LlamaCppRuntimeSpec(threads=1, context_tokens=2048)
        trial = TrialSpec(pair=pair, runtime=spec, task=ToolCall(), method=TestLlamaCppStreams.method)
        replica = Replica(Versioned(Champion(trial=trial, measurement=measurement()), VERSION), LimitsSpec())
        with serving({MODEL: replica}) as address:
            yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

    @pytest.fixture(scope="class")
    def prompts(self) -> list[str]:
        return [PIES, EMOJIS, GREETING]


def test_what_nobody_reads_is_not_decoded(smollm2: LlamaCppRuntime) -> None:
    """Fails if a closed stream keeps the server from the next request until it would have ended."""
    request = Request("r", tuple(smollm2.tokenizer.encode(PIES)), 1000)
    stream = smollm2.stream(request, TestLlamaCppStreams.method, None)
    next(stream)
    stream.close()
    smollm2.generate(request._replace(max_new_tokens=2), TestLlamaCppStreams.method)
    server = smollm2._server(TestLlamaCppStreams.method)
    ended = re.findall(rb"stop processing: n_tokens = (\d+)", server._process.read_log())
    assert len(ended) > 1
    assert all(int(tokens) < 1000 for tokens in ended)


@pytest.fixture(scope="module")
def hf() -> HfRuntime:
    return HfRuntime(HfRuntimeSpec(threads=1), PairSpec(target=TargetSpec(model="smollm2")))


def test_prompts_are_the_hf_runtimes(smollm2: LlamaCppRuntime, hf: HfRuntime) -> None:
    """Fails if one experiment compares two runtimes on different prompts."""
    for text in ("", " a", "Zürich ☃ 🎉 <|im_end|> x", "def f(x):\n    return x\n"):
        token_ids = hf.tokenizer.encode(text)
        assert smollm2.tokenizer.encode(text) == token_ids
        assert smollm2.tokenizer.decode(token_ids) == hf.tokenizer.decode(token_ids)
    talk = [{"role": "user", "content": "What is 2 + 2?"}]
    assert smollm2.tokenizer.chat_ids(talk, None) == hf.tokenizer.chat_ids(talk, None)
    assert smollm2.tokenizer.renders_tools == hf.tokenizer.renders_tools


def test_outputs_are_the_hf_runtimes_but_for_ties(smollm2: LlamaCppRuntime, hf: HfRuntime) -> None:
    """On the same weights, dequantised: fails if ids, template or end differ but where two tokens are near.

    Near is not very near: llama.cpp's products with Q4_1 round the hidden states to 8 bits.
    """
    tasks = (ToolCall(limit=1, max_new_tokens=16), PythonRepo(limit=2, context_tokens=100, max_new_tokens=16))
    requests = [r for task in tasks for r in open_task(task).prompts(hf.tokenizer, hf.context_tokens).requests]
    for request in requests:
        expected, found = hf.generate(request, PLAIN), smollm2.generate(request, PLAIN)
        parted = first_divergence(request, expected, found, hf.top2_margin)
        assert parted is None or parted.top2_margin < 1, parted


def test_the_margin_is_the_hf_runtimes(smollm2: LlamaCppRuntime, hf: HfRuntime) -> None:
    """Fails if the margin is one of probabilities, or of what sampling has left."""
    prompt = hf.tokenizer.encode(COUNTING)
    assert smollm2.top2_margin(prompt) == pytest.approx(hf.top2_margin(prompt), abs=0.3)


def test_the_measurement_says_what_was_run(smollm2: LlamaCppRuntime) -> None:
    """Fails if the build or the weights' type is missing, or a method that drafted nothing passes for one that did."""
    silent = Ngram(num_draft_tokens=30, min_ngram=30, max_ngram=30)
    task = ToolCall(limit=1)
    pair = PairSpec(target=TargetSpec(model="smollm2", dtype="gguf"))
    trial = TrialSpec(pair=pair, runtime=LlamaCppRuntimeSpec(threads=1), task=task, method=silent)
    request = Request("r", tuple(smollm2.tokenizer.encode("The planets are")), 8)
    (result,) = [r for r in measure(smollm2, [trial], Prompts((request,), ())) if isinstance(r, TrialResult)]
    found = result.measurement
    assert found.never_proposed
    assert found.match.value == 1
    assert found.environment.runtime_build == "llama.cpp b11549 (xllamacpp 2026.10.11549)"
    assert found.environment.dtype == "Q4_1"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain target, one with MTP, and right and wrong drafters."""
    folder = tmp_path_factory.mktemp("ggufs")
    torn = folder / "torn.gguf"
    torn.write_bytes(write_llama(folder / "whole.gguf").read_bytes()[:2000])
    (folder / "text.gguf").write_text("no weights", encoding="utf-8")
    return {
        "llama": write_llama(folder / "llama.gguf"),
        "twin": write_llama(folder / "twin.gguf"),
        "stranger": write_llama(folder / "stranger.gguf", seed=5),
        "other_words": write_llama(folder / "words.gguf", words=("he", "<|end|>", "<|pad|>")),
        "qwen35": write_qwen35(folder / "qwen35.gguf"),
        "head": write_qwen35(folder / "head.gguf", head_only=True),
        "wide_head": write_qwen35(folder / "wide_head.gguf", hidden=64, head_only=True),
        "dflash": write_dflash(folder / "dflash.gguf", second=False),
        "dflash2": write_dflash(folder / "dflash2.gguf", second=True),
        "wide": write_dflash(folder / "wide.gguf", second=True, hidden=64),
        "deep": write_dflash(folder / "deep.gguf", second=True, layers=(0, 2)),
        "broken": write_dflash(folder / "broken.gguf", second=True, whole=False),
        "torn": torn,
        "text": folder / "text.gguf",
        "missing": folder / "missing.gguf",
    }


def _proposed(trace: Trace) -> int:
    return sum(step.proposed for step in trace.steps)


def _accepted(trace: Trace) -> int:
    return sum(step.accepted for step in trace.steps)


@pytest.mark.parametrize(
    ("target", "kind", "drafter", "k"),
    [
        ("qwen35", "mtp", None, 3),
        ("qwen35", "mtp", None, 7),
        ("qwen35", "mtp", "head", 3),
        ("llama", "dflash", "dflash", 3),
        ("llama", "dflash2", "dflash2", 7),
        ("llama", "draft_model", "stranger", 4),
    ],
)
def test_drafted_output_is_plain_decodings(
    files: dict[str, Path], target: str, kind: str, drafter: str | None, k: int
) -> None:
    """Fails if a drafter is not loaded, or what is rejected is not undone: linear attention in ``qwen35`` included."""
    runtime = _open(files[target], drafter=(kind, files[drafter] if drafter else None))
    request = Request("r", BYTES, 80)
    plain, drafted = (runtime.generate(request, m) for m in (PLAIN, Draft(drafter="drafter", num_draft_tokens=k)))
    runtime.close()
    assert drafted.output_ids == plain.output_ids
    assert drafted.finish_reason == plain.finish_reason
    assert _proposed(drafted) > len(drafted.steps)
    assert {step.source for step in drafted.steps if step.proposed} == {"draft"}
    assert max(step.proposed for step in drafted.steps) <= k


def test_every_draft_of_a_twin_is_accepted(files: dict[str, Path]) -> None:
    """The rule for steps, where the answer is known: fails if bonus token or prefill count as accepted."""
    runtime = _open(files["llama"], twin=("draft_model", files["twin"]))
    found = runtime.generate(Request("r", BYTES, 36), Draft(drafter="twin", num_draft_tokens=4))
    runtime.close()
    assert len(found.output_ids) == 36
    assert [(step.proposed, step.accepted) for step in found.steps] == [(4, 4)] * 7


def test_an_mtp_head_is_right_now_and_then(files: dict[str, Path]) -> None:
    """Fails if acceptance, of which only counts are known, is lost between server and trace."""
    runtime = _open(files["qwen35"], mtp=("mtp", None))
    found = runtime.generate(Request("r", BYTES, 80), Draft(drafter="mtp", num_draft_tokens=3))
    runtime.close()
    assert 0 < _accepted(found) < _proposed(found)


@pytest.mark.parametrize("method", [PLAIN, Draft(drafter="twin", num_draft_tokens=7)])
def test_an_output_may_fill_the_context(files: dict[str, Path], method: MethodSpec) -> None:
    """Fails if the server's own limit ends an output before ``max_new_tokens`` does."""
    runtime = _open(files["llama"], twin=("draft_model", files["twin"]))
    prompt = (BYTES * CONTEXT)[: runtime.context_tokens - 8]
    found = runtime.generate(Request("r", prompt, 8), method)
    runtime.close()
    assert len(found.output_ids) == 8 or found.output_ids[-1] == END_ID


NGRAM_SIZES = [
    (Ngram(num_draft_tokens=8, min_ngram=1, max_ngram=3), "min_ngram=1 and max_ngram=3"),
    (Ngram(num_draft_tokens=2, min_ngram=3, max_ngram=3), "num_draft_tokens=2 is less than max_ngram=3"),
]
WRONG_DRAFTERS = [
    ("llama", "dflash2", "wide", 7, "hidden states of 64 numbers, but the target's have 32"),
    ("llama", "dflash2", "deep", 7, r"from layers \[0, 2\] of a target, but this target has 2 layers of 32"),
    ("llama", "dflash2", "dflash2", 8, "drafts at most 7 tokens, but num_draft_tokens=8"),
    ("llama", "dflash2", "dflash", 7, "of kind 'dflash2', but .* is a dflash$"),
    ("llama", "dflash", "stranger", 7, "of architecture 'llama', not 'dflash'"),
    ("llama", "eagle3", "stranger", 3, "is told of no EAGLE-3 drafters"),
    ("llama", "mtp", None, 3, "has no layers for multi-token prediction"),
    ("qwen35", "mtp", "wide_head", 3, "hidden states of 64 numbers, but the target's have 32"),
    ("llama", "draft_model", "other_words", 3, "vocabulary is not the target's"),
    ("llama", "draft_model", "missing", 3, "no GGUF file .*missing"),
    ("llama", "draft_model", "text", 3, "is not a GGUF file"),
    ("llama", "draft_model", "torn", 3, "is cut off"),
]


@pytest.mark.parametrize(("method", "said"), NGRAM_SIZES)
def test_sizes_that_never_draft_are_refused(files: dict[str, Path], method: Ngram, said: str) -> None:
    """Fails if ngram-simple decodes plainly under another name."""
    pair = PairSpec.model_validate({"target": {"model": str(files["llama"]), "dtype": "gguf"}})
    assert said in str(LlamaCppRuntime.refusal(pair, method))


def test_settings_of_choicespecs_own_loop_are_refused(files: dict[str, Path]) -> None:
    """Fails if outputs are called exact, or a pace adaptive, that the server knows nothing of."""
    pair = PairSpec.model_validate({"target": {"model": str(files["llama"]), "dtype": "gguf"}})
    for method in (Ngram(exact=True), Ngram(pace="adaptive")):
        assert "leave them out, or use hf" in str(LlamaCppRuntime.refusal(pair, method))


@pytest.mark.parametrize(("target", "kind", "drafter", "k", "said"), WRONG_DRAFTERS)
def test_a_wrong_drafter_is_refused_before_anything_is_loaded(
    files: dict[str, Path], target: str, kind: str, drafter: str | None, k: int, said: str
) -> None:
    """Fails if it ends in a dead server, as a wrong width does, or in plain decoding, as a missing drafter may."""
    runtime = _open(files[target], wrong=(kind, files[drafter] if drafter else None))
    with pytest.raises((Unsupported, CheckpointError), match=said):
        runtime.generate(Request("r", BYTES, 8), Draft(drafter="wrong", num_draft_tokens=k))
    assert runtime.process_ids == []


def test_an_unknown_drafter_is_named_with_those_there_are(files: dict[str, Path]) -> None:
    """Fails if a misspelling ends in a traceback."""
    runtime = _open(files["llama"], twin=("draft_model", files["twin"]))
    with pytest.raises(Unsupported, match="no drafter 'twinn'; known: twin"):
        runtime.generate(Request("r", BYTES, 8), Draft(drafter="twinn"))


def test_a_server_that_dies_over_a_file_says_why(files: dict[str, Path]) -> None:
    """Fails if what no header shows ends in a dead worker; the other methods go on."""
    runtime = _open(files["llama"], broken=("dflash2", files["broken"]))
    with pytest.raises(ServerError, match=r"lost before it was ready(.|\n)*'blk\.0\.ffn_gate\.weight' not found"):
        runtime.generate(Request("r", BYTES, 8), Draft(drafter="broken"))
    assert runtime.generate(Request("r", BYTES, 8), PLAIN).output_ids
    runtime.close()


def _kill(process_id: int) -> None:
    os.kill(process_id, signal.SIGKILL)
    os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)


def test_a_killed_server_is_said_with_the_end_of_its_log(files: dict[str, Path]) -> None:
    """Fails if a request to a dead server hangs, or raises what the worker does not know."""
    flags = [
        "--model",
        str(files["llama"]),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--ctx-size",
        "64",
        "--parallel",
        "1",
    ]
    flags += ["--threads", "1", "--threads-batch", "1", "--cache-ram", "0", "--fit", "off"]
    server = LlamaCppServer("xllamacpp", flags, os.environ)
    _kill(server.process_id)
    with pytest.raises(ServerError, match=r"it ended with -9; the end of its log:\n(.|\n)*listening on"):
        server.post("/completion", {"prompt": [1], "n_predict": 1})
    assert not server.alive


def test_the_request_after_a_death_is_answered(files: dict[str, Path]) -> None:
    """Fails if one death costs every request that follows."""
    runtime = _open(files["llama"])
    request = Request("r", BYTES, 8)
    before = runtime.generate(request, PLAIN)
    _kill(*runtime.process_ids)
    assert runtime.generate(request, PLAIN).output_ids == before.output_ids
    runtime.close()


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for a site's own ``llama-server``: the package's server under the binary's flags, which never ends."""
    path = tmp_path_factory.mktemp("bin") / "llama-server"
    path.write_text(
        f"#!{sys.executable}\n"
        "import signal, sys\n"
        "if sys.argv[1:] == ['--version']:\n"
        "    print('version: 4321 (abcdef0)')\n"
        "    raise SystemExit\n"
        f"sys.path.insert(0, {str(PLATFORM)!r})\n"
        "import xllamacpp\n"
        "from choicespec.runtimes.llamacpp_server import read_parameters\n"
        "flags = [flag for flag in sys.argv[1:] if flag not in ('--device', 'none')]\n"
        "server = xllamacpp.Server(read_parameters(xllamacpp, flags))\n"
        "signal.pause()\n",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def test_a_sites_own_binary_serves(files: dict[str, Path], binary: Path) -> None:
    """Fails if the flags are not the binary's, its version is lost, or it outlives what started it."""
    runtime = _open(files["qwen35"], server=binary, mtp=("mtp", None))
    assert runtime.build == f"llama.cpp 4321 (abcdef0) ({binary})"
    request = Request("r", BYTES, 24)
    drafted = runtime.generate(request, Draft(drafter="mtp"))
    assert drafted.output_ids == runtime.generate(request, PLAIN).output_ids
    assert _proposed(drafted)
    started = [_child_of(process_id) for process_id in runtime.process_ids]
    runtime.close()
    for process_id in started:
        await_end(process_id)


def _child_of(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()[0])


def _no_program(files: dict[str, Path]) -> None:
    _open(files["llama"], server=files["missing"])


def _too_long(files: dict[str, Path]) -> None:
    _open(files["llama"], context_tokens=CONTEXT + 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(_no_program, "runtime.server: no program"), (_too_long, f"context_tokens={CONTEXT + 1} exceeds the {CONTEXT}")],
)
def test_a_wrong_setting_is_said_at_opening(
    files: dict[str, Path], wrong: Callable[[dict[str, Path]], None], said: str
) -> None:
    """Fails if it is found out only by a server that dies, or is capped in silence."""
    with pytest.raises(SpecError, match=said):
        wrong(files)


def test_gpus_need_a_binary_for_them(files: dict[str, Path]) -> None:
    """Fails if a pair that was given a GPU decodes on the CPU."""
    pair = PairSpec(target=TargetSpec(model=str(files["llama"]), dtype="gguf"), gpus=1)
    with pytest.raises(Unsupported, match=r"gpus=1, .* as runtime\.server"):
        LlamaCppRuntime(LlamaCppRuntimeSpec(), pair)


@pytest.mark.parametrize("own", [True, False])
def test_no_server_outlives_a_killed_owner(files: dict[str, Path], binary: Path, own: bool) -> None:
    """Fails if Ray, which kills its actors, leaves servers behind that hold memory and cores."""
    server = None if own else str(binary)
    code = (
        "import sys\n"
        "from choicespec.runtimes.llamacpp import LlamaCppRuntime\n"
        "from choicespec.spec.pair import PairSpec\n"
        "from choicespec.spec.runtime import LlamaCppRuntimeSpec\n"
        f"pair = PairSpec.model_validate({{'target': {{'model': {str(files['llama'])!r}, 'dtype': 'gguf'}}}})\n"
        f"runtime = LlamaCppRuntime(LlamaCppRuntimeSpec(threads=1, server={server!r}), pair)\n"
        "runtime.load()\n"
        "print(*runtime.process_ids, flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(PLATFORM)}
    command: Sequence[str] = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        launched = int(owner.stdout.readline())
        processes = [launched] if own else [launched, _child_of(launched)]
        owner.kill()
    for process_id in processes:
        await_end(process_id)


def test_an_autoregressive_method_needs_no_drafter() -> None:
    """Fails if the baseline of a pair depends on what its methods need."""
    pair = PairSpec.model_validate({"target": {"model": "smollm2", "dtype": "gguf"}})
    assert LlamaCppRuntime.refusal(pair, Autoregressive()) is None
