"""A run's alarms by episode, as its events tell them: what was raised, when, and whether it is over."""

from __future__ import annotations

from tandem.observability.report.folder import Row, RunFolder


def episodes(run: RunFolder) -> list[Row]:
    """Each with alarm, since, step (first told), told (how often), over (a step, or None), and what was said last.

    What followed a step that the run was resumed from did not happen.
    """
    found: list[Row] = []
    for event in run.events:
        name, step = event.get("event"), event.get("step")
        if not isinstance(step, int):
            continue
        if name == "resumed":
            found = [episode for episode in found if episode["step"] <= step]
            for episode in found:
                episode["over"] = None if (episode["over"] or 0) > step else episode["over"]
        elif name in ("alarm", "alarm_over"):
            _take(found, event, over=name == "alarm_over")
    return found


def _take(found: list[Row], event: Row, *, over: bool) -> None:
    """An event as the beginning, the going on or the end of an episode."""
    last = next((row for row in reversed(found) if row["alarm"] == event.get("alarm") and row["over"] is None), None)
    if over:
        if last is not None:
            last["over"] = event["step"]
        return
    said = {key: event.get(key) for key in ("alarm", "since", "seen", "means", "change", "metrics")}
    if last is None:
        found.append({**said, "step": event["step"], "told": 1, "over": None})
    else:
        last.update(said, told=last["told"] + 1)
