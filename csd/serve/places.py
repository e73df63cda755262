"""Places that clients hold, such as those of a queue, with room for clients to come."""

from collections.abc import Hashable


class Places:
    """Places, of which a client gets another one only while it holds fewer than are free.

    So a client takes at most half of those that others have left, and leaves as many for clients to
    come. Clients that come and go one by one get equal shares. None is a client without this limit.
    """

    def __init__(self, count: int):
        self.count = count
        self.held = 0
        self._of: dict[Hashable, int] = {}

    @property
    def full(self) -> bool:
        return self.held >= self.count

    def allows(self, client: Hashable) -> bool:
        """True if the client may take a place."""
        return not self.full and (
            client is None or self._of.get(client, 0) < self.count - self.held
        )

    def take(self, client: Hashable) -> None:
        self.held += 1
        if client is not None:
            self._of[client] = self._of.get(client, 0) + 1

    def give(self, client: Hashable) -> None:
        self.held -= 1
        if client is not None:
            self._of[client] -= 1
            if not self._of[client]:
                del self._of[client]
