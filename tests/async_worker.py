"""train.py with an engine that samples in threads while the trainer computes, as servers do: transformers behind a
lock, each token after a random delay, new weights in the middle of responses. Run by test_async.py.

OUT.RANK.jsonl gets a line for each step, before its update: the uids of its groups by their position in the data.
"""

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import engines.launch  # noqa: E402
import errors  # noqa: E402
import train  # noqa: E402
from engines.hf import HFEngine  # noqa: E402
from model import load_hf  # noqa: E402
from utils import run_script  # noqa: E402

DELAY = float(os.environ.get("DELAY", "0.01"))  # seconds a token, at most


class StandIn(HFEngine):
    def __init__(self, *of, **more):
        super().__init__(*of, **more)
        self.lock = threading.RLock()
        self.sampled: dict[int, list[int]] = {}  # by id of a rollout: which weights sampled its tokens

    def metrics(self):
        return {"servers_idle": 0.25}

    def load_weights(self, named_tensors):
        with self.lock:
            return super().load_weights(named_tensors)

    def _prefill_batch(self, *of):
        with self.lock:
            return super()._prefill_batch(*of)

    def _decode_step(self, batch, responses, sampling, head_HV):
        time.sleep(DELAY * random.random())
        with self.lock:
            rollouts = [batch.rows[b].rollout for b in batch.active_rows]
            for r in rollouts:
                self.sampled.setdefault(id(r), []).append(self.weights_version)
            super()._decode_step(batch, responses, sampling, head_HV)
            for r in rollouts:
                if r.ended_by:
                    r.versions = self.sampled.pop(id(r))


def stand_in(servers, processor, dtype, ctx, should_stop, **more):
    path = sys.argv[sys.argv.index("--model") + 1]
    return StandIn(load_hf(path, dtype), processor, ctx.device, should_stop=should_stop)


def plug_in_stand_in(module, flag):
    return SimpleNamespace(ServerEngine=stand_in) if module == "engines.server" else errors.plug_in(module, flag)


def recording(make_batch):
    def recorded(pool, cfg, *more):
        first = pool.position - pool.batches_used
        uids: dict[int, list[str]] = {}
        for (number, _), group in pool.groups.items():
            uids.setdefault(first + number, []).append(group[0].prompt.uid)
        with Path(f"{cfg.run.out}.{pool.ctx.rank}.jsonl").open("a") as file:
            file.write(json.dumps(uids) + "\n")
        return make_batch(pool, cfg, *more)

    return recorded


if __name__ == "__main__":
    engines.launch.plug_in = plug_in_stand_in
    train.check_engine = lambda *of: None
    train.pack_batch = recording(train.pack_batch)
    run_script(train.main, train.parse_args)
