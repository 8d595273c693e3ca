"""The blocks of a request, from the stream of events that llama.cpp's server sends for it.

An event has a token and running totals: T tokens, P drafted, A accepted. A pass of the target yields its accepted
tokens and one of its own, the prompt's pass too, so T - A passes are whole; unlike in an answer's totals, each is known
by itself. A token that ends inside a character has no event: its id is found from the character's bytes, and its pass
may be told with the totals of the next.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from choicespec.decoding.loop import Block
from choicespec.decoding.stopping import StopRule
from choicespec.errors import ServerError
from choicespec.records import FinishReason, Step
from choicespec.runtimes.gguf_header import GgufHeader

FINISH_REASONS: dict[str, FinishReason] = {"eos": "eos", "word": "stop", "limit": "length"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of a vocabulary that is no byte-level BPE
Event = Mapping[str, Any]


class Pieces:
    """What the tokens of a vocabulary are, in bytes.

    Args:
        header: of the target.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._header = header

    def before(self, text: str, last_id: int, number: int) -> list[int]:
        """The ids of so many tokens which, followed by ``last_id``, are a text.

        Where several are, those with the longest tokens first, as tokenizers merge; the text is theirs all the same.

        Raises:
            ServerError: there are none.
        """
        found = self._split(text.encode().removesuffix(self._of_ids[last_id]), number)
        if found is None:
            raise ServerError(f"llama.cpp's server sent a text that no {number + 1} tokens of its vocabulary are")
        return found

    def _split(self, text: bytes, number: int) -> list[int] | None:
        if number == 0:
            return None if text else []
        for size in range(len(text) - number + 1, 0, -1):
            token_id = self._ids.get(text[:size])
            if token_id is not None and (rest := self._split(text[size:], number - 1)) is not None:
                return [token_id, *rest]
        return None

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: token_id for token_id, piece in enumerate(self._of_ids)}

    @cached_property
    def _of_ids(self) -> list[bytes]:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        tokens = [token.decode(errors="replace") for token in self._header.vocabulary]
        if self._header.text("tokenizer.ggml.model") != "gpt2":
            return [_piece(token) for token in tokens]
        byte_of = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
        return [bytes(byte_of[symbol] for symbol in token if symbol in byte_of) for token in tokens]


def _piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


class BlockStream:
    """Makes blocks of events. The last block says why it is the last, so each is told when the next has come.

    Args:
        source: who proposes.
        stop: where the output ends, for all but end-of-sequence tokens, which the server knows.
        pieces: of the target's vocabulary.
        decode_on: the ids of so many tokens that follow an output, once the stream has ended.
    """

    def __init__(
        self,
        source: str,
        stop: StopRule,
        pieces: Pieces,
        decode_on: Callable[[Sequence[int], int], Sequence[int]],
    ) -> None:
        self._source, self._stop, self._pieces = source, stop, pieces
        self._decode_on = decode_on
        self._pending_ids: list[int] = []  # of a pass that is not whole
        self._output_ids: list[int] = []  # of those that are
        self._passes = self._proposed = self._accepted = 0
        self._decode_ms = 0.0

    def blocks(self, events: Iterable[Event]) -> Iterator[Block]:
        """The blocks, up to the one that ends the output."""
        held: Block | None = None
        for event in events:
            self._take_ids(event)
            for block in self._settled(event):
                if held is not None:
                    yield held
                held = block
                if block.finish_reason is not None:
                    yield block
                    return
            if event["stop"]:
                assert held is not None, "a prompt's pass yields a token"
                yield held._replace(finish_reason=FINISH_REASONS[event["stop_type"]])
                return

    def _take_ids(self, event: Event) -> None:
        missing = event["tokens_predicted"] - len(self._output_ids) - len(self._pending_ids) - len(event["tokens"])
        if missing and event["stop"]:  # the output ends inside a character, which nobody is told
            self._pending_ids += self._decode_on([*self._output_ids, *self._pending_ids], missing)
        elif missing:
            self._pending_ids += self._pieces.before(event["content"], event["tokens"][0], missing)
        self._pending_ids += event["tokens"]

    def _settled(self, event: Event) -> Iterator[Block]:
        """The passes that are whole by now. Of several with one event, all but the last are taken to have no draft."""
        timings = event["timings"]
        proposed, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)  # missing before any draft
        passes = event["tokens_predicted"] - accepted - self._passes
        if event["stop"] and self._pending_ids:
            passes = max(passes, 1)  # it ends inside a draft
        for left in range(passes, 0, -1):
            elapsed_ms = (timings["predicted_ms"] - self._decode_ms) / left
            if self._passes == 0:
                yield self._block(1, None, timings["prompt_ms"])
            elif left > 1:
                self._decode_ms += elapsed_ms
                yield self._block(1, Step(0, 0, "", 0.0, elapsed_ms), elapsed_ms)
            else:
                new, kept = proposed - self._proposed, accepted - self._accepted
                self._proposed, self._accepted, self._decode_ms = proposed, accepted, timings["predicted_ms"]
                step = Step(new, kept, self._source if new else "", 0.0, elapsed_ms)
                yield self._block(len(self._pending_ids), step, elapsed_ms)

    def _block(self, size: int, step: Step | None, elapsed_ms: float) -> Block:
        kept, reason = self._stop.cut(self._output_ids, self._pending_ids[:size])
        self._output_ids += kept
        self._passes += 1
        del self._pending_ids[:size]
        if step is not None:
            step = step._replace(accepted=min(step.accepted, len(kept)))
        return Block(kept, step, "stop" if reason == "stop" else None, elapsed_ms)
