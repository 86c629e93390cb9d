"""Format segments as subtitles: SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

from collections.abc import Sequence

from .segments import Segment


def write_srt(segments: Sequence[Segment], first: int = 1) -> str:
    """Return the segments as SubRip, with numbers from `first` on."""
    return "".join(
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_line(each.text)}\n\n"
        for number, each in enumerate(segments, first)
    )


def write_vtt(segments: Sequence[Segment]) -> str:
    """Return the segments as WebVTT."""
    cues = (
        f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_escaped(_line(each.text))}\n\n"
        for each in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _line(text: str) -> str:
    # An arrow would be parsed as the times of a cue, and an empty line would end the cue.
    return " ".join(text.replace("-->", "->").split())


def _escaped(text: str) -> str:
    # In WebVTT these characters begin a reference or a tag.
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _time(seconds: float, separator: str) -> str:
    """Return a time with milliseconds, such as 00:01:02.500."""
    total, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, seconds_left = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds_left:02}{separator}{milliseconds:03}"
