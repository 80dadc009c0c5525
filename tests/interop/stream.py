"""One end of a TCP connection: sends so many MiB, receives as many, and compares each with what it must be.

    stream.py listen|connect ADDRESS MIB
"""

import random
import socket
import sys
import threading

PORT, BLOCK, PATIENCE = 5001, 1 << 20, 120.0


def block(seed: int, number: int, body: bytes) -> bytes:
    """A block, which begins with where it belongs."""
    return bytes([seed]) + number.to_bytes(7, "big") + body


def body(seed: int) -> bytes:
    return random.Random(seed).randbytes(BLOCK - 8)


def send(connection: socket.socket, seed: int, count: int) -> None:
    rest = body(seed)
    for number in range(count):
        connection.sendall(block(seed, number, rest))


def receive(connection: socket.socket, seed: int, count: int) -> None:
    rest, view = body(seed), memoryview(bytearray(BLOCK))
    for number in range(count):
        got = 0
        while got < BLOCK:
            more = connection.recv_into(view[got:])
            if more == 0:
                raise SystemExit(f"the stream ends after {number * BLOCK + got} bytes")
            got += more
        if view != block(seed, number, rest):
            raise SystemExit(f"block {number} is wrong")


def main() -> None:
    role, address, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "listen":
        with socket.create_server((address, PORT)) as server:
            server.settimeout(PATIENCE)
            print("listening", flush=True)
            connection, _ = server.accept()
    else:
        connection = socket.create_connection((address, PORT), PATIENCE)
    with connection:
        connection.settimeout(PATIENCE)
        ours, theirs = (1, 2) if role == "listen" else (2, 1)
        sender = threading.Thread(target=send, args=(connection, ours, count), daemon=True)
        sender.start()
        receive(connection, theirs, count)
        sender.join(PATIENCE)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
    print(f"{count} MiB are right")


if __name__ == "__main__":
    main()
