"""A worker of vLLM for a union: vLLM drafts with a drafter of its own, and ChoiceSpec has the last word on the draft.

So the drafter's cache, its hidden states and its attention are vLLM's affair. A proposer class (``vllm_proposer``) is
told of none of these, and there is no room for one beside a drafter.
"""

from vllm.platforms import current_platform
from vllm.v1.outputs import DraftTokenIds

from choicespec.runtimes.vllm_proposer import ChoiceProposer

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class UnionWorker(Worker):
    """The device's own worker, but for the drafts that it hands to the scheduler.

    Attributes:
        choice: what weighs them.
    """

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the target and vLLM's drafter, and watch both before they are compiled."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.choice = ChoiceProposer(self.vllm_config)
        self.choice.load_model(self.model_runner.get_model())
        self.choice.drafter.watch(self.model_runner.drafter.model)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts of the step that has just ended, once its tokens stand in the batch."""
        found = super().take_draft_token_ids()
        if found is None:
            return None
        return DraftTokenIds(found.req_ids, self.choice.improve(found.draft_token_ids))
