"""Before the first step: do engine and trainer mean the same by the same prompt, weights and tokens?

What goes wrong between two implementations of one model goes wrong silently: pictures expanded to another number of
tokens, positions counted otherwise, samples of a packed batch seeing each other, weights that arrive under a name nobody
reads. Training then runs, and learns less. Here each of these is measured on real prompts, and a run that fails does not
start. It leaves no trace: metrics are bit for bit the same without it. (That the fullest micro-batch fits in the GPU's
memory is tried by train.probe_memory, also before the first step.)
"""

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist

import grpo
import model
from errors import UserError
from model import Policy, Processor
from prepare_data import Example
from rollout import HFEngine, Prompt, Rollout, Sampling, VLLMEngine, difference, make_prompts
from sharding import full_parameters
from utils import derive_seed

# Mean |difference| of a token's log-probability, in nats. In fp32 it is rounding, some 1e-7, and any mistake is far above
# this; in bfloat16 rounding alone makes 0.003 to 0.02.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
SAMPLES, NEW_TOKENS = 2, 16


def choose(examples: Sequence[Example], lengths: Sequence[int], room: int, copies: int) -> list[Example]:
    """A few unlike prompts that fit into one micro-batch together: the one with the most pictures, one without, the
    shortest, the longest."""
    order = sorted(range(len(examples)), key=lambda i: lengths[i])
    wanted = [max(order, key=lambda i: (len(examples[i].images), -lengths[i]))]
    wanted += [i for i in order if not examples[i].images][:1] + [order[0], order[-1]]
    chosen = []
    for i in dict.fromkeys(wanted):
        cost = copies * lengths[i] + SAMPLES * NEW_TOKENS
        if not chosen or cost <= room:
            chosen.append(examples[i])
            room -= cost
    return chosen


def scored(policy: Policy, groups: Sequence[Sequence[Rollout]], args: argparse.Namespace, image_token: int) -> torch.Tensor:
    """Log-probabilities of the responses' tokens, one micro-batch per group, in the order of the rollouts."""
    out = []
    for group in groups:
        samples, at = [], 0
        for r in group:
            n = len(r.response)
            uid = r.uid if args.attn != "flash" else f"{r.uid}/{r.sample}"
            place = {"place": list(map(float, range(at, at + n)))}
            samples.append(grpo.Sample(uid, r.token_ids, [False] * r.prompt_len + [True] * n, place, r.images))
            at += n
        micro = grpo.plant(samples, image_token)
        logp = policy(micro, args.temperature)[0].float().cpu()
        out.append(logp[micro.values["place"].argsort()])
    return torch.cat(out)


def check_prompts(rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[str]:
    """Is the prompt that was answered the one that will be trained on?"""
    for r, prompt in zip(rollouts, (p for p in prompts for _ in range(SAMPLES)), strict=True):
        if r.token_ids[: r.prompt_len] != prompt.token_ids:
            return [f"example {r.uid!r}: {difference(r.token_ids[: r.prompt_len], prompt.token_ids)}; check --min-pixels, --max-pixels and "
                    f"the model's preprocessor_config.json"]
    return []


def check_positions(policy: Policy, prompts: Sequence[Prompt]) -> list[str]:
    """Are the places that we give to a prompt's tokens those that transformers gives them? Of text alone they are a count."""
    for prompt in (p for p in prompts if p.images and hasattr(policy.hf.model, "get_rope_index")):
        ids, grids = torch.tensor([prompt.token_ids]), [image.grid_thw for image in prompt.images]
        kinds = (ids == policy.image_token_id).int()
        theirs = policy.hf.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor(grids))[0][:, 0]
        ours = model.mrope_positions(prompt.token_ids, grids, policy.image_token_id, policy.merge_size)
        if not torch.equal(ours, theirs.to(ours)):
            at = int((ours != theirs).any(0).nonzero()[0])
            return [f"positions (t, h, w) of example {prompt.uid!r} differ from transformers' from token {at}: {ours[:, at].tolist()}, and "
                    f"{theirs[:, at].tolist()} there; this model is no such family as model.FAMILIES lists"]
    return []


