"""The guard: where we may be sent, decided by name and by address, and a connection that goes nowhere else."""

from __future__ import annotations

import ipaddress
import resource
import socket
import ssl
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tuneyard import guard, outbound
from tuneyard.settings import settings
from tuneyard.webhook_records import Answer
from webhook_fixtures import Receiver, answer, authority, configured, drip, raw, receiver, receiving, reset  # noqa: F401

BAD_URLS = [
    "http://example.com/", "file:///etc/passwd", "ftp://example.com/", "gopher://example.com/", "//example.com/",
    "example.com", "", "https://", "https:///path", "javascript:alert(1)", "https:example.com",
    "https://169.254.169.254/latest/meta-data/", "https://127.0.0.1/", "https://127.1/", "https://0x7f.1/",
    "https://2130706433/", "https://017700000001/", "https://0/", "https://[::1]/",
    "https://[::ffff:169.254.169.254]/", "https://[fe80::1%25eth0]/", "https://1.1.1.1/", "https://1.1.1.1./",
    "https://0x7f000001/", "https://127.0.0.1.:443/", "https://１２７.0.0.1/", "https://localhost/",
    "https://LOCALHOST./", "https://a.localhost/", "https://intranet/", "https://printer.local/",
    "https://metadata.google.internal/", "https://db.internal/", "https://router.lan/", "https://x.home.arpa/",
    "https://user@example.com/", "https://user:pass@example.com/", "https://example.com@evil.example/",
    "https://:@example.com/", "https://example.com/#frag", "https://example.com\\@evil.example/",
    "https://exa mple.com/", "https://example.com/a b", "https://example.com/\r\nX: y", "https://example.com/\tx",
    "https://example.com/\x00", "https://example.com/\x7f", "https://example.com:22/", "https://example.com:8443/",
    "https://example.com:0/", "https://example.com:99999/", "https://example.com:abc/", "https://-example.com/",
    "https://ex%61mple.com/", "https://exa_$mple.com/", "https://api.tuneyard.example/v1/models",
    "https://API.tuneyard.example./", "https://example.com/" + "x" * 2048,
]  # fmt: skip
BAD_ADDRESSES = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1",
    "127.255.255.254", "168.63.129.16", "169.254.0.1", "169.254.169.254", "169.254.170.2", "172.16.0.1",
    "172.31.255.255", "192.0.0.8", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1",
    "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:8.8.8.8",
    "64:ff9b::a9fe:a9fe", "64:ff9b::808:808", "64:ff9b:1::1", "100::1", "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::",
    "2002:a9fe:a9fe::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fd12:3456::1", "fe80::1",
    "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1", "not an address", "",
]  # fmt: skip
GOOD_ADDRESSES = [
    "1.1.1.1",
    "8.8.8.8",
    "52.95.110.1",
    "172.32.0.1",
    "100.128.0.1",
    "2606:4700::1111",
    "2a00:1450:4001::1",
]


@pytest.fixture
def strict(configured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's settings, with the API's own name in them."""
    monkeypatch.setenv("TUNEYARD_OWN_HOSTS", '["api.tuneyard.example"]')
    settings.cache_clear()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The name service: a host's addresses, an exception, or seconds to hang."""
    known: dict[str, Any] = {}
    original = socket.getaddrinfo

    def ask(host: str, port: int, *rest: Any, **more: Any) -> Any:
        if host not in known:
            return original(host, port, *rest, **more)
        found = known[host]
        if isinstance(found, Exception):
            raise found
        if isinstance(found, float):
            time.sleep(found)
            return []
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
            for one in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    return known


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_we_may_not_be_sent_to_is_refused_by_its_name(strict: None, url: str):
    with pytest.raises(guard.Blocked) as blocked:
        guard.target(url)

    assert str(blocked.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/", "https://example.com:443/a?b=c%20d", "https://hooks.slack.com/services/T/B/x",
        "https://xn--bcher-kva.example/", "https://bücher.example/", "https://a_b.example.com/",
    ],
)  # fmt: skip
def test_an_ordinary_url_is_taken(strict: None, url: str):
    found = guard.target(url)

    assert (found.scheme, found.port) == ("https", 443)
    assert found.host.isascii() and "." in found.host


