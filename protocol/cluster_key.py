"""Keys by which the machines of one engine authenticate each other.

Sockets that other machines can reach are encrypted and authenticated by CURVE (https://rfc.zeromq.org/spec/26/). To
connect, a client needs the server's public key. To be admitted, it needs the engine's client key.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from .config import EngineConfig
from .errors import ConfigError


class ClusterKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two CURVE key pairs in Z85, for sockets that bind and for sockets that connect. Each machine has both."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __post_init__(self) -> None:
        for public, secret in (
            (self.server_public, self.server_secret),
            (self.client_public, self.client_secret),
        ):
            if zmq.curve_public(secret.encode()).decode() != public:
                raise ValueError("a public key does not match its secret key")

    def __repr__(self) -> str:
        return "ClusterKey(…)"

    @classmethod
    def generate(cls) -> ClusterKey:
        """Return a new random key."""
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        return cls(*(key.decode() for key in pairs))

    def save(self, path: str) -> None:
        """Write the key to a new file with mode 0600. Raise ConfigError if the file exists or cannot be written."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} exists; remove it or choose another --out") from None
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        with open(descriptor, "wb") as file:
            file.write(self.encode())

    def encode(self) -> bytes:
        """Return the content of a key file, a JSON object."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Admit only clients with this key to `socket`, from its next bind on. Its context needs `admit_clients`."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.server_secret.encode())

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """From the next connect on, let `socket` use this key."""
        socket.set(zmq.CURVE_SERVERKEY, self.server_public.encode())
        socket.set(zmq.CURVE_PUBLICKEY, self.client_public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self.client_secret.encode())


def load_cluster_key(path: str) -> ClusterKey:
    """Read a key file. Raise ConfigError if the file cannot be read, is readable by everyone, or is not a key."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                raise ConfigError(f"{path} is readable by everyone; run chmod 600 {path}")
            content = file.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read the key {path}: {error.strerror}; create one with engine keygen"
        ) from None
    try:
        return msgspec.json.decode(content, type=ClusterKey)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, zmq.ZMQError) as error:
        raise ConfigError(f"{path} is not a key written by engine keygen: {error}") from None


def cluster_key_of(config: EngineConfig) -> ClusterKey | None:
    """Return the key of an engine that spans several machines.

    Return None for an engine on one machine, whose sockets are in a private directory.
    """
    path = config.parallel.cluster_key
    return None if path is None else load_cluster_key(path)


def admit_clients(context: zmq.Context[Any], key: ClusterKey) -> None:
    """Admit only clients with `key` to the secured sockets of `context`.

    A thread answers libzmq's authentication requests (ZAP, https://rfc.zeromq.org/spec/27/) until the context is
    terminated.
    """
    # Only the thread may close this socket. It belongs to a shadow context, because terminating that one does not close
    # it.
    socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    socket.bind("inproc://zeromq.zap.01")
    admitted = z85.decode(key.client_public)

    def answer() -> None:
        with socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                version, request_id, *_, mechanism, client_key = socket.recv_multipart()
                is_admitted = (mechanism, client_key) == (b"CURVE", admitted)
                status = (b"200", b"OK") if is_admitted else (b"400", b"unknown key")
                socket.send_multipart((version, request_id, *status, b"", b""))

    threading.Thread(target=answer, name="admission", daemon=True).start()
