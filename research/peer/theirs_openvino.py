"""OpenVINO GenAI's pipeline with continuous batching, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

from peer.worker import Done, Job, Settings, serve

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
CACHE_GB = 2
"""Of keys and values: 32 sequences of 512 tokens of the pair in float32 take 1.4."""


def start(settings: Settings) -> Callable[[Job], Done]:
    from openvino import Tensor
    from openvino_genai import (
        ContinuousBatchingPipeline,
        GenerationConfig,
        SchedulerConfig,
        draft_model,
    )
    from transformers import AutoTokenizer

    precision = PRECISIONS[settings.dtype]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": settings.num_threads,
    }
    scheduler = SchedulerConfig()
    scheduler.max_num_seqs = settings.max_sequences
    scheduler.max_num_batched_tokens = settings.max_sequences * settings.max_context_len
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = False
    draft = {"draft_model": draft_model(settings.draft, "CPU", **properties)} if settings.k else {}
    pipeline = ContinuousBatchingPipeline(
        settings.target, scheduler, "CPU", {**properties, **draft}
    )
    tokenizer = AutoTokenizer.from_pretrained(settings.target, trust_remote_code=False)
    speculation = {"num_assistant_tokens": settings.k} if settings.k else {}

    def run(job: Job) -> Done:
        generation = GenerationConfig(
            max_new_tokens=job.max_tokens, ignore_eos=True, do_sample=False, **speculation
        )
        start_s = time.perf_counter()
        # As on the other sides, texts to tokens and tokens to texts are in the time.
        inputs = [Tensor(tokenizer(text, return_tensors="np")["input_ids"]) for text in job.prompts]
        results = pipeline.generate(inputs, [generation] * len(inputs))
        answers = [result.m_generation_ids[0] for result in results]
        texts = [str(tokenizer.decode(one, skip_special_tokens=True)) for one in answers]
        seconds = time.perf_counter() - start_s
        return Done(seconds, sum(map(len, answers)), texts)

    return run


if __name__ == "__main__":
    serve(start)
