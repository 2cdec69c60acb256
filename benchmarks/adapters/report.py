"""What a comparison says: rates, ratios to the reference, and where outputs part. Pure functions over answers.

A *row* is one answer: ``kind``, ``token_ids``, ``seconds``, ``first_seconds``, ``first_tokens``. Every side has the
same prompts in the same order. A ratio is how many times as fast the reference is: below 1 it is behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]
Side = tuple[str, str]


def rate(rows: Sequence[Row]) -> float:
    """Tokens a second after the prompt was in. NaN where nothing came after the first that were given."""
    tokens = sum(len(row["token_ids"]) - row["first_tokens"] for row in rows)
    return tokens / sum(row["seconds"] - row["first_seconds"] for row in rows) if tokens else math.nan


def whole_rate(rows: Sequence[Row]) -> float:
    """Tokens a second, the prompt's time counted."""
    return sum(len(row["token_ids"]) for row in rows) / sum(row["seconds"] for row in rows)


def divergence(ours: Sequence[int], other: Sequence[int], eos: Sequence[int]) -> int | None:
    """The first position where two texts differ, None if nowhere. After the end of our text nothing counts: some
    programs may not write an end of text when they must go on, some write it and go on."""
    end = next((i for i, token in enumerate(ours) if token in eos), len(ours))
    return next((i for i in range(end) if i >= len(other) or ours[i] != other[i]), None)


def summarise(
    sides: Mapping[Side, Sequence[Row]], reference: Side, eos: Sequence[int], greedy: bool
) -> list[dict[str, Any]]:
    """One dictionary a side: its rates, the reference's speed over its own (in all, by kind, by prompt), and, greedy,
    the divergences from the reference. Raises KeyError without the reference."""
    base = sides[reference]
    kinds = list(dict.fromkeys(row["kind"] for row in base))
    summary = []
    for (peer, mode), rows in sides.items():
        entry: dict[str, Any] = {
            "peer": peer,
            "mode": mode,
            "tokens_per_second": rate(rows),
            "tokens_per_second_with_prompt": whole_rate(rows),
            "ratio": rate(base) / rate(rows),
            "ratio_with_prompt": whole_rate(base) / whole_rate(rows),
            "ratio_median": middle(rate([a]) / rate([b]) for a, b in zip(base, rows, strict=True)),
            "ratio_by_kind": {kind: rate(of(base, kind)) / rate(of(rows, kind)) for kind in kinds},
        }
        if greedy:
            pairs = zip(base, rows, strict=True)
            found = [divergence(a["token_ids"], b["token_ids"], eos) for a, b in pairs]
            entry["divergences"] = [{"prompt": i, "position": at} for i, at in enumerate(found) if at is not None]
        summary.append(entry)
    return summary


def middle(ratios: Iterable[float]) -> float:
    """The median of those that say something."""
    told = [ratio for ratio in ratios if not math.isnan(ratio)]
    return median(told) if told else math.nan


def of(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def best_modes(summary: Sequence[Mapping[str, Any]], but: str) -> dict[str, Mapping[str, Any]]:
    """Every peer's fastest mode after the prompt, ``but`` the reference's own program."""
    best: dict[str, Mapping[str, Any]] = {}
    for entry in summary:
        name = entry["peer"]
        if name != but and (name not in best or entry["tokens_per_second"] > best[name]["tokens_per_second"]):
            best[name] = entry
    return best


def table(result: Mapping[str, Any]) -> str:
    """One configuration for people: a line a side, a line a failure, and the verdict on every peer's best mode."""
    summary, prompts = result["sides"], result["prompts"]
    kinds = list(summary[0]["ratio_by_kind"])
    title = f"{result['pair']} pair, {result['precision']}, temperature {result['temperature']:g}: {prompts} prompts"
    head = ["", "tok/s", "+prompt", "ratio", "median", *kinds, "+prompt", "same text"]
    lines = [f"{title}, {result['max_new_tokens']} tokens each, {result['threads']} threads"]
    lines += ["ratio: how many times as fast Leadout's `auto` is; below 1.00 it is behind"]
    body = [cells(entry, prompts) for entry in summary]
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    for row in (head, *body):
        lines.append("  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, len(row)))]))
    lines += [
        f"{failure['peer']} {failure['mode']}: not measured: {failure['reason']}" for failure in result["failures"]
    ]
    lines += [f"{name}: {remark}" for name, remark in result["remarks"].items()]
    return "\n".join([*lines, *strangers(summary, prompts), *verdicts(summary)])


def cells(entry: Mapping[str, Any], prompts: int) -> list[str]:
    numbers = [f"{entry['ratio']:.2f}", f"{entry['ratio_median']:.2f}"]
    numbers += [f"{ratio:.2f}" for ratio in entry["ratio_by_kind"].values()]
    speeds = [f"{entry['tokens_per_second']:.0f}", f"{entry['tokens_per_second_with_prompt']:.0f}"]
    name = f"{entry['peer']} {entry['mode']}"
    return [name, *speeds, *numbers, f"{entry['ratio_with_prompt']:.2f}", same(entry, prompts)]


def same(entry: Mapping[str, Any], prompts: int) -> str:
    """How many outputs are the reference's; of the others, where the first parts and how many are near-ties."""
    if "divergences" not in entry:
        return "-"
    parted = entry["divergences"]
    text = f"{prompts - len(parted)}/{prompts}"
    if parted:
        ties = sum(bool(one.get("near_tie")) for one in parted)
        text += f", earliest at {min(one['position'] for one in parted)}, {ties} near-ties"
    return text


def strangers(summary: Sequence[Mapping[str, Any]], prompts: int) -> list[str]:
    """Who writes another text on more than half of the prompts, from where no near-tie explains it: whatever is fast
    there is another model, converted or run wrongly."""
    lines = []
    for entry in summary:
        parted = [one for one in entry.get("divergences", ()) if one.get("near_tie") is False]
        if 2 * len(parted) > prompts:
            margin = median(one["margin"] for one in parted)
            lines.append(
                f"{entry['peer']} {entry['mode']}: ANOTHER MODEL'S TEXT on {len(parted)} of {prompts} prompts (median"
                f" margin {margin:.1f}): its figures compare nothing"
            )
    return lines


def verdicts(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """Against the best mode of every peer: ahead by how much, and where not."""
    lines = []
    for name, entry in best_modes(summary, but=summary[0]["peer"]).items():
        behind = [f"{kind} {ratio:.2f}" for kind, ratio in entry["ratio_by_kind"].items() if ratio < 1]
        note = f"; BEHIND on {', '.join(behind)}" if behind else ""
        lines.append(f"best of {name}: {entry['mode']}; Leadout is {entry['ratio']:.2f} times as fast{note}")
    return lines
