r"""On-policy distillation: a teacher, which sees the same images, scores the tokens that the student samples (GKD,
arXiv:2306.13649; the policy-gradient form of the reverse KL, with a discount of 0).

    A_t = task advantage + distill_coef * (log q(y_t) - log pi_old(y_t))

with the teacher q and the student's policy pi_old before the update. On policy, ascending the second part descends
KL(pi || q) of each next-token distribution. --algo opd leaves the task advantage out (--adv none).
"""

from dataclasses import dataclass

import torch

from errors import need
from grpo import LOSSES, StepInfo, algo_arg, register_advantage, register_method
from settings import flag_field


@dataclass(frozen=True)
class Settings:
    """On-policy distillation"""

    teacher: str | None = flag_field(None, "teacher model: folder or hub id; must have the same tokenizer, chat "
                                     "template and patch layout as --model")
    distill_coef: float = algo_arg(1.0, "weight of the teacher's log-ratio in the advantage", above=0)


@register_advantage("none", norm_std="none", grouped=False)
def no_advantage(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return zeros, for training on a teacher alone; rewards are only logged."""
    return torch.zeros_like(rewards_PG)


def add_teacher(advantages_N: torch.Tensor, batch, algo, info: StepInfo) -> torch.Tensor:
    """Return the advantages with the teacher's part; tokens that are not packed, and so have no log-probabilities, keep
    theirs."""
    packed_N = ~batch.tokens.old_logps.isnan()
    log_ratio_N = (batch.tokens.teacher_logps.double() - batch.tokens.old_logps.double())[packed_N]
    need(log_ratio_N.isfinite().all(), f"--teacher {algo.teacher}: its log-probabilities are not finite; use another")
    advantages_N = advantages_N.clone()
    advantages_N[packed_N] += algo.distill_coef * log_ratio_N
    return advantages_N


def check_distillation(algo) -> None:
    need(algo.old_policy == "trainer",
         f"--teacher {algo.teacher} needs the log-probabilities of the trainer's old policy; use --algo-args "
         "old_policy=trainer")
    need(LOSSES[algo.loss].per_token,
         f"--teacher {algo.teacher}: each token gets an advantage of its own, but --loss {algo.loss} couples the "
         "tokens of a response; use --loss clip")


def check_teacher(teacher: str, model: str, processor, other) -> None:
    """Raise UserError unless the teacher's processor, `other`, has the student's vocabulary, chat template, special
    tokens and patches. The merges of the tokenizers and their normalization are not compared."""
    patcher, others = processor.patcher, other.patcher
    differing = {
        "vocabulary": processor.tokenizer.get_vocab() != other.tokenizer.get_vocab(),
        "chat template": processor.tokenizer.chat_template != other.tokenizer.chat_template,
        "image token": processor.image_token_id != other.image_token_id,
        "end tokens": processor.eos_ids != other.eos_ids,
        "patches": (patcher.patch, patcher.merge, patcher.slice_frames)
                   != (others.patch, others.merge, others.slice_frames)
                   or not torch.equal(patcher.table_CB, others.table_CB),
        "positions in videos": processor.tokens_per_second != other.tokens_per_second,
    }  # fmt: skip
    names = ", ".join(name for name, differs in differing.items() if differs)
    need(not names, f"--teacher {teacher}: differs from --model {model} in its {names}; choose a teacher of the same "
         "family")


register_method(
    presets={"opd": {"adv": "none", "teacher": None}}, is_on=lambda algo: algo.teacher is not None,
    columns=("old_logps", "teacher_logps"), change_advantages=add_teacher, check=check_distillation,
    zero_without_advantage=False,
)  # fmt: skip
