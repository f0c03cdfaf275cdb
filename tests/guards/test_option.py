"""Option `guards`."""

import math

import pytest

from fxpasses.config import Hardening
from fxpasses.guards.option import Guards, guards_text, parse_guards


@pytest.mark.parametrize(
    ("value", "guards"),
    [
        ("products,payloads,on=skip", Guards(products=True, payloads=True, on="skip")),
        ("products payloads on=skip", Guards(products=True, payloads=True, on="skip")),
        ({"values": 1e6, "digest": 50}, Guards(values=1e6, digest=50)),
        ("values", Guards(values=math.inf)),
        ("gradients", Guards(gradients=True)),
        ("all,on=recompute", Guards(True, True, True, math.inf, 100, "recompute")),
        ("all,digest=7", Guards(True, True, True, math.inf, 7)),
        (
            "products,on=recompute,region=blocks.[13]",
            Guards(products=True, on="recompute", region="blocks.[13]"),
        ),
        ("products on=recompute region=2", Guards(products=True, on="recompute", region="2")),
    ],
)
def test_what_it_says(value, guards):
    text = Hardening(guards=value).guards
    assert parse_guards(text) == guards and guards_text(text) == text


def test_nothing_is_no_guard():
    assert guards_text("") == guards_text(None) == guards_text({}) == Hardening().guards == ""
    assert not parse_guards("") and not parse_guards("on=skip")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("product", "unknown 'product'; did you mean 'products'?"),
        ({"on": "skp", "products": True}, "got on='skp'; did you mean 'skip'?"),
        ("values=-1", "got values=-1; expected a positive limit, or inf"),
        ("digest=1.5", "got digest=1.5; expected a number of steps"),
        ("products=3", "got products=3; expected true or false"),
        ("products,on=skip,region=a", "got region='a' with on='skip'; a region is what on="),
        ("values,on=recompute,region=a", "no guard that looks into a region; add 'products'"),
        (
            {"products": True, "on": "recompute", "region": "a b"},
            "got region='a b'; expected a pat",
        ),
        (3, "got 3; expected a string such as 'products,payloads' or a mapping"),
    ],
)
def test_what_can_not_be_read_is_refused(value, message):
    with pytest.raises(ValueError, match="option 'guards'") as caught:
        Hardening(guards=value)
    assert message in str(caught.value)
