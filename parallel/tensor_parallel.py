"""Tensor parallelism (arXiv:1909.08053, section 3): each process of a process group of neighbours computes some
attention heads, some units of the MLPs, and the policy head of some tokens. All processes of the group get the same
micro-batches. The rest (tower, experts, recurrent layers, norms) is computed in full on each, with the same result.

sharding.apply_fsdp applies it to a policy from outside; the policy's code does not depend on it.
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

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # linear layers divided by their outputs
ROW_PARALLEL = ("o_proj", "down_proj")  # divided by their inputs; outputs are summed over the process group
HEAD_NORMS = ("q_norm", "k_norm")  # one weight for all heads; each process has some of the heads
PLACEMENTS = {  # how a layer's parameters are divided; each process has those without an entry in full
    **dict.fromkeys(COLUMN_PARALLEL, {"weight": Shard(0), "bias": Shard(0), "lora_B": Shard(0)}),
    **dict.fromkeys(ROW_PARALLEL, {"weight": Shard(1), "lora_A": Shard(1)}),
    **dict.fromkeys(HEAD_NORMS, {}),
}


def check_tp(config: transformers.PreTrainedConfig, tp: int) -> None:
    """Raise UserError if the language model cannot be divided by `tp`."""
    text = config.get_text_config()
    for name, label in (("num_key_value_heads", "key-value heads"), ("intermediate_size", "units of an MLP")):
        n = getattr(text, name, None) or tp
        need(n % tp == 0, f"--tp {tp}: the model's {n} {label} cannot be divided by {tp}; use a divisor of {n}")


def can_parallelize(module: nn.Module) -> bool:
    """Return whether a module is an attention layer or an MLP whose linear layers can all be divided."""
    names = {name.split(".")[0] for name, _ in module.named_parameters()}
    return bool(names & {*ROW_PARALLEL}) and names <= PLACEMENTS.keys()


def parallelize_blocks(policy: Policy, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> tuple[list, list]:
    """Divide a policy's language blocks and its head over the processes of a one-dimensional mesh, in place. Return
    the modules that were divided and the blocks' other modules that are large enough to be FSDP units."""
    children = list(chain.from_iterable(block.children() for block in blocks))
    divided = [child for child in children if can_parallelize(child)]
    names = ", ".join(dict.fromkeys(type(child).__name__ for child in children))
    need(
        divided,
        f"--tp {mesh.size()}: none of {names} consists only of {', '.join(COLUMN_PARALLEL + ROW_PARALLEL)}; use --tp 1",
    )
    for module in divided:
        parallelize_block_part(module, mesh)
    # mixtures of experts and recurrent layers, but not norms, which are too small
    whole = [child for child in children if child not in divided and any(p.ndim > 1 for p in child.parameters())]
    for module in whole:
        module.register_forward_hook(clone_views)
    parallelize_head(policy, mesh.get_group())
    return divided, whole


def clone_views(module: nn.Module, inputs: tuple, output: object) -> object:
    """Return a copy of an output that is a view: FSDP warns of views, as in-place operations on them drop its hooks."""
    return output.clone() if getattr(output, "_base", None) is not None else output


# ----------------------------------------------------------------------------------------------------------------------
# Attention and MLPs


def parallelize_block_part(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give each process of the mesh its part of an attention layer or an MLP, in place. Inputs and outputs are whole
    and the same on all processes: activations are summed over them once in the forward and once in the backward.

    Parameters become DTensors, so that FSDP and checkpoints know which parts they are, but the forward computes with
    plain tensors. torch's parallelize_module and distribute_module compute with DTensors: each operation then costs a
    dispatch in Python, and for each new length of a micro-batch, that is for nearly all, placements are computed
    again. A small model took two to five times as long with them."""
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


def parallelize_linear(layer: nn.Module, layer_name: str, mesh: DeviceMesh) -> None:
    """Turn a layer's parameters into DTensors, and make its forward compute with this process's part of them."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        # every process has the same values, read or drawn, so each takes its part without communication
        placements = [PLACEMENTS[layer_name].get(name, Replicate())]
        part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
    forward = layer.forward

    def forward_local(x: torch.Tensor) -> torch.Tensor:
        parameters = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
        for name, parameter in parameters.items():
            # an undivided parameter is used for some of the heads or units only, so its gradients must still be summed
            local = parameter.to_local(grad_placements=None if name in PLACEMENTS[layer_name] else [Partial()])
            added_by_all = layer_name in ROW_PARALLEL and name == "bias"  # each process adds it before the sum
            layer._parameters[name] = local / mesh.size() if added_by_all else local
        try:
            return forward(x)
        finally:
            layer._parameters.update(parameters)

    layer.forward = forward_local


class _AllReduceForward(torch.autograd.Function):
    """An in-place all-reduce over a process group. Its gradient is not reduced: it is the same on all processes."""

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
    """An identity whose gradient is summed over a process group, as each process uses the same input differently."""

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
    """Divide the policy head, in place: each process of the group computes log-probabilities, entropies and loss of
    some of the tokens, and all processes get the results of all tokens."""
    head = policy.apply_head
    size = group.size()

    def apply_divided(hidden_KH, target_K, temperature, loss, tokens) -> PolicyOutput:  # replaces Policy.apply_head
        # The head's gradients here are those of some tokens. FSDP divides them by the size of the group, like those of
        # all undivided parameters (sharding.apply_fsdp), so they are multiplied by it here. Gradients that go back to
        # the blocks are not.
        rows = local_rows(len(target_K), tokens, loss, group)
        hidden_RH = _AllReduceBackward.apply(hidden_KH, group, 1 / size)[rows]
        out = head(hidden_RH, target_K[rows], temperature, loss, None if tokens is None else tokens[rows])
        padding = (rows.start, len(target_K) - rows.stop)
        logp_K = _AllReduceForward.apply(F.pad(out.logp_K, padding), group, size)
        entropy_K = _AllReduceForward.apply(F.pad(out.entropy_K, padding), group, size)
        total = None if out.loss is None else _AllReduceForward.apply(out.loss.clone(), group, size)
        return PolicyOutput(logp_K, entropy_K, total)

    policy.tp_group = group
    policy.apply_head = apply_divided


def local_rows(n: int, tokens: TokenBatch | None, loss: Callable | None, group: dist.ProcessGroup) -> slice:
    """Return which of n tokens this process computes the head for: whole rollouts if the loss couples tokens."""
    per_token = loss is None or loss.per_token
    bounds = torch.tensor(range(n + 1) if per_token else rollout_bounds(tokens.rollout))
    even_split = torch.tensor([n * group.rank() // group.size(), n * (group.rank() + 1) // group.size()])
    start, stop = bounds[torch.searchsorted(bounds, even_split)].tolist()
    return slice(start, stop)
