"""Requests to addresses that users gave us: guarded, and over when their time is over whatever the other side does.

Time-outs of HTTP clients are per read, so an endpoint that drips bytes would hold us for ever. Here the deadline sits
in the network stream, and each operation gets what is left of it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpcore
import httpx

from tuneyard import guard
from tuneyard.guard import Blocked
from tuneyard.once import Once
from tuneyard.webhook_records import Answer, Outcome

DNS_SECONDS = 3.0
CONNECT_SECONDS = 5.0
MOST_READ = 64 * 1024
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
            for chunk in response.iter_stream():
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
        try:
            for chunk in response.iter_stream():
                head += chunk
                if len(head) >= MOST_READ:
                    break
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, TimeoutError):
            pass
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
) -> Iterator[httpcore.Response]:
    """Send a request on a connection of its own and wait for the status and headers of the answer."""
    try:
        target = guard.target(url)
    except Blocked as error:
        raise Failed(Outcome.BLOCKED, f"The URL is not allowed: {error}.") from error
    origin = httpcore.Origin(target.scheme.encode(), target.host.encode(), target.port)
    where = httpcore.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
    sent = [("Host", target.authority.decode("ascii")), *headers]
    if method == "POST":
        sent.append(("Content-Length", str(len(body))))
    tls = _tls() if target.scheme == "https" else None
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(
            httpcore.HTTPConnection(origin, ssl_context=tls, network_backend=_Network(deadline))
        )
        with _named_failures("The connection ended before the endpoint had answered."):
            response = stack.enter_context(
                connection.stream(
                    method, where, headers=[(k.encode(), v.encode()) for k, v in sent], content=body
                )
            )
        yield response


@contextlib.contextmanager
def _named_failures(cut_short: str) -> Iterator[None]:
    late = Failed(Outcome.TIMEOUT, "The endpoint had not answered in time.")
    try:
        yield
    except (httpcore.TimeoutException, TimeoutError) as error:
        raise late from error
    except httpcore.ConnectError as error:
        raise Failed(Outcome.CONNECT, "The connection was refused or lost.") from error
    except httpcore.NetworkError as error:
        raise Failed(Outcome.HTTP, cut_short) from error
    except httpcore.ProtocolError as error:
        raise Failed(Outcome.HTTP, f"{cut_short} {error}") from error


@Once
def _tls() -> ssl.SSLContext:
    """Certificates are always checked; ``SSL_CERT_FILE`` names other authorities than the usual ones."""
    context = httpx.create_ssl_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class _Network(httpcore.NetworkBackend):
    """Connections to addresses that were judged, with what is left of the deadline for every operation."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002  the deadline counts
        local_address: str | None = None,  # noqa: ARG002
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        """Resolve the host once, judge every address it has, and connect to one of these very addresses."""
        found = _resolve(host, port, min(DNS_SECONDS, self.deadline.left()))
        for _, address in found:
            try:
                guard.check_address(address)
            except Blocked as error:
                raise Failed(Outcome.BLOCKED, f"The URL is not allowed: {error}.") from error
        connecting = Deadline(min(CONNECT_SECONDS, self.deadline.left()))
        return _Stream(_connect(found, port, connecting), self.deadline)


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


class _Stream(httpcore.NetworkStream):
    """A socket whose every operation ends by the deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self.connection, self.deadline = connection, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        """At most so many bytes as soon as there are any, none at the end."""
        with self._operation(httpcore.ReadError, httpcore.ReadTimeout):
            self.connection.settimeout(self.deadline.left())
            return self.connection.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        """Send all of it."""
        with self._operation(httpcore.WriteError, httpcore.WriteTimeout):
            while buffer:
                self.connection.settimeout(self.deadline.left())
                buffer = buffer[self.connection.send(buffer) :]

    def close(self) -> None:
        """End the connection."""
        self.connection.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        """The same stream encrypted, once the certificate was found to be the named host's."""
        try:
            self.connection.settimeout(self.deadline.left())
            return _Stream(
                ssl_context.wrap_socket(self.connection, server_hostname=server_hostname), self.deadline
            )
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise Failed(
                Outcome.TLS,
                f"The certificate of {server_hostname!r} cannot be trusted: {error.verify_message}.",
            ) from error
        except TimeoutError as error:
            self.close()
            raise httpcore.ReadTimeout from error
        except (OSError, ValueError) as error:
            self.close()
            reason = getattr(error, "reason", None) or "the connection ended"
            raise Failed(Outcome.TLS, f"No encrypted connection could be made: {reason}.") from error

    def get_extra_info(self, info: str) -> Any:
        """What httpcore asks about the connection."""
        return {"ssl_object": self.connection if isinstance(self.connection, ssl.SSLSocket) else None}.get(
            info
        )

    @contextlib.contextmanager
    def _operation(self, broken: type[Exception], late: type[Exception]) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise late from error
        except OSError as error:
            raise broken(str(error)) from error
