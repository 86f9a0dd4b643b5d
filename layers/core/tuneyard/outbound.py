"""Requests to addresses that users gave us: guarded, and over when their time is over whatever the other side does.

Time-outs of HTTP clients are per read, so an endpoint that drips bytes would hold us for ever. Here each operation on
the connection gets what is left until the deadline. h11 writes and reads the HTTP.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import h11
import httpx

from tuneyard import guard
from tuneyard.guard import Blocked
from tuneyard.once import Once
from tuneyard.webhook_records import Answer, Outcome

DNS_SECONDS = 3.0
CONNECT_SECONDS = 5.0
MOST_READ = 64 * 1024
_MOST_HEAD = 100 * 1024
Address = tuple[socket.AddressFamily, str]


class Failed(Exception):
    """A request did not get its answer: which part failed, and a sentence about it."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def post(url: str, *, headers: list[tuple[str, str]], body: bytes, seconds: float) -> Answer:
    """POST a body and read the head of the answer, raw, never followed elsewhere; over within ``seconds``.

    2xx with complete headers is a success, and no trouble after that undoes it.
    """
    began = time.monotonic()
    try:
        answer = _post(url, headers, body, Deadline(seconds))
    except Failed as error:
        answer = Answer(outcome=error.outcome, error=str(error))
    return answer.model_copy(update={"duration_ms": round((time.monotonic() - began) * 1000)})


def download(url: str, *, most_bytes: int, seconds: float) -> bytes:
    """The body of a GET, as it is; Failed when it is too large, takes too long, or is not answered with 200."""
    deadline = Deadline(seconds)
    with _exchange("GET", url, [("Accept-Encoding", "identity")], b"", deadline) as response:
        if response.status != 200:
            raise Failed(Outcome.HTTP, f"The address answered {response.status}, not 200.")
        body = bytearray()
        with _named_failures("The connection ended before the file was complete."):
            for chunk in response.body():
                body += chunk
                if len(body) > most_bytes:
                    raise Failed(Outcome.HTTP, f"The file is larger than {most_bytes / 1e6:g} MB.")
        return bytes(body)


class Deadline:
    """A moment after which nothing is waited for."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def left(self) -> float:
        """The seconds until then; raises when there are none."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _post(url: str, headers: list[tuple[str, str]], body: bytes, deadline: Deadline) -> Answer:
    with _exchange("POST", url, headers, body, deadline) as response:
        head = bytearray()
        good = 200 <= response.status < 300
        with contextlib.suppress(h11.ProtocolError, OSError):
            for chunk in response.body():
                head += chunk
                if len(head) >= MOST_READ:
                    break
        return Answer(
            outcome=Outcome.SUCCEEDED if good else Outcome.HTTP,
            status_code=response.status,
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers],
            body=bytes(head[:MOST_READ]),
            error=None if good else f"The endpoint answered {response.status}.",
        )


@contextlib.contextmanager
def _exchange(
    method: str, url: str, headers: list[tuple[str, str]], body: bytes, deadline: Deadline
) -> Iterator[_Response]:
    """Send a request on a connection of its own and wait for the status and headers of the answer."""
    try:
        target = guard.target(url)
    except Blocked as error:
        raise Failed(Outcome.BLOCKED, f"The URL is not allowed: {error}.") from error
    sent = [("Host", target.authority.decode("ascii")), *headers]
    if method == "POST":
        sent.append(("Content-Length", str(len(body))))
    with contextlib.ExitStack() as stack:
        with _named_failures("The connection ended before the endpoint had answered."):
            connection = stack.enter_context(_connected(target, deadline))
            request = h11.Request(method=method, target=target.path, headers=sent)
            response = _Response(connection, deadline, request, body)
        yield response


