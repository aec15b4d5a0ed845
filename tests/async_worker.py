"""train.py with an engine that samples in threads while the trainer computes, as servers do. Run by test_async.py.

The engine is HFEngine behind a lock. It waits a random time for each token, and a weight sync can come in the middle of
a response. Before the update of each step, OUT.RANK.jsonl gets a line: the uids of its groups by position in the data.
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

DELAY = float(os.environ.get("DELAY", "0.01"))  # maximum delay of a token, in seconds


class ThreadedEngine(HFEngine):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock = threading.RLock()
        self.sampled: dict[int, list[int]] = {}  # by id of a rollout: version of the weights that sampled each token

    def metrics(self):
        return {"servers_idle": 0.25}

    def load_weights(self, named_tensors):
        with self.lock:
            return super().load_weights(named_tensors)

    def _prefill_batch(self, *args):
        with self.lock:
            return super()._prefill_batch(*args)

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


def start_engine(servers, processor, dtype, ctx, should_stop, **kwargs):
    path = sys.argv[sys.argv.index("--model") + 1]
    return ThreadedEngine(load_hf(path, dtype), processor, ctx.device, should_stop=should_stop)


def plug_in_test_engine(module, flag):
    return SimpleNamespace(ServerEngine=start_engine) if module == "engines.server" else errors.plug_in(module, flag)


def record_groups(make_batch):
    def record_then_make_batch(pool, cfg, *args):
        first = pool.position - pool.batches_used
        uids: dict[int, list[str]] = {}
        for (number, _), group in pool.groups.items():
            uids.setdefault(first + number, []).append(group[0].prompt.uid)
        with Path(f"{cfg.run.out}.{pool.ctx.rank}.jsonl").open("a") as file:
            file.write(json.dumps(uids) + "\n")
        return make_batch(pool, cfg, *args)

    return record_then_make_batch


if __name__ == "__main__":
    engines.launch.plug_in = plug_in_test_engine
    train.check_engine = lambda *args: None
    train.server_kind = lambda *args: ""  # there is none to ask
    train.pack_batch = record_groups(train.pack_batch)
    run_script(train.main, train.parse_args)
