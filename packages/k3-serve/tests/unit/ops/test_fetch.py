"""Remote media: every known form of request forgery is refused, and the limits hold (serving 8)."""

import asyncio
import ssl

import httpx
import pytest

from k3_core.errors import K3Error
from k3_serve.ops.fetch import FetchError, MediaPolicy, check_url, fetch, fetch_all, is_public

HOST = "images.example.com"
URL = f"https://{HOST}/cat.png"
POLICY = MediaPolicy(frozenset({HOST}), max_bytes=1000, seconds=2.0)
PUBLIC = "93.184.216.34"

FORBIDDEN_URLS = [
    "http://images.example.com/cat.png",  # not https
    "file:///etc/passwd",
    "ftp://images.example.com/x",
    "gopher://images.example.com/x",
    "//images.example.com/x",
    "https:images.example.com",
    "https:///etc/passwd",
    "https://169.254.169.254/latest/meta-data/",
    "http://169.254.169.254/latest/meta-data/",
    "https://2852039166/",  # 169.254.169.254 as one number
    "https://0xa9fea9fe/",
    "https://0251.0376.0251.0376/",
    "https://169.254.43518/",
    "https://127.1/",
    "https://0/",
    "https://localhost/",
    "https://LOCALHOST/",
    "https://[::1]/",
    "https://[::ffff:169.254.169.254]/",
    "https://[::ffff:a9fe:a9fe]/",
    "https://[2002:a9fe:a9fe::1]/",
    "https://[64:ff9b::a9fe:a9fe]/",
    "https://[fe80::1%25eth0]/",
    "https://images.example.com@169.254.169.254/",
    "https://user:secret@images.example.com/",
    "https://@images.example.com/",
    "https://images.example.com:8443/",
    "https://images.example.com:22/",
    "https://images.example.com:0/",
    "https://images.example.com:99999/",
    "https://images.example.com.evil.org/",
    "https://evil.org/images.example.com",
    "https://evil.org#@images.example.com/",
    "https://evil.org?@images.example.com/",
    "https://evil.org\\@images.example.com/",
    "https://images.example.com\\.evil.org/",
    "https://images.example.com%2eevil.org/",
    "https://images.example.com./",
    "https://xn--80ak6aa92e.com/",
    "https://\u2460\u2461\u2466.\u24ea.\u24ea.\u2460/",  # 127.0.0.1 in circled digits
    "https://images\u3002example.com/",
    "https://images.example.com/a b",
    "https://images.example.com/\r\nHost: evil.org",
    "https://images.example.com/\x00",
    "https://[images.example.com/",
    "https://" + "a" * 3000,
]
FORBIDDEN_ADDRESSES = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
    *(
        "169.254.169.254",
        "100.64.0.1",
        "192.0.0.1",
        "192.88.99.1",
        "192.0.2.1",
        "198.18.0.1",
        "203.0.113.1",
    ),
    *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:93.184.216.34", "::127.0.0.1", "::ffff:0:7f00:1"),
    *("64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1"),
    *("100::1", "5f00::1", "3fff::1"),
]


@pytest.mark.parametrize("url", FORBIDDEN_URLS)
def test_a_forbidden_address_is_refused_before_any_lookup(url) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FetchError) as caught:
        asyncio.run(fetch(url, POLICY, resolver=never, transport=httpx.MockTransport(never)))
    assert "169.254" not in str(caught.value)


async def never(*_: object) -> list[str]:
    raise AssertionError("a name was looked up or a host was asked")


@pytest.mark.parametrize("address", FORBIDDEN_ADDRESSES)
def test_a_host_with_one_private_address_is_refused(address) -> None:  # type: ignore[no-untyped-def]
    assert not is_public(address)
    with pytest.raises(FetchError, match="public addresses only"):
        get(answers=[PUBLIC, address], handler=never)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946"])
def test_public_addresses_are_public(address) -> None:  # type: ignore[no-untyped-def]
    assert is_public(address)


def answer(data: bytes, status: int = 200, **headers: str) -> httpx.Response:
    """A response whose body is streamed, as over a network."""

    async def pieces():  # type: ignore[no-untyped-def]
        yield data

    return httpx.Response(status, headers=headers, content=pieces())


def get(  # type: ignore[no-untyped-def]
    url=URL, *, answers=(PUBLIC,), handler=lambda request: httpx.Response(200), policy=POLICY
) -> bytes:
    lookups = []

    async def resolver(host: str) -> list[str]:
        lookups.append(host)
        return list(answers)

    transport = httpx.MockTransport(handler)
    data = asyncio.run(fetch(url, policy, resolver=resolver, transport=transport))
    assert lookups == [HOST]  # once: a second answer could be another address
    return data


