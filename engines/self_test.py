"""Before the first step: do engine and trainer mean the same by the same prompt, weights and tokens?

What goes wrong between two implementations of one model goes wrong silently: images expanded to another number of
tokens, positions counted otherwise, samples of a packed batch seeing each other, weights that arrive under a name
nobody reads. Training then runs, and learns less. Here each of these is measured on real prompts, and a run that fails
does not start. It leaves no trace: metrics are bit for bit the same without it. (That the fullest micro-batch fits in
the GPU's memory is tried by parallel.models.probe_memory, also before the first step.)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import model
from errors import need
from layers.lora import find_lora_layers
from model import Policy, Processor
from packing import Packer
from parallel.sharding import FullParameters, local_shard, reshard
from prepare_data import Example
from rollout import Engine, ExampleList, Prompt, ResetFn, Rollout, SamplingParams, identity, make_prompts
from utils import derive_seed, gather

# Mean |difference| of a token's log-probability between engine and trainer, in nats. In fp32 it is rounding, some 1e-7,
# and any mistake is far above this; in bfloat16 rounding alone makes up to 0.02. A confident policy hides mistakes: its
# log-probabilities are near 0 whatever is wrong. Everything else is therefore measured under nudged weights, whose
# policy is unsure, and compared with what rounding makes of these same log-probabilities (see `rounded`): other
# forwards of the same function differ by LIMIT times as much at most. benchmarks/self_test.py measures both sides.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
LIMIT = 2.2
FLOOR = 1e-4  # nats: smaller differences do not matter
SAMPLES_PER_PROMPT = 4
NEW_TOKENS = 16  # per sample; if --max-new-tokens is lower, there are more samples
# The nudge adds noise to every STRIDE-th element of a tensor (a prime: no row or column is left out), so that the
# tensor changes by a fraction NUDGE of its norm. What is very small, such as a bias of zeros, an adapter at its start
# or a layer of a toy, is taken for as large as would matter: a vector for 1, a table of positions for 2, a matrix for
# one that keeps the size of what it multiplies. The fraction is 2 NUDGE in the vision tower, as the compared tokens
# only attend to its tokens; 4 NUDGE for adapters, whose low rank changes few directions; 3 NUDGE for adapters in the
# tower. With less, a trained policy stays sure of its answers. With more, the tower becomes chaotic: rounding changes
# as much as a missing tensor does. What is kept to undo the nudge is 1 / STRIDE of what is trained.
PERTURBATION = 0.5
STRIDE = 31

ENGINE_HINT = "try --rollout hf, another --attn, --dtype float32, or the versions of requirements.txt"
NOT_SENT = "a sync does not bring all weights to their places, or the engine computes another function"
UNKNOWN_FAMILY = "this model is no such family as model.FAMILIES lists"


def select_prompts(examples: ExampleList, room: int, copies: int) -> list[Example]:
    """A few unlike prompts that fit into one micro-batch together: the one with the most images, one without, the
    shortest, the longest."""
    lengths = examples.lengths
    order = sorted(range(len(examples)), key=lambda i: lengths[i])
    wanted = [max(order, key=lambda i: (len(examples[i].images), -lengths[i]))]
    wanted += [i for i in order if not examples[i].images][:1] + [order[0], order[-1]]
    chosen = []
    for i in dict.fromkeys(wanted):
        cost = copies * lengths[i] + SAMPLES_PER_PROMPT * NEW_TOKENS
        if not chosen or cost <= room:
            chosen.append(examples[i])
            room -= cost
    return chosen


def trainer_logprobs(policy: Policy, packer: Packer, rollouts: Sequence[Rollout], temperature: float) -> torch.Tensor:
    """Log-probabilities of the responses' tokens, computed together, in the order of the rollouts."""
    logp_N = torch.zeros(sum(len(r.response) for r in rollouts))
    for micro in packer.pack(rollouts):  # one, unless copies of a single prompt fill more
        logp_N[micro.token_index_K] = policy(micro, temperature).logp_K.float().cpu()
    return logp_N


