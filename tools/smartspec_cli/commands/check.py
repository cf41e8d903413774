"""`smartspec check`: checks whether speculation changes the text of this pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

import typer
from rich.table import Table

from smartspec_bench.exactness import (
    COUNTS,
    NO_SPECULATION,
    CheckArm,
    CheckError,
    CheckReport,
    check_pair_exactness,
    force_drafting,
    reference,
)
from smartspec_bench.progress import Progress
from smartspec_bench.prompts import MIXED, chat_template, generated
from smartspec_cli.commands import (
    JsonFile,
    check_outputs,
    fail,
    result_console,
    table,
    write_json,
)
from smartspec_cli.commands.settings import (
    Changes,
    Config,
    Draft,
    Heads,
    Lora,
    Model,
    engine_of,
    numbers_of,
    parsed,
    server_config,
)
from smartspec_gateway.openai.formats.call_grammar import CallFormat, Function, call_grammar
from smartspec_launch.gateway import adapter_names, tokenizer_dir
from smartspec_py.api.inputs import GenerateParams
from smartspec_py.config import LocalEngineConfig, ServerConfig
from smartspec_py.core.types import GuideType
from smartspec_py.serving.request import RequestError
from smartspec_testing.local import serving

MAX_TOKENS = 64
CONTEXT_LEN, NUM_ROWS = 512, 8
LIMITS = {
    "max_sequences": NUM_ROWS,
    "max_queue": 4096,
    "max_context_len": CONTEXT_LEN,
    "max_cache_tokens": 2 * NUM_ROWS * CONTEXT_LEN // 5,  # causes preemptions in mixed batches
    "profile_s": 0.0,  # the check plans with constant costs
}
NUM_SHOWN = 5

MOST_BY_ROUNDING = 1e-3
"""A log-probability in float32 differs at most so much from that of a merged model. The largest
difference that was seen is 6e-5."""

PENALTIES: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 40, "top_p": 0.95},
    {"repetition_penalty": 1.2, "min_p": 0.02},
    {"presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 24},
    {"bias_words": (" the",), "bias_weights": (-2.0,), "bad_words": ("and",)},
    {"stop_words": (" of", "?")},
)
"""Request fields besides temperature. The requests use these sets in turn."""

PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["city", "river"]},
        "number": {"type": "integer"},
    },
    "required": ["name", "kind"],
}
FUNCTIONS: list[Function] = [("find_place", PLACE), ("current_time", None)]
"""Functions of which the guided requests must call one or more."""


def check(
    model: Model = None,
    draft: Draft = None,
    heads: Heads = None,
    lora: Lora = None,
    config: Config = None,
    settings: Changes = None,
    tokens: Annotated[
        int, typer.Option(help="Number of tokens to compare, at least.", min=1)
    ] = 12_000,
    temperatures: Annotated[
        str, typer.Option(help="Sampling temperatures, separated by commas.")
    ] = "0,0.7,1.0",
    prompts: Annotated[int, typer.Option(help="Prompts per workload.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Compare the text of every policy and proposer with that of no speculation.

    Each request runs alone and in mixed batches, together with requests that are cancelled and
    preempted. Draft lengths are 1, 3 and limits.max_draft_len. Policies that choose by cost get a
    cost model with almost free drafts, so that they draft. With OpenVINO, no text may differ, and
    no bit of a token's log-probability. With PyTorch in float32, no text may differ. With PyTorch
    in lower precision, rounding can change a text where two tokens are almost equally likely. The
    check of a small pair takes a few minutes.

    Some requests are guided: their text is a tool call in the model's format, as with the
    `tool_choice` `required`.

    With LoRA adapters, the requests have none and each adapter in turn. Log-probabilities of their
    texts are compared with those of the merged model, which PyTorch computes in float32.

    Prints PASS (exit code 0) or FAIL (1): a text or, with OpenVINO, a bit differs, a policy drafted
    nothing, or in float32 an adapter differs from its merged model by more than rounding.
    """
    check_outputs(json=json_file)
    checked = server_config(model, draft, heads, config, settings, lora=lora, limits=LIMITS)
    folder = tokenizer_dir(checked)
    template = parsed("model", chat_template, folder)
    adapters = (None, *adapter_names(checked))
    num_texts = max(4 * prompts, len(adapters))
    texts = [one.text for one in islice(generated(MIXED, seed, template), num_texts)]
    chosen = numbers_of(temperatures, "temperatures", 0, 100)
    from smartspec_gateway.openai.formats.prompts import Prompts  # imports Transformers

    call_format = Prompts(folder).call_format if folder else CallFormat.HERMES
    requests = _requests(texts, chosen, seed, adapters, call_format)
    reports, merged, facts = _run(checked, requests, tokens)
    console = result_console(json_file)
    compares_bits = str(facts.get("runtime")).startswith("OpenVINO")
    is_exact = facts.get("runtime") in ("OpenVINO", "PyTorch") and facts.get("dtype") == "float32"
    summary = {"engine": dict(facts), **_summary(reports, compares_bits, merged, is_exact)}
    console.print(_table(reports, summary))
    for one in summary["divergences"][:NUM_SHOWN]:
        where = f"{one['arm']}, {one['mode']}: token {one['index']}"
        console.print(f"{where} is {one['found']} instead of {one['expected']}", highlight=False)
    for name, difference in merged.items():
        text = f"adapter {name}: log-probabilities are those of the merged model within"
        console.print(f"{text} {difference:.1e}", highlight=False)
    console.print(_verdict_line(summary), style="bold", highlight=False, soft_wrap=True)
    write_json(json_file, summary)
    raise typer.Exit(0 if summary["verdict"] == "PASS" else 1)