@pytest.mark.parametrize(
    ("address", "shown"), [(PUBLIC, PUBLIC), ("2606:4700::1111", "[2606:4700::1111]")]
)
def test_the_connection_goes_to_the_checked_address_under_the_name(address, shown) -> None:  # type: ignore[no-untyped-def]
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer(b"pixels")

    assert get(URL + "?size=2", answers=[address], handler=handler) == b"pixels"
    (request,) = seen
    assert str(request.url) == f"https://{shown}/cat.png?size=2"
    assert request.headers["Host"] == HOST
    assert request.extensions["sni_hostname"] == HOST
    assert not {"authorization", "cookie", "referer"} & set(request.headers)


def test_remote_media_is_off_by_default() -> None:
    with pytest.raises(FetchError, match="remote media is off"):
        check_url(URL, MediaPolicy())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused(status) -> None:  # type: ignore[no-untyped-def]
    answer = httpx.Response(status, headers={"Location": "http://169.254.169.254/"})
    with pytest.raises(FetchError, match=f"answered {status}; redirects are not followed"):
        get(handler=lambda _: answer)


@pytest.mark.parametrize("status", [204, 206, 404, 500])
def test_an_answer_that_is_no_file_is_refused(status) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FetchError, match=f"answered {status}$"):
        get(handler=lambda _: httpx.Response(status, content=b"internal"))


def test_the_size_limit_holds_while_streaming() -> None:
    num_sent = 0

    async def endless():  # type: ignore[no-untyped-def]
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b"x" * 100

    with pytest.raises(FetchError, match="longer than 1000 bytes"):
        get(handler=lambda _: httpx.Response(200, content=endless()))
    assert num_sent == 11


def test_a_compressed_answer_is_refused() -> None:
    answer = httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=b"\x1f\x8b")
    with pytest.raises(FetchError, match="compressed"):
        get(handler=lambda _: answer)


@pytest.mark.parametrize("slow_part", ["lookup", "answer", "body"])
def test_the_time_limit_holds_for_every_part(slow_part) -> None:  # type: ignore[no-untyped-def]
    async def wait(part: str) -> None:
        await asyncio.sleep(60 if part == slow_part else 0)

    async def resolver(_: str) -> list[str]:
        await wait("lookup")
        return [PUBLIC]

    async def drip():  # type: ignore[no-untyped-def]
        yield b"x"
        await wait("body")

    async def handler(_: httpx.Request) -> httpx.Response:
        await wait("answer")
        return httpx.Response(200, content=drip())

    policy = MediaPolicy(POLICY.hosts, seconds=0.05)
    transport = httpx.MockTransport(handler)
    with pytest.raises(FetchError, match=r"within 0\.05 s"):
        asyncio.run(fetch(URL, policy, resolver=resolver, transport=transport))


def test_no_proxy_of_the_machine_takes_part(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert get(handler=lambda _: answer(b"direct")) == b"direct"


def test_a_host_without_an_address_and_a_dead_host_are_errors() -> None:
    async def unknown(_: str) -> list[str]:
        raise OSError("no such host")

    with pytest.raises(FetchError, match="no address"):
        asyncio.run(fetch(URL, POLICY, resolver=unknown))

    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("93.184.216.34 port 443 refused")

    with pytest.raises(FetchError, match=r"could not be fetched \(ConnectError\)$"):
        get(handler=refuse)


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "127.1", "2852039166", "*.example.com", "::1", "a_b.com", "X.com", ""],
)
def test_an_allow_list_has_names_only(host) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(K3Error, match="is not a host name"):
        MediaPolicy(frozenset({host}))


def test_files_are_fetched_once_and_bounded_together() -> None:
    asked = []

    async def one(url: str, _: MediaPolicy) -> bytes:
        asked.append(url)
        return b"x" * 400

    both = asyncio.run(fetch_all([URL, URL + "2", URL], POLICY, get=one))
    assert sorted(asked) == [URL, URL + "2"]
    assert both == {URL: b"x" * 400, URL + "2": b"x" * 400}
    with pytest.raises(FetchError, match="together"):
        asyncio.run(fetch_all([URL, URL + "2", URL + "3"], POLICY, get=one))


@pytest.mark.parametrize("name", [HOST, "other.example.com"])
def test_the_certificate_must_be_of_the_name(certificate, tls_echo, name) -> None:  # type: ignore[no-untyped-def]
    """Over TLS on loopback: the checked address is connected to, the name is what is verified."""
    authority, _ = certificate(HOST)
    port = tls_echo(*certificate(HOST), b"over tls")

    class Rerouted(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            assert request.url.host == PUBLIC
            request.url = request.url.copy_with(host="127.0.0.1", port=port)
            return await super().handle_async_request(request)

    async def resolver(_: str) -> list[str]:
        return [PUBLIC]

    policy = MediaPolicy(frozenset({name}))
    transport = Rerouted(verify=ssl.create_default_context(cafile=authority))
    call = fetch(f"https://{name}/", policy, resolver=resolver, transport=transport)
    if name == HOST:
        assert asyncio.run(call) == b"over tls"
    else:
        with pytest.raises(FetchError, match="ConnectError"):
            asyncio.run(call)
