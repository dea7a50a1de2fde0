"""Values of a `config.json`, of the right types. Free of JAX."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zoo.dialect import HEADS, REQUIRED, SHARE


class Reader:
    """Reads values of the right type, and notes those that are not."""

    def __init__(self, raw: dict[str, Any], problems: list[str]):
        self.raw, self.problems = raw, problems

    def size(self, key: str, default: Any, fields: dict[str, Any], alias: str | None = None) -> int:
        """Return an integer; what stands for a default is worked out from the fields read before.

        Args:
            key: what it is called.
            default: where the file does not say: a number, or HEADS or SHARE, or REQUIRED.
            fields: those read before.
            alias: what else it may be called.
        """
        value = self.raw.get(key, None if default in (HEADS, SHARE) else default)
        if alias is not None and key not in self.raw:
            value = self.raw.get(alias, value)
        if callable(default):
            value = self.raw.get(key)
            value = default(fields) if value is None else value
        if value is REQUIRED:
            self.problems.append(f"`{key}` is missing")
            return 0
        if value is None and key == "num_key_value_heads":
            return fields["num_heads"]
        if value is None and key == "head_dim":
            width, heads = fields["embed_dim"], fields["num_heads"]
            if heads < 1 or width % heads:
                self.problems.append(
                    f"`head_dim` is missing, and `hidden_size`={width} is no multiple of {heads} heads"
                )
                return 0
            return width // heads
        if type(value) is not int:
            self.problems.append(f"`{key}`={value!r} is not an integer")
            return 0
        return value

    def number(self, key: str, default: float | None) -> float | None:
        """Return a real number; None only where that switches something off."""
        value = self.raw.get(key, default)
        if value is None and (default is None or key.endswith("softcapping")):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
            self.problems.append(f"`{key}`={value!r} is not a number")
            return None
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"`{key}`={value!r} is neither true nor false")
        return bool(value)

    def layers(self, key: str, count: int) -> set[int]:
        """Return a list of layers' numbers."""
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(type(layer) is int and 0 <= layer < count for layer in value):
            self.problems.append(f"`{key}`={value!r} is not a list of layers, from 0 to {count - 1}")
            return set()
        return set(value)

    def types(
        self,
        names: Mapping[str, str],
        usual: str,
        key: str = "layer_types",
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Return a letter for each layer, of the names of their kinds that the file lists; the usual where it does not.

        Args:
            names: by letter.
            usual: a letter for each layer.
            key: what the list is called.
            aliases: what else a kind may be called, and what that means.
        """
        listed, letters = self.raw.get(key), {name: letter for letter, name in names.items()}
        letters |= {alias: letters[name] for alias, name in aliases.items()}
        if listed is None:
            return usual
        if not isinstance(listed, list) or len(listed) != len(usual) or not set(map(str, listed)) <= set(letters):
            known = f"{len(usual)} of {' and '.join(letters)}"
            self.problems.append(f"`{key}`={listed!r} is not supported, only {known}")
            return usual
        return "".join(letters[name] for name in listed)

    def word(self, key: str, words: Mapping[str, str], default: str) -> str:
        """Return what one of some words is for us."""
        value = self.raw.get(key, default)
        if value not in words:
            self.problems.append(f"`{key}`={value!r} is not supported, only {' or '.join(map(repr, words))}")
        return words.get(value, "")

    def count(self, key: str, default: int) -> int:
        """Return a number of layers, at least 1."""
        value = self.raw.get(key, default)
        if type(value) is not int or value < 1:
            self.problems.append(f"`{key}`={value!r} is not a number of layers")
            return 1
        return value

    def flags(self, key: str, count: int) -> list[bool] | None:
        """Return a 1 or 0 for each layer, or None where the file has none; what is behind the last one nobody reads."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or any(one not in (0, 1) for one in value):
            self.problems.append(f"`{key}`={value!r} is not a list of {count} times 0 or 1")
            return [True] * count
        return [bool(one) for one in value[:count]]
