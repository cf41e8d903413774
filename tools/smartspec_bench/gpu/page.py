"""The document as a page of Markdown: its tables, and what they are tables of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smartspec_bench.gpu.document import (
    BatchPoint,
    Document,
    LoadPoint,
    ModelInfo,
)
from smartspec_bench.gpu.plan import BASELINE

JUDGED = "goodput"


def page(document: Document) -> str:
    parts = [
        _head(document),
        _device(document),
        _pair(document),
        _bandwidth(document),
        _exactness(document),
        _passes(document),
        _rates(document),
        _load(document),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(document: Document) -> str:
    lines = ["# Speculation on one device"]
    if document.note:
        lines.append(f"**{document.note}**")
    lines.append(f"{document.date}, {document.elapsed_s:.0f} s.")
    if document.left_out:
        lines.append(f"Left out: {'; '.join(document.left_out)}.")
    return "\n\n".join(lines)


def _device(document: Document) -> str:
    device = document.device
    if device is None:
        return ""
    rows = [
        ("device", device.name),
        ("host", f"{device.machine}; {device.driver}"),
        ("memory", f"{device.memory_gb:.1f} GB, {device.free_gb:.1f} GB free"),
        ("copies within it", f"{device.copy_gb_per_s:.1f} GB/s, read and written"),
        ("versions", ", ".join(f"{name} {text}" for name, text in device.versions.items())),
    ]
    return _section("Device", ("", ""), rows)


def _pair(document: Document) -> str:
    pair = document.pair
    if pair is None:
        return ""
    models = [("target", pair.target), ("draft", pair.draft)]
    launches = "replays of CUDA graphs" if pair.uses_graphs else "launched kernel by kernel"
    why = f" ({pair.graph_error})" if pair.graph_error else ""
    text = (
        f"The shipped pair, expanded and prepared on the device in {pair.build_s:.1f} s, in "
        f"{pair.dtype}; it says what the small models say. Up to {pair.max_sequences} sequences at "
        f"once; short passes are {launches}{why}."
    )
    header = ("", "parameters", "read in a pass", "layers", "hidden", "cache of a token")
    return _section("Pair", header, [_model(name, model) for name, model in models], text)


def _model(name: str, model: ModelInfo) -> Sequence[str]:
    return (
        name,
        f"{model.num_parameters / 1e6:.1f} M",
        f"{model.bytes_read / 1e9:.3f} GB",
        str(model.size["num_layers"]),
        str(model.size["hidden_size"]),
        f"{model.cache_bytes_per_token / 1024:.0f} KiB",
    )


def _bandwidth(document: Document) -> str:
    found = document.bandwidth
    if found is None:
        return ""
    verdict = "reached" if found.share >= found.goal else "missed"
    plain = ""
    if found.plain_ms is not None:
        plain = f" Launched kernel by kernel, such a pass takes {found.plain_ms:.2f} ms."
    return (
        "## Share of the copy bandwidth\n\n"
        f"A pass of the target over one token of one sequence reads {found.bytes_read / 1e9:.3f} "
        f"GB of weights and takes {found.median_ms:.2f} ms (median; best {found.best_ms:.2f} ms), "
        f"{found.share:.2f} of the copy bandwidth; the goal of {found.goal} is {verdict}.{plain}"
    )


def _exactness(document: Document) -> str:
    if not document.exactness:
        return ""
    text = (
        "Greedy texts against those without speculation. A text counts once, where it first "
        "differs; what no rounding explains is a fault."
    )
    header = ("policy", "texts", "tokens", "accepted of drafted", "differ", "near-ties", "faults")
    rows = [
        (
            f"{arm.policy}, {arm.mode}",
            str(arm.num_requests),
            str(arm.num_tokens),
            f"{arm.num_accepted} of {arm.num_drafted}",
            str(arm.num_differences),
            str(arm.num_near_ties),
            str(arm.num_faults),
        )
        for arm in document.exactness
    ]
    return _section("Exactness", header, rows, text)


def _passes(document: Document) -> str:
    if not document.batches:
        return ""
    num_k = len(document.batches[0].target_ms)
    probs = ", ".join(f"{prob:.2f}" for prob in document.accept_probs)
    text = (
        "Milliseconds of a pass of the target over 1 + k tokens of each sequence, and of the draft "
        f"over one. With the acceptance of drafts 1, 2, .. ({probs}; each given that those before "
        "it were accepted) they speak for the k in the last column; the loop's own time is not in "
        "them."
    )
    header = ("at once", *(f"k = {k}" for k in range(num_k)), "draft", "best k")
    rows = [
        (
            str(point.num_rows),
            *(f"{ms:.2f}" for ms in point.target_ms),
            f"{point.draft_ms:.2f}",
            str(point.predicted_k),
        )
        for point in document.batches
    ]
    return _section("Passes", header, rows, text)


def _rates(document: Document) -> str:
    if not document.batches:
        return ""
    policies = [rate.policy for rate in document.batches[0].rates]
    text = (
        "Tokens a second while so many requests are out, medians over the rounds; the best fixed "
        "length is chosen in hindsight."
    )
    header = ("at once", "rounds", *policies, f"k of {JUDGED}", "over none", "over best fixed")
    return _section(
        "Policies by batch", header, [_rate_row(point) for point in document.batches], text
    )


def _rate_row(point: BatchPoint) -> Sequence[str]:
    judged, best = point.rate(JUDGED), point.best_fixed
    return (
        str(point.num_rows),
        str(len(judged.tokens_tps)),
        *(f"{rate.median_tps:.1f}" for rate in point.rates),
        f"{judged.draft_len:.2f}",
        f"{judged.median_tps / point.rate(BASELINE).median_tps:.3f}",
        f"{judged.median_tps / best.median_tps:.3f} ({best.policy})",
    )


def _load(document: Document) -> str:
    if not document.load or document.saturation_rps is None:
        return ""
    text = (
        f"Poisson arrivals at shares of {document.saturation_rps:.2f} requests/s, the saturation "
        "rate of none at the largest batch; one phase each. Latency counts from when a request was "
        "due."
    )
    header = ("load", "requests/s", "policy", "requests", "failed", "mean ms", "p95 ms", "tokens/s")
    return _section("Latency under load", header, map(_load_row, document.load), text)


def _load_row(point: LoadPoint) -> Sequence[str]:
    return (
        f"{point.load:g}",
        f"{point.rate_rps:.2f}",
        point.policy,
        str(point.num_requests),
        str(point.num_failed),
        "-" if point.mean_ms is None else f"{point.mean_ms:.0f}",
        "-" if point.p95_ms is None else f"{point.p95_ms:.0f}",
        f"{point.tokens_tps:.1f}",
    )


def _section(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], text: str = ""
) -> str:
    table = [header, ["---"] * len(header), *rows]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return "\n\n".join(part for part in (f"## {title}", text, lines) if part)
