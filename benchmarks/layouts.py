"""How the results of each benchmark are laid out as tables of ``docs/benchmarks.md``.

A layout gets a record and a device, and returns Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.records import Record, of_device
from benchmarks.wording import number_of_bytes, table, time, times

__all__ = ["LAYOUTS", "Layout", "verdicts"]

Layout = Callable[[Record, str], str]


def verdicts(record: Record, device: str) -> Iterator[tuple[str, str]]:
    """Yield what was aimed at, with what became of it, for every result that has a target."""
    for part in ("rows", "first_calls"):
        for row in of_device(record, part, device):
            aimed_at = row.get("target", "") is not None and row.get("way") != "plain torch"
            if row.get("verdict") is not None and aimed_at:
                yield f"{_name(row)}: {row.get('target', 'nothing is lost')}", row["verdict"]
    for line in record.get("targets", []):
        target, _, verdict = line.rpartition(": ")
        # What is said of no device is said of the one that the record was made on.
        if f", {device}" in target or not any(f", {other}" in target for other in ("cpu", "cuda")):
            yield target, verdict


def _name(row: dict[str, Any]) -> str:
    if "scope" in row:  # what a model is, is said above its table
        model = row["what"].partition(":")[0]
        return f"{model}, {row['phase']}, {row['mode']}, {row['scope']}"
    names = ("what", "way", "id", "operator", "test")
    return next(str(row[name]) for name in names if row.get(name))


def _comparisons(record: Record, device: str) -> str:
    rows = of_device(record, "rows", device)
    listed = []
    for row in rows:
        ratio, host = row["ratio"], row.get("host")
        on_host = "" if host is None else time(host["added_ns"]["median"])
        listed.append(
            (
                row["what"] if row["what"] != "a call after the first" else f"`{row['id']}`",
                f"`{row['baseline']}`",
                f"`{row['guarded']}`" if row["guarded"] != row["baseline"] else "the same, guarded",
                f"{time(row['baseline_ns']['median'])} → {time(row['guarded_ns']['median'])}",
                f"{times(ratio['median'])} [{ratio['q1']:.3g}, {ratio['q3']:.3g}]",
                *([on_host] if device == "cuda" else []),
                "" if row["target"] is None else f"{row['target']}: {row['verdict']}",
            )
        )
    header = ["", "plain", "against", "per call", "ratio [quartiles]", "target"]
    if device == "cuda":
        header.insert(-1, "more on the host")
    rounds = rows[0]["n"]
    reasons = dict.fromkeys(row["why"] for row in rows if row["why"])
    notes = [f"- Where a target is missed: {reason}." for reason in reasons]
    same = record.get("untouched")
    if same:
        notes.append(
            f"- What no guard patches: {same['the_same_object']:,} of {same['attributes']:,} "
            "attributes of torch are the same objects with both guards installed."
        )
    clock = " Times are between CUDA events; the host's own are beside." if device == "cuda" else ""
    lead = f"Medians of {rounds} rounds in which both sides took turns.{clock}\n\n"
    return lead + table(header, listed) + ("\n\n" + "\n".join(notes) if notes else "")


_ASSIGN = re.compile(r"(.+)-1e(\d+)-((?:compiled-)?(?:forward|backward))-(\w+)(?:-over-(\w+))?$")


def _assign(record: Record, device: str) -> str:
    """One column per size: the rows are too many for one line each."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    sizes: dict[str, None] = {}
    for row in of_device(record, "rows", device):
        found = _ASSIGN.match(row["id"])
        if found is None:
            raise ValueError(f"the record has a row {row['id']!r} that names no size")
        kind, power, step, way, over = found.groups("")
        sizes[power] = None
        against = f"`{over}`" if over else "two statements"
        mark = "" if (row["verdict"] or "reached").startswith("reached") else " (missed)"
        key = (kind, step.replace("-", ", "), f"`{way}`", against)
        cells.setdefault(key, {})[power] = f"{row['ratio']['median']:.2f}{mark}"
    header = ("index", "step", "way", "against", *(f"10^{power}" for power in sizes))
    rows = [(*key, *(found.get(power, "") for power in sizes)) for key, found in cells.items()]
    reasons = dict.fromkeys(row["why"] for row in record["rows"] if row["why"])
    notes = "\n".join(f"- Where a target is missed: {reason}." for reason in reasons)
    lead = (
        "Times over those of `out = t.clone(); out[index] = value`, or of `index_put`, for "
        "tensors of 10^3 to 10^8 elements; medians of "
        f"{record['rows'][0]['n']} rounds in which both sides took turns."
    )
    return "\n\n".join(part for part in (lead, table(header, rows), notes) if part)


