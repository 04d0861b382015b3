"""Which network interface of this machine has an address."""

from __future__ import annotations

import fcntl
import socket
import struct

from services.common.errors import StartError

_SIOCGIFADDR = 0x8915  # netdevice(7)
_NAME_BYTES = 16


def interface_of(address: str) -> str:
    """The interface's name, such as eth0, of an IPv4 address; all of 127.0.0.0/8 is the loopback's. Raises StartError.

    Linux; an interface's first address is looked at, as its own tools show it.
    """
    for _, name in socket.if_nameindex():
        if (own := _address_of(name)) == address or (own == "127.0.0.1" and address.startswith("127.")):
            return name
    raise StartError(f"no network interface of this machine has the address {address}; name one that has")


def _address_of(name: str) -> str:
    request = struct.pack(f"{_NAME_BYTES}s240x", name.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has no IPv4 address
            return ""
    return socket.inet_ntoa(answer[20:24])
