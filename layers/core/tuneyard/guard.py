"""Where we may be sent: the rules for addresses that users give us, webhooks and training data alike.

A URL is read by the HTTP client's own parser and by no other. Its host is judged by its name when it is saved, and by
every address that it resolves to each time before a connection is made; ``outbound`` connects to the address that was
judged. ``ipaddress.is_global`` would not do: it takes NAT64 and multicast for global, and differs between versions.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from functools import lru_cache
from typing import NamedTuple

import httpx

from tuneyard.settings import settings

MOST_CHARACTERS = 2048
_LOCAL_NAMES = (".localhost", ".local", ".localdomain", ".internal", ".intranet", ".lan", ".home.arpa")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
_DENIED_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; metadata of one cloud
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's own services
        "169.254.0.0/16",  # link-local, metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_ALLOWED_V6 = ipaddress.IPv6Network("2000::/3")
_DENIED_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: any IPv4 address inside
        "3fff::/20",  # documentation
    )
)
_LAPTOP = tuple(
    ipaddress.ip_network(network)
    for network in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7")
)
"""What ``allow_local_targets`` adds. Link-local addresses stay shut, and with them every metadata service."""
_NEVER = tuple(ipaddress.ip_network(network) for network in ("fd00:ec2::/32",))


class Blocked(Exception):
    """We do not go there; the text says why, as the end of a sentence."""


class Target(NamedTuple):
    """A URL that was judged by its name, in the parts that a request needs."""

    scheme: str
    host: str
    port: int
    path: bytes
    authority: bytes
    """The ``Host`` header."""


def target(text: str, *, own_hosts: tuple[str, ...] = ()) -> Target:
    """The parts of a URL that we may be sent to as far as its name tells; Blocked says what is wrong with it.

    ``own_hosts`` are names of this API beside those of the settings.
    """
    local = settings().allow_local_targets
    url = _parsed(text)
    schemes = ("https", "http") if local else ("https",)
    if url.scheme not in schemes:
        raise Blocked("it does not begin with https://")
    host = url.raw_host.decode("ascii").lower().rstrip(".")
    if not host:
        raise Blocked("it names no host")
    port = {"https": 443, "http": 80}[url.scheme] if url.port is None else url.port
    _check_own(host, port, (settings().api_host, *settings().own_hosts, *own_hosts))
    if local:
        with contextlib.suppress(ValueError):
            check_address(str(ipaddress.ip_address(host)))
    else:
        _check_name(host)
        if port not in settings().webhook_ports:
            allowed = ", ".join(map(str, settings().webhook_ports))
            raise Blocked(f"the port {port} is not one of those that may be used here: {allowed}")
    return Target(url.scheme, host, port, url.raw_path, url.netloc)


def check_address(text: str) -> None:
    """Blocked unless an address is one of the public internet, or a local one where those are allowed."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise Blocked("its host resolves to something that is no plain IP address") from error
    if not _is_public(address) and not (settings().allow_local_targets and _is_local(address)):
        raise Blocked(f"its host resolves to {address}, which is not an address of the public internet")


@lru_cache(maxsize=1024)
def _parsed(text: str) -> httpx.URL:
    if len(text) > MOST_CHARACTERS:
        raise Blocked(f"it has more than {MOST_CHARACTERS} characters")
    if any(ord(c) <= 32 or 0x7F <= ord(c) <= 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in text):
        raise Blocked("it holds a space or a control character")
    if "\\" in text:
        raise Blocked("it holds a backslash")
    if "#" in text:
        raise Blocked("it has a fragment (#...)")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise Blocked(f"it cannot be read: {error}") from error
    if url.userinfo or "@" in url.netloc.decode("ascii", "replace"):
        raise Blocked("it holds a user name or password; use an access token instead")
    return url


def _check_name(host: str) -> None:
    if ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]):
        raise Blocked("its host is an IP address; use a name")
    if "." not in host or f".{host}".endswith(_LOCAL_NAMES):
        raise Blocked("its host is a name of a private network")
    if not all(re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", label) for label in host.split(".")):
        raise Blocked("its host is no host name")


def _check_own(host: str, port: int, own_hosts: tuple[str, ...]) -> None:
    for name in own_hosts:
        own, _, own_port = name.lower().partition(":")
        if host == own and own_port in ("", str(port)):
            raise Blocked("it is this API itself")


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _DENIED_V4)
    if address.scope_id is not None or address not in _ALLOWED_V6:
        return False
    return not any(address in network for network in _DENIED_V6)


def _is_local(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    def within(networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]) -> bool:
        return any(address in network for network in networks if network.version == address.version)

    return within(_LAPTOP) and not within(_NEVER)
