"""Run by test_train.py under torchrun: one update on fixed rollouts, shared out over the ranks; saves loss and gradients.

    python -m torch.distributed.run --standalone --nproc-per-node N tests/parity_worker.py MODEL OUT.pt [flags of train.py]
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from PIL import Image  # noqa: E402

import grpo  # noqa: E402
import train  # noqa: E402
from model import Policy, load_hf, load_processor, shard  # noqa: E402
from rollout import Rollout  # noqa: E402
from utils import dist_setup, run_script  # noqa: E402


def main(_) -> None:
    torch.set_num_threads(1)
    model, out, *flags = sys.argv[1:]
    args = train.parse_args(["--model", model, "--data", "-", "--out", "-", "--steps", "1", *flags])
    ctx = dist_setup()
    processor = load_processor(model)
    rng = random.Random(0)

    # Six prompts with 0, 1 or 3 pictures, four ragged responses each. The first prompts are text only, so that with
    # --micro-tokens this small some rank has a micro-batch without pictures, and ranks differ in their number of them.
    rollouts = []
    for p, n_images in enumerate([0, 1, 0, 3, 0, 1]):
        images = [processor.image(f"{p}/{i}", Image.frombytes("RGB", (84, 56), rng.randbytes(84 * 56 * 3))) for i in range(n_images)]
        prompt = processor.encode([{"role": "user", "content": "<image>" * n_images + "What now? " * (p + 1)}], images)
        for g in range(4):
            response = [rng.randrange(250) for _ in range(rng.randint(1, 14))]
            rollouts.append(Rollout(f"p{p}", g, prompt + response, len(prompt), [True] * len(response),
                                    [-5.0] * len(response), images, "stop", "", advantage=rng.choice([-1.0, 0.5, 0.0, 2.0])))

    policy = Policy(load_hf(model), processor, args.freeze_vision)
    policy.train()
    if args.grad_checkpointing:
        policy.hf.gradient_checkpointing_enable({"use_reentrant": False})
    shard(policy, ctx.device, torch.float32)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.0)
    mine = [r for r in rollouts if int(r.uid[1:]) % ctx.world == ctx.rank]
    micros = train.pack_minibatch(mine, args, processor, ctx.device, grpo.flop_rates(policy.hf.config))
    args.max_grad_norm = 1e9  # the gradients themselves, unclipped
    metrics = train.update(policy, optimizer, [micros], args, ctx)
    gradients = {n: p.grad.full_tensor() for n, p in policy.named_parameters() if p.grad is not None}
    if ctx.main:
        torch.save({"metrics": metrics, "gradients": gradients, "micros": len(micros)}, out)


if __name__ == "__main__":
    run_script(main, lambda: None)