def check_logprobs(what: str, a: torch.Tensor, b: torch.Tensor, tolerance: float, advice: str) -> list[str]:
    gap = (a - b).abs()
    if gap.mean().item() <= tolerance:  # a NaN is not
        return []
    return [f"{what} differ by {gap.mean().item():.2e} nats a token on average, {gap.max().item():.2e} at most, where {tolerance:.0e} "
            f"is tolerated; {advice}"]


@torch.no_grad()
def self_test(
    policy: Policy, engine: HFEngine | VLLMEngine, examples: Sequence[Example], lengths: Sequence[int], processor: Processor,
    args: argparse.Namespace,
) -> str:
    """Compare engine and trainer; a line of what was measured. ValueError, on all ranks, with all that disagrees. Every rank
    does the same work on the same prompts, so that collectives match."""
    dtype = engine.dtype
    copies = SAMPLES if args.attn == "flash" else 1
    prompts = make_prompts(choose(examples, lengths, args.micro_tokens, copies), processor)
    sampling = Sampling(min(NEW_TOKENS, args.max_new_tokens), args.temperature, seed=derive_seed(args.seed, "self-test"))
    engine.wake()
    rollouts = engine.generate(prompts, SAMPLES, sampling)
    if policy.peers is not None:  # forwards in common, of prompts and samples that must be the same to the last token
        dist.broadcast_object_list(rollouts, group=policy.peers, group_src=0)
    failures = check_prompts(rollouts, prompts)
    theirs = torch.tensor([p for r in rollouts for p in r.logprobs])
    alone = scored(policy, [[r] for r in rollouts], args, processor.image_token_id)
    packed = scored(policy, [rollouts], args, processor.image_token_id)
    failures += check_logprobs(
        f"log-probabilities of engine ({args.rollout}) and trainer", theirs, alone, TOLERANCE[dtype],
        "the engine computes another function: try --rollout hf, another --attn, --dtype float32, or compare the versions in README",
    )
    # What engine and trainer have in common they would both get wrong: positions, embeddings, what attends to what. Rounding
    # hides such mistakes in bfloat16, but not from what it makes of engine and trainer themselves; and positions are integers.
    failures += check_positions(policy, prompts)
    firsts = [i for i, r in enumerate(rollouts) if r.sample == 0]
    plain = [policy.plain_logprobs(r.token_ids, r.images, r.prompt_len, args.temperature).cpu() for r in (rollouts[i] for i in firsts)]
    ours = alone.split([len(r.response) for r in rollouts])
    plain, ours = torch.cat(plain), torch.cat([ours[i] for i in firsts])
    noise = (theirs - alone).abs().mean().item()
    failures += check_logprobs(
        "log-probabilities of the trainer and of transformers' own forward", plain, ours, min(TOLERANCE[dtype], 1e-4 + 3 * noise),
        "positions, embeddings or attention are computed otherwise here; this model is no such family as model.FAMILIES lists",
    )
    failures += check_logprobs(
        "log-probabilities of the trainer, packed and separate,", packed, alone, TOLERANCE[dtype],
        f"samples of a micro-batch see each other, or positions are off: try another --attn than {args.attn}",
    )
    count = 0

    def counted():
        nonlocal count
        for named in full_parameters(policy, dtype=dtype):
            count += 1
            yield named

    unequal = engine.unequal_weights(counted())
    if unequal:
        name = max(unequal, key=unequal.get)
        failures.append(f"{len(unequal)} of {count} weight tensors differ between trainer and engine after a sync, {name} by "
                        f"{unequal[name]:.2e}; the engine would sample from stale weights")
    engine.reset_caches()
    everywhere: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, failures)
    failed = [f"{line} (rank {rank})" for rank, lines in enumerate(everywhere) for line in lines]
    if failed:
        raise UserError("self-test before the first step (--no-self-test trains all the same): " + "; ".join(dict.fromkeys(failed)))
    pictures = sum(len(p.images) > 0 for p in prompts)
    return (
        f"self-test: {len(prompts)} prompts ({pictures} with pictures) tokenised alike; |dlogp| of engine and trainer "
        f"{(theirs - alone).abs().mean().item():.1e} (at most {(theirs - alone).abs().max().item():.1e}), of packed and separate "
        f"{(packed - alone).abs().mean().item():.1e}, of the trainer and transformers' own forward "
        f"{(plain - ours).abs().mean().item():.1e}; {count} weight tensors equal"
    )
