"""The page of planted faults holds today's list."""

from __future__ import annotations

from collections import Counter

from tests.kernels import faults_page


def test_the_page_names_each_fault_and_the_layer_that_found_it() -> None:
    """That the layer is the right one is held by the tests that plant them."""
    listed = [(source, wrong) for source, wrong, _ in faults_page.every_fault()]
    rows = faults_page.rows()
    assert list(rows) == listed, "python -m tests.kernels.faults_page"
    assert set(rows.values()) <= {name for name, _, _ in faults_page.LAYERS}
    assert len(listed) >= 40 and max(Counter(listed).values()) == 1
    assert faults_page.PAGE.read_text() == faults_page.page(rows)


def test_layers_are_known_by_what_they_say() -> None:
    said = {
        "exit status 66: WARNING: ThreadSanitizer: data race (pid=7)": "ThreadSanitizer",
        "exit status 1: ==7==ERROR: AddressSanitizer: heap-buffer-overflow": "AddressSanitizer",
        "exit status 1: x.cu:3: runtime error: signed integer overflow": "UBSan",
        "wrong values in random order": "orders",
        "the order of threads shows": "orders",
        "x.cu:3: lanes are not in its mask": "the shim",
        "wrong values in forward order": "numbers",
        "wrong values: row 1": "numbers",
    }
    assert {text: faults_page.layer_of(text) for text in said} == said
