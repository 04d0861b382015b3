"""The reference of the contracts: it is current, says something of each public field, and reads comments rightly."""

from __future__ import annotations

import re

import pytest
from triptych.inference.v1 import inference_pb2

from services.cli import api_docs
from services.cli.api_docs import Told


@pytest.mark.parametrize("name", api_docs.PAGES)
def test_a_page_is_current(name: str) -> None:
    written = api_docs.path(name).read_text(encoding="utf-8")
    assert written == api_docs.render(name), "run python -m services.cli.docs"


def test_every_field_of_the_public_api_is_described() -> None:
    assert api_docs.undescribed("inference") == []


def test_every_message_and_rpc_of_the_public_api_has_its_place() -> None:
    page = api_docs.render("inference")
    for message in inference_pb2.DESCRIPTOR.message_types_by_name.values():
        assert f"\n### {message.name}\n" in page
        for field in message.fields:
            assert f"| `{field.name}` = {field.number} |" in page
    for method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods:
        assert f"| `{method.name}` |" in page


@pytest.mark.parametrize("name", api_docs.PAGES)
def test_links_lead_to_headings(name: str) -> None:
    headings = {
        (page, heading.replace(".", "").lower())
        for page in api_docs.PAGES
        for heading in re.findall(r"^### (\S+)$", api_docs.render(page), re.MULTILINE)
    }
    assert set(re.findall(r"\]\((\w+)\.md#(\w+)\)", api_docs.render(name))) <= headings


@pytest.mark.parametrize(
    ("comment", "told"),
    [
        ("choices returned; [1, max_choices]; 1", Told("choices returned", "[1, max_choices]", "1")),
        ("true sum; (0, 1]; model's, 1", Told("true sum", "(0, 1]", "model's, 1")),
        ("BOS, once; true", Told("BOS, once", "", "true")),
        ("ids; [0, k]; unset: none", Told("ids", "[0, k]", "none")),
        ("no stop; [0, m]; 0. [frontend] texts", Told("no stop ([frontend] texts)", "[0, m]", "0")),
        ("held; [0, k]; 0. Both 0: none", Told("held; Both 0: none", "[0, k]", "0")),
        ("[prompt / block_tokens] of 32 bytes; chained", Told("[prompt / block_tokens] of 32 bytes; chained")),
        ("plain", Told("plain")),
    ],
)
def test_a_comment_is_taken_apart(comment: str, told: Told) -> None:
    assert Told.of(comment) == told


def test_what_a_field_may_be_refused_with_is_told() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` = \d+ \|.*\| ([^|]*) \|$", api_docs.render("inference"), re.MULTILINE))
    assert rows["n"] == "INVALID_ARGUMENT"
    assert rows["adapter"] == "UNIMPLEMENTED: not served yet"