def shard_index(parameter: torch.Tensor) -> list[int]:
    """The number of this process's shard, along each dimension of the mesh that divides the tensor."""
    if not isinstance(parameter, DTensor):
        return []
    at = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return [number for number, placement in at if placement.is_shard()]


@contextmanager
def perturb_weights(policy: Policy) -> Iterator[None]:
    """Every trained tensor changed a little, each in its own way, and put back to the last bit. What several processes
    hold they all change the same: the change is a function of the tensor's name and of which shard it is."""
    reshard(policy)
    kept, tower = [], f"hf.{policy.hf.family.vision}."
    scales = {f"{name}.lora_B": layer.scale for name, layer in find_lora_layers(policy).items()}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and not name.startswith("value_head."):  # which no engine has
            values = local_shard(parameter.detach())
            stride = STRIDE if values.numel() > 100 * STRIDE else 1
            some = values.view(-1)[::stride]
            kept.append((some, some.clone()))
            seed = derive_seed("nudge", name, *shard_index(parameter))
            noise = torch.randn(len(some), generator=torch.Generator().manual_seed(seed))
            table = name.endswith("pos_embed.weight")
            least = 1.0 if parameter.dim() == 1 else 2.0 if table else parameter.shape[-1] ** -0.5
            size = max(least, some.float().square().mean().sqrt().item())
            size /= max(1.0, scales.get(name, 0.0))  # what an adapter gives is multiplied by its scale
            in_tower, adapter = name.startswith(tower), ".lora_" in name
            fraction = PERTURBATION * ((3 if in_tower else 4) if adapter else 2 if in_tower else 1)
            some += (fraction * stride**0.5 * size * noise).to(some)
    try:
        yield
    finally:
        reshard(policy)
        for some, original in kept:
            some.copy_(original)


