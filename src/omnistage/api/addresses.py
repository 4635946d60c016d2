"""Which internet addresses a server may be sent to by a stranger's URL."""

from __future__ import annotations

import ipaddress

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_REFUSED_V4 = tuple(
    ipaddress.IPv4Network(block)
    for block in (
        # https://www.iana.org/assignments/iana-ipv4-special-registry
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        # Azure's host agent: a public number that only its own machines reach
        "168.63.129.16/32",
    )
)
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_REFUSED_V6 = tuple(
    ipaddress.IPv6Network(block)
    for block in (
        # https://www.iana.org/assignments/iana-ipv6-special-registry
        "2001::/23",
        "2001:db8::/32",
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str | IpAddress) -> bool:
    """Whether the address belongs to the public internet, judged by the IPv4 address inside where
    an IPv6 one carries it (mapped, 6to4, NAT64). Addresses with a zone (`%eth0`) never do.

    Raises `ValueError` when `address` is no numeric address.
    """
    if isinstance(address, str):
        address = ipaddress.ip_address(address)
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in block for block in _REFUSED_V4)
    if address.scope_id is not None:
        return False
    inner = _embedded_v4(address)
    if inner is not None:
        return is_public(inner)
    return address in _GLOBAL_V6 and not any(address in block for block in _REFUSED_V6)


def _embedded_v4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
