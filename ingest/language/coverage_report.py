"""The coverage of a recipe for people: tables for a terminal, a page, plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from ingest.language.coverage import LanguagePlan, coverage_summary
from ingest.language.pages import Raw, bar, heading, page, percent, table, text_table


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """Share of frames per branch and outcome, for people and programs."""

    plan: LanguagePlan

    def to_json(self) -> dict[str, Any]:
        """Plain values; see ``coverage_summary``."""
        return coverage_summary(self.plan)

    def to_text(self) -> str:
        """Tables for a terminal."""
        data = self.to_json()
        lines = [
            f"{data['frames']} frames of {data['episodes']} episodes, policy {data['policy']} (ambiguous: {data['on_ambiguous']}), "
            f"{data['kept_frames']} stay in the selection",
            text_table(["branch", "chosen", "share", "rendered", "share"], self._branches(data)),
            text_table(["outcome", "frames", "share"], self._outcomes(data)),
        ]
        return "\n\n".join([*lines, *self._notes(data)])

    def to_html(self) -> str:
        """A page of its own."""
        data = self.to_json()
        branches = [[*row, Raw(bar(entry["rendered_share"]))] for row, entry in zip(self._branches(data), data["branches"], strict=True)]
        outcomes = [[*row, Raw(bar(entry["share"]))] for row, entry in zip(self._outcomes(data), data["outcomes"], strict=True)]
        kept = f"{data['kept_frames']} stay in the selection (policy {data['policy']})"
        body = f"<p>{data['frames']} frames of {data['episodes']} episodes; {kept}.</p>"
        body += table(["branch", "chosen", "share", "rendered", "share", ""], branches) + table(
            ["outcome", "frames", "share", ""], outcomes
        )
        body += "".join(f"<p>{escape(note)}</p>" for note in self._notes(data, faults=False))
        faults = [[fault["episode"], fault["frame"], fault["style"] or "", fault["message"]] for fault in data["faults"]]
        return page(
            "Recipe coverage",
            body + (heading("Ambiguous frames") + table(["episode", "frame", "style", "problem"], faults) if faults else ""),
        )

    @staticmethod
    def _branches(data: Mapping[str, Any]) -> list[list[object]]:
        return [
            [entry["branch"], entry["chosen"], percent(entry["chosen_share"]), entry["rendered"], percent(entry["rendered_share"])]
            for entry in data["branches"]
        ]

    @staticmethod
    def _outcomes(data: Mapping[str, Any]) -> list[list[object]]:
        return [[entry["outcome"], entry["frames"], percent(entry["share"])] for entry in data["outcomes"]]

    @staticmethod
    def _notes(data: Mapping[str, Any], *, faults: bool = True) -> list[str]:
        notes = [f"Branch {name} renders on no frame." for name in data["never_rendered"]]
        if data["empty_targets"]:
            notes.append(f"{data['empty_targets']} frames supervise an empty text: guard the target with if_present.")
        if data["leaving"]:
            frames = sum(stop - start for ranges in data["leaving"].values() for start, stop in ranges)
            notes.append(f"{frames} frames of {len(data['leaving'])} episodes have no supervision and leave the selection.")
        if faults:
            notes += [f"episode {fault['episode']}, frame {fault['frame']}: {fault['message']}" for fault in data["faults"][:20]]
        return notes
