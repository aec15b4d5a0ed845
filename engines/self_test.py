"""The self-test before the first step: do engine and trainer compute the same function of a prompt, weights and tokens?

Differences between two implementations of a model are silent: images expanded to another number of tokens, positions
counted in another way, samples of a packed batch that see each other, weights sent under a name that nobody reads.
Training then runs, but learns less. This file measures each of these on real prompts, and a run that fails does not
start. The test has no side effects: metrics are bit for bit the same without it. (Another check before the first step,
parallel.models.probe_memory, tries whether the fullest micro-batch fits in the GPU's memory.)
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
from rollout import Engine, ExampleList, Prompt, ResetFn, Rollout, SamplingParams, identity, make_prompts
from utils import derive_seed, gather

# TOLERANCE limits the mean |difference| of a token's log-probability between engine and trainer, in nats. In fp32 the
# difference is only rounding, about 1e-7, and any mistake is far above this; in bfloat16, rounding alone gives up to
# 0.02. A confident policy hides mistakes, because its log-probabilities are near 0 whatever is wrong. All other checks
# are therefore made with perturbed weights, whose policy is unsure, and compared with the effect of rounding on the
# same log-probabilities (see `with_rounding_noise`): other implementations of the same function differ by at most LIMIT
# times as much. benchmarks/self_test.py measures both sides.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
LIMIT = 2.2
FLOOR = 1e-4  # in nats; smaller differences do not matter
# No token may differ by more than this times the limit of the mean. Speculative decoding with vLLM 0.32's CPU build
# returns wrong log-probabilities for a few tokens in a hundred, which a mean in bfloat16 could hide
OUTLIER = 100
SAMPLES_PER_PROMPT = 4
NEW_TOKENS = 16  # per sample; with a lower --max-new-tokens there are more samples
# The perturbation adds noise to every STRIDE-th element of a tensor (STRIDE is a prime, so no row or column is left
# out), so that the tensor changes by a fraction PERTURBATION of its norm. Very small tensors, such as a bias of zeros,
# a new adapter or a layer of a toy model, are treated as if they had a size that matters: 1 for a vector, 2 for a table
# of positions, and for a matrix the size that preserves the norm of its input. The fraction is 2 PERTURBATION in the
# vision tower, because the compared tokens only attend to the tower's tokens; 4 PERTURBATION for adapters, whose low
# rank changes few directions; and 3 PERTURBATION for adapters in the tower. With less, a trained policy stays sure of
# its answers. With more, the tower becomes chaotic: rounding has as much effect as a missing tensor. To undo the
# perturbation, 1 / STRIDE of the trained elements are copied.
PERTURBATION = 0.5
STRIDE = 31

ENGINE_HINT = "try --rollout hf, another --attn, --dtype float32, or the versions of requirements.txt"
NOT_SENT = "the weight sync does not update all weights, or the engine computes another function"
UNKNOWN_FAMILY = "this model does not behave like its family in model.FAMILIES"


def select_prompts(examples: ExampleList, max_tokens: int, copies: int) -> list[int]:
    """Return the indices of up to five different prompts that fit together in a micro-batch of `max_tokens` tokens: the
    one with the most images, the shortest with a video, the shortest without either, the shortest and the longest.
    `copies`: how often a prompt is packed."""
    lengths = examples.lengths
    order = sorted(range(len(examples)), key=lambda i: lengths[i])
    candidates = [max(order, key=lambda i: (len(examples[i].images), -lengths[i]))]
    candidates += [i for i in order if examples[i].videos][:1]
    candidates += [i for i in order if not examples[i].images and not examples[i].videos][:1] + [order[0], order[-1]]
    selected = []
    for i in dict.fromkeys(candidates):
        n_tokens = copies * lengths[i] + SAMPLES_PER_PROMPT * NEW_TOKENS
        if not selected or n_tokens <= max_tokens:
            selected.append(i)
            max_tokens -= n_tokens
    return selected


def trainer_logprobs(policy: Policy, packer: Packer, rollouts: Sequence[Rollout], temperature: float) -> torch.Tensor:
    """Return the trainer's log-probabilities of the responses' tokens, in the order of the rollouts, which are packed
    together."""
    logp_N = torch.zeros(sum(len(r.response) for r in rollouts))
    for micro in packer.pack(rollouts):  # a single one, unless the copies of one prompt do not fit
        logp_N[micro.token_index_K] = policy(micro, temperature).logp_K.float().cpu()
    return logp_N


def shard_index(parameter: torch.Tensor) -> list[int]:
    """Return the index of this rank's shard along each mesh dimension that shards the tensor."""
    if not isinstance(parameter, DTensor):
        return []
    dimensions = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return [index for index, placement in dimensions if placement.is_shard()]


