"""Pages: where keys and values of a text are kept, a fixed number of tokens on each. Free of JAX.

There is a `Pool` for each window kind, that is, for the layers that see the same number of keys. A page may belong to
several texts and to the prefix cache at once; it is free again when nobody holds it. Full pages of known ids are
also in a `PrefixCache`: a radix tree whose edges are as long as a page. So a text that begins as another one did starts
with its pages.
"""

from collections import OrderedDict
from collections.abc import Sequence


class Pool:
    """The pages of one window kind: which are free, and how many hold each of the others."""

    def __init__(self, count: int, window: int | None):
        self.window = window
        self.holders = [0] * count
        self.free = list(range(count))[::-1]

    def take(self) -> int:
        """Return a free page, held once; there must be one."""
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> int:
        """Hold a page once more, and return it."""
        assert self.holders[page] > 0, f"page {page} is free"
        self.holders[page] += 1
        return page

    def release(self, page: int) -> None:
        """Hold a page once less."""
        assert self.holders[page] > 0, f"page {page} is free already"
        self.holders[page] -= 1
        if not self.holders[page]:
            self.free.append(page)


class Node:
    """A page's worth of ids after those of its parent, and where their keys and values are, a page of each kind.

    Behind the window of a kind its page may be given up before the others: it is None then.
    """

    def __init__(self, parent: "Node | None", key: tuple[int, ...], pages: list[int | None]):
        self.parent, self.key, self.pages = parent, key, pages
        self.children: dict[tuple[int, ...], Node] = {}
        self.attached = True


class PrefixCache:
    """What was read before, by its ids; it holds every page in it once. The least recently used leaves go first.

    Args:
        pools: of each window kind.
        size: tokens on a page.
    """

    def __init__(self, pools: Sequence[Pool], size: int):
        self.pools, self.size = pools, size
        self.root = Node(None, (), [None] * len(pools))
        self._used: OrderedDict[Node, None] = OrderedDict()  # least recently first, children before their parents

    def __len__(self) -> int:
        return len(self._used)

    def match(self, ids: Sequence[int], most: int) -> list[Node]:
        """Return the nodes of the longest known beginning of at most so many ids that a text can go on from.

        It needs all pages of a kind without a window, and of the others those that the next token sees.
        """
        found, node = [], self.root
        for start in range(0, most - self.size + 1, self.size):
            child = node.children.get(tuple(ids[start : start + self.size]))
            if child is None:
                break
            found.append(child)
            node = child
        while found and not all(
            found[i].pages[kind] is not None
            for kind, pool in enumerate(self.pools)
            for i in range(behind(len(found) * self.size, pool.window, self.size), len(found))
        ):
            found.pop()
        self.touch(found[-1] if found else self.root)
        return found

    def add(self, parent: Node, key: tuple[int, ...], pages: Sequence[int | None]) -> Node:
        """Return the node of a page's ids after `parent`; what it lacks of these pages it holds from now on."""
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, [None] * len(self.pools))
        for kind, page in enumerate(pages):
            if node.pages[kind] is None and page is not None:
                node.pages[kind] = self.pools[kind].hold(page)
        self.touch(node)
        return node

    def touch(self, node: Node) -> None:
        """Say that a node is used now, and with it all before it."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            self._used[step] = None
            self._used.move_to_end(step)
            step = step.parent

    def spare(self, kind: int) -> int:
        """Return how many pages of a kind nothing but this cache holds."""
        holders = self.pools[kind].holders
        pages = (node.pages[kind] for node in self._used)
        return sum(page is not None and holders[page] == 1 for page in pages)

    def evict(self, kind: int) -> bool:
        """Give up a page of a kind, if there is one that no text holds: of the least recently used leaf.

        Of a kind with a window it may also be that of a node in the middle: texts go on behind it.
        """
        pool = self.pools[kind]
        for node in self._used:
            page = node.pages[kind]
            if page is None or pool.holders[page] > 1 or (pool.window is None and node.children):
                continue
            if not node.children:
                self._remove(node)
            else:
                node.pages[kind] = None
                pool.release(page)
            return True
        return False

    def _remove(self, node: Node) -> None:
        for pool, page in zip(self.pools, node.pages, strict=True):
            if page is not None:
                pool.release(page)
        assert node.parent is not None
        del self._used[node], node.parent.children[node.key]
        node.pages, node.attached = [None] * len(self.pools), False
        if (
            node.parent.parent is not None
            and not node.parent.children
            and not any(page is not None for page in node.parent.pages)
        ):
            self._remove(node.parent)


def behind(position: int, window: int | None, size: int) -> int:
    """Return the first page, counted within a text, that a query at a position still sees."""
    return 0 if window is None else max(0, position - window + 1) // size
