"""Stop strings, wherever pieces of a text end."""

from hypothesis import given
from hypothesis import strategies as st

from experiments.serving.stops import Stops


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_what_is_shown_ends_before_the_first_stop(pieces, strings):
    stops, text, shown, fed = Stops(strings), "".join(pieces), "", ""
    for piece in pieces:
        fed += "" if stops.found else piece
        shown += stops.feed(piece)
        assert fed.startswith(shown) and not any(string in shown for string in strings)
    shown += stops.feed("", last=True)
    ends = [text.index(string) + len(string) for string in strings if string in text]
    if not ends:
        assert (shown, stops.found) == (text, None)
    else:
        assert stops.found is not None
        assert text.startswith(shown + stops.found)
        assert len(shown) < min(ends)