@contextmanager
def perturb_weights(policy: Policy) -> Iterator[None]:
    """Within the context, add noise to every trained tensor; afterwards, restore it to the last bit. The noise depends
    only on the tensor's name and shard index, so all ranks that have a copy of a shard change it in the same way."""
    reshard(policy)
    originals, tower = [], f"hf.{policy.hf.family.vision}."
    scales = {f"{name}.lora_B": layer.scale for name, layer in find_lora_layers(policy).items()}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and not name.startswith("value_head."):  # engines have no value head
            values = local_shard(parameter.detach())
            stride = STRIDE if values.numel() > 100 * STRIDE else 1
            elements = values.view(-1)[::stride]
            originals.append((elements, elements.clone()))
            seed = derive_seed("nudge", name, *shard_index(parameter))
            noise = torch.randn(len(elements), generator=torch.Generator().manual_seed(seed))
            is_table = name.endswith("pos_embed.weight")
            min_size = 1.0 if parameter.dim() == 1 else 2.0 if is_table else parameter.shape[-1] ** -0.5
            size = max(min_size, elements.float().square().mean().sqrt().item())
            size /= max(1.0, scales.get(name, 0.0))  # an adapter's output is multiplied by its scale
            in_tower, is_adapter = name.startswith(tower), ".lora_" in name
            fraction = PERTURBATION * ((3 if in_tower else 4) if is_adapter else 2 if in_tower else 1)
            elements += (fraction * stride**0.5 * size * noise).to(elements)
    try:
        yield
    finally:
        reshard(policy)
        for elements, original in originals:
            elements.copy_(original)