def _first_calls(record: Record, device: str) -> str:
    rows = [
        (
            f"`{row['id']}`",
            f"{row['plain_seconds']['median']:.2f} → {row['checked_seconds']['median']:.2f} s",
            times(row["ratio"]["median"]),
            times(row["processor_ratio"]["median"]),
            times(row["memory_ratio"]["median"]),
            f"{row['target']}: {row['verdict']}",
        )
        for row in of_device(record, "first_calls", device)
    ]
    header = ("first calls", "plain → checked", "ratio", "processor", "memory", "target")
    return f"{table(header, rows)}\n\n{_comparisons(record, device)}"


def _end_to_end(record: Record, device: str) -> str:
    rows = of_device(record, "rows", device)
    parts = [
        (
            "The ratio is that of a round, the scope's time over that of nothing in the same "
            "round; in brackets its 95 % interval, a bootstrap of the median. An interval that "
            "holds 1 found no difference. Memory is what a step needs more at its peak."
        )
    ]
    for what in dict.fromkeys(row["what"] for row in rows):
        mine = [row for row in rows if row["what"] == what]
        listed = []
        for phase, mode in dict.fromkeys((row["phase"], row["mode"]) for row in mine):
            for row in mine:
                if (row["phase"], row["mode"]) != (phase, mode):
                    continue
                change = {name: 100 * (value - 1) for name, value in row["ratio"].items()}
                listed.append(
                    (
                        f"{phase}, {mode}",
                        _code(row["scope"]),
                        f"{row['nothing_ms']['median']:.4g} ms",
                        f"{change['median']:+.2f} % [{change['low']:+.2f}, {change['high']:+.2f}]",
                        f"{row['more_bytes']:+d} B",
                        "" if row["target"] is None else f"{row['target']}: {row['verdict']}",
                    )
                )
        header = ("step", "with", "nothing takes", "longer [95 %]", "memory", "target")
        parts += [f"**{what[0].upper()}{what[1:]}.** {_rounds(mine)}", table(header, listed)]
    return "\n\n".join(parts)


def _rounds(rows: list[dict[str, Any]]) -> str:
    again = max(row["compiled_again"] for row in rows)
    graphs = "no scope made another compile anew" if not again else f"{again} graphs compiled anew"
    rounds, calls = (_span([row[name] for row in rows]) for name in ("n", "calls"))
    return f"{rounds} rounds of {calls} steps; {graphs}."


