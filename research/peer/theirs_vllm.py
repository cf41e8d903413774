"""vLLM's CPU build, its engine in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

from peer.worker import Done, Job, Settings, serve


def start(settings: Settings) -> Callable[[Job], Done]:
    from vllm import LLM, SamplingParams

    speculative = (
        {"method": "draft_model", "model": settings.draft, "num_speculative_tokens": settings.k}
        if settings.k
        else None
    )
    llm = LLM(
        model=settings.target,
        dtype=settings.dtype,
        max_model_len=settings.max_context_len,
        max_num_seqs=settings.max_sequences,
        enable_prefix_caching=False,
        speculative_config=speculative,
        seed=0,
    )

    def run(job: Job) -> Done:
        sampling = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        start_s = time.perf_counter()
        outputs = llm.generate(list(job.prompts), sampling, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        answers = [output.outputs[0] for output in outputs]
        return Done(
            seconds, sum(len(one.token_ids) for one in answers), [one.text for one in answers]
        )

    return run


if __name__ == "__main__":
    serve(start)
