"""Stop strings, which may begin and end anywhere in a token."""

from collections.abc import Sequence


class Stops:
    """Finds stop strings in a text that comes in pieces, and holds back what may yet become one.

    Args:
        strings: what ends the text.
    """

    def __init__(self, strings: Sequence[str]):
        self.strings = [string for string in strings if string]
        self.held = ""
        self.found: str | None = None

    def feed(self, piece: str, *, last: bool = False) -> str:
        """Return what may be shown of the text so far; nothing follows once a stop was found, which is not shown."""
        if self.found is not None:
            return ""
        text = self.held + piece
        at = [(text.find(string), string) for string in self.strings if string in text]
        if at:
            end, self.found = min(at)
            self.held = ""
            return text[:end]
        keep = 0 if last else max((begins(text, string) for string in self.strings), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def begins(text: str, string: str) -> int:
    """Return how long the longest beginning of a string is that a text ends with."""
    lengths = range(min(len(text), len(string) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(string[:length])), 0)
