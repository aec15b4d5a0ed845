"""A helper for tests of graders: it computes the tasks' own rewards of texts."""

from collections.abc import Sequence

from prepare_data import Example
from reward import RewardConfig
from rewards.grade import Grader, make_rollout_stub


def score_batch(responses: Sequence[str], examples: Sequence[Example]) -> list[dict[str, float]]:
    """Return the rewards of each response, in order, computed in this process; there is one example per response."""
    rollouts = [make_rollout_stub(example, text) for example, text in zip(examples, responses, strict=True)]
    return Grader(RewardConfig(reward_workers=0, reward_errors="stop")).collect(rollouts)
