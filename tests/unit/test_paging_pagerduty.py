"""A page as a PagerDuty event: valid and within the limits, whatever the page holds."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sentinel.model import Page, Urgency
from sentinel.paging.pagerduty import BODY_MAX, dedup_key, event
from sentinel.paging.text import cut, line, plain
from sentinel.testing.pagerduty import problems

ANY_TEXT = st.text(st.characters(), max_size=60)  # lone surrogates included, as undecodable bytes leave them
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT | st.integers(), inner, max_size=3) | st.frozensets(ANY_TEXT)
    ),
    max_leaves=8,
)


def built(**fields: Any) -> dict[str, Any]:
    fields = {"id": "p", "dedup_key": "k", "event": "trigger", "at": 1_800_000_000.25, "summary": "s", "source": "t01"} | fields
    body = event(Page(**fields), "key", "sentinel")
    assert len(body) <= BODY_MAX
    found: dict[str, Any] = json.loads(body, parse_constant=lambda c: 1 / 0)
    return found


def test_what_a_person_sees() -> None:
    """Summary, source, severity, time, class, group, details, client and the runbook's link are where PagerDuty wants them."""
    body = built(
        urgency=Urgency.WARNING, summary="GPU fell\noff the bus", source="t01/gpu@0009:01:00.0", component="t01/gpu@0009:01:00.0",
        fault="gpu-off-bus", runbook="https://c/runbooks/gpu-off-bus", details={"evidence": ["NVRM: Xid 79"]},
    )  # fmt: skip
    assert body == {
        "routing_key": "key", "event_action": "trigger", "dedup_key": "k", "client": "sentinel",
        "payload": {
            "summary": "GPU fell off the bus", "source": "t01/gpu@0009:01:00.0", "severity": "warning",
            "timestamp": "2027-01-15T08:00:00.250+00:00", "component": "t01/gpu@0009:01:00.0", "group": "t01",
            "class": "gpu-off-bus", "custom_details": {"evidence": ["NVRM: Xid 79"]},
        },
        "links": [{"href": "https://c/runbooks/gpu-off-bus", "text": "Runbook: gpu-off-bus"}],
    }  # fmt: skip
    assert built(event="resolve") == {"routing_key": "key", "event_action": "resolve", "dedup_key": "k"}


def test_huge_details_are_left_out_with_a_note() -> None:
    """A body over the service's limit keeps everything but the details, which say that and why they are missing."""
    body = built(details={"log": ["ü" * 1000] * 600}, summary="s" * 5000)
    assert set(body["payload"]["custom_details"]) == {"note"}
    assert "512000" in body["payload"]["custom_details"]["note"]
    assert len(body["payload"]["summary"]) == 1024
    assert body["payload"]["summary"].endswith("s…")
    small = built(details={"log": ["ü" * 1000] * 200})
    assert len(small["payload"]["custom_details"]["log"]) == 200


def test_cutting_keeps_characters_whole() -> None:
    """What is cut fits, ends in …, and never splits a letter from its accents or an emoji from its parts."""
    assert cut("short", 10) == "short"
    assert cut("exactly ten", 11) == "exactly ten"
    assert cut("a word too many", 10) == "a word to…"
    assert cut("e\u0301" * 10, 6) == "e\u0301e\u0301…"
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    assert cut("ab" + family, 5) == "ab…"
    assert line("a\tb\x00c\nd " + family, 50) == "a b c d " + family
    assert 60 < len(cut("a" + "\u0301" * 500, 100)) <= 100, "nor does a pile of accents make it lose everything"


def test_long_dedup_keys_stay_distinct() -> None:
    """A key over 255 characters is shortened, always to the same, and two that differ at the end stay two."""
    one, two = dedup_key("x" * 300 + "1"), dedup_key("x" * 300 + "2")
    assert len(one) == len(two) == 255
    assert one != two
    assert one == dedup_key("x" * 300 + "1")
    assert dedup_key("y" * 255) == "y" * 255


def test_a_runbook_that_is_no_link_is_a_detail() -> None:
    """PagerDuty takes absolute links only; another spelling is shown among the details."""
    body = built(runbook="/runbooks/x", details={"a": 1})
    assert "links" not in body
    assert body["payload"]["custom_details"] == {"a": 1, "runbook": "/runbooks/x"}


@given(
    summary=ANY_TEXT, source=ANY_TEXT, component=ANY_TEXT, fault=ANY_TEXT, runbook=ANY_TEXT, key=st.text(min_size=1),
    at=st.floats(), details=st.dictionaries(ANY_TEXT, ANY_VALUE, max_size=4),
)  # fmt: skip
def test_every_page_is_a_valid_event(key: str, **fields: Any) -> None:
    """Whatever a page holds (raw bytes, NaN, empty text, nested anything), the event is valid JSON and a valid event."""
    assert problems(built(dedup_key=key, **fields)) == []


def test_what_is_no_json_is_written_as_text() -> None:
    """Objects, bytes, endless nesting and huge numbers become text instead of an error."""
    endless: list[Any] = []
    endless.append(endless)
    assert "[" in json.dumps(plain(endless))
    assert plain({1: b"x", "n": 2**70, "f": float("nan")}) == {"1": "b'x'", "n": str(2**70), "f": "nan"}
