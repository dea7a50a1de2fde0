"""The pages of the families are those that the committed numbers make, and no number is above what is promised."""

import json

import pytest

from tests.zoo import family_pages
from tests.zoo.family_pages import family_of
from tests.zoo.hf_cases import CASES, ENCODERS
from zoo.families import FAMILIES
from zoo.huggingface.config import from_hf

CHEAP = "llama2"


def test_pages_are_the_generated_ones():
    for name, text in family_pages.pages().items():
        assert (family_pages.PAGES / name).read_text() == text, "run `python -m tests.zoo.family_pages`"


def test_every_family_is_measured_and_within_the_bounds():
    measured = json.loads(family_pages.MEASURED.read_text())["cases"]
    assert {family_of(case) for case in measured} == set(FAMILIES)
    kinds = {raw["model_type"] for raw in (CASES | ENCODERS).values()}
    assert {(CASES | ENCODERS)[case]["model_type"] for case in measured} == kinds
    for case, found in measured.items():
        assert found["logits"] <= 2e-5 * max(1, found["rms"]), case
        # The norm behind a recurrence magnifies the roundings of both sides, and so do bounds that cut gates off.
        recurrent = "matrices" in from_hf((CASES | ENCODERS)[case]).recurrent_state
        steep = recurrent or family_of(case) == "gemma3n"
        assert found["gradients"] <= (2e-5 if steep else 1e-5), case


def test_a_number_is_what_is_measured():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    recorded, found = json.loads(family_pages.MEASURED.read_text())["cases"][CHEAP], family_pages.measure(CHEAP)
    assert found["rms"] == pytest.approx(recorded["rms"], rel=2e-3)
    for name in ("logits", "gradients"):  # roundings, which another processor makes otherwise
        assert recorded[name] / 8 < found[name] < recorded[name] * 8