@contextmanager
def with_rounding_noise(policy: Policy) -> Iterator[None]:
    """Within the context, change the output of each block of the vision tower and the language model at random, by up
    to the dtype's unit roundoff. All later operations then round differently too, so log-probabilities change by as
    much as with another implementation of the same function."""
    generator, family = torch.Generator().manual_seed(0), policy.hf.family

    def round_again(block: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        noise = (torch.rand(output.shape, generator=generator) - 0.5).to(output.device)
        return (output.float() * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    blocks = [*policy.hf.get_submodule(f"{family.language}.{family.blocks}")]
    # Run the blocks uncompiled here: compiled ones (--compile) would not call the hooks of the layers inside them
    compiled = {block: vars(block).pop("forward") for block in blocks if "forward" in vars(block)}
    blocks += policy.visual[0].get_submodule(family.vision_blocks)
    blocks += find_lora_layers(policy.hf).values()  # engines merge adapters, which rounds too
    hooks = [block.register_forward_hook(round_again) for block in blocks]
    cache, policy.cache = policy.cache, None  # its image features have no such noise
    try:
        yield
    finally:
        policy.cache = cache
        for block, forward in compiled.items():
            block.forward = forward
        for hook in hooks:
            hook.remove()


def check_lengths(prompts: Sequence[Prompt], lengths: Sequence[int]) -> list[str]:
    """Return an error if a prompt lacks tokens that its row has, such as those of its images."""
    for prompt, n in zip(prompts, lengths, strict=True):
        if len(prompt.token_ids) != n:
            return [f"the prompt of example {prompt.uid!r} has {len(prompt.token_ids)} tokens, but its row has {n}: "
                    "images are lost, or the environment's reset depends on chance"]  # fmt: skip
    return []


def check_mrope_positions(policy: Policy, prompts: Sequence[Prompt]) -> list[str]:
    """Return an error if the M-RoPE positions of a prompt with images differ from transformers'. (Positions of text are
    just a count.)"""
    with_images = [prompt for prompt in prompts if prompt.images and hasattr(policy.hf.model, "get_rope_index")]
    for prompt in with_images:
        ids = torch.tensor([prompt.token_ids])
        grids = [part.grid_thw for image in prompt.images for part in image.parts]
        if max(t for t, _, _ in grids) > 1:
            continue  # transformers' positions after such videos are wrong, docs/silent_failures.md
        types = (ids == policy.image_token_id).int()
        expected, _ = policy.hf.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=torch.tensor(grids))
        positions = model.mrope_positions(prompt.token_ids, prompt.images, policy.image_token_id, policy.merge_size)
        wrong = (positions != expected[:, 0].to(positions)).any(0)
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
    reset_fn: ResetFn = identity,
) -> str:
    """Compare engine and trainer, and return a line with the measured differences. Raise UserError on all ranks, with
    all differences that are too large. Every rank does the same work on the same prompts, so that collectives match."""
    new_tokens, seed = min(NEW_TOKENS, sampling.max_new_tokens), derive_seed(sampling.seed, "self-test")
    samples = SAMPLES_PER_PROMPT * (NEW_TOKENS // new_tokens)  # a mean over few tokens is noisy
    selected = select_prompts(examples, packer.max_tokens, 1 if packer.share else samples)
    prompts = make_prompts([examples[i] for i in selected], processor, reset_fn=reset_fn)
    sampling = replace(sampling, max_new_tokens=new_tokens, seed=seed)
    compute = partial(trainer_logprobs, policy, packer, temperature=sampling.temperature)

    def sync() -> None:
        engine.sync(partial(FullParameters, policy, dtype=engine.dtype))

    def sample() -> tuple[list[Rollout], torch.Tensor, torch.Tensor]:
        """Return rollouts and the log-probabilities of their tokens from the engine, and from the trainer, which
        computes one rollout at a time."""
        rollouts = engine.generate(prompts, samples, sampling)
        if policy.tp_group is not None:  # tensor-parallel ranks compute together, so they need the same samples
            dist.broadcast_object_list(rollouts, group=policy.tp_group, group_src=0)
        engine_logp = torch.cat([torch.tensor(r.logprobs) for r in rollouts])
        return rollouts, engine_logp, torch.cat([compute([r]) for r in rollouts])

    rollouts, engine_logp, trainer_logp = sample()
    unperturbed = (engine_logp - trainer_logp).abs()
    with perturb_weights(policy):
        engine.sleep()  # as before each update, so that weights that are lost in the sleep are found below
        sync()
        rollouts, engine_logp, trainer_logp = sample()
        synced = (engine_logp - trainer_logp).abs()
        if engine.expert_layers:  # the other checks are without
            rollouts = [replace(r, experts=[], separate_turns=[turn._replace(experts=()) for turn in r.separate_turns])
                        for r in rollouts]
            trainer_logp = torch.cat([compute([r]) for r in rollouts])
        plain_logp = [policy.unpacked_logprobs(r.prompt, r.response, sampling.temperature).cpu() for r in rollouts]
        packed_logp = compute(rollouts)
        with with_rounding_noise(policy):
            rounding = (compute(rollouts) - packed_logp).abs()
    sync()
    # engine and trainer share some code, so transformers' own forward checks positions, embeddings and attention masks
    plain, packed = ((logp - trainer_logp).abs() for logp in (torch.cat(plain_logp), packed_logp))
    moved = (compute(rollouts) - packed_logp).abs().mean()

    limit = FLOOR + LIMIT * rounding.mean().item()
    checks = (
        (f"engine ({type(engine).__name__}) and trainer", unperturbed, TOLERANCE[engine.dtype], ENGINE_HINT),
        ("the trainer and transformers' own forward", plain, limit, UNKNOWN_FAMILY),
        ("packed and separate samples", packed, limit, f"try another --attn than {policy.attention}"),
        ("engine and trainer under new weights", synced, limit, f"{NOT_SENT}; {ENGINE_HINT}"),
    )
    failures = check_lengths(prompts, [examples.lengths[i] for i in selected]) + check_mrope_positions(policy, prompts)
    for what, gap, tolerance, advice in checks:
        if not (gap.mean() <= tolerance and gap.max() <= OUTLIER * tolerance):  # also fails for NaN
            differ = f"differ by {gap.mean():.2e} nats per token on average, {gap.max():.2e} at most"
            failures.append(f"log-probabilities of {what} {differ}, but the limit of the average is {tolerance:.1e}; "
                            f"{advice}")
    if not moved > 3 * limit:
        failures.append(f"new weights moved log-probabilities by only {moved:.2e}, too little to check the sync")

    gathered = gather([f"{line} (rank {dist.get_rank()})" for line in failures])
    message = "; ".join(chain.from_iterable(gathered))
    need(not message, f"self-test before the first step (--no-self-test skips it): {message}")
    with_images = sum(len(p.images) > 0 for p in prompts)
    lines = [f"self-test: {len(prompts)} prompts ({with_images} with images or videos) tokenized the same; "
             "mean |dlogp| of"]
    lines += [f"  {what}: {gap.mean():.1e} (limit {tolerance:.1e})" for what, gap, tolerance, _ in checks]
    return "\n".join([*lines, f"  new weights moved log-probabilities by {moved:.1e}; self-test passed"])
