"""Blocks from the events of llama.cpp's server, as it sends them for a decode that is known."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from choicespec.decoding.stopping import StopRule
from choicespec.runtimes.gguf_header import GgufHeader
from choicespec.runtimes.llamacpp_stream import BlockStream, Pieces
from hypothesis import given
from hypothesis import strategies as st

WORDS = ("a", "bc", "\N{LOWER ONE EIGHTH BLOCK}d", "\N{SNOWMAN}")
BYTES = "\N{PARTY POPPER}\N{SNOWMAN}".encode()  # characters that are written byte by byte
VOCABULARY = tuple(word.encode() for word in (*WORDS, *(f"<0x{byte:02X}>" for byte in sorted(set(BYTES)))))
ID_OF_BYTE = {byte: len(WORDS) + place for place, byte in enumerate(sorted(set(BYTES)))}
HEADER = GgufHeader(Path("none"), {"tokenizer.ggml.tokens": VOCABULARY, "tokenizer.ggml.model": b"llama"}, {})


def decoded(token_ids: Sequence[int]) -> bytes:
    byte_of = {token_id: byte for byte, token_id in ID_OF_BYTE.items()}
    words = [word.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode() for word in WORDS]
    return b"".join(words[i] if i < len(words) else bytes([byte_of[i]]) for i in token_ids)


class Pass(NamedTuple):
    """A pass of the target, with a draft of ``proposed`` tokens; all of the tokens but the last were drafted."""

    token_ids: tuple[int, ...]
    proposed: int


def events(passes: Sequence[Pass]) -> Iterator[dict[str, Any]]:
    """An event a token, except where the text so far ends inside a character; totals are told with a pass's first."""
    told_ids: list[int] = []
    told_bytes, proposed, accepted = 0, 0, 0
    for number, one in enumerate(passes):
        proposed, accepted = proposed + one.proposed, accepted + len(one.token_ids) - 1
        timings = {"prompt_ms": 7.0, "predicted_ms": 10.0 * number, "draft_n": proposed, "draft_n_accepted": accepted}
        for token_id in one.token_ids:
            told_ids.append(token_id)
            text = decoded(told_ids)
            try:
                content = text[told_bytes:].decode()
            except UnicodeDecodeError:
                continue
            told_bytes = len(text)
            yield _event(content, [token_id], len(told_ids), timings)
    yield _event("", [], len(told_ids), timings) | {"stop": True, "stop_type": "limit"}


def _event(content: str, token_ids: list[int], tokens: int, timings: dict[str, Any]) -> dict[str, Any]:
    return {"content": content, "tokens": token_ids, "tokens_predicted": tokens, "timings": timings, "stop": False}


@st.composite
def decodes(draw: st.DrawFn, whole_characters: bool) -> list[Pass]:
    parts: list[tuple[int, ...]] = [(token_id,) for token_id in range(len(WORDS))]
    if not whole_characters:
        parts += [tuple(ID_OF_BYTE[byte] for byte in character.encode()) for character in BYTES.decode()]
    token_ids = [i for part in draw(st.lists(st.sampled_from(parts), min_size=1, max_size=12)) for i in part]
    token_ids = token_ids[: draw(st.integers(1, len(token_ids)))]  # it may end inside a character
    passes, rest = [Pass((token_ids[0],), 0)], token_ids[1:]
    while rest:
        size = draw(st.integers(1, min(4, len(rest))))
        passes.append(Pass(tuple(rest[:size]), draw(st.integers(size - 1, 5))))
        rest = rest[size:]
    return passes


def stream(whole: Sequence[int], stop: tuple[str, ...] = ()) -> BlockStream:
    """What reads the events of an output; asked for tokens that no event has, it answers with the output's."""
    rule = StopRule((), len(whole), stop, lambda token_ids: decoded(token_ids).decode(errors="replace"))
    return BlockStream("ngram", rule, Pieces(HEADER), lambda known, number: whole[len(known) : len(known) + number])


@given(decodes(whole_characters=True))
def test_a_pass_is_a_block(passes: list[Pass]) -> None:
    """Fails if a client gets tokens one by one, or a step has the draft of another."""
    found = list(stream([i for one in passes for i in one.token_ids]).blocks(events(passes)))
    assert [block.token_ids for block in found] == [one.token_ids for one in passes]
    steps = [(block.step.proposed, block.step.accepted, block.step.source) for block in found[1:] if block.step]
    assert steps == [(p.proposed, len(p.token_ids) - 1, "ngram" if p.proposed else "") for p in passes[1:]]
    assert [block.elapsed_ms for block in found] == [7.0, *[10.0] * (len(passes) - 1)]
    assert [block.finish_reason for block in found] == [*[None] * (len(passes) - 1), "length"]


@given(decodes(whole_characters=False))
def test_tokens_inside_a_character_are_found(passes: list[Pass]) -> None:
    """The server does not tell them. Fails if text is lost or written otherwise, or tokens, steps or drafts are."""
    whole = [i for one in passes for i in one.token_ids]
    found = list(stream(whole).blocks(events(passes)))
    assert [i for block in found for i in block.token_ids] == whole
    steps = [block.step for block in found if block.step is not None]
    assert sum(step.proposed for step in steps) == sum(one.proposed for one in passes)
    assert sum(step.accepted for step in steps) == len(whole) - len(passes)
    assert len(steps) == len(passes) - 1
    assert sum(block.elapsed_ms for block in found[1:]) == 10.0 * (len(passes) - 1)


def test_a_stop_string_ends_the_output_inside_a_draft() -> None:
    """Fails if tokens behind a stop string are kept, or counted as accepted, or the stream is read on."""
    passes = [Pass((0,), 0), Pass((0, 1, 0, 0), 5), Pass((3,), 0)]
    rest = events(passes)
    found = list(stream([0, 0, 1, 0, 0, 3], stop=("abc",)).blocks(rest))
    assert [block.token_ids for block in found] == [(0,), (0, 1)]
    assert found[-1].finish_reason == "stop"
    assert found[-1].step is not None
    assert (found[-1].step.proposed, found[-1].step.accepted) == (5, 2)
    assert next(rest)["tokens"] == [3]
