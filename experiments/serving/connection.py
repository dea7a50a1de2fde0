"""Connections whose client has said all that it will (`shutdown(SHUT_WR)`) still get their answer.

Uvicorn closes a connection at the end of what comes in. But whoever hangs up for good looks the same from here, until
something is sent: its system answers that with a reset. So while an answer is being made, whoever has gone silent is
sent `100 Continue` every second, which clients of HTTP/1.1 pass over, as often as it comes.
"""

from uvicorn.protocols.http.h11_impl import H11Protocol

EVERY = 1.0  # seconds


class Connection(H11Protocol):
    """Uvicorn's, but for what happens at the end of what comes in."""

    silent = False

    def eof_received(self) -> bool:  # ty: ignore
        """Return whether the connection stays open: where a whole request waits for its answer."""
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete and not cycle.more_body
        self.silent = waits and self.scope["http_version"] != "1.0"
        if self.silent:
            self._probe()
        return self.silent

    def _probe(self) -> None:
        """Find out whether the client is still there, for as long as nothing else does."""
        if self.transport.is_closing() or self.cycle.response_started:
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(EVERY, self._probe)

    def on_response_complete(self) -> None:
        """Hang up behind the answer: nothing more will be asked."""
        super().on_response_complete()
        if self.silent and self.cycle.response_complete:
            self.transport.close()
