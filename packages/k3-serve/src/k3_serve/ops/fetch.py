"""Images by https address: off by default, and never a way into the server's own network.

The guard against request forgery of serving 8: an allow-list of host names, one resolution whose
every address must be public, a connection to that very address, no redirect, no proxy, port 443
only, and limits of size and time that hold while the answer streams in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httpx

from k3_core.errors import K3Error

LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
HOST_NAME = re.compile(rf"(?=.{{4,253}}$)(?:{LABEL}\.)+(?=[a-z]){LABEL}")
MAX_URL = 2048
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str], Awaitable[list[str]]]
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# Inside that range, Teredo and 6to4 carry an IPv4 address, which may be any, and some addresses
# are for documents; outside it lie the mapped ones and those of NAT64.
NOT_PUBLIC: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = [
    *map(ipaddress.IPv6Network, ("2001::/32", "2002::/16", "2001:db8::/32", "3fff::/20")),
    ipaddress.IPv4Network("192.88.99.0/24"),  # the relays of 6to4
]


class FetchError(Exception):
    """A remote file that is not fetched; the message is for the client and names no address."""


@dataclass(frozen=True)
class MediaPolicy:
    """Which hosts remote media may come from (none: it is off), and what one file may cost."""

    hosts: frozenset[str] = frozenset()
    max_bytes: int = 32 * 2**20
    seconds: float = 10.0

    def __post_init__(self) -> None:
        for host in self.hosts:
            if not HOST_NAME.fullmatch(host):
                raise K3Error(
                    f"media host {host!r} is not a host name in small letters, such as "
                    "images.example.com; addresses and wildcards are not allowed"
                )


def is_public(text: str) -> bool:
    """Whether an address belongs to the public internet and embeds no other address."""
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if address.version == 6 and address not in GLOBAL_UNICAST:
        return False
    if any(address in net for net in NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def check_url(url: str, policy: MediaPolicy) -> SplitResult:
    """The parts of an address that may be fetched; FetchError for any other."""
    if not policy.hosts:
        raise FetchError("remote media is off on this server; send a data URL (data:image/png;...)")
    if len(url) > MAX_URL:
        raise FetchError(f"an address of {len(url)} characters; at most {MAX_URL}")
    if not url.isascii() or any(char <= " " or char in '\\\x7f<>"`{|}^' for char in url):
        raise FetchError("the address has characters that belong percent-encoded")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise FetchError("the address is not a valid URL") from error
    if parts.scheme != "https":
        raise FetchError("only https addresses are fetched")
    if "@" in parts.netloc:
        raise FetchError("the address has credentials; they are never sent")
    if port not in (None, 443):
        raise FetchError(f"port {port} is not fetched from; only 443 is")
    # Only the exact spelling of a listed name passes, so no address in any notation does.
    if (parts.hostname or "") not in policy.hosts:
        raise FetchError("the host is not one of those that this server fetches from")
    return parts


async def resolve(host: str) -> list[str]:
    """Every address of a host."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def checked_address(host: str, resolver: Resolve) -> str:
    """The address to connect to. All of a host's must be public: one that is not is an attack."""
    try:
        addresses = await resolver(host)
    except OSError as error:
        raise FetchError("the host has no address") from error
    if not addresses or not all(is_public(address) for address in addresses):
        raise FetchError("the host does not resolve to public addresses only")
    return addresses[0]


async def fetch(
    url: str,
    policy: MediaPolicy,
    *,
    resolver: Resolve = resolve,
    transport: httpx.AsyncBaseTransport | None = None,
) -> bytes:
    """The file at an address; FetchError when the policy or the answer forbids it.

    The connection goes to the address that was checked, under the name that was asked for: a
    second resolution could give another address.
    """
    parts = check_url(url, policy)
    host = str(parts.hostname)
    try:
        async with asyncio.timeout(policy.seconds):
            address = await checked_address(host, resolver)
            shown = f"[{address}]" if ":" in address else address
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = {"Host": host, "User-Agent": "k3-serve", "Accept": "image/*,video/*"}
            # trust_env: no proxy and no netrc of this machine takes part.
            async with (
                httpx.AsyncClient(transport=transport, trust_env=False) as client,
                client.stream(
                    "GET",
                    f"https://{shown}{path}",
                    headers={**headers, "Accept-Encoding": "identity"},
                    follow_redirects=False,
                    timeout=policy.seconds,
                    extensions={"sni_hostname": host},
                ) as response,
            ):
                return await _read(response, policy)
    except TimeoutError as error:
        raise FetchError(f"the file did not arrive within {policy.seconds:g} s") from error
    except httpx.HTTPError as error:
        raise FetchError(f"the file could not be fetched ({type(error).__name__})") from error


async def _read(response: httpx.Response, policy: MediaPolicy) -> bytes:
    if response.status_code != 200:
        hint = "; redirects are not followed" if response.is_redirect else ""
        raise FetchError(f"the host answered {response.status_code}{hint}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FetchError("the host compressed the file, which could hide its size")
    pieces: list[bytes] = []
    num_bytes = 0
    async for piece in response.aiter_raw():
        num_bytes += len(piece)
        if num_bytes > policy.max_bytes:
            raise FetchError(f"the file is longer than {policy.max_bytes} bytes")
        pieces.append(piece)
    return b"".join(pieces)


async def fetch_all(
    urls: Iterable[str], policy: MediaPolicy, *, get: Callable[..., Awaitable[bytes]] = fetch
) -> dict[str, bytes]:
    """The files of the distinct https addresses, four at a time; all together obey `max_bytes`."""
    files: dict[str, bytes] = {}
    gate = asyncio.Semaphore(4)

    async def one(url: str) -> None:
        async with gate:
            files[url] = await get(url, policy)
            if sum(map(len, files.values())) > policy.max_bytes:
                raise FetchError(f"the files together are longer than {policy.max_bytes} bytes")

    tasks = [asyncio.ensure_future(one(url)) for url in dict.fromkeys(urls)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return files