def _requests(
    texts: Sequence[str],
    temperatures: Sequence[float],
    seed: int,
    adapters: Sequence[str | None] = (None,),
    call_format: CallFormat = CallFormat.HERMES,
) -> list[GenerateParams]:
    """A request for each text and temperature, and a guided one for each fourth text."""
    grammar = call_grammar(FUNCTIONS, call_format, may_repeat=True)
    guided = {"guide_type": GuideType.EBNF_GRAMMAR, "guide": grammar}
    chosen = [
        *((index, PENALTIES[index % len(PENALTIES)]) for index in range(len(texts))),
        *((index, guided) for index in range(0, len(texts), 4)),
    ]
    return [
        GenerateParams(
            text=texts[index],
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seed=seed + index,
            return_log_probs=True,
            adapter=adapters[index % len(adapters)],
            **fields,
        )
        for index, fields in chosen
        for temperature in temperatures
    ]


def _arms(max_draft_len: int, names: Sequence[str]) -> list[CheckArm]:
    """names: the proposers. With several proposers, one arm leaves the choice to the planner."""
    lengths = sorted({1, min(3, max_draft_len), max_draft_len})
    return [
        CheckArm("none"),
        *(CheckArm(f"fixed:{k}", name) for name in names for k in lengths),
        *(CheckArm("goodput", name) for name in names),
        *([CheckArm("goodput")] if len(names) > 1 else []),
    ]


def _run(
    config: ServerConfig, requests: Sequence[GenerateParams], tokens: int
) -> tuple[list[CheckReport], dict[str, float], Mapping[str, object]]:
    """The reports; by adapter the difference to its merged model; and model, dtype, runtime and
    threads of the engine."""
    merged: dict[str, float] = {}
    with Progress("loading models") as shown:
        engine = engine_of(config)
        arms = _arms(config.limits.max_draft_len, list(engine.proposers))
        with serving(engine, config) as server:
            force_drafting(server, config)
            try:
                if not server.has_grammars:
                    requests = [one for one in requests if one.guide_type is None]
                shown.update("reference without speculation")
                cases = reference(server, requests)
                reports = check_pair_exactness(server, cases, arms, tokens, shown.update)
            except (CheckError, RequestError) as error:
                fail(str(error))
        if isinstance(config.engine, LocalEngineConfig) and config.engine.lora:
            from smartspec_bench.merged import merged_differences

            shown.update("comparing adapters with merged models")
            merged = merged_differences(config.engine, engine, cases)
    return reports, merged, engine.facts


