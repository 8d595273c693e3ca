"""What a replica tells of its work: metrics for Prometheus through Ray, and a log line an answer, without its text."""

import logging

from ray.serve.metrics import Counter

from choicespec.serving.answers import Finished, Refused

_log = logging.getLogger("ray.serve")
_ANSWERS = "choicespec_answers"


class Figures:
    """Counters of one model; rates are ratios of them.

    decode rate = decode_tokens / decode_seconds, accepted/step = accepted_tokens / steps, gate rate = drafted_steps /
    steps. Ray Serve itself counts waiting and running requests, and their latency.

    Args:
        model: the name that clients use.
    """

    def __init__(self, model: str) -> None:
        self._answers = Counter(_ANSWERS, description="Questions, by how they ended.", tag_keys=("model", "ended"))
        self._counters = {
            name: Counter(f"choicespec_{name}", description=description, tag_keys=("model",))
            for name, description in (
                ("prompt_tokens", "Tokens of prompts."),
                ("output_tokens", "Tokens of outputs."),
                ("decode_tokens", "Tokens decoded after the prompt's own pass."),
                ("decode_seconds", "Time spent on decode_tokens."),
                ("steps", "Rounds of propose and verify."),
                ("drafted_steps", "Rounds in which something was proposed."),
                ("accepted_tokens", "Draft tokens kept."),
            )
        }
        for counter in self._counters.values():
            counter.set_default_tags({"model": model})
        self._answers.set_default_tags({"model": model})
        self._model = model

    def ended(self, question_id: str, event: Finished | Refused) -> None:
        """Count an answer, or a refusal."""
        if isinstance(event, Refused):
            self._count(question_id, event.code or str(event.status))
            return
        progress = event.progress
        amounts = {
            "prompt_tokens": progress.prompt_tokens,
            "output_tokens": progress.output_tokens,
            "decode_tokens": progress.decode_tokens,
            "decode_seconds": progress.decode_ms / 1e3,
            "steps": progress.steps,
            "drafted_steps": progress.drafted_steps,
            "accepted_tokens": progress.accepted,
        }
        for name, amount in amounts.items():
            if amount:  # a counter takes no zero
                self._counters[name].inc(amount)
        self._count(question_id, event.finish_reason, {**amounts, "method": event.method, "version": event.version})

    def left(self, question_id: str) -> None:
        """Count a client that went away, or an answer that failed."""
        self._count(question_id, "left")

    def _count(self, question_id: str, ended: str, more: dict[str, object] | None = None) -> None:
        self._answers.inc(tags={"ended": ended})
        # as text, and as fields where Serve logs JSON
        fields = {"question": question_id, "model": self._model, "ended": ended, **(more or {})}
        _log.info("answered %s", " ".join(f"{name}={value}" for name, value in fields.items()), extra=fields)
