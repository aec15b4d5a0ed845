"""Run by test_train.py under torchrun: one update on fixed rollouts, shared out over the ranks; saves losses and gradients.

    python -m torch.distributed.run --standalone --nproc-per-node N tests/parity_worker.py MODEL OUT.pt [flags of train.py]

Further cases follow a "/", each with flags of its own; OUT.pt then holds one result for each. A flag `float64` has all of
them computed in double precision.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

import grpo  # noqa: E402
import train  # noqa: E402
from model import AdaptersOff, Critic, Lora, Policy, add_lora, load_hf, load_processor, lora_layers  # noqa: E402
from rollout import Rollout  # noqa: E402
from sharding import full, lora_of, shard  # noqa: E402
from utils import Context, dist_setup, from_peers, run_script  # noqa: E402


def rollouts_of(processor, group_size: int) -> list[Rollout]:
    """Six prompts with 0, 1 or 3 pictures, ragged responses. The first prompts are text only, so that with --micro-tokens this
    small some rank has a micro-batch without pictures, and ranks differ in their number of them."""
    rng = random.Random(0)
    rollouts = []
    for p, n_images in enumerate([0, 1, 0, 3, 0, 1]):
        images = [processor.image(f"{p}/{i}", Image.frombytes("RGB", (84, 56), rng.randbytes(84 * 56 * 3))) for i in range(n_images)]
        prompt = processor.encode([{"role": "user", "content": "<image>" * n_images + "What now? " * (p + 1)}], images)
        for g in range(group_size):
            response = [rng.randrange(250) for _ in range(rng.randint(1, 14))]
            rollouts.append(Rollout(f"p{p}", g, prompt + response, len(prompt), [True] * len(response),
                                    [-5.0] * len(response), images, "stop", "", {"reward": rng.choice([0.0, 0.3, 1.0]) if p else 0.3}))
            # near the toy's own, so that some ratios are clipped; where an update scores its rollouts this is replaced
            rollouts[-1].columns["old_logp"] = [-6.1 + rng.uniform(-0.6, 0.6) for _ in response]
    return rollouts


def shaken(model: torch.nn.Module, size: float) -> torch.nn.Module:
    """With noise on the weights of the head, the same on every rank: a reference that differs, values that are not all 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def assert_equal_copies(model: Policy) -> None:
    """What each peer has whole has the same gradient on all, to the last bit: there is nothing that would bring them together."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and model.peers and parameter.device_mesh.mesh_dim_names[-1] == "tp":
            if parameter.placements[-1].is_replicate():
                mine = parameter.grad.to_local().contiguous()
                first = mine.clone()
                torch.distributed.broadcast(first, group=model.peers, group_src=0)
                assert torch.equal(first, mine), name


SINGLE, DOUBLE = (torch.float32, torch.Tensor.float), (torch.float64, torch.Tensor.double)


def one_case(model: str, flags: list[str], double: bool) -> dict:
    args = train.parse_args(["--model", model, "--data", "-", "--out", "-", "--steps", "1", "--group-size", "4", *flags])
    args.max_grad_norm = 1e9  # the gradients themselves, unclipped
    ctx = Context(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    if ctx.world == 1:  # what others are compared with
        args.replicate = args.tp = 1
    processor = load_processor(model)
    lora, frozen = lora_of(vars(args)), args.freeze_vision and not args.lora_vision

    def load(lora: Lora | None = lora) -> torch.nn.Module:
        torch.float32, torch.Tensor.float = SINGLE
        hf = load_hf(model)
        if lora:  # B starts at 0, and then A has no gradient
            for layer in lora_layers(add_lora(hf, lora)).values():
                torch.nn.init.constant_(layer.lora_B, 0.01)
        if double:  # what asks for single precision by name gets double
            hf = hf.double()
            if "moe" in hf.config.model_type:
                hf.set_experts_implementation("eager")  # the grouped product knows no float64
            torch.float32, torch.Tensor.float = DOUBLE
        return hf

    models = {"policy": Policy(load(), processor, frozen, value_head=args.adv == "gae" and args.critic == "head",
                               freeze_merger=args.freeze_merger)}
    if args.adv == "gae" and args.critic == "separate":
        models["critic"] = Critic(load(), processor, frozen)
    if args.kl_coef > 0 and not lora:
        models["reference"] = Policy(shaken(load(None), 0.01), processor).requires_grad_(False)
    optimizers = {}
    for name, m in models.items():
        if hasattr(m, "value_head"):
            shaken(m.value_head.to(torch.float32), 0.1)
        m.train()
        if args.grad_checkpointing:
            m.hf.gradient_checkpointing_enable({"use_reentrant": False})
        shard(m, ctx.device, torch.float32, frozen=name == "reference", replicate=args.replicate, tp=args.tp)
        trained = [p for p in m.parameters() if p.requires_grad]
        optimizers[name] = torch.optim.SGD(trained, lr=0.0) if trained else None
    policy, critic, reference = (models.get(name) for name in ("policy", "critic", "reference"))
    if lora and args.kl_coef > 0:
        reference = AdaptersOff(policy)

    mine = [r for r in rollouts_of(processor, args.group_size) if int(r.uid[1:]) % ctx.world == ctx.rank]
    [mine] = from_peers([mine], policy.peers)
    pack = lambda: train.pack_minibatch(mine, args, processor, ctx.device, grpo.flop_rates(policy.hf.config))  # noqa: E731
    micros = []
    if train.scores_first(args):
        micros = pack()
        train.score([micros], args, policy, reference, critic)
    metrics = train.set_advantages(mine, args, args.kl_coef)
    for micro in micros:
        for name in ("advantage", "return") if args.adv == "gae" else ("advantage",):
            micro.take(name)
    micros = micros or pack()
    torch.manual_seed(train.dropout_seed(args, 0, ctx.rank))
    metrics |= train.update(policy, optimizers["policy"], [micros], args, ctx, args.kl_coef, reference, critic, optimizers.get("critic"))
    for m in models.values():
        assert_equal_copies(m)
    pictures: list[list[int]] = [[]] * ctx.world
    torch.distributed.all_gather_object(pictures, [len(micro.images) for micro in micros])
    gradients = {f"{name}.{n}": full(p.grad) for name, m in models.items() for n, p in m.named_parameters() if p.grad is not None}
    return {"metrics": metrics, "gradients": gradients, "micros": len(micros), "pictures": pictures}


def main(_) -> None:
    torch.set_num_threads(1)
    model, out, *flags = sys.argv[1:]
    double = "float64" in flags
    flags = [flag for flag in flags if flag != "float64"]
    ctx, cases = dist_setup(), [[]]
    for flag in flags:
        if flag == "/":
            cases.append([])
        else:
            cases[-1].append(flag)
    results = [one_case(model, case, double) for case in cases]
    if ctx.main:
        torch.save(results, out)


if __name__ == "__main__":
    run_script(main, lambda: None)
