"""Stop strings, against a search of the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.stops import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=12)


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    """(all text sent, what stopped it); flushed when nothing did."""
    sent = ""
    for piece in pieces:
        scanned = matcher.push(piece)
        sent += scanned.text
        if scanned.stop is not None:
            return sent, scanned.stop
    return sent + matcher.flush(), None


def expected(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """The same by str.find over what has come, piece by piece."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if found:
            start, _, stop = min(found)
            return text[:start], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=8), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4))
def test_any_cut_of_any_text_stops_where_a_search_of_the_whole_does(pieces: list[str], stops: list[str]) -> None:
    assert run(StopMatcher(stops, include=False), pieces) == expected(pieces, stops)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(LETTERS, max_size=8), stop=st.text(alphabet="ab", min_size=1, max_size=5))
def test_only_the_longest_suffix_that_could_become_a_stop_is_held_back(pieces: list[str], stop: str) -> None:
    matcher = StopMatcher([stop], include=False)
    text = sent = ""
    for piece in pieces:
        text += piece
        scanned = matcher.push(piece)
        sent += scanned.text
        if scanned.stop is not None:
            return
        held = max(n for n in range(len(stop)) if n == 0 or text.endswith(stop[:n]))
        assert len(text) - len(sent) == held


def test_the_earliest_match_wins_and_of_those_the_longest() -> None:
    assert run(StopMatcher(["b", "abc", "ab"], include=False), ["xxabcd"]) == ("xx", "abc")


def test_the_stop_string_is_left_in_when_asked_and_nothing_behind_it() -> None:
    assert run(StopMatcher(["END"], include=True), ["so E", "ND there"]) == ("so END", "END")


def test_a_match_before_stops_are_allowed_passes_as_text() -> None:
    matcher = StopMatcher(["ab"], include=False)
    assert matcher.push("ab", may_stop=False).text == "ab"
    assert matcher.push("xa", may_stop=False).text == "x"
    assert matcher.push("b").stop == "ab"  # begun before, ends where stops are allowed


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopMatcher([], include=False).push("anything").text == "anything"