def _table(reports: Sequence[CheckReport], summary: Mapping[str, Any]) -> Table:
    counts = ("tokens", "drafted", "accepted", "cached", "bits")
    rows = []
    for one in reports:
        policy, _, proposer = one.arm.partition(", ")
        numbers = (*(one.counts[name] for name in counts), len(one.divergences))
        rows.append((policy, proposer, one.mode, *map(str, numbers)))
    return table(
        "Tokens with speculation compared with tokens without",
        ("policy", "proposer", "mode", *counts, "texts"),
        rows,
        "cached: prompt tokens served from the prefix cache; bits: tokens of equal texts with "
        "other bits of their log-probability; texts: that differ. There were also "
        f"{summary['num_cancelled']} cancelled requests and {summary['num_preemptions']} "
        "preemptions.",
        num_texts=3,
    )


def _summary(
    reports: Sequence[CheckReport],
    compares_bits: bool = False,
    merged: Mapping[str, float] | None = None,
    is_exact: bool = False,
) -> dict[str, Any]:
    """The JSON document. compares_bits: whether other bits alone make it a failure. merged: see
    `merged_differences`. is_exact: whether more than MOST_BY_ROUNDING makes it a failure."""
    merged = merged or {}
    divergences = [one for report in reports for one in report.divergences]
    without_drafts = [
        f"{one.arm} {one.mode}"
        for one in reports
        if one.arm != str(NO_SPECULATION) and not one.counts["drafted"]
    ]
    sums = {f"num_{name}": sum(one.counts[name] for one in reports) for name in COUNTS}
    is_passed = sums["num_tokens"] > 0 and not divergences and not without_drafts
    is_passed &= not (compares_bits and sums["num_bits"])
    wrong = [name for name, most in merged.items() if is_exact and not most <= MOST_BY_ROUNDING]
    is_passed &= not wrong
    return {
        "verdict": "PASS" if is_passed else "FAIL",
        **sums,
        "num_diverged": len(divergences),
        "without_drafts": without_drafts,
        "merged": dict(merged),
        "unlike_merged": wrong,
        "divergences": [asdict(one) for one in divergences[:20]],
    }


def _verdict_line(summary: Mapping[str, Any]) -> str:
    """Such as `PASS: 7,588 tokens compared (902 guided), 7,215 drafted, 3,033 accepted; no text
    differs`."""
    num_diverged, num_tokens = summary["num_diverged"], summary["num_tokens"]
    num_guided = summary["num_guided"]
    parts = [
        f"{summary['verdict']}: {num_tokens:,} tokens compared"
        f"{f' ({num_guided:,} guided)' if num_guided else ''}, "
        f"{summary['num_drafted']:,} drafted, {summary['num_accepted']:,} accepted"
    ]
    if summary["num_bits"]:
        parts.append(f"{summary['num_bits']:,} tokens of equal texts have other bits")
    if num_diverged:
        per_thousand = 1e3 * num_diverged / num_tokens
        parts.append(f"{num_diverged} texts differ ({per_thousand:.2g} in 1,000 tokens)")
    else:
        parts.append("no text differs")
    if summary["without_drafts"]:
        parts.append(f"no drafts, nothing compared: {'; '.join(summary['without_drafts'])}")
    if summary["unlike_merged"]:
        parts.append(f"unlike the merged model: {', '.join(summary['unlike_merged'])}")
    return "; ".join(parts)
