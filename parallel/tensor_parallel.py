"""Tensor parallelism (arXiv:1909.08053, section 3): of a group of neighbouring processes each computes some heads of
attention, some units of the MLPs, and the policy head of some tokens. All of a group get the same micro-batches, and
what is not divided (tower, experts, recurrent layers, norms) each of them computes whole, with the same result.

It is put on a policy from outside, by sharding.shard; the policy's own code does not know of it.
"""

from collections.abc import Callable, Iterable
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from errors import need
from kernels import rollout_bounds
from model import Policy, PolicyOutput
from packing import TokenBatch

COLUMN_PARALLEL = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
)  # linear layers of which each process has some outputs
ROW_PARALLEL = ("o_proj", "down_proj")  # and some inputs: what they give is summed over the group
HEAD_NORMS = ("q_norm", "k_norm")  # one weight for all heads, of which each process has some
PLACEMENTS = {  # of the parameters of such a layer; what is not named, each process has whole
    **dict.fromkeys(COLUMN_PARALLEL, {"weight": Shard(0), "bias": Shard(0), "lora_B": Shard(0)}),
    **dict.fromkeys(ROW_PARALLEL, {"weight": Shard(1), "lora_A": Shard(1)}),
    **dict.fromkeys(HEAD_NORMS, {}),
}


def check_tp(config: transformers.PreTrainedConfig, tp: int) -> None:
    """UserError where the language model cannot be divided by tp."""
    text = config.get_text_config()
    for name, what in (("num_key_value_heads", "key-value heads"), ("intermediate_size", "units of an MLP")):
        n = getattr(text, name, None) or tp
        need(n % tp == 0, f"--tp {tp}: the model's {n} {what} do not divide into so many parts; use a divisor of {n}")


def can_parallelize(module: nn.Module) -> bool:
    """Is this an attention layer or an MLP of layers that we know how to divide?"""
    names = {name.split(".")[0] for name, _ in module.named_parameters()}
    return bool(names & {*ROW_PARALLEL}) and names <= PLACEMENTS.keys()