@contextmanager
def rounded(policy: Policy) -> Iterator[None]:
    """Round the output of each block, of tower and language model, once more: at random, by up to the dtype's unit
    roundoff. From there on every later operation rounds differently too, so log-probabilities change by as much as
    another implementation of the same function would change them."""
    generator, family = torch.Generator().manual_seed(0), policy.hf.family

    def round_again(block: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        noise = (torch.rand(output.shape, generator=generator) - 0.5).to(output.device)
        return (output.float() * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    blocks = [*policy.hf.get_submodule(f"{family.language}.{family.blocks}")]
    blocks += policy.visual[0].get_submodule(family.vision_blocks)
    blocks += find_lora_layers(policy.hf).values()  # which engines have merged, and rounded
    hooks = [block.register_forward_hook(round_again) for block in blocks]
    cache, policy.cache = policy.cache, None  # of features that were rounded without
    try:
        yield
    finally:
        policy.cache = cache
        for hook in hooks:
            hook.remove()


def check_mrope_positions(policy: Policy, prompts: Sequence[Prompt]) -> list[str]:
    """Are the positions that we give to a prompt's tokens those that transformers gives them? Of text they are a
    count."""
    with_images = [prompt for prompt in prompts if prompt.images and hasattr(policy.hf.model, "get_rope_index")]
    for prompt in with_images:
        ids, grids = torch.tensor([prompt.token_ids]), [image.grid_thw for image in prompt.images]
        kinds = (ids == policy.image_token_id).int()
        theirs, _ = policy.hf.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor(grids))
        ours = model.mrope_positions(prompt.token_ids, grids, policy.image_token_id, policy.merge_size)
        wrong = (ours != theirs[:, 0].to(ours)).any(0)
        if wrong.any():
            differ = f"differ from transformers' from token {int(wrong.int().argmax())} on"
            return [f"positions (t, h, w) of example {prompt.uid!r} {differ}; {UNKNOWN_FAMILY}"]
    return []


@torch.no_grad()
def self_test(
    policy: Policy,
    engine: Engine,
    examples: ExampleList,
    processor: Processor,
    packer: Packer,
    sampling: SamplingParams,
    start_of: ResetFn = identity,
) -> str:
    """Compare engine and trainer; a line of what was measured. UserError, on all ranks, with all that disagrees. Every
    rank does the same work on the same prompts, so that collectives match."""
    new_tokens, seed = min(NEW_TOKENS, sampling.max_new_tokens), derive_seed(sampling.seed, "self-test")
    samples = SAMPLES_PER_PROMPT * (NEW_TOKENS // new_tokens)  # a mean over few tokens would be chance
    chosen = select_prompts(examples, packer.max_tokens, 1 if packer.share else samples)
    prompts = make_prompts(chosen, processor, start_of=start_of)
    sampling = replace(sampling, max_new_tokens=new_tokens, seed=seed)
    compute = partial(trainer_logprobs, policy, packer, temperature=sampling.temperature)

    def sync() -> None:
        engine.sync(partial(FullParameters, policy, dtype=engine.dtype))

    def sample() -> tuple[list[Rollout], torch.Tensor, torch.Tensor]:
        """Rollouts, and the log-probabilities of their tokens by the engine and by the trainer, one at a time."""
        rollouts = engine.generate(prompts, samples, sampling)
        if policy.tp_group is not None:  # they compute together, so their samples must be the same to the last token
            dist.broadcast_object_list(rollouts, group=policy.tp_group, group_src=0)
        theirs = torch.cat([torch.tensor(r.logprobs) for r in rollouts])
        return rollouts, theirs, torch.cat([compute([r]) for r in rollouts])

    rollouts, theirs, ours = sample()
    both = (theirs - ours).abs()
    with perturb_weights(policy):
        engine.sleep()  # as before each update: the test below finds what sleep makes it forget
        sync()
        rollouts, theirs, ours = sample()
        plain = [policy.unpacked_logprobs(r.prompt, r.response, sampling.temperature).cpu() for r in rollouts]
        together = compute(rollouts)
        with rounded(policy):
            rounding = (compute(rollouts) - together).abs()
    sync()
    # What engine and trainer have in common they would both get wrong: positions, embeddings, what attends to what.
    plain, packed, synced = ((other - ours).abs() for other in (torch.cat(plain), together, theirs))
    moved = (compute(rollouts) - together).abs().mean()

    limit = FLOOR + LIMIT * rounding.mean().item()
    checks = (
        (f"engine ({type(engine).__name__}) and trainer", both, TOLERANCE[engine.dtype], ENGINE_HINT),
        ("the trainer and transformers' own forward", plain, limit, UNKNOWN_FAMILY),
        ("packed and separate samples", packed, limit, f"try another --attn than {policy.attention}"),
        ("engine and trainer under new weights", synced, limit, f"{NOT_SENT}; {ENGINE_HINT}"),
    )
    failures = check_mrope_positions(policy, prompts)
    for what, gap, tolerated, advice in checks:
        if not gap.mean() <= tolerated:  # a NaN is not
            differ = f"differ by {gap.mean():.2e} nats a token on average, {gap.max():.2e} at most"
            failures.append(f"log-probabilities of {what} {differ}, where {tolerated:.1e} is tolerated; {advice}")
    if not moved > 3 * limit:
        failures.append(f"new weights moved log-probabilities by {moved:.2e} only, which says nothing of the sync")

    everywhere = gather([f"{line} (rank {dist.get_rank()})" for line in failures])
    failed = "; ".join(chain.from_iterable(everywhere))
    need(not failed, f"self-test before the first step (--no-self-test trains all the same): {failed}")
    with_images = sum(len(p.images) > 0 for p in prompts)
    measured = ", of ".join(f"{what} {gap.mean():.1e}" for what, gap, *_ in checks)
    return (f"self-test: {len(prompts)} prompts ({with_images} with images) tokenised the same; |dlogp| of {measured} "
            f"(limit {limit:.1e}), which moved them by {moved:.1e}")
