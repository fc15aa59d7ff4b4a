"""The lines of a check: what each claims, what it saw, and the files that keep them.

Every line goes to ``lines.jsonl`` as it ends, one JSON object each, so that a machine that goes
away takes at most the line with it that was running. ``table.md`` is made anew from them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from context import Check

PASS, FAIL, NOT = "pass", "fail", "not possible"
TRIES = 2
"""How often a line begins that does not end, say because the machine goes down."""


class Saw(NamedTuple):
    """What a line saw.

    Attributes:
        good: whether it is as claimed.
        text: figures with their units.
        facts: what later lines compare with, by name; figures for programs.
    """

    good: bool
    text: str
    facts: dict[str, Any] = {}  # noqa: RUF012


class Line(NamedTuple):
    """A line of the check.

    Attributes:
        name: begins with the letter of its part.
        claims: one sentence.
        work: looks.
        beside: whether it may run beside its neighbours that may too: its times do not matter.
        needs_s: with fewer seconds left it is left to the next call.
    """

    name: str
    claims: str
    work: Callable[[Check], Saw]
    beside: bool = False
    needs_s: float = 10.0


class Lines:
    """The lines that have ended, in this call and in earlier ones with the same settings.

    Attributes:
        facts: of all lines.
        sequence: all lines that there are to be, for the table.
    """

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        """Reads what an earlier call wrote to the folder; what other settings wrote is put aside.

        Args:
            folder: where the files are.
            asked: the settings.
        """
        self.raw, self.table = folder / "lines.jsonl", folder / "table.md"
        self.asked = asked
        self.facts: dict[str, Any] = {}
        self.sequence: Sequence[Line] = ()
        self._ended: dict[str, dict[str, Any]] = {}
        self._begun: Counter[str] = Counter()
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        records = self._read()
        if not records or records[0].get("asked") != asked:
            if records:
                os.replace(self.raw, folder / "lines-before.jsonl")
            self.raw.unlink(missing_ok=True)
            self._append({"asked": asked})
            return
        for record in records[1:]:
            self._take(record)

    def _read(self) -> list[dict[str, Any]]:
        """The whole records; a last one that was cut off is none."""
        found = []
        try:
            for text in self.raw.read_text("utf-8", "replace").splitlines():
                record = json.loads(text)
                found += [record] if isinstance(record, dict) else []
        except (OSError, ValueError):
            pass
        return found

    def _take(self, record: dict[str, Any]) -> None:
        name = record.get("line")
        if isinstance(record.get("began"), str):
            self._begun[record["began"]] += 1
        elif isinstance(record.get("left"), str):
            self._begun[record["left"]] -= 1
        elif isinstance(name, str) and record.get("result") in (PASS, FAIL, NOT):
            self._ended[name] = record
            self.facts.update(record.get("facts") or {})

    def _append(self, record: dict[str, Any]) -> None:
        with self._lock, open(self.raw, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def ended(self, name: str) -> bool:
        """Whether the line needs not begin again."""
        return name in self._ended

    def passed(self, name: str) -> bool:
        """Whether the line ended and passed."""
        return self.ended(name) and self._ended[name]["result"] == PASS

    def lost(self, name: str) -> bool:
        """Whether the line began as often as it may, and no call lived to see its end."""
        return self._begun[name] >= TRIES

    def begin(self, name: str) -> None:
        """Notes that the line begins."""
        record = {"began": name, "at": round(time.time(), 3)}
        self._take(record)
        self._append(record)

    def leave(self, name: str) -> None:
        """Notes that the call's time was over before the line's: it is not the line's fault."""
        record = {"left": name}
        self._take(record)
        self._append(record)

    def end(self, line: Line, result: str, saw: Saw, took_s: float) -> None:
        """Keeps a line and prints it."""
        record: dict[str, Any] = {
            "line": line.name,
            "claims": line.claims,
            "result": result,
            "saw": saw.text,
        }
        record |= {"took_s": round(took_s, 2), "facts": saw.facts}
        self._take(record)
        self._append(record)
        with self._lock:
            self.write()
        print(f"{result:12} {took_s:5.1f} s  {line.name}: {saw.text}", flush=True)

    def count(self, result: str) -> int:
        """How many lines have this result."""
        return sum(record["result"] == result for record in self._ended.values())

    def write(self) -> None:
        """Writes the table, with the lines that were not reached."""
        head = self.facts.get("machine", "machine not known")
        counts = ", ".join(f"{self.count(result)} {result}" for result in (PASS, FAIL, NOT))
        rest = [line for line in self.sequence if not self.ended(line.name)]
        took = sum(record["took_s"] for record in self._ended.values())
        text = f"# What ran on a GPU\n\n{head}\n\n{counts}, {len(rest)} not reached; {took:.0f} s "
        text += "of lines, some of them beside each other\n\n"
        text += "| line | claims | saw | result | s |\n| --- | --- | --- | --- | ---: |\n"
        for line in self.sequence:
            found = self._ended.get(line.name)
            cells = [line.name, line.claims, "", "not reached", ""]
            if found:
                cells[2:] = [found["saw"], found["result"], f"{found['took_s']:.1f}"]
            shown = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
            text += f"| {' | '.join(shown)} |\n"
        part = self.table.with_suffix(".part")
        part.write_text(text, "utf-8")
        os.replace(part, self.table)
