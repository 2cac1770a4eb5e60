"""What was found, as text, as one JSON document, and as the Markdown page that a team keeps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from engine.doctor.runner import Finding

_WORDS = ("pass", "warn", "fail", "skip")


def line(finding: Finding) -> str:
    """`PASS  accelerator (a)   evidence`, and the remedy on a line of its own."""
    result = finding.result
    point = f" ({finding.probe.point})" if finding.probe.point else ""
    text = f"{result.status.upper():<5} {finding.probe.name + point:<20} {result.evidence}\n"
    if result.remedy:
        text += f"{'':<6}{'':<20} → {result.remedy}\n"
    return text


def totals(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.result.status for finding in findings)
    return ", ".join(f"{counts[word]} {word}" for word in _WORDS)


def has_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.result.status == "fail" for finding in findings)


def as_json(findings: Sequence[Finding], about: Mapping[str, Any]) -> str:
    probes = [
        {
            "probe": finding.probe.name,
            "point": finding.probe.point,
            "title": finding.probe.title,
            "status": finding.result.status,
            "evidence": finding.result.evidence,
            "remedy": finding.result.remedy,
            "seconds": round(finding.seconds, 3),
            "facts": finding.result.facts,
        }
        for finding in findings
    ]
    document = {"about": about, "healthy": not has_failed(findings), "probes": probes}
    return json.dumps(document, indent=2, default=str) + "\n"


def as_markdown(findings: Sequence[Finding], about: Mapping[str, Any]) -> str:
    """Hardware, image, versions, patches, command, results, date."""
    lines = [
        f"# millstream doctor on {about['host']}, {about['date']}",
        "",
        f"`{about['command']}` ended with {1 if has_failed(findings) else 0}: {totals(findings)}.",
        "",
        "| what | |",
        "|---|---|",
    ]
    for key in ("hardware", "image", "versions", "patches", "variables"):
        for name, value in about[key].items():
            lines.append(f"| {_cell(name)} | {_cell(str(value))} |")
    lines += ["", "| probe | result | seen | to do |", "|---|---|---|---|"]
    for finding in findings:
        result, point = finding.result, f" ({finding.probe.point})" if finding.probe.point else ""
        cells = (finding.probe.title + point, result.status, result.evidence, result.remedy)
        lines.append("| " + " | ".join(_cell(each) for each in cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
