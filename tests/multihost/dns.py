"""dns.py ADDRESS NAMES LOG: answers at the address's UDP port 53 with the addresses that the file NAMES has, in lines as those of
/etc/hosts. It reads the file for each question, so a name is known from the moment that it stands there. LOG gets a line for each:
the name, and "known" or "unknown"."""

import socket
import struct
import sys


def name_of(question):
    labels, at = [], 12
    while question[at]:
        labels.append(question[at + 1:at + 1 + question[at]].decode("ascii", "replace"))
        at += 1 + question[at]
    return ".".join(labels).lower(), at + 1


def address_of(name, path):
    with open(path, encoding="ascii") as file:
        for line in file:
            address, *names = line.split() or [""]
            if name in names:
                return address
    return None


def answer(question, path, log):
    name, end = name_of(question)
    kind = struct.unpack(">H", question[end:end + 2])[0]
    address = address_of(name, path)
    print(name, "known" if address else "unknown", file=log, flush=True)
    has_it = address and kind == 1  # A; of other kinds there is none
    head = question[:2] + struct.pack(">HHHHH", 0x8580 if address else 0x8583, 1, 1 if has_it else 0, 0, 0)
    record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(address) if has_it else b""
    return head + question[12:end + 4] + record


def main():
    address, path, log_path = sys.argv[1:]
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((address, 53))
    with open(log_path, "w", encoding="ascii") as log:
        while True:
            question, sender = server.recvfrom(4096)
            try:
                server.sendto(answer(question, path, log), sender)
            except (IndexError, struct.error):
                pass  # no question


main()