def parallelize_blocks(policy: Policy, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> tuple[list, list]:
    """Divide a policy's language blocks and its head over the processes of a one-dimensional mesh, in place. Returns
    the modules that were divided, and the blocks' other modules that are large enough to be units of FSDP."""
    children = list(chain.from_iterable(block.children() for block in blocks))
    divided = [child for child in children if can_parallelize(child)]
    kinds = ", ".join(dict.fromkeys(type(child).__name__ for child in children))
    need(
        divided,
        f"--tp {mesh.size()}: of {kinds}, none is made of {', '.join(COLUMN_PARALLEL + ROW_PARALLEL)} alone; use 1",
    )
    for module in divided:
        parallelize_block_part(module, mesh)
    # mixtures of experts and recurrent layers; norms are too small
    whole = [child for child in children if child not in divided and any(p.ndim > 1 for p in child.parameters())]
    for module in whole:
        module.register_forward_hook(clone_views)
    parallelize_head(policy, mesh.get_group())
    return divided, whole


def clone_views(module: nn.Module, inputs: tuple, output: object) -> object:
    """FSDP warns of units that return a view; an operation on it in place would drop its hooks."""
    return output.clone() if getattr(output, "_base", None) is not None else output


# ----------------------------------------------------------------------------------------------------------------------
# Attention and MLPs


def parallelize_block_part(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give each process of the mesh its part of an attention layer or an MLP, in place. What goes in and comes out is
    whole, and the same on all processes: one sum of activations over them in the forward, one in the backward.

    Parameters become DTensors, so that FSDP and checkpoints know what they are parts of, but the forward computes
    with plain tensors. torch's parallelize_module and distribute_module compute with DTensors: each operation then
    costs a dispatch in Python, and for each new length of a micro-batch, that is for nearly all, placements are
    worked out anew. A small model took two to five times as long with them."""
    group = mesh.get_group()

    def sum_gradients(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (_AllReduceBackward.apply(args[0], group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _AllReduceBackward.apply(kwargs["hidden_states"], group)}

    module.register_forward_pre_hook(sum_gradients, with_kwargs=True)
    for name, layer in module.named_children():
        if name in PLACEMENTS:
            parallelize_linear(layer, name, mesh)
        if name in ROW_PARALLEL:
            layer.register_forward_hook(lambda _, inputs, output: _AllReduceForward.apply(output, group))


def parallelize_linear(layer: nn.Module, kind: str, mesh: DeviceMesh) -> None:
    """Its parameters become DTensors, and its forward computes with what this process has of them."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        # every process has read or drawn the same, so each takes its part without asking
        placements = [PLACEMENTS[kind].get(name, Replicate())]
        part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
    forward = layer.forward

    def locally(x: torch.Tensor) -> torch.Tensor:
        held = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
        for name, parameter in held.items():
            # what is held whole has met a part of the heads or units only: its gradients are still to be summed
            local = parameter.to_local(grad_placements=None if name in PLACEMENTS[kind] else [Partial()])
            once_each = kind in ROW_PARALLEL and name == "bias"  # and outputs are summed
            layer._parameters[name] = local / mesh.size() if once_each else local
        try:
            return forward(x)
        finally:
            layer._parameters.update(held)

    layer.forward = locally


class _AllReduceForward(torch.autograd.Function):
    """Over a group, in place. The gradient is the same on all of it already."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, factor: float = 1.0) -> torch.Tensor:
        ctx.factor = factor
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad * ctx.factor if ctx.factor != 1 else grad, None, None


class _AllReduceBackward(torch.autograd.Function):
    """What is the same on all of a group goes different ways there, and comes back as gradients to be summed."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup, factor: float = 1.0) -> torch.Tensor:
        ctx.group, ctx.factor = group, factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = (grad * ctx.factor).contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


# ----------------------------------------------------------------------------------------------------------------------
# The policy head


def parallelize_head(policy: Policy, group: dist.ProcessGroup) -> None:
    """Each process of the group computes log-probabilities, entropies and loss of some of the tokens, and all get
    all of them."""
    head = policy.apply_head
    size = group.size()

    def divided(hidden_KH, target_K, temperature, loss, tokens) -> PolicyOutput:  # as Policy.head
        # Gradients of the head itself are those of some tokens, and are divided by the size of the group as those of
        # all that each process has whole (sharding.shard). So they are multiplied by it, and what goes back to the
        # blocks is not.
        rows = local_rows(len(target_K), tokens, loss, group)
        hidden_RH = _AllReduceBackward.apply(hidden_KH, group, 1 / size)[rows]
        out = head(hidden_RH, target_K[rows], temperature, loss, None if tokens is None else tokens[rows])
        around = (rows.start, len(target_K) - rows.stop)
        logp_K = _AllReduceForward.apply(F.pad(out.logp_K, around), group, size)
        entropy_K = _AllReduceForward.apply(F.pad(out.entropy_K, around), group, size)
        total = None if out.loss is None else _AllReduceForward.apply(out.loss.clone(), group, size)
        return PolicyOutput(logp_K, entropy_K, total)

    policy.tp_group = group
    policy.apply_head = divided


def local_rows(n: int, tokens: TokenBatch | None, loss: Callable | None, group: dist.ProcessGroup) -> slice:
    """Return which of n tokens this process computes the head for: whole rollouts if the loss couples tokens."""
    per_token = loss is None or loss.per_token
    cuts = torch.tensor(range(n + 1) if per_token else rollout_bounds(tokens.rollout))
    wanted = torch.tensor([n * group.rank() // group.size(), n * (group.rank() + 1) // group.size()])
    start, stop = cuts[torch.searchsorted(cuts, wanted)].tolist()
    return slice(start, stop)
