"""Locks and unlocks a path with kazoo, as it is told line by line: "try", "lock", "unlock"."""

import sys

from kazoo.client import KazooClient

client = KazooClient(hosts=sys.argv[1])
client.start()
lock = client.Lock(sys.argv[2], extra_lock_patterns=["-lock-"])
print("ready", flush=True)
for line in sys.stdin:
    match line.strip():
        case "try":
            print("got" if lock.acquire(blocking=False) else "busy", flush=True)
        case "lock":
            lock.acquire()
            print("got", flush=True)
        case "unlock":
            lock.release()
            print("free", flush=True)