@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_an_address_that_is_not_of_the_public_internet_is_refused(strict: None, address: str):
    with pytest.raises(guard.Blocked):
        guard.check_address(address)


@pytest.mark.parametrize("address", GOOD_ADDRESSES)
def test_a_public_address_is_taken(strict: None, address: str):
    guard.check_address(address)


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "fd00:ec2::254", "64:ff9b::a9fe:a9fe", "0.0.0.0", "::", "224.0.0.1", "fe80::1"],
)
def test_metadata_services_stay_shut_even_on_a_laptop(receiver: Receiver, address: str):
    with pytest.raises(guard.Blocked):
        guard.check_address(address)
    with pytest.raises(guard.Blocked):
        guard.target(f"http://[{address}]/" if ":" in address else f"http://{address}/")


def test_one_private_address_among_public_ones_is_enough_to_refuse(
    strict: None, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    opened: list[Any] = []
    monkeypatch.setattr(outbound.socket, "socket", lambda *a, **_: opened.append(a))
    names["mixed.example"] = ["1.1.1.1", "10.0.0.7"]

    found = posted("https://mixed.example/")

    assert found.outcome == "blocked" and "10.0.0.7" in (found.error or "")
    assert opened == []


def test_a_name_is_resolved_once_so_a_second_answer_changes_nothing(
    receiver: Receiver, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []
    names["once.example"] = ["127.0.0.1"]
    inner = socket.getaddrinfo

    def counting(host: str, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        return inner(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", counting)

    found = posted(f"http://once.example:{receiver.port}/hook")

    assert found.outcome == "succeeded" and asked.count("once.example") == 1
    assert receiver.received[0].headers["host"] == f"once.example:{receiver.port}"


def test_a_name_that_is_not_there_or_slow_is_a_dns_error(
    strict: None, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outbound, "DNS_SECONDS", 0.3)
    names["gone.example"] = socket.gaierror(-2, "Name or service not known")
    names["slow.example"] = 2.0
    began = time.monotonic()

    assert [posted(f"https://{name}.example/").outcome for name in ("gone", "slow")] == ["dns_error"] * 2
    assert time.monotonic() - began < 1.5


def test_a_closed_port_is_a_connect_error_and_a_silent_one_a_timeout(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outbound, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert posted(f"http://127.0.0.1:{port}/").outcome == "connect_error"
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        began = time.monotonic()
        assert posted(f"http://127.0.0.1:{full.getsockname()[1]}/").outcome == "timeout"
        assert time.monotonic() - began < 2
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    "script",
    [
        drip(b"", every=0.2),
        drip(b"HTTP/1.1 200 OK\r\nX: ", every=0.2),
        drip(b"HTTP/1.1 500 X\r\nContent-Length: 100000\r\n\r\n", every=0.2),
        drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", every=0.2),
        raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 3),
    ],
)
def test_whatever_drips_the_request_ends_at_its_deadline(receiver: Receiver, script: Any):
    url = receiver.on("/hook", lambda connection: (script(connection), time.sleep(5)))
    began = time.monotonic()

    posted(url, seconds=1.0)

    assert 0.9 < time.monotonic() - began < 1.4


def test_a_tls_handshake_that_never_comes_ends_at_the_deadline(receiver: Receiver, names: dict[str, Any]):
    names["mute.example"] = ["127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        found = posted(f"https://mute.example:{mute.getsockname()[1]}/", seconds=1.0)

    assert found.outcome == "timeout" and time.monotonic() - began < 1.5


def test_a_body_that_is_not_read_by_the_endpoint_ends_at_the_deadline(receiver: Receiver):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        began = time.monotonic()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        found = outbound.post(url, headers=[], body=b"x" * 50_000_000, seconds=1.0)

    assert found.outcome == "timeout" and time.monotonic() - began < 1.6


def test_a_gzip_bomb_is_neither_unpacked_nor_read_to_its_end(receiver: Receiver):
    packer = zlib.compressobj(9, wbits=31)
    bomb = packer.compress(b"\0" * 50_000_000) + packer.flush()
    url = receiver.on("/hook", answer(200, bomb * 4, Content_Encoding="gzip"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    found = posted(url)

    assert found.outcome == "succeeded" and found.body == (bomb * 4)[: outbound.MOST_READ]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_redirect_is_not_followed(receiver: Receiver):
    trap = receiver.url("/trap")

    found = posted(receiver.on("/hook", answer(307, Location=trap)))

    assert (found.outcome, found.status_code) == ("http_error", 307)
    assert receiver.at("/trap") == []


def test_no_proxy_of_the_environment_is_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/")

    assert posted(receiver.url()).outcome == "succeeded"


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (reset(), "http_error"),
        (raw(b""), "http_error"),
        (raw(b"HTTP/1.1 OK\r\n\r\n"), "http_error"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 60_000 + b"\r\n"), "http_error"),
        (raw(b"HTTP/1.0 200 OK\r\n\r\nall of it"), "succeeded"),
        (raw(b"HTTP/1.1 204 No Content\r\n\r\n"), "succeeded"),
    ],
)
def test_an_answer_that_is_none_is_told_from_one_that_is(receiver: Receiver, script: Any, outcome: str):
    assert posted(receiver.on("/hook", script)).outcome == outcome


def test_a_certificate_must_be_trusted_and_the_hosts_own(
    receiver: Receiver,
    authority: tuple[Path, ssl.SSLContext],
    names: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    cert, context = authority
    asked: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    names["secure.example"] = names["other.example"] = ["127.0.0.1"]
    with receiving(context) as server:
        untrusted = posted(f"https://secure.example:{server.port}/hook")
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        outbound._tls.cache_clear()
        good = posted(f"https://secure.example:{server.port}/hook")
        wrong = posted(f"https://other.example:{server.port}/hook")

        assert [one.outcome for one in (untrusted, good, wrong)] == ["tls_error", "succeeded", "tls_error"]
        assert asked == ["secure.example", "secure.example", "other.example"]
        (got,) = server.received
        assert got.headers["host"] == f"secure.example:{server.port}"


def test_a_plain_server_where_tls_is_asked_for_is_a_tls_error(receiver: Receiver, names: dict[str, Any]):
    names["plain.example"] = ["127.0.0.1"]

    def refuse(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 400 X\r\n\r\n")
            time.sleep(0.5)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=refuse, args=(server,))
        thread.start()
        assert posted(f"https://plain.example:{server.getsockname()[1]}/").outcome == "tls_error"
        thread.join()


def test_another_peer_than_the_one_judged_is_refused(receiver: Receiver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("10.9.9.9", 80))

    assert posted(receiver.url()).outcome == "blocked"
    assert receiver.received == []


def test_training_data_by_https_goes_through_the_same_guard(api: TestClient, receiver: Receiver):
    line = b'{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n'
    model = api.post(
        "/v1/preview/models", json={"project": "p", "name": "m", "base_model": "tuneyard/tiny"}
    ).json()
    body = {"model_id": model["id"], "training_data_url": receiver.on("/train.jsonl", answer(200, line))}

    made = api.post("/v1/preview/sft-training-jobs", json=body)

    assert made.status_code == 200
    from tuneyard import blobs

    assert blobs.get(blobs.input_key(made.json()["id"])) == line
    for url in (
        receiver.on("/gone", answer(404)),
        "http://169.254.169.254/x",
        receiver.on("/to", answer(302, Location="/x")),
    ):
        refused = api.post("/v1/preview/sft-training-jobs", json=body | {"training_data_url": url})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "training_data_url")


def test_training_data_that_is_too_large_is_refused(
    api: TestClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settings(), "max_download_bytes", 1000)
    with pytest.raises(outbound.Failed, match="larger"):
        outbound.download(receiver.on("/big", answer(200, b"x" * 5000)), most_bytes=1000, seconds=5)


def test_the_deny_list_covers_what_the_library_calls_not_global():
    for network in (*guard._DENIED_V4, *guard._DENIED_V6):
        assert isinstance(network, ipaddress.IPv4Network | ipaddress.IPv6Network)
    for text in (
        "10.0.0.1",
        "127.0.0.1",
        "169.254.1.1",
        "192.168.0.1",
        "100.64.0.1",
        "fc00::1",
        "fe80::1",
        "::1",
    ):
        assert not guard._is_public(ipaddress.ip_address(text))


def posted(url: str, *, seconds: float = 5.0) -> Answer:
    """What comes of a POST."""
    return outbound.post(url, headers=[("Content-Type", "application/json")], body=b"{}", seconds=seconds)
