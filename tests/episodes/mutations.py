"""Make requests that are nearly right, for tests of what reads them."""

from __future__ import annotations

import copy
import json
import random


def mutated(rng: random.Random, valid: dict) -> bytes:
    """Return a valid request after one to three mutations of its values, or of its bytes."""
    body = copy.deepcopy(valid)
    odd = (
        None,
        True,
        -1,
        0,
        2**70,
        1e308,
        "",
        "\0",
        "x" * 5000,
        [],
        {},
        [[]],
        [None],
        {"a": {}},
        "assistant",
    )
    for _ in range(rng.randint(1, 3)):
        node = body
        while True:
            keys = [*node] if isinstance(node, dict) else [*range(len(node))]
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], dict | list) and rng.random() < 0.7:
                node = node[key]
                continue
            if rng.random() < 0.2:
                del node[key]
            else:
                node[key] = copy.deepcopy(rng.choice(odd))
            break
    data = bytearray(json.dumps(body).encode())
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)


TEXTS = ("text", "content", "thinking", "system", "instructions", "description")
"""Keys whose values may be any text."""
LETTERS = 'aé日🙂\n\t "\\<|{}[]0\u202e\uffff'


def variant(rng: random.Random, valid: dict) -> bytes:
    """Return a request that is as valid as the given one: with other texts, another order of keys, and JSON written
    in another way."""

    def changed(value, key: str = ""):
        if isinstance(value, dict):
            items = rng.sample([*value.items()], len(value))
            return {name: changed(one, name) for name, one in items}
        if isinstance(value, list):
            return [changed(one) for one in value]
        is_text = isinstance(value, str) and key in TEXTS
        return "x" + "".join(rng.choices(LETTERS, k=rng.randint(0, 30))) if is_text else value

    how = {"ensure_ascii": rng.random() < 0.5, "indent": rng.choice([None, 2]), "separators": (" , ", " : ")}
    return json.dumps(changed(valid), **how).encode()
