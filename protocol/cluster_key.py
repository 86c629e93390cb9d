"""The keys by which the machines of one engine know one another.

Sockets that other machines reach are encrypted and authenticated by CURVE (https://rfc.zeromq.org/spec/26/): a
client must know the server's public key to be understood at all, and have the one client key to be let in.
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
    """Two CURVE key pairs in Z85: one for sockets that bind, one for sockets that connect. Each machine has both."""

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
                raise ValueError("a public key does not belong to its secret one")

    def __repr__(self) -> str:
        return "ClusterKey(…)"

    @classmethod
    def generate(cls) -> ClusterKey:
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        return cls(*(key.decode() for key in pairs))

    def save(self, path: str) -> None:
        """Write a new file that its owner alone can read. Raises ConfigError if there is a file already."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} exists; remove it, or choose another --out") from None
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        with open(descriptor, "wb") as file:
            file.write(self.encode())

    def encode(self) -> bytes:
        """The content of a key file, a JSON object."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Admit only clients with this key where `socket` binds from now on. Its context needs an `admit_clients`."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.server_secret.encode())

    def present(self, socket: zmq.Socket[Any]) -> None:
        """Use this key wherever `socket` connects from now on."""
        socket.set(zmq.CURVE_SERVERKEY, self.server_public.encode())
        socket.set(zmq.CURVE_PUBLICKEY, self.client_public.encode())
        socket.set(zmq.CURVE_SECRETKEY, self.client_secret.encode())


def load_cluster_key(path: str) -> ClusterKey:
    """Raises ConfigError, naming the file and the remedy, unless it is a key that the world cannot read."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                raise ConfigError(f"{path}: everybody can read this key; chmod 600 it")
            content = file.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read the key {path}: {error.strerror}; make one by engine keygen"
        ) from None
    try:
        return msgspec.json.decode(content, type=ClusterKey)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, zmq.ZMQError) as error:
        raise ConfigError(f"{path} is not a key of engine keygen: {error}") from None


def cluster_key_of(config: EngineConfig) -> ClusterKey | None:
    """The key of an engine on several machines. None on one machine: its sockets are in a private directory."""
    path = config.parallel.cluster_key
    return None if path is None else load_cluster_key(path)


def admit_clients(context: zmq.Context[Any], key: ClusterKey) -> None:
    """Let only clients with `key` in wherever a socket of `context` is guarded.

    Answers libzmq's questions (ZAP, https://rfc.zeromq.org/spec/27/) in a thread, until the context is terminated.
    """
    # The thread alone may close this socket, so it must not be one of those that the context closes.
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
