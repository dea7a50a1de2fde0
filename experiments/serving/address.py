"""Where a server listens: its port is held before a model is read, and listened at once there is someone to answer."""

import contextlib
import errno
import socket
from collections.abc import Generator
from typing import Any

from experiments.commandline.console import CommandError
from experiments.runtime.manifest import reason

BACKLOG = 4096  # connections that wait to be accepted
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # as `localhost`'s ::1 is where there is no IPv6


@contextlib.contextmanager
def held(host: str, port: int) -> Generator[list[socket.socket]]:
    """Yield sockets that are bound to every address of a host, and do not listen yet.

    Raises:
        CommandError: there is no such host here, or the port is not free.
    """
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        with _explained(host, port):
            absent: list[OSError] = []
            every = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for found in dict.fromkeys(every):  # some systems tell an address twice
                own = sockets[0].getsockname()[1] if sockets else port  # port=0 is any, but the same at every address
                try:
                    sockets.append(stack.enter_context(_bound(found, own)))
                except OSError as error:
                    if error.errno not in _ABSENT:
                        raise
                    absent.append(error)
            if not sockets:
                raise absent[0]
        yield sockets


def listen(sockets: list[socket.socket], host: str, port: int) -> None:
    """Accept connections.

    Raises:
        CommandError: somebody else has begun to listen in the meantime.
    """
    with _explained(host, port):
        for each in sockets:
            each.listen(BACKLOG)


def url(sockets: list[socket.socket], host: str) -> str:
    """Return where clients find the protocol."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{sockets[0].getsockname()[1]}/v1"


def _bound(found: tuple[Any, ...], port: int) -> socket.socket:
    family, kind, protocol, _, (host, _, *rest) = found
    new = socket.socket(family, kind, protocol)
    try:
        new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # 0.0.0.0 has a socket of its own
            new.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        new.bind((host, port, *rest))
    except OSError:
        new.close()
        raise
    return new


@contextlib.contextmanager
def _explained(host: str, port: int) -> Generator[None]:
    """Turn what the system says of an address into an error for the user."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        remedy = "Give another host=, such as 127.0.0.1"
        if isinstance(error, PermissionError):
            remedy = "Give another port=, of 1024 or more"
        elif isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            remedy = "Give another port=, or end what listens there"
        raise CommandError(f"cannot serve at host={host} port={port}: {reason(error)}. {remedy}.") from None
