"""The address of a control store on etcd, as a user writes it and as every process of a run gets it.

``etcd://HOST:PORT,HOST:PORT,HOST:PORT`` names all nodes. With ``etcds://`` the connections are encrypted, and options
may follow: ``etcds://HOST:PORT?ca=FILE&cert=FILE&key=FILE&user=NAME&password_file=FILE``. An address holds no secret,
only the paths of files that hold one, so it may appear in a config and on a command line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, urlencode

from megatron_ft.config.validators import nearest
from megatron_ft.utils import net

PASSWORD_VARIABLE = "MEGATRON_FT_ETCD_PASSWORD"
"""Environment variable with the password of ``user``, where ``password_file`` is not given."""
_SCHEMES = {"etcd": False, "etcds": True}
"""For each scheme: whether connections are encrypted."""
RULE = '"etcd://HOST:PORT,HOST:PORT,HOST:PORT" with all nodes of an etcd (etcds:// with TLS)'


def is_etcd(text: str) -> bool:
    """Return whether ``text`` is the address of an etcd; ``host:port`` is the address of an embedded store."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in _SCHEMES


@dataclass(frozen=True)
class EtcdAddress:
    """The nodes of an etcd, and how a client connects to them.

    Attributes:
        endpoints: Host and port of each node.
        tls: Connections are encrypted. The other attributes need it.
        ca: File with the certificates that must have signed those of the nodes. "": the system's.
        cert: File with this client's certificate. "": none.
        key: File with the certificate's key.
        user: User of etcd. "": none.
        password_file: File with the user's password. "": the environment holds it.
    """

    endpoints: tuple[tuple[str, int], ...]
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""

    @classmethod
    def parse(cls, text: str) -> EtcdAddress:
        """Read an address. Raises ``ValueError``; its message continues one that begins with the setting and its
        value."""
        scheme, _, rest = text.partition("://")
        nodes, question, query = rest.partition("?")
        if not is_etcd(text):
            raise ValueError(f"; it must be {RULE}")
        tls = _SCHEMES[scheme]
        endpoints = tuple(_endpoint(node) for node in nodes.split(","))
        if len(set(endpoints)) < len(endpoints):
            raise ValueError(f", which names a node twice; it must be {RULE}")
        address = cls(endpoints, tls, **_options(query))
        if question and not tls:
            raise ValueError(
                ", whose options need TLS: without it a password could be read on the network; use etcds://"
            )
        if bool(address.cert) != bool(address.key):
            raise ValueError(", which names only one of cert and key; give the files of the certificate and of its key")
        if address.password_file and not address.user:
            raise ValueError(", which names a password_file and no user; give user=NAME as well")
        return address

    def __str__(self) -> str:
        scheme = "etcds" if self.tls else "etcd"
        given = {name: getattr(self, name) for name in _OPTIONS if getattr(self, name)}
        return f"{scheme}://{self.nodes}" + (f"?{urlencode(given, safe='/')}" if given else "")

    @property
    def nodes(self) -> str:
        """As ``HOST:PORT,HOST:PORT,...``."""
        return ",".join(net.joined(*endpoint) for endpoint in self.endpoints)


_OPTIONS = tuple(field.name for field in fields(EtcdAddress) if field.type == "str")


def _endpoint(node: str) -> tuple[str, int]:
    found = net.split(node)
    if found is None or not found[1] or set(found[0]) & set("/ @?"):
        raise ValueError(f", of which {node!r} is no HOST:PORT; it must be {RULE}")
    return found


def _options(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "password":
            raise ValueError(
                f": an address must not hold a password, because others can read it; put it into a file of mode 0600 and "
                f"give password_file=FILE, or into {PASSWORD_VARIABLE}"
            )
        if name not in _OPTIONS:
            raise ValueError(f", whose option {name!r} is not known{nearest(name, _OPTIONS)}")
        if name in found or not value:
            raise ValueError(f", whose option {name} must be given once, and not be empty")
        if name != "user" and not os.path.isabs(value):
            raise ValueError(f", whose option {name} is {value!r}; it must be an absolute path, the same on all hosts")
        found[name] = value
    return found