@contextlib.contextmanager
def _named_failures(cut_short: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise Failed(Outcome.TIMEOUT, "The endpoint had not answered in time.") from error
    except OSError as error:
        raise Failed(Outcome.HTTP, cut_short) from error
    except h11.ProtocolError as error:
        raise Failed(Outcome.HTTP, f"{cut_short} {error}") from error


class _Response:
    """What comes back for a request: the head is there, the body is read on demand, all of it by the deadline."""

    def __init__(
        self, connection: socket.socket, deadline: Deadline, request: h11.Request, body: bytes
    ) -> None:
        self._connection, self._deadline = connection, deadline
        self._talk = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEAD)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have answered all the same
            for event in (request, h11.Data(body), h11.EndOfMessage()):
                self._write(self._talk.send(event) or b"")
        while not isinstance(head := self._event(), h11.Response):
            pass
        self.status: int = head.status_code
        self.headers = head.headers.raw_items()

    def body(self) -> Iterator[bytes]:
        """The body as it comes in, raw."""
        while isinstance(event := self._event(), h11.Data):
            yield bytes(event.data)

    def _event(self) -> Any:
        while (event := self._talk.next_event()) is h11.NEED_DATA:
            self._connection.settimeout(self._deadline.left())
            received = self._connection.recv(MOST_READ)
            if not received and self._talk.their_state is h11.SEND_RESPONSE:
                raise h11.RemoteProtocolError("It said nothing.")
            self._talk.receive_data(received)
        return event

    def _write(self, data: bytes) -> None:
        while data:
            self._connection.settimeout(self._deadline.left())
            data = data[self._connection.send(data) :]


@Once
def _tls() -> ssl.SSLContext:
    """Certificates are always checked; ``SSL_CERT_FILE`` names other authorities than the usual ones."""
    context = httpx.create_ssl_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _connected(target: guard.Target, deadline: Deadline) -> socket.socket:
    """A connection to one of the host's addresses, each of which was judged, encrypted where the URL says so."""
    found = _resolve(target.host, target.port, min(DNS_SECONDS, deadline.left()))
    for _, address in found:
        try:
            guard.check_address(address)
        except Blocked as error:
            raise Failed(Outcome.BLOCKED, f"The URL is not allowed: {error}.") from error
    connection = _connect(found, target.port, Deadline(min(CONNECT_SECONDS, deadline.left())))
    try:
        connection.settimeout(deadline.left())
        return connection if target.scheme == "http" else _encrypted(connection, target.host)
    except BaseException:
        connection.close()
        raise


def _encrypted(connection: socket.socket, host: str) -> ssl.SSLSocket:
    """The same connection encrypted, once the certificate was found to be the named host's."""
    try:
        return _tls().wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        told = f"The certificate of {host!r} cannot be trusted: {error.verify_message}."
        raise Failed(Outcome.TLS, told) from error
    except TimeoutError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or "the connection ended"
        raise Failed(Outcome.TLS, f"No encrypted connection could be made: {reason}.") from error


def _resolve(host: str, port: int, seconds: float) -> list[Address]:
    """The addresses of a host. The system call cannot be broken off, so a thread is left behind with a late one."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return [(socket.AF_INET if address.version == 4 else socket.AF_INET6, str(address))]
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise Failed(Outcome.DNS, f"The name {host!r} was not resolved within {seconds:.0f} s.")
    if isinstance(answers[0], Exception) or not answers[0]:
        raise Failed(Outcome.DNS, f"The name {host!r} has no address.")
    return list(dict.fromkeys((family, str(place[0])) for family, _, _, _, place in answers[0]))


def _connect(addresses: list[Address], port: int, deadline: Deadline) -> socket.socket:
    late = False
    for place, (family, address) in enumerate(addresses):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(deadline.left() / (len(addresses) - place))
            connection.connect((address, port))
            if connection.getpeername()[0] != address:
                raise Failed(
                    Outcome.BLOCKED, "The URL is not allowed: another address answered than was judged."
                )
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError as error:
            late = isinstance(error, TimeoutError)
            connection.close()
        except BaseException:
            connection.close()
            raise
    if late:
        raise Failed(Outcome.TIMEOUT, f"No connection within {CONNECT_SECONDS:.0f} s.")
    raise Failed(Outcome.CONNECT, "The connection was refused, or there is no way to the host.")