def _span(values: list[int]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _code(text: str) -> str:
    name, comma, rest = text.partition("),")
    return f"`{name})`{',' if comma else ''}{rest}" if "(" in text and comma else _quoted(text)


def _quoted(text: str) -> str:
    return f"`{text}`" if "(" in text else text


def _doctor(record: Record, device: str) -> str:
    rows = [
        (
            f"`{row['id']}`",
            f"{row['bare']}: {row['detail']}" if row["detail"] else row["bare"],
            f"{row['guarded']}: {row['guarded_detail']}"
            if row["guarded_detail"]
            else row["guarded"],
            ", ".join(f"`{guard}`" for guard in row["guards"]),
        )
        for row in of_device(record, "rows", device)
    ]
    return table(("defect", "bare torch", "guarded", "guard"), rows)


def _failures(record: Record, device: str) -> str:
    rows = of_device(record, "rows", device)
    counts = []
    for name, what in (
        ("torch", "plain torch"),
        ("guarded", "`guarded()`"),
        ("installed", "`install()`"),
    ):
        found = [row[name] for row in rows]
        counts.append(
            (
                what,
                str(sum(each != "not patched" for each in found)),
                str(sum(each.startswith("corrupt") for each in found)),
                str(found.count("as it was")),
                str(found.count("did not fail")),
            )
        )
    header = ("with", "calls", "corrupt", "as they were", "did not fail")
    bad = [row for row in rows if row["verdict"] == "does not hold"]
    named = ", ".join(f"`{row['operator']}`" for row in bad)
    parts = [
        (
            "Each output is an empty tensor in memory that belongs to another library, so it can't "
            "grow. Compared are shape, stride, offset, storage and every byte."
        ),
        table(header, counts),
    ]
    if bad:
        parts.append(f"Not as they were with a guard: {named}.")
    if record.get("unfinished"):
        names = ", ".join(f"`{name}`" for name in record["unfinished"])
        parts.append(f"Begun and not ended, by the clock or because the process died: {names}.")
    return "\n\n".join(parts)


def _cuda_tests(record: Record, device: str) -> str:
    rows = of_device(record, "rows", device)
    outcomes = dict.fromkeys(row["outcome"] for row in rows)
    counts = table(
        ("", "tests"),
        [(each, str(sum(row["outcome"] == each for row in rows))) for each in outcomes],
    )
    listed = [
        f"- `{row['test']}`: {row['outcome']}: {row['why'].splitlines()[-1] if row['why'] else ''}"
        for row in rows
        if row["outcome"] != "passed"
    ]
    return "\n\n".join([counts, "\n".join(listed)] if listed else [counts])


def _kernels(record: Record, device: str) -> str:
    names = ("operators", "kernels", "copies") if device == "cuda" else ("operators",)
    rows = []
    for row in of_device(record, "rows", device):
        counts = [f"{row[name][0]} → {row[name][1]}" for name in (*names, "peak_bytes")]
        more = ", ".join(f"{count} `{name}`" for name, count in row["more"].items())
        rows.append((row["what"], *counts, more, row["verdict"] or "not claimed"))
    return table(("", *names, "bytes at the peak", "more", "claim"), rows)


def _out_of_memory(record: Record, device: str) -> str:
    rows = [
        (
            _quoted(row["way"]),
            f"{row['error']} at {number_of_bytes(row['asked_bytes'])}",
            f"{number_of_bytes(row['says_bytes'])} of {number_of_bytes(row['holds_bytes'])}",
            _yes(row["same_memory"] and row["same_elements"]),
            _yes(row["grows_again"]),
            _yes(row["training_equal"]),
            row["verdict"],
        )
        for row in of_device(record, "rows", device)
    ]
    allowed = number_of_bytes(record["rows"][0]["allowed_bytes"])
    header = (
        "resized by", "fails with", "says and has", "same memory and elements",
        "can be resized after", "training equals a run without", "",
    )  # fmt: skip
    return f"The process was allowed {allowed} more than it had.\n\n{table(header, rows)}"


def _yes(value: bool | None) -> str:
    return "yes" if value else "no"


def _buckets(record: Record, device: str) -> str:
    on_gpu = device == "cuda"
    rows = []
    for row in of_device(record, "rows", device):
        cells = [
            row["row"],
            row["phase"],
            f"{row['total_s']:.1f} s",
            f"{row['steady_ms']:.2f} ms",
            str(row["graphs"]),
            f"{100 * row['waste']:.1f} %",
        ]
        if on_gpu:
            cells += [str(row["cuda_graphs"]), number_of_bytes(row["gpu_bytes"])]
        rows.append(cells)
    header = ["", "phase", "all batches, from cold", "a step later", "graphs", "waste"]
    if on_gpu:
        header += ["CUDA graphs", "memory reserved"]
    overheads = [
        (
            str(each["buckets"]),
            f"{each['added_exact_us']:.1f} µs",
            f"{each['added_padded_us']:.1f} µs",
        )
        for each in of_device(record, "overhead", device)
    ]
    calls = table(("buckets", "`bucketed` adds to an exact fit", "to a padded call"), overheads)
    return f"{table(header, rows)}\n\n{calls}"


def _stream(record: Record, device: str) -> str:
    """Lay out what each row took in all, and late in each phase."""
    [summary] = of_device(record, "summary", device)
    phases = summary["phases"]
    rows = [
        (
            row["row"],
            f"{row['total_s']:.1f} s",
            *(f"{each['milliseconds'][row['row']]:.2f} ms" for each in phases),
        )
        for row in of_device(record, "rows", device)
    ]
    header = ("", "the whole stream, from cold", *(f"late in {each['phase']}" for each in phases))
    found = "\n".join(f"- {line}" for line in summary["verdicts"])
    return f"{table(header, rows)}\n\n{found}"


def _fit(record: Record, _: str) -> str:
    rules = list(record["summary"]["mean_waste_percent"])
    rows = [
        (
            row["kind"],
            *(
                f"**{value:.1f}**" if value == least else f"{value:.1f}"
                for value in (row["waste_percent"][rule] for rule in rules)
            ),
        )
        for row in record["rows"]
        if (row["cost"], row["count"]) == ("linear", 8)
        for least in [min(row["waste_percent"].values())]
    ]
    beaten = record["summary"]["cells_another_rule_wins"]
    times_taken = [
        (row["what"], f"{row['processor_seconds']:.3f} s") for row in record["planning_times"]
    ]
    return "\n\n".join(
        (
            (
                "Held-out waste in percent of the useful cost, 8 buckets, linear cost, the maxima "
                f"of batches of 16; the mean of {record['splits']} random halves, the least in "
                "bold:"
            ),
            table(("lengths", *rules), rows),
            (
                f"Over all {record['summary']['cells']} cells (4, 8 and 16 buckets; linear and "
                f"quadratic cost) another rule does better in {len(beaten)}."
            ),
            table(("planning", "processor time"), times_taken),
        )
    )


def _sampler(record: Record, _: str) -> str:
    totals = record["summary"]
    listed = [
        (
            f"**{rule}**" if "Bucket" in rule else rule,
            f"{waste:.1f} %",
            str(totals["mean_shapes"][rule]),
            f"{totals['largest_step_over_mean'][rule]:.1f}",
        )
        for rule, waste in totals["mean_waste_percent"].items()
    ]
    names = [name for name in totals["mean_waste_percent"] if name.endswith((", longest", "sizes"))]
    shown = [name for name in names if "Bucket" in name or name.endswith("longest")]
    kinds = list(dict.fromkeys(row["kind"] for row in record["rows"]))
    found = {(row["kind"], row["rule"]): row["waste_percent"] for row in record["rows"]}
    rows = [(kind, *(f"{found[kind, rule]:.1f}" for rule in shown)) for kind in kinds]
    lead = (
        f"What an epoch computes beyond its real tokens, at about {record['tokens']:,} padded "
        f"tokens per step in the mean; {record['epochs']} epochs of {len(kinds)} kinds of "
        "lengths. A rule is followed by what lengths are rounded up to: the longest of the batch, "
        "multiples of 64, or the best ladder of so many sizes for what the rule made. The largest "
        "step is over the mean one: what memory has to hold."
    )
    header = ("batches", "waste, mean", "shapes, mean", "largest step")
    each = "By kind of lengths, in percent, where the other rules pad to the longest of the batch:"
    return "\n\n".join((lead, table(header, listed), each, table(("lengths", *shown), rows)))


def _overlap(record: Record, device: str) -> str:
    rows = [
        (
            f"{row['what'].partition(':')[0]}, {row['phase']}",
            f"{row['nothing_ms']['median']:.3g} ms",
            (
                f"{row['ratio']['median']:.3f} times "
                f"[{row['ratio']['low']:.3f}, {row['ratio']['high']:.3f}]"
            ),
            (
                f"{row['control']['median']:.3f} [{row['control']['low']:.3f}, "
                f"{row['control']['high']:.3f}]"
            ),
            row["verdict"],
        )
        for row in of_device(record, "steps", device)
    ]
    header = ("step", "plain", "with the guard [95 %]", "plain, once more [95 %]", "")
    return f"{_comparisons(record, device)}\n\n{table(header, rows)}"


def _host(record: Record, device: str) -> str:
    rows = []
    for row in of_device(record, "rows", device):
        host_us = 1e3 * row.get("host_least_ms", row["host_ms"]["q1"])
        kinds = [
            f"{kind}: " + ", ".join(f"{count} `{name}`" for name, count in functions.items())
            for kind, functions in row["calls"].items()
        ]
        rows.append(
            (
                f"{row['what'].partition(':')[0]}, {row['phase']}, {row['mode']}",
                _code(row["scope"]),
                str(row["count"]),
                "; ".join(kinds),
                f"{row['bound_ns'] / 1e3:.2f} µs of {host_us:.0f} µs",
                f"{row['percent']:.2g} %",
                f"{row['target']}: {row['verdict']}",
            )
        )
    header = ("step", "with", "calls", "of", "at most", "of the host's time", "target")
    prices = ((kind, time(cost)) for kind, cost in record["cost_ns"].items())
    least = "host_least_ms" in record["rows"][0]
    taken = "least that the processor took for" if least else "lower quartile of"
    return "\n\n".join(
        (
            (
                "Every call of a Python function is reported while a step runs, and those that "
                "enter torchguard are counted, in the thread of the step. Each costs at most the "
                "upper quartile of what was measured for its kind. The host's time is the "
                f"{taken} a step whose tensors are so small that computing them takes next to "
                "nothing, on a CPU. On a GPU the same Python runs, and its step launches kernels "
                "besides; no count there is in this record."
            ),
            table(header, rows),
            table(("a call", "adds at most"), prices),
            "The models, with all their layers where they run eager:",
            "\n".join(f"- {what}" for what in dict.fromkeys(row["what"] for row in record["rows"])),
        )
    )


def _imports(record: Record, device: str) -> str:
    rows = [
        (
            f"`{row['what']}`",
            "{median:.1f} ms [{q1:.1f}, {q3:.1f}]".format_map(row["clock_ms"]),
            f"{row['processor_ms']['median']:.1f} ms",
            str(row["modules"]),
            "" if row["target"] is None else f"{row['target']}: {row['verdict']}",
        )
        for row in of_device(record, "rows", device)
    ]
    header = ("", "on the clock [quartiles]", "of the processor", "modules", "target")
    return f"Medians of {record['rows'][0]['n']} processes.\n\n{table(header, rows)}"


def _walks(record: Record, device: str) -> str:
    rows = [
        (
            row["what"],
            str(row["files"]),
            str(row["functions"]),
            str(row["changes"]),
            f"{row['target']}: {row['verdict']}",
        )
        for row in of_device(record, "rows", device)
    ]
    header = ("a call", "files", "functions", "changes of file", "target")
    return f"Exact counts, from a profile of the call.\n\n{table(header, rows)}"


def _cold_start(record: Record, device: str) -> str:
    rows = [
        (
            row["what"],
            "{median:.1f} s [{q1:.1f}, {q3:.1f}]".format_map(row["seconds"]),
            str(row["checks"]),
            str(row["derivations"]),
            str(row["graphs_compiled"]),
            str(row["cpp_compilations"]),
            "" if row["target"] is None else f"{row['target']}: {row['verdict']}",
        )
        for row in of_device(record, "rows", device)
    ]
    header = (
        "start", "seconds [quartiles]", "runs for checks", "derivations", "graphs compiled",
        "runs of the C++ compiler", "target",
    )  # fmt: skip
    return f"Medians of {record['rows'][0]['n']} processes each.\n\n{table(header, rows)}"


def _transaction(record: Record, device: str) -> str:
    """Lay out the times, and how the fault points ended, a line for each way and case."""
    totals = [
        (
            row["way"],
            row["case"],
            str(row["points"]),
            str(row["wrong"]),
            str(row["stuck"]),
            str(row["committed"]),
        )
        for row in of_device(record, "faults", device)
    ]
    header = ("cleaned up by", "training", "fault points", "wrong", "raises again", "counts")
    held = [
        (row["what"], str(row["held"]), str(row["buffers"]), str(row["deepcopy"]))
        for row in of_device(record, "memory", device)
    ]
    return "\n\n".join(
        (
            _comparisons(record, device),
            (
                "Bytes of tensors that a block holds on the device when its optimizer has stepped. "
                "On a CPU random states are 5056 of them; the rest is buffers, and without a fused "
                "optimizer parameters and state."
            ),
            table(("optimizer", "held", "buffers", "deep copy of state dicts"), held),
            (
                "Each operator of a step raises, once before and once after it has run; then the "
                "same batch is tried again. Wrong: something differs from a run that never failed. "
                "Counts: the failure came after the optimizer's step, which is not tried again."
            ),
            table(header, totals),
        )
    )


LAYOUTS: dict[str, Layout] = {
    "end_to_end": _end_to_end,
    "host": _host,
    "kernels": _kernels,
    "resize": _comparisons,
    "out_of_memory": _out_of_memory,
    "overlap": _overlap,
    "buckets": _buckets,
    "stream": _stream,
    "cold_start": _cold_start,
    "padding": _comparisons,
    "fit": _fit,
    "sampler": _sampler,
    "assign": _assign,
    "verified": _first_calls,
    "transaction": _transaction,
    "checkpoint": _comparisons,
    "import": _imports,
    "walk": _walks,
    "doctor": _doctor,
    "failures": _failures,
    "cuda_tests": _cuda_tests,
}
"""By the benchmark's name."""
